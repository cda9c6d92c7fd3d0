from __future__ import annotations

import io
import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

import tokenmill as tm
from tokenmill.demo import CORPUS_DIR, TOKENIZER_DIR
from tokenmill.store import open_store

EXAMPLES = "Examples: ⟦trained⟧, masked without brackets, ‹control tokens›"


def test_json_holds_the_facts_of_a_store(tokenmill, folder):
    store = open_store(folder / "stores" / "web")
    found = tokenmill("inspect", store.path, "--json").json
    assert list(found) == ["web"]
    facts = found["web"]
    assert (facts["documents"], facts["tokens"], facts["shards"]) == (60, store.num_tokens, 1)
    assert facts["fingerprint"] == store.manifest.fingerprint
    assert facts["tokenizer"] == dict(store.manifest.tokenizer)
    assert facts["keys"] == {"sequence": "<u2"}
    assert [item["name"] for item in facts["inputs"]] == ["web.jsonl"]


@pytest.mark.parametrize(
    ("lengths", "bins"),
    [
        (
            [0, 1, 2, 3, 4, 7, 8, 1024],
            {"0": 1, "1 to 1": 1, "2 to 3": 2, "4 to 7": 2, "8 to 15": 1, "1024 to 2047": 1},
        ),
        ([], {}),
        ([0, 0], {"0": 2}),
    ],
)
def test_lengths_are_counted_by_powers_of_two(tokenmill, make_store, lengths, bins):
    path, _, _ = make_store("web", lengths, max_tokens_per_shard=16)
    facts = tokenmill("inspect", path, "--json").json["web"]
    assert facts["lengths"] == {"sequence": bins}
    assert facts["longest"] == {"sequence": max(lengths, default=0)}
    assert tokenmill("inspect", path).code == 0


def test_text_shows_facts_lengths_and_examples(tokenmill, folder):
    done = tokenmill("inspect", folder / "stores" / "web")
    assert (done.code, done.err) == (0, "")
    titles = ["Store web", "Supervision", "Document lengths", EXAMPLES]
    assert [title for title in re.findall(r"^\S.*?(?=\s*$)", done.out, re.MULTILINE) if title in titles] == titles
    assert "bytes, 259 ids" in done.out
    assert "'<|bos|>' (id 256), added / '<|eos|>' (id 257), added" in " ".join(done.out.split())


def test_examples_are_the_text_of_the_first_middle_and_last_document(tokenmill, tmp_path):
    lines = ['{"text": "alpha"}', '{"text": "beta"}', '{"text": "gamma"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert tokenmill("prepare", tmp_path / "a.jsonl", "--out", tmp_path / "a").code == 0
    shown = tokenmill("inspect", tmp_path / "a").out
    assert re.findall(r"alpha|beta|gamma", shown) == ["alpha", "beta", "gamma"]


def test_documents_cannot_speak_to_the_terminal(tokenmill, tmp_path):
    """[S.i]"""
    text = r"[/x]\u001b[2J\u0007\u202e[bold]"
    (tmp_path / "a.jsonl").write_text(f'{{"text": "{text}"}}\n', encoding="utf-8")
    assert tokenmill("prepare", tmp_path / "a.jsonl", "--out", tmp_path / "a").code == 0
    done = tokenmill("inspect", tmp_path / "a")
    assert (done.code, done.err) == (0, "")
    assert "[/x]\ufffd[2J" in done.out
    assert re.search("[\x00-\x09\x0b-\x1f\u202e]", done.out) is None


def test_a_run_shows_all_its_stores(tokenmill, folder):
    found = tokenmill("inspect", folder / "run.toml", "--json").json
    assert [(name, facts["documents"]) for name, facts in found.items()] == [("web", 60), ("books", 25)]
    shown = tokenmill("inspect", folder / "run.toml").out
    assert re.findall(r"^Store (\w+)", shown, re.MULTILINE) == ["web", "books"]


def test_lengths_add_up_to_all_documents(tokenmill, make_store):
    lengths = np.random.default_rng(0).integers(0, 300, 50).tolist()
    path, _, _ = make_store("web", lengths, max_tokens_per_shard=1000)
    assert sum(tokenmill("inspect", path, "--json").json["web"]["lengths"]["sequence"].values()) == 50


def test_a_tokenizer_file_that_is_gone_costs_only_the_examples(tokenmill, tmp_path):
    tokenizer = shutil.copytree(TOKENIZER_DIR, tmp_path / "tokenizer")
    arguments = ["--out", tmp_path / "a", "--tokenizer", tokenizer, "--workers", 1]
    assert tokenmill("prepare", CORPUS_DIR / "dialogue.jsonl", *arguments).code == 0
    shutil.rmtree(tokenizer)
    done = tokenmill("inspect", tmp_path / "a")
    assert (done.code, done.err) == (0, "")
    assert "tokenizer.json, " in done.out


def test_all_stores_of_a_folder_are_shown_one_after_the_other(tokenmill, folder):
    found = tokenmill("inspect", folder / "stores", "--json").json
    assert [(name, facts["documents"]) for name, facts in found.items()] == [("books", 25), ("web", 60)]
    done = tokenmill("inspect", folder / "stores", "--html", folder / "all.html")
    assert re.findall(r"^Store (\w+)", done.out, re.MULTILINE) == ["books", "web"]
    assert re.findall(r">Store (\w+) *<", (folder / "all.html").read_text(encoding="utf-8")) == ["books", "web"]


def test_the_working_directory_has_a_name(tokenmill, folder, monkeypatch):
    monkeypatch.chdir(folder / "stores" / "web")
    assert list(tokenmill("inspect", ".", "--json").json) == ["web"]


def test_what_is_said_of_foreign_files_is_not_for_a_run(tokenmill, folder):
    done = tokenmill("inspect", folder / "run.toml", "--eos-id", 3)
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(
        r"error: .*run\.toml: eos_id = 3 cannot be combined with a run; write it under .*\n", done.err
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/report.html", r"folder not found: .*no; create it first"),
        ("stores", r"expected a file, got the folder .*stores; name a file in it, such as report\.html"),
    ],
)
def test_a_page_that_cannot_be_written_is_refused_before_anything_is_read(tokenmill, folder, name, message):
    done = tokenmill("inspect", folder / "nowhere", "--html", folder / name)
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(rf"error: --html: {message}\n", done.err)


