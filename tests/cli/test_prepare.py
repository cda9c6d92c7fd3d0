from __future__ import annotations

import json
import re

import pytest

from tokenmill.demo import TOKENIZER_DIR
from tokenmill.store import open_store, verify


def test_json_reports_what_the_store_holds(tokenmill, folder):
    done = tokenmill("prepare", folder / "web.jsonl", "--out", folder / "new", "--workers", 1, "--json")
    report, store = done.json, open_store(folder / "new")
    assert (report["documents"], report["tokens"], report["shards"]) == (60, store.num_tokens, 1)
    assert report["fingerprint"] == store.manifest.fingerprint == verify(folder / "new").fingerprint
    assert report["fingerprint"] == open_store(folder / "stores" / "web").manifest.fingerprint
    assert (report["skipped"], report["files"]) == ({}, 1)
    assert report["input_bytes"] == (folder / "web.jsonl").stat().st_size


def test_text_shows_the_same_facts(tokenmill, folder):
    done = tokenmill("prepare", folder / "web.jsonl", "--out", folder / "new", "--tokenizer", "bytes")
    assert (done.code, done.err) == (0, "")
    for fact in ("documents", "60", "tokens per byte", "skipped", "none", "fingerprint"):
        assert fact in done.out


def test_the_ids_are_the_bytes_of_the_texts(tokenmill, folder):
    assert tokenmill("prepare", folder / "books.jsonl", "--out", folder / "new").code == 0
    store = open_store(folder / "new")
    lines = (folder / "books.jsonl").read_text(encoding="utf-8").splitlines()
    for document, line in enumerate(lines):
        assert store.fetch_record(document, "sequence").tolist() == [256, *json.loads(line)["text"].encode(), 257]


def test_bos_and_eos_can_be_left_out_and_shards_made_small(tokenmill, folder):
    out = folder / "new"
    options = ["--no-bos", "--no-eos", "--max-tokens-per-shard", 500, "--workers", 1]
    report = tokenmill("prepare", folder / "web.jsonl", "--out", out, *options, "--json").json
    store = open_store(out)
    assert report["shards"] == store.num_shards > 3
    assert max(shard.tokens for shard in store.manifest.shards) <= 500
    assert int(store.fetch(0, store.num_tokens, "sequence").max()) < 256


def test_several_inputs_and_another_field(tokenmill, folder):
    for name in ("b2", "b10"):
        (folder / f"{name}.jsonl").write_text(json.dumps({"doc": {"body": name}}) + "\n", encoding="utf-8")
    out = folder / "new"
    done = tokenmill("prepare", folder / "b10.jsonl", folder / "b2.jsonl", "--out", out, "--text-field", "doc.body")
    assert done.code == 0
    store = open_store(out)
    found = [bytes(store.fetch_record(i, "sequence")[1:-1].astype("|u1")) for i in range(store.num_documents)]
    assert found == [b"b2", b"b10"]


def test_a_tokenizer_file_is_used_with_its_engine(tokenmill, folder):
    report = tokenmill(
        "prepare",
        folder / "web.jsonl",
        "--out",
        folder / "new",
        "--tokenizer",
        TOKENIZER_DIR,
        "--workers",
        1,
        "--json",
    ).json
    assert report["engine"].split()[0] in ("fastokens", "tokenizers")
    assert report["tokens_per_byte"] < 1


