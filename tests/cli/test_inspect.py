from __future__ import annotations

import re
import shutil

import numpy as np
import pytest

from tokenmill.demo import CORPUS_DIR, TOKENIZER_DIR
from tokenmill.store import open_store


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
    assert facts["lengths"] == bins
    assert facts["longest_document"] == max(lengths, default=0)
    assert tokenmill("inspect", path).code == 0


def test_text_shows_facts_lengths_and_examples(tokenmill, folder):
    done = tokenmill("inspect", folder / "stores" / "web")
    assert (done.code, done.err) == (0, "")
    titles = ["Store web", "Supervision", "Document lengths", "Examples: trained bright, masked dim"]
    assert [title for title in re.findall(r"^\S.*?(?=\s*$)", done.out, re.MULTILINE) if title in titles] == titles
    assert "bytes, 259 ids" in done.out
    assert "id 256, added / id 257, added" in done.out


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
    assert sum(tokenmill("inspect", path, "--json").json["web"]["lengths"].values()) == 50


def test_a_tokenizer_file_that_is_gone_costs_only_the_examples(tokenmill, tmp_path):
    tokenizer = shutil.copytree(TOKENIZER_DIR, tmp_path / "tokenizer")
    arguments = ["--out", tmp_path / "a", "--tokenizer", tokenizer, "--workers", 1]
    assert tokenmill("prepare", CORPUS_DIR / "dialogue.jsonl", *arguments).code == 0
    shutil.rmtree(tokenizer)
    done = tokenmill("inspect", tmp_path / "a")
    assert (done.code, done.err) == (0, "")
    assert "tokenizer.json, " in done.out


@pytest.mark.parametrize("name", ["nowhere", "nowhere.toml", "stores"])
def test_what_is_not_there_is_an_error(tokenmill, folder, name):
    done = tokenmill("inspect", folder / name)
    assert (done.code, done.out) == (1, "")
    assert re.fullmatch(rf"error: .*{name}: .*, got .*; .*\n", done.err)


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


def test_examples_tell_trained_from_masked(chat):
    """[T1.d]"""
    from tokenmill.cli.audit import examples
    from tokenmill.encode.load import open_tokenizer

    first, last = examples(open_store(chat), open_tokenizer("bytes"))
    assert [text for trained, text in first.runs if trained] == ["four<|im_end|>"]
    assert [text for trained, text in last.runs if trained] == ["five & six<|im_end|>"]
    assert "2 + 2?" in first.runs[0][1]


def test_the_page_needs_nothing_else_and_runs_nothing(tokenmill, chat, tmp_path):
    page = tmp_path / "report.html"
    assert tokenmill("inspect", chat, "--html", page).code == 0
    text = page.read_text(encoding="utf-8")
    assert re.findall(r'<span class="trained">(.*?)</span>', text, re.S) == [
        "four&lt;|im_end|&gt;",
        "five &amp; six&lt;|im_end|&gt;",
    ]
    assert "&lt;b&gt;" in text
    assert "<b>" not in text
    assert not re.search(r"<script|<link|<img|https?:|src=|onerror", text)
    assert "default-src 'none'" in text


def test_pairs_are_audited_array_by_array(tokenmill, tmp_path):
    (tmp_path / "dpo.jsonl").write_text(
        '{"prompt": "Say: ", "chosen": "yes", "rejected": "no"}\n', encoding="utf-8"
    )
    assert tokenmill("prepare", tmp_path / "dpo.jsonl", "--out", tmp_path / "dpo", "--recipe", "dpo").code == 0
    found = tokenmill("inspect", tmp_path / "dpo", "--json").json["dpo"]["audit"]
    assert [(one["key"], one["supervised"]) for one in found] == [("chosen", 4), ("rejected", 3)]
    assert tokenmill("inspect", tmp_path / "dpo").code == 0
