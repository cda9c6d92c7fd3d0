"""Prompts alone, for online training: raw prompts and columns, resumed exactly."""

from __future__ import annotations

import json

import pytest

import tokenmill as tm

TOKENIZER = tm.open_tokenizer("bytes")
TEXTS = [{"prompt": f"{n} + {n} = ", "answer": str(2 * n), "level": n % 3} for n in range(20)]
CHATS = [{**record, "prompt": [{"role": "user", "content": record["prompt"]}]} for record in TEXTS]


@pytest.fixture(params=["texts", "messages"])
def run(request, tmp_path):
    records = TEXTS if request.param == "texts" else CHATS
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    options = tm.PrepareOptions(
        keep=("prompt", "answer", "level"), chat_template="chatml" if records is CHATS else None
    )
    tm.prepare(
        tmp_path / "prompts.jsonl",
        out=tmp_path / "prompts",
        recipe="prompts",
        workers=1,
        options=options,
        progress=False,
    )
    tables = {"run": {"epochs": 2, "global_batch_size": 6, "seq_len": 64}}
    run = tm.Run.from_tables(tables | {"sources": [{"name": "prompts", "store": "prompts"}]}, folder=tmp_path)
    return run, records


ASKED = {"arrays": ("prompts", "prompt_len"), "columns": ("prompt", "answer", "level")}


def test_a_batch_has_the_tokens_the_raw_prompts_and_the_columns(run):
    run, records = run
    for step in range(run.plan().steps):
        numbers = [use.spans[0].document for use in run.plan().what(step)]
        batch = run.loader(**ASKED)[step]
        assert batch["prompt"].tolist() == [records[number]["prompt"] for number in numbers]
        assert batch["answer"].tolist() == [records[number]["answer"] for number in numbers]
        assert batch["level"].tolist() == [records[number]["level"] for number in numbers]
        for ids, length, number in zip(batch["prompts"], batch["prompt_len"], numbers, strict=True):
            text = TOKENIZER.decode(ids[:length])
            plain = TEXTS[number]["prompt"]
            written = f"<|im_start|>user\n{plain}<|im_end|>\n<|im_start|>assistant\n"
            assert text == f"<|bos|>{plain if records is TEXTS else written}"


def test_numbers_of_a_column_are_exact(tmp_path):
    """A float holds no number above 2^53 exactly, and NaN stands for none."""
    levels = [2**53 + 1, None, 2**63, 10**400]
    records = [{"prompt": "1 + 1 = ", "level": level} for level in levels]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    options = tm.PrepareOptions(keep=("level",))
    how = {"recipe": "prompts", "workers": 1, "options": options, "progress": False}
    tm.prepare(tmp_path / "prompts.jsonl", out=tmp_path / "prompts", **how)
    tables = {"run": {"epochs": 1, "global_batch_size": 4, "seq_len": 64}}
    run = tm.Run.from_tables(tables | {"sources": [{"name": "prompts", "store": "prompts"}]}, folder=tmp_path)
    numbers = [use.spans[0].document for use in run.plan().what(0)]
    batch = run.loader(arrays=("prompts",), columns=("level",))[0]
    assert batch["level"].tolist() == [levels[number] for number in numbers]


def test_a_loop_that_stops_goes_on_with_the_next_prompts(run):
    run, _ = run
    straight = [batch["prompt"].tolist() for batch in run.loader(micro_batch=3, **ASKED)]
    loader = run.loader(micro_batch=3, **ASKED)
    stream = iter(loader)
    first = [next(stream)["prompt"].tolist() for _ in range(4)]
    again = run.loader(micro_batch=3, **ASKED)
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert first + [batch["prompt"].tolist() for batch in again] == straight


def test_all_arrays_of_a_group_are_there_and_have_no_responses(run):
    run, _ = run
    batch = run.loader(micro_batch=6)[0]
    assert batch["responses"].shape == (6, 0, 64)
    assert batch["group_size"].tolist() == [0] * 6
    assert run.report().sources[0].fates.trained == 0
