"""A step as people look at it is what the loader delivers."""

from __future__ import annotations

import json

import numpy as np
import pytest

import tokenmill as tm
from tokenmill.errors import PlanError
from tokenmill.inspect.examples import examples, excerpt, inspect_document
from tokenmill.inspect.steps import deal_step, inspect_packing, inspect_step, inspect_strip
from tokenmill.inspect.stores import tokenizer_of
from tokenmill.types import Span

RUN = """\
[run]
steps = 4
global_batch_size = 4
seq_len = {seq_len}
{more}
[[sources]]
name = "web"
store = "web"
"""


def make_run(folder, records, *, seq_len=48, more="", **options):
    path = folder / "web.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    tm.prepare(path, out=folder / "web", tokenizer="bytes", progress=False, workers=1, **options)
    (folder / "run.toml").write_text(RUN.format(seq_len=seq_len, more=more), encoding="utf-8")
    return tm.Run.from_toml(folder / "run.toml")


def texts(count=60):
    return [{"text": "word " * (1 + number % 9)} for number in range(count)]


@pytest.mark.parametrize(
    "more",
    [
        *(f'packing = "{packing}"' for packing in ("best_fit", "concat", "padded", "bos_best_fit")),
        "segment_multiple = 8",
    ],
)
def test_strips_are_what_the_loader_delivers(tmp_path, more):
    run = make_run(tmp_path, texts(), more=more)
    batch = run.loader(threads=0, arrays=("input_ids", "labels", "doc_ids"))[2]
    contents = inspect_step(run, 2)
    known = run.stores["web"].manifest.tokenizer
    assert [row.slot for row in contents.rows] == [0, 1, 2, 3]
    for row, ids, labels, documents in zip(contents.rows, *batch.values(), strict=True):
        (strip,) = row.strips
        columns = np.concatenate(
            [np.arange(c, c + s.length) for c, s in zip(strip.places, strip.spans, strict=True)]
        )
        inside = columns[columns < ids.size]
        assert np.flatnonzero(documents >= 0).tolist() == inside.tolist()
        trained = np.zeros(strip.room, np.bool_)
        for begin, end in strip.trained:
            trained[begin:end] = True
        assert trained[1:].tolist() == (labels >= 0).tolist()
        assert not trained[0]
        tokens = inspect_strip(run, 2, row.slot).tokens
        assert [token.id for token in tokens][: inside.size] == ids[inside].tolist()
        assert [token.trained for token in tokens] == trained[columns].tolist()
        assert [(token.document, token.position) for token in tokens] == [
            (span.document, place) for span in strip.spans for place in range(span.start, span.start + span.length)
        ]
        for marks, name in ((strip.bos, "bos_id"), (strip.eos, "eos_id")):
            at = [column for column, token in zip(columns, tokens, strict=True) if token.id == known[name]]
            assert list(marks) == at


def test_labels_further_ahead_leave_the_strips_as_they_are(tmp_path):
    plain = make_run(tmp_path, texts())
    (tmp_path / "far.toml").write_text(RUN.format(seq_len=48, more="horizon = 3"), encoding="utf-8")
    assert inspect_step(tm.Run.from_toml(tmp_path / "far.toml"), 1) == inspect_step(plain, 1)


def chat(number):
    turns = [("user", f"question {number}"), ("assistant", f"answer {number}")]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def test_masked_tokens_of_a_chat_are_not_trained(tmp_path):
    options = tm.PrepareOptions(chat_template="chatml")
    run = make_run(tmp_path, [chat(n) for n in range(20)], seq_len=128, recipe="chat", options=options)
    tokens = inspect_strip(run, 0, 0, tokenizer=tokenizer_of(run.stores["web"])).tokens
    trained = "".join(token.text for token in tokens if token.trained)
    assert trained.startswith("answer ")
    assert "question" not in trained