@pytest.mark.parametrize(("name", "code"), [("nowhere", 2), ("nowhere.toml", 2), ("web.jsonl", 1)])
def test_what_is_not_there_is_an_error(tokenmill, folder, name, code):
    done = tokenmill("inspect", folder / name)
    assert (done.code, done.out) == (code, "")
    assert re.fullmatch(rf"error: .*{name}.*; .*\n", done.err)


CHAT = (
    '{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "four"}]}\n'
    '{"messages": [{"role": "user", "content": "<b>"}, {"role": "assistant", "content": "five & six"}]}\n'
)


@pytest.fixture
def chat(tokenmill, tmp_path):
    (tmp_path / "chat.jsonl").write_text(CHAT, encoding="utf-8")
    options = ["--recipe", "chat", "--chat-template", "chatml", "--workers", 1]
    assert tokenmill("prepare", tmp_path / "chat.jsonl", "--out", tmp_path / "chat", *options).code == 0
    return tmp_path / "chat"


def test_the_audit_counts_what_is_trained_on(tokenmill, chat):
    """[T1.d]"""
    (found,) = tokenmill("inspect", chat, "--json").json["chat"]["audit"]
    store = open_store(chat)
    trained = len("four<|im_end|>") + len("five & six<|im_end|>")
    assert (found["key"], found["items"], found["audited"], found["supervised"]) == ("sequence", 2, 2, trained)
    assert found["supervised_percent"] == 100 * trained / store.num_tokens
    assert (found["fully_masked"], found["truncated"]) == (0, 0)
    shown = " ".join(tokenmill("inspect", chat).out.split())
    assert "'<|bos|>' (id 256), before 2 of 2 texts / '<|eos|>' (id 257), added where no" in shown


ZEPHYR = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("options", "started"), [((), 0), (("--bos",), 2), (("--chat-template", "chatml"), 2)], ids=str
)
def test_bos_stands_before_conversations_where_the_template_writes_it_or_it_is_asked_for(
    tokenmill, tmp_path, options, started
):
    """[T2.b]"""
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(TOKENIZER_DIR, tokenizer)
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": ZEPHYR}))
    (tmp_path / "chat.jsonl").write_text(CHAT, encoding="utf-8")
    out = tmp_path / "chat"
    arguments = ["--out", out, "--recipe", "chat", "--tokenizer", tokenizer, "--workers", 1, *options]
    shown = " ".join(tokenmill("prepare", tmp_path / "chat.jsonl", *arguments).out.split())
    assert ("no BOS before conversations, as the chat template writes none" in shown) is not bool(started)
    (found,) = tokenmill("inspect", out, "--json").json["chat"]["audit"]
    assert (found["with_bos"], found["audited"]) == (started, 2)
    assert f"before {started} of 2 texts" in " ".join(tokenmill("inspect", out).out.split())
    run = '[run]\nsteps = 1\nglobal_batch_size = 1\nseq_len = 64\npacking = "bos_best_fit"\n'
    (tmp_path / "run.toml").write_text(f'{run}[[sources]]\nname = "chat"\nstore = "chat"\n')
    planned = tokenmill("plan", tmp_path / "run.toml")
    assert planned.code == (0 if started else 2)
    assert started or "needs documents that start with BOS" in planned.err