def test_a_bad_line_stops_with_file_and_line_and_leaves_no_store(tokenmill, folder):
    with (folder / "web.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"text": 5}\n')
    done = tokenmill("prepare", folder / "web.jsonl", "--out", folder / "new")
    assert (done.code, done.out) == (1, "")
    assert re.fullmatch(r"error: .*web\.jsonl:61: .*, got .*; .*\n", done.err)
    assert tokenmill("verify", folder / "new").code == 1


def test_a_bad_line_is_skipped_and_counted_when_asked(tokenmill, folder):
    with (folder / "web.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"text": 5}\n{broken\n')
    options = ["--on-error", "skip", "--json", "--workers", 1]
    report = tokenmill("prepare", folder / "web.jsonl", "--out", folder / "new", *options).json
    assert (report["documents"], sum(report["skipped"].values())) == (60, 2)
    assert open_store(folder / "new").manifest.skipped["counts"] == report["skipped"]


def test_a_finished_store_is_replaced_only_when_asked(tokenmill, folder):
    arguments = ["prepare", folder / "books.jsonl", "--out", folder / "stores" / "web", "--workers", 1]
    done = tokenmill(*arguments, "--min-chars", 5)
    assert done.code == 1
    assert re.fullmatch(r"error: .*stores/web: .* recipe\.preprocessing\.min_chars 0 -> 5; .*--rebuild\n", done.err)
    assert open_store(folder / "stores" / "web").num_documents == 60
    assert tokenmill(*arguments, "--rebuild").code == 0
    assert open_store(folder / "stores" / "web").num_documents == 25


def test_new_files_are_added_and_the_report_says_so(tokenmill, folder):
    out = ["--out", folder / "stores" / "web", "--workers", 1]
    shown = tokenmill("prepare", folder / "web.jsonl", folder / "books.jsonl", *out).out
    assert re.search(r"new\s+1 files, 25 documents", shown)
    assert open_store(folder / "stores" / "web").num_documents == 85
    again = tokenmill("prepare", folder / "web.jsonl", folder / "books.jsonl", *out).out
    assert "nothing: all files are in the store already" in again


def test_several_stores_are_listed(tokenmill, folder):
    shown = tokenmill("prepare", folder / "web.jsonl", "--out", folder / "new", "--val-fraction", 0.3).out
    assert re.search(r"train\s+\d+.*\n\s*val\s+\d+", shown)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--on-error", "skpi"], r"on_error: must be one of stop, skip, got 'skpi'; did you mean 'skip'\?"),
        (["--workers", 0], r"workers: must be at least 1, got 0; leave it out.*"),
        (["--tokenizer", "nowhere.json"], r".*nowhere\.json.*got .*; .*"),
        (["--max-tokens-per-shard", 0], r".*max_tokens_per_shard: must be .* from 1 to .*, got 0; .+"),
        (["--max-tokens-per-shard", -3], r".*max_tokens_per_shard: must be .* from 1 to .*, got -3; .+"),
        (["--text-field", ""], r".*text_field.*got .*; .*"),
        (["--engine", "warp"], r".*engine.*got 'warp'; .*"),
    ],
)
def test_an_option_that_cannot_be_right_is_refused_before_anything_is_written(tokenmill, folder, options, message):
    """[A1.a]"""
    done = tokenmill("prepare", folder / "web.jsonl", "--out", folder / "new", *options)
    assert (done.code, done.out) == (1, "")
    assert re.fullmatch(f"error: {message}\n", done.err)
    assert not (folder / "new" / "manifest.json").exists()


@pytest.mark.parametrize("name", ["nowhere.jsonl", "*.parquet", "run.toml", "s3://bucket/a.jsonl"])
def test_an_input_that_cannot_be_read_is_named(tokenmill, folder, monkeypatch, name):
    monkeypatch.chdir(folder)
    done = tokenmill("prepare", name, "--out", folder / "new")
    assert (done.code, done.out) == (1, "")
    assert re.fullmatch(rf"error: .*{re.escape(name)}: .*, got .*; .*\n", done.err)


def test_out_in_the_folder_of_the_inputs_deletes_none_of_them(tokenmill, folder):
    """[C1.d]"""
    data = (folder / "web.jsonl").read_bytes()
    (folder / "shard-00000.jsonl").write_bytes(data)
    done = tokenmill("prepare", folder / "shard-00000.jsonl", "--out", folder)
    assert done.code == 1
    assert "choose another path for it" in done.err
    assert (folder / "shard-00000.jsonl").read_bytes() == data