def test_both_sides_of_a_pair_are_strips(tmp_path):
    records = [{"prompt": f"p{n} ", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(12)]
    run = make_run(tmp_path, records, seq_len=32, recipe="dpo")
    batch = run.loader(threads=0)[1]
    for row in inspect_step(run, 1).rows:
        assert [strip.key for strip in row.strips] == ["chosen", "rejected"]
        for place, strip in enumerate(row.strips):
            length = int(batch[f"{strip.key}_len"][row.slot])
            ids = [token.id for token in inspect_strip(run, 1, row.slot, place).tokens]
            assert ids == batch[strip.key][row.slot, :length].tolist()
            flags = batch[f"{strip.key}_mask"][row.slot].copy()
            flags[0] = False
            assert strip.num_trained == int(flags.sum())
            assert (strip.bos, strip.eos) == ((0,), (length - 1,))


@pytest.mark.parametrize(("slot", "strip"), [(4, 0), (0, 1), (-1, 0)])
def test_what_is_not_there_is_named(tmp_path, slot, strip):
    run = make_run(tmp_path, texts())
    with pytest.raises(PlanError, match=r"must lie within 0:\d+, got"):
        inspect_strip(run, 0, slot, strip)


def test_rows_are_measured_by_stage_and_source(tmp_path):
    run = make_run(tmp_path, texts())
    (packed,) = inspect_packing(run)
    index = run.plan().stages[0].rows["web"]
    spans = index.spans(np.arange(index.num_rows))
    assert (packed.rows, packed.sampled, sum(packed.fill)) == (index.num_rows,) * 3
    assert sum(packed.lengths.values()) == spans.length.size


def test_a_record_that_is_cut_fills_its_row(tmp_path):
    records = [{"prompt": f"p{n} ", "chosen": "good " * 5, "rejected": f"bad {n}"} for n in range(12)]
    run = make_run(tmp_path, records, seq_len=16, more='split = "truncate_end"', recipe="dpo")
    (packed,) = inspect_packing(run)
    assert packed.fill == (0,) * 10 + (12,)


def test_rows_are_dealt_as_the_loader_deals_them(tmp_path):
    run = make_run(tmp_path, texts(), more='balance = "attention"')
    deal = deal_step(run, 1, 2, 1)
    plain = inspect_step(run, 1)
    for rank in range(2):
        batch = run.loader(rank=rank, world_size=2, threads=0)[1]
        slots = [slot for member in deal.dealt if member.rank == rank for slot in member.slots]
        for slot, ids in zip(slots, batch["input_ids"], strict=True):
            tokens = inspect_strip(run, 1, slot).tokens
            assert ids[: len(tokens)].tolist() == [token.id for token in tokens][: ids.size]
    assert sorted(slot for member in deal.in_order for slot in member.slots) == [row.slot for row in plain.rows]
    assert deal.waiting_dealt <= deal.waiting_in_order


MIXED = "中文字符 🎉 👩‍👧 ☰ é"


def shown_texts(tokens):
    """Return the texts of characters, each with the number of its tokens."""
    texts = []
    for token in tokens:
        if token.continues:
            assert token.text == ""
            texts[-1][1] += 1
        else:
            texts.append([token.text, 1])
    return [tuple(text) for text in texts]


def test_each_character_of_a_strip_is_shown_whole_by_its_first_token(tmp_path):
    run = make_run(tmp_path, [{"text": MIXED}] * 8, seq_len=64)
    strip = inspect_strip(run, 0, 0, tokenizer=tokenizer_of(run.stores["web"]))
    (span, *_) = inspect_step(run, 0).rows[0].strips[0].spans
    wanted = [(character, len(character.encode())) for character in MIXED]
    assert shown_texts(strip.tokens[: span.length]) == [("<|bos|>", 1), *wanted, ("<|eos|>", 1)]
    # A page that begins or ends in the middle of a character shows what the whole strip shows.
    tokenizer = tokenizer_of(run.stores["web"])
    for first in range(12):
        page = inspect_strip(run, 0, 0, first=first, count=3, tokenizer=tokenizer).tokens
        assert page == strip.tokens[first : first + 3]


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_bytes_of_two_spans_make_no_character(tmp_path, packing):
    # Rows of 8 tokens cut characters of three bytes: what is cut stays U+FFFD on both sides.
    run = make_run(
        tmp_path, [{"text": "中文字符日本語한국어"[n:]} for n in range(6)], seq_len=7, more=f'packing = "{packing}"'
    )
    store = run.stores["web"]
    tokenizer = tokenizer_of(store)
    cut = 0
    for step in range(4):
        for row in inspect_step(run, step).rows:
            tokens = inspect_strip(run, step, row.slot, tokenizer=tokenizer).tokens
            begin = 0
            for span in row.strips[0].spans:
                text = "".join(token.text for token in tokens[begin : begin + span.length])
                ids = store.fetch_record(span.document, "sequence")[span.start : span.start + span.length]
                assert text == tokenizer.decode(ids)
                cut += "\ufffd" in text
                begin += span.length
    assert cut


def test_a_document_is_spelled_alike_on_every_page(tmp_path):
    run = make_run(tmp_path, [{"text": MIXED}] * 8)
    store = run.stores["web"]
    tokenizer = tokenizer_of(store)
    (whole,) = inspect_document(store, 0, tokenizer).parts
    assert "".join(whole.strings) == f"<|bos|>{MIXED}<|eos|>"
    assert [not continues for continues in whole.continues].count(True) == len(MIXED) + 2
    for first in range(0, 20):
        (page,) = inspect_document(store, 0, tokenizer, first=first, count=4).parts
        assert (page.strings, page.continues) == (
            whole.strings[first : first + 4],
            whole.continues[first : first + 4],
        )
    (silent,) = inspect_document(store, 0).parts
    assert (silent.strings, silent.continues) == (None, None)


def test_the_beginning_of_a_span_ends_with_a_whole_character(tmp_path):
    store = make_run(tmp_path, [{"text": MIXED}] * 8).stores["web"]
    whole = Span(document=0, start=0, length=store.document_bounds(0)[1] - store.document_bounds(0)[0])
    for most in range(1, 12):
        shown = excerpt(store, whole, tokenizer_of(store), most)
        assert shown.endswith("…")
        assert MIXED.startswith(shown.removeprefix("<|bos|>")[:-1])


def test_parts_of_an_example_are_cut_between_characters(tmp_path):
    """A long example is shown in pieces around its turns."""
    talk = [{"messages": [{"role": "user", "content": "问" * 301}, {"role": "assistant", "content": "答" * 302}]}]
    options = tm.PrepareOptions(chat_template="chatml")
    store = make_run(tmp_path, talk * 4, recipe="chat", options=options).stores["web"]
    for example in examples(store, tokenizer_of(store)):
        assert example.left_out or any(piece.left_out for piece in example.runs)
        assert not [piece.text for piece in example.runs if "\ufffd" in piece.text]