def test_the_audit_finds_masked_cut_and_endless_records(tokenmill, tmp_path, tokenizer_identity):
    """[T1.d]"""
    from tokenmill.store import StoreSpec, StoreWriter

    identity = tokenizer_identity(300) | {"eos_id": 2}
    spec = StoreSpec(keys={"sequence": "<u2", "loss_mask": "|u1"}, tokenizer=identity, recipe={}, kind="sft")
    with StoreWriter(tmp_path / "sft", spec) as writer:
        ids = np.array([5, 6, 2, 5, 6, 7, 9, 2, 8], "<u2")
        mask = np.array([1, 1, 1, 0, 0, 0, 1, 0, 1], "u1")
        writer.append({"sequence": ids, "loss_mask": mask}, np.array([0, 3, 6, 8, 8, 9]))
        writer.commit()
    (found,) = tokenmill("inspect", tmp_path / "sft", "--json").json["sft"]["audit"]
    # The first token of a document is never a label, whatever its mask.
    assert (found["tokens"], found["supervised"]) == (9, 2)
    assert (found["fully_masked"], found["without_eos"]) == (4, 3)
    assert found["truncated"] is None


def test_an_answer_that_ends_a_turn_is_not_called_endless(tokenmill, tmp_path):
    """[T1.d] What a template writes behind the end of a turn is not trained, and says nothing of it."""
    (tmp_path / "tokenizer").mkdir()
    body = json.loads((TOKENIZER_DIR / "tokenizer.json").read_text(encoding="utf-8"))
    marks = [
        {"id": 4096 + number, "content": text, "special": True, "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": False}
        for number, text in enumerate(["<|im_start|>", "<|im_end|>"])
    ]
    body["added_tokens"] += marks
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(json.dumps(body), encoding="utf-8")
    shutil.copy(TOKENIZER_DIR / "tokenizer_config.json", tmp_path / "tokenizer")
    (tmp_path / "chat.jsonl").write_text(CHAT, encoding="utf-8")
    options = ["--recipe", "chat", "--chat-template", "chatml", "--tokenizer", tmp_path / "tokenizer"]
    assert tokenmill("prepare", tmp_path / "chat.jsonl", "--out", tmp_path / "chat", *options).code == 0
    store = open_store(tmp_path / "chat")
    assert 4097 not in [int(store.fetch_record(record, "sequence")[-1]) for record in range(2)]
    (found,) = tokenmill("inspect", tmp_path / "chat", "--json").json["chat"]["audit"]
    assert (found["supervised"] > 0, found["without_eos"], found["without_eos_percent"]) == (True, 0, 0)
    shutil.rmtree(tmp_path / "tokenizer")
    shutil.rmtree(tmp_path / "chat" / ".tokenizer")  # without it, nobody knows which token ends a turn
    (found,) = tokenmill("inspect", tmp_path / "chat", "--json").json["chat"]["audit"]
    assert (found["without_eos"], found["without_eos_percent"]) == (None, None)


def test_texts_that_cannot_be_shown_are_told_and_a_tokenizer_may_be_named(tokenmill, tmp_path):
    shutil.copytree(TOKENIZER_DIR, tmp_path / "tokenizer")
    shutil.copy(CORPUS_DIR / "prose.jsonl", tmp_path)
    store, run = tmp_path / "store", tmp_path / "run.toml"
    options = ["--out", store, "--tokenizer", tmp_path / "tokenizer"]
    assert "BOS is '<|bos|>'" in " ".join(tokenmill("prepare", tmp_path / "prose.jsonl", *options).out.split())
    run.write_text(
        f"[run]\nsteps = 2\nglobal_batch_size = 2\nseq_len = 8\n[[sources]]\nstore = '{store}'\nname = 'a'\n"
    )
    commands = [["inspect", store], ["what", run, "--step", "0"]]
    whole = [tokenmill(*command) for command in commands]
    assert [done.err for done in whole] == ["", ""]
    shutil.move(tmp_path / "tokenizer", tmp_path / "moved")
    assert [tokenmill(*command).out for command in commands] == [done.out for done in whole]
    shutil.rmtree(store / ".tokenizer")
    for command, before in zip(commands, whole, strict=True):
        without = tokenmill(*command)
        assert without.out != before.out
        assert "no text can be shown, as the tokenizer" in " ".join(without.err.split())
        assert "name its tokenizer with --tokenizer" in " ".join(without.err.split())
        named = tokenmill(*command, "--tokenizer", tmp_path / "moved")
        assert (named.out, named.err) == (before.out, "")
        wrong = tokenmill(*command, "--tokenizer", "bytes")
        assert (wrong.code, "must be the one that made" in " ".join(wrong.err.split())) == (1, True)


def test_examples_tell_trained_from_masked(chat):
    """[T1.d]"""
    from tokenmill.encode.engines import open_tokenizer
    from tokenmill.inspect.examples import examples

    first, last = examples(open_store(chat), open_tokenizer("bytes"))
    assert [piece.text for piece in first.runs if piece.trained] == ["four<|im_end|>"]
    assert [piece.text for piece in last.runs if piece.trained] == ["five & six<|im_end|>"]
    assert [piece.text for piece in first.runs if piece.control] == ["<|bos|>"]
    assert "2 + 2?" in first.runs[1].text


def test_the_page_needs_nothing_else_and_runs_nothing(tokenmill, chat, tmp_path):
    page = tmp_path / "report.html"
    assert tokenmill("inspect", chat, "--html", page).code == 0
    text = page.read_text(encoding="utf-8")
    assert re.findall(r'<span class="k t" title="[^"]*">(.*?)</span>', text, re.DOTALL) == [
        "four&lt;|im_end|&gt;",
        "five &amp; six&lt;|im_end|&gt;",
    ]
    assert "&lt;b&gt;" in text
    assert "<b>" not in text
    assert not re.search(r"<script|<link|<img|https?:|src=|onerror", text)
    assert "default-src 'none'" in text


def test_without_colour_trained_text_stands_in_brackets(tokenmill, chat):
    """[T1.d]"""
    shown = tokenmill("inspect", chat).out
    assert EXAMPLES in shown.splitlines()
    assert re.findall("⟦(.*?)⟧", shown) == ["trained", "four<|im_end|>", "five & six<|im_end|>"]


@pytest.mark.parametrize(
    ("options", "marked"),
    [
        ({"force_terminal": True, "color_system": "truecolor", "no_color": False}, False),
        ({"force_terminal": True, "color_system": "truecolor", "no_color": True}, True),
        ({"force_terminal": True, "color_system": None}, True),
        ({"force_terminal": False, "color_system": "truecolor", "no_color": False}, True),
    ],
)
def test_brackets_stand_where_there_is_no_terminal_with_colour(tokenmill, chat, monkeypatch, options, marked):
    written = io.StringIO()
    monkeypatch.setattr("tokenmill.cli.console.console", Console(file=written, width=200, **options))
    assert tokenmill("inspect", chat).code == 0
    shown = written.getvalue()
    assert ("⟦four<|im_end|>⟧" in shown, "⟦" in shown) == (marked, marked)
    assert ("trained bright, masked dim" in shown) == (not marked)
    assert (re.search(r"\x1b\[1;32mfour<\|im_end\|>", shown) is not None) == (not marked)


@pytest.fixture
def skipping(tokenmill, tmp_path):
    """Return a store of which 12 records were skipped."""
    lines = ['{"text": "good"}', *(f'{{"no{number}\\u001b[2J<b>": 1}}' for number in range(12))]
    (tmp_path / "bad.jsonl").write_text("\n".join(lines), encoding="utf-8")
    options = ["--out", tmp_path / "bad", "--on-error", "skip", "--workers", 1]
    assert tokenmill("prepare", tmp_path / "bad.jsonl", *options).code == 0
    return tmp_path / "bad"


def test_skipped_records_stand_by_reason_with_an_example_and_what_to_do(tokenmill, skipping):
    """[S.i]"""
    facts = tokenmill("inspect", skipping, "--json").json["bad"]
    assert [one["line"] for one in facts["skipped"]["first"][:10]] == [*range(2, 12)]
    (reason,) = facts["reasons"]
    assert (reason["reason"], reason["records"], reason["file"], reason["line"]) == (
        "missing_field",
        12,
        "bad.jsonl",
        2,
    )
    assert reason["way_out"].startswith("name the fields in a recipe")
    done = tokenmill("inspect", skipping)
    assert (done.code, done.err) == (0, "")
    assert re.search(r"^12 skipped records, an example of each reason\s*$", done.out, re.MULTILINE)
    assert re.search(r"^missing_field +12 +bad\.jsonl +2 +.*no0", done.out, re.MULTILINE)
    assert "\x1b" not in done.out


def test_the_page_names_recipe_input_files_and_skipped_records(tokenmill, skipping, tmp_path):
    assert tokenmill("inspect", skipping, "--html", tmp_path / "report.html").code == 0
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<td>recipe</td><td>text</td>" in text
    skipped, inputs = text.split(">12 skipped records, an example of each reason")[1].split(">Input files")
    shown = [[re.sub("<.*?>", " ", part).split() for part in each.split("<tr>")] for each in (skipped, inputs)]
    assert ["bad.jsonl", "1", "6"] in [words[:3] for words in shown[1]]
    assert [words[:4] for words in shown[0] if "12" in words] == [["missing_field", "12", "bad.jsonl", "2"]]
    assert "&lt;b&gt;" in skipped
    assert "<b>" not in skipped
    assert "\x1b" not in text


def talk(answer: str, **more: object) -> dict:
    return {"messages": [{"role": "user", "content": "Q?"}, {"role": "assistant", "content": answer, **more}]}


TOOLS = {"tools": [{"type": "function", "function": {"name": "weather", "parameters": {}}}]}
ENDED = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.tool_calls %}<tool_call>{{ m.tool_calls[0].function.name }}{% endif %}"
    "{{ m.content }}{{ eos_token if m.content != 'no end' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def varied(tokenmill, tmp_path):
    """Prepare chats of every kind, with a template that ends all turns but one."""
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(TOKENIZER_DIR, tokenizer)
    config = json.loads((tokenizer / "tokenizer_config.json").read_text())
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": ENDED}))
    call = [{"type": "function", "function": {"name": "weather", "arguments": {}}}]
    chats = [
        *(talk(f"answer {number}") for number in range(20)),
        talk("word " * 300),
        talk("no end"),
        talk(""),
        talk("<think>why</think>so"),
        talk("see", tool_calls=call),
        talk("it spells <|eos|>"),
        {"messages": [{"role": "user", "content": "Q? " * 200}, {"role": "assistant", "content": "yes"}], **TOOLS},
        {"messages": [{"role": "user", "content": "only"}]},
        talk("x", mask=True),
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(each) + "\n" for each in chats), encoding="utf-8")
    options = ["--recipe", "chat", "--tokenizer", tokenizer, "--on-error", "skip", "--workers", 1]
    assert tokenmill("prepare", tmp_path / "chats.jsonl", "--out", tmp_path / "varied", *options).code == 0
    return tmp_path / "varied"


def test_examples_show_every_kind_of_record(varied):
    """[T1.d]"""
    from tokenmill.inspect.examples import examples
    from tokenmill.inspect.stores import tokenizer_of

    store = open_store(varied)
    found = {why: each for each in examples(store, tokenizer_of(store), seed=3) for why in each.why}
    texts = {why: "".join(piece.text for piece in each.runs) for why, each in found.items()}
    assert {"longest", "most trained", "least trained", "turns without a trained end", "empty answers"} <= set(
        found
    )
    assert {"tools", "reasoning", "drawn by seed 3"} <= set(found)
    assert {why: found[why].item for why in ("empty_answers", "tools_not_written")} == {
        "empty_answers": 22,
        "tools_not_written": 26,
    }
    assert texts["turns without a trained end"].endswith("<|assistant|>no end")
    assert "<tool_call>weather" in texts["tools"]
    assert "<think>" in texts["reasoning"]
    assert found["longest"].item in (20, 26)
    assert texts["least trained"].endswith("yes<|eos|>")
    # A long one is cut around what is trained on, its end included.
    least = found["least trained"]
    assert least.tokens > 400
    assert sum(piece.left_out for piece in least.runs) + least.left_out > 0
    assert [piece.text for piece in least.runs if piece.trained] == ["yes", "<|eos|>"]
    others = {each.item for each in examples(store, tokenizer_of(store), seed=4)}
    assert others != {each.item for each in found.values()}


def test_a_control_token_looks_unlike_a_text_that_spells_it(tokenmill, varied):
    document = tokenmill("inspect", varied, "--document", 25).out
    assert len(re.findall(r"‹<\|eos\|>›", document)) == 2, "the ends of the two turns"
    assert re.search(r"'.*(?:eos|os).*'", document), "the text of the record"
    shown = " ".join(tokenmill("inspect", varied, "--seed", 1).out.split())
    assert "⟦yes‹<|eos|>›⟧" in shown
    assert "drawn by seed 1" in shown


def test_the_audit_scores_turns_and_tells_the_notes_of_the_build(tokenmill, varied):
    """[T1.d]"""
    facts = tokenmill("inspect", varied, "--json").json["varied"]
    (audit,) = facts["audit"]
    assert (audit["turns"], audit["unended_turns"]) == (27, 1)
    assert audit["unended_turns_percent"] == pytest.approx(100 / 27)
    assert [(each["name"], each["records"], each["document"]) for each in facts["notes"]] == [
        ("empty_answers", 1, 22),
        ("tools_not_written", 1, 26),
    ]
    assert {each["reason"]: each["line"] for each in facts["reasons"]} == {"no_trained_message": 28, "flag": 29}
    shown = tokenmill("inspect", varied).out
    assert re.search(r"^Notes of the build, and the first document of each\s*$", shown, re.MULTILINE)
    assert re.search(r"^empty_answers +1 +22 +an answer without a text", shown, re.MULTILINE)
    assert "turns without end %" in " ".join(shown.split())


def test_a_store_without_skipped_records_lists_none(tokenmill, folder):
    assert "skipped records" not in tokenmill("inspect", folder / "stores" / "web").out


def test_pairs_are_counted_and_audited_array_by_array(tokenmill, tmp_path):
    (tmp_path / "dpo.jsonl").write_text(
        '{"prompt": "Say: ", "chosen": "yes", "rejected": "no"}\n', encoding="utf-8"
    )
    assert tokenmill("prepare", tmp_path / "dpo.jsonl", "--out", tmp_path / "dpo", "--recipe", "dpo").code == 0
    facts = tokenmill("inspect", tmp_path / "dpo", "--json").json["dpo"]
    assert [(one["key"], one["supervised"]) for one in facts["audit"]] == [("chosen", 4), ("rejected", 3)]
    chosen, rejected = len("<Say: yes>"), len("<Say: no>")  # with BOS and EOS
    assert facts["tokens"] == chosen + rejected
    assert facts["longest"] == {"chosen": chosen, "rejected": rejected}
    assert facts["lengths"] == {"chosen": {"8 to 15": 1}, "rejected": {"8 to 15": 1}}
    shown = tokenmill("inspect", tmp_path / "dpo").out
    assert re.findall(r"^(longest \w+) +(\d+) *$", shown, re.MULTILINE) == [
        ("longest chosen", str(chosen)),
        ("longest rejected", str(rejected)),
    ]
    assert re.search(rf"^tokens per record +{chosen + rejected} *$", shown, re.MULTILINE)
    assert re.findall(r"^Lengths of (\w+)", shown, re.MULTILINE) == ["chosen", "rejected"]


def test_prompts_have_no_share_of_masked_or_endless_ones(tokenmill, tmp_path):
    (tmp_path / "grpo.jsonl").write_text(
        '{"prompt": "2+2=", "responses": ["4", "five", ""], "rewards": [1, 0, 0]}\n', encoding="utf-8"
    )
    assert tokenmill("prepare", tmp_path / "grpo.jsonl", "--out", tmp_path / "grpo", "--recipe", "grpo").code == 0
    facts = tokenmill("inspect", tmp_path / "grpo", "--json").json["grpo"]
    prompts, responses = facts["audit"]
    assert [prompts[name] for name in ("key", "fully_masked", "without_eos")] == ["prompts", None, None]
    assert (prompts["fully_masked_percent"], prompts["without_eos_percent"]) == (None, None)
    assert [responses[name] for name in ("key", "fully_masked", "without_eos")] == ["responses", 0, 0]
    assert facts["tokens"] == len("<2+2=") + len("4>") + len("five>") + len(">")
    assert facts["longest"] == {"prompts": 5, "responses": 5}
    assert sum(facts["lengths"]["responses"].values()) == 3
    shown = tokenmill("inspect", tmp_path / "grpo").out
    assert re.search(r"^prompts +1 +0 +– +0 +– +– +0 *$", shown, re.MULTILINE)


def test_the_audit_is_whole_at_80_columns(tokenmill, tmp_path, monkeypatch):
    (tmp_path / "grpo.jsonl").write_text(
        '{"prompt": "2+2=", "responses": ["4", "5"], "rewards": [1, 0]}\n', encoding="utf-8"
    )
    assert tokenmill("prepare", tmp_path / "grpo.jsonl", "--out", tmp_path / "grpo", "--recipe", "grpo").code == 0
    monkeypatch.setenv("COLUMNS", "80")
    shown = tokenmill("inspect", tmp_path / "grpo").out
    audit = shown.split("Supervision")[1].split("Lengths of")[0]
    assert sorted(re.findall(r"supervised|masked|truncated|EOS", audit)) == [
        "EOS",
        "masked",
        "supervised",
        "truncated",
    ]
    assert max(map(len, audit.splitlines())) <= 80


def test_one_document_is_shown_with_its_origin_tokens_and_masks(tokenmill, folder):
    store = open_store(folder / "stores" / "web")
    found = tokenmill("inspect", store.path, "--document", 4, "--json").json
    assert found["origin"] == {"file": "web.jsonl", "place": 5, "counts": "line", "kept": {}}
    (part,) = found["parts"]
    assert part["ids"] == store.fetch_record(4, "sequence").tolist()
    assert (len(part["strings"]), part["mask"]) == (len(part["ids"]), None)
    assert part["trained"] == [False, *[True] * (len(part["ids"]) - 1)]
    shown = tokenmill("inspect", store.path, "--document", 4)
    assert (shown.code, shown.err) == (0, "")
    assert shown.lines[0] == f"Document 4 of {store.path}, from web.jsonl:5"
    assert re.search(r"^ *0 +256 +‹<\|bos\|>› +– +no", shown.out, re.MULTILINE)
    assert "\x1b" not in shown.out
    done = tokenmill("inspect", store.path, "--document", 60)
    assert (done.code, done.out) == (2, "")
    assert "document out of range: 60" in done.err
    assert "--document: must be given with a store" in tokenmill("inspect", "run.toml", "--document", 4).err


ENTRY = Path(sys.executable).parent / "tokenmill"


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGE = {
    "flipped ids": (lambda s: flip(s / "shard-00000" / "sequence.bin"), "shard-00000/sequence.bin"),
    "flipped index": (lambda s: flip(s / "shard-00000" / "documents.bin"), "shard-00000/documents.bin"),
    "flipped manifest": (lambda s: flip(s / "manifest.json"), "manifest.json"),
    "truncated": (lambda s: (s / "shard-00000" / "sequence.bin").write_bytes(b"x"), "shard-00000/sequence.bin"),
    "missing file": (lambda s: (s / "shard-00000" / "sequence.bin").unlink(), "shard-00000/sequence.bin"),
    "missing shard": (lambda s: shutil.rmtree(s / "shard-00000"), "shard-00000/sequence.bin"),
    "renamed shard": (lambda s: (s / "shard-00000").rename(s / "shard-00001"), "shard-00001"),
    "missing manifest": (lambda s: (s / "manifest.json").unlink(), "manifest.json"),
}


def test_a_whole_store_is_said_to_be_ok(tokenmill, folder):
    store = folder / "stores" / "web"
    done = tokenmill("verify", store)
    assert (done.code, done.err) == (0, "")
    assert re.match(rf"ok  {re.escape(str(store))}: 2 files in 1 shard, .* 60 documents, [\d,]+ tokens;", done.out)


def test_json_reports_the_counts(tokenmill, folder):
    store = open_store(folder / "stores" / "web")
    files = [file for shard in store.manifest.shards for file in shard.files.values()]
    assert tokenmill("verify", store.path, "--json").json == {
        "path": str(store.path),
        "ok": True,
        "shards": 1,
        "files": 2,
        "bytes": sum(file.bytes for file in files),
        "documents": 60,
        "tokens": store.num_tokens,
        "fingerprint": store.manifest.fingerprint,
        "problems": [],
    }


@pytest.mark.parametrize("json", [False, True])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_broken_store_gives_exit_code_1_and_the_name_of_the_file_on_stderr(tokenmill, folder, damage, json):
    """[S.f]"""
    change, name = DAMAGE[damage]
    change(folder / "stores" / "web")
    done = tokenmill("verify", folder / "stores" / "web", *(["--json"] if json else []))
    assert done.code == 1
    lines = done.err.splitlines()
    assert all(re.fullmatch(r"error: .*: .*; .*", line) for line in lines)
    assert name in lines[0]
    if json:
        found = msgspec.json.decode(done.out)
        assert found["ok"] is False
        assert [f"error: {problem}" for problem in found["problems"]] == lines
    else:
        assert done.out == ""


def test_all_broken_files_of_several_stores_are_named(tokenmill, folder):
    """[S.f]"""
    web = folder / "stores" / "web"
    shutil.copytree(web, folder / "whole")
    shutil.copytree(web, folder / "gone")
    flip(web / "shard-00000" / "sequence.bin")
    flip(web / "shard-00000" / "documents.bin")
    (folder / "gone" / "manifest.json").unlink()
    done = tokenmill("verify", web, folder / "whole", folder / "gone")
    assert done.code == 1
    assert [line.split(": ")[0] for line in done.lines] == [f"ok  {folder}/whole"]
    broken = [f"{web}/shard-00000/documents.bin", f"{web}/shard-00000/sequence.bin", f"{folder}/gone"]
    assert sorted(re.findall(rf"{re.escape(str(folder))}[^: ]*", done.err)) == sorted(broken)
    found = msgspec.json.decode(tokenmill("verify", web, folder / "whole", folder / "gone", "--json").out)
    assert ("path" in found, found["ok"]) == (False, False)
    assert [(store["ok"], store["documents"], len(store["problems"])) for store in found["stores"]] == [
        (False, 60, 2),
        (True, 60, 0),
        (False, 0, 1),
    ]


def test_the_exit_code_of_the_process_tells_a_whole_store_from_a_broken_one(folder):
    """[S.f]"""
    store = folder / "stores" / "web"
    whole = subprocess.run([ENTRY, "verify", store], capture_output=True, text=True, check=False)
    flip(store / "shard-00000" / "sequence.bin")
    broken = subprocess.run([ENTRY, "verify", store], capture_output=True, text=True, check=False)
    assert (whole.returncode, whole.stderr) == (0, "")
    assert (broken.returncode, broken.stdout) == (1, "")
    assert "shard-00000/sequence.bin: checksum must be" in broken.stderr
    assert "Traceback" not in broken.stderr


def test_a_path_with_brackets_is_shown_as_it_is(tokenmill, folder):
    store = (folder / "stores" / "web").rename(folder / "a[bold]b")
    assert f"ok  {store}: " in tokenmill("verify", store).out


@pytest.fixture
def split(tokenmill, folder):
    """Return a folder with the stores train and val, as `prepare --val-fraction` makes it."""
    arguments = ["--out", folder / "split", "--val-fraction", 0.3, "--workers", 1]
    assert tokenmill("prepare", folder / "web.jsonl", *arguments).code == 0
    return folder / "split"


def test_all_stores_of_a_folder_are_verified_one_after_the_other(tokenmill, split):
    done = tokenmill("verify", split)
    assert (done.code, done.err) == (0, "")
    assert [line.split(": ")[0] for line in done.lines] == [f"ok  {split}/train", f"ok  {split}/val"]
    found = tokenmill("verify", split, "--json").json
    assert (found["path"], found["ok"]) == (str(split), True)
    assert found["stores"] == [tokenmill("verify", split / name, "--json").json for name in ("train", "val")]
    assert sum(store["documents"] for store in found["stores"]) == 60


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (lambda out: flip(out / "val" / "shard-00000" / "sequence.bin"), "val/shard-00000/sequence.bin"),
        (lambda out: (out / "val" / "manifest.json").unlink(), "val"),
    ],
)
def test_one_broken_store_of_a_folder_gives_exit_code_1(tokenmill, split, damage, name):
    """[S.f]"""
    damage(split)
    done = tokenmill("verify", split)
    assert done.code == 1
    assert [line.split(": ")[0] for line in done.lines] == [f"ok  {split}/train"]
    assert re.fullmatch(rf"error: (no store at this path: )?{re.escape(str(split))}/{name}[: ].*; .*\n", done.err)
    done = tokenmill("verify", split, "--json")
    found = msgspec.json.decode(done.out)
    assert (done.code, found["ok"]) == (1, False)
    assert [store["ok"] for store in found["stores"]] == [True, False]


def test_hashes_are_added_to_stores_that_lack_them(tokenmill, split):
    kept = {name: (split / name / ".hashes" / "00000.bin").read_bytes() for name in ("train", "val")}
    for name in kept:
        shutil.rmtree(split / name / ".hashes")
    done = tokenmill("verify", split, "--add-hashes")
    assert (done.code, done.err) == (0, "")
    assert {name: (split / name / ".hashes" / "00000.bin").read_bytes() for name in kept} == kept


def test_view_names_a_port_that_is_taken_or_that_there_is_not(tokenmill, run_toml):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        taken = tokenmill("view", run_toml, "--port", port)
    assert taken.code == 2
    assert taken.err == (
        f"error: --port: must be a free port, got {port} (Address already in use); "
        "leave it out, and a free one is taken\n"
    )
    wrong = tokenmill("view", run_toml, "--port", 99_999)
    assert (wrong.code, wrong.err.partition(": Input")[0]) == (2, "error: invalid value for '--port'")
    host = tokenmill("view", run_toml, "--host", "no such host", "--expose")
    assert host.err.startswith("error: --host: must be an address of this machine, got 'no such host' (")


def test_view_refuses_a_run_to_compare_with_that_is_not_there(tokenmill, run_toml, folder):
    missing = tokenmill("view", run_toml, "--diff", "nope.toml")
    assert missing.code == 2
    assert "config not found: nope.toml" in missing.err
    store = tokenmill("view", folder / "stores" / "web", "--diff", run_toml)
    assert store.err.startswith("error: --diff: must be given with a run, got the store ")


def test_a_character_of_several_tokens_is_shown_by_the_first_of_them(tokenmill, tmp_path):
    (tmp_path / "a.txt").write_text("a中", encoding="utf-8")
    tm.prepare(tmp_path / "a.txt", out=tmp_path / "a", tokenizer="bytes", progress=False, workers=1)
    shown = tokenmill("inspect", tmp_path / "a", "--document", 0).out
    assert re.findall(r"^ *\d+ +(\d+) +(\S+) ", shown, re.MULTILINE)[1:5] == [
        ("97", "'a'"),
        ("228", "'中'"),
        ("184", "(continued)"),
        ("173", "(continued)"),
    ]
    (part,) = tokenmill("inspect", tmp_path / "a", "--document", 0, "--json").json["parts"]
    assert part["strings"] == ["<|bos|>", "a", "中", "", "", "<|eos|>"]
    assert part["continues"] == [False, False, False, True, True, False]
