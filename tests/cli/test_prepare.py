from __future__ import annotations

import json
import re
from dataclasses import fields

import numpy as np
import pytest

from tokenmill.build.options import GROUPS, PrepareOptions
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
        (["--on-error", "skpi"], r"--on-error: expected one of stop, skip, got 'skpi'; did you mean 'skip'\?"),
        (["--workers", 0], r"workers: must be at least 1, got 0; leave it out.*"),
        (["--tokenizer", "nowhere.json"], r"tokenizer not found: .nowhere\.json.; .*"),
        (["--max-tokens-per-shard", 0], r".*max_tokens_per_shard: expected a whole number from 1 .*, got 0; .+"),
        (
            ["--max-tokens-per-shard", -3],
            r".*max_tokens_per_shard: expected a whole number from 1 .*, got -3; .+",
        ),
        (["--text-field", ""], r".*text_field.*got .*; .*"),
        (["--tokenizer-engine", "warp"], r".*engine.*got 'warp'; .*"),
    ],
)
def test_an_option_that_cannot_be_right_is_refused_before_anything_is_written(tokenmill, folder, options, message):
    """[A1.a]"""
    done = tokenmill("prepare", folder / "web.jsonl", "--out", folder / "new", *options)
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(f"error: {message}\n", done.err)
    assert not (folder / "new" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("name", "code"), [("nowhere.jsonl", 2), ("*.parquet", 2), ("run.toml", 1), ("s3://bucket/a.jsonl", 1)]
)
def test_an_input_that_cannot_be_read_is_named(tokenmill, folder, monkeypatch, name, code):
    monkeypatch.chdir(folder)
    done = tokenmill("prepare", name, "--out", folder / "new")
    assert (done.code, done.out) == (code, "")
    assert re.fullmatch(rf"error: .*{re.escape(name)}[:;] .+\n", done.err)


def test_out_in_the_folder_of_the_inputs_deletes_none_of_them(tokenmill, folder):
    """[C1.d]"""
    data = (folder / "web.jsonl").read_bytes()
    (folder / "shard-00000.jsonl").write_bytes(data)
    done = tokenmill("prepare", folder / "shard-00000.jsonl", "--out", folder)
    assert done.code == 1
    assert "choose another path for it" in done.err
    assert (folder / "shard-00000.jsonl").read_bytes() == data


@pytest.fixture
def tokens(tmp_path):
    ids = np.random.default_rng(0).integers(2, 256, 500).astype(np.uint16)
    ids[49::50] = 0
    np.save(tmp_path / "a.npy", ids)
    ids.tofile(tmp_path / "b.bin")
    return ids


def test_files_become_a_store_that_is_verified(tokenmill, tmp_path, tokens):
    done = tokenmill("import", tmp_path / "a.npy", "--out", tmp_path / "ours", "--eos-id", 0)
    assert (done.code, done.err) == (0, "")
    assert re.search(r"compared +500 numbers, all equal to the files", done.out)
    store = open_store(tmp_path / "ours")
    assert store.fetch(0, 500, "sequence").tolist() == tokens.tolist()
    assert store.num_documents == 10
    assert tokenmill("verify", tmp_path / "ours").code == 0


def test_json_is_the_report(tokenmill, tmp_path, tokens):
    arguments = ["import", tmp_path / "b.bin", "--out", tmp_path / "ours", "--dtype", "uint16", "--json"]
    report = tokenmill(*arguments).json
    assert report == {
        "path": str(tmp_path / "b.bin"),
        "format": "bin",
        "out": str(tmp_path / "ours"),
        "documents": 1,
        "tokens": tokens.size,
        "shards": 1,
        "keys": {"sequence": "|u1"},
        "fingerprint": open_store(tmp_path / "ours").fingerprint,
        "compared": 500,
    }
    assert tokenmill(*arguments).code == 1
    assert tokenmill(*arguments, "--rebuild").code == 0


def test_a_tokenizer_is_the_users_word(tokenmill, tmp_path, folder):
    """With it, imported files mix with what was prepared by it."""
    ids = np.array([256, *b"the mill", 256, *b"grinds"], np.uint16)
    np.save(tmp_path / "c.npy", ids)
    prepared = open_store(folder / "stores" / "web").manifest.tokenizer
    assert tokenmill("import", tmp_path / "c.npy", "--out", tmp_path / "ours", "--tokenizer", "bytes").code == 0
    imported = open_store(tmp_path / "ours").manifest.tokenizer
    assert {key: imported[key] for key in ("kind", "content", "vocab_size")} == {
        key: prepared[key] for key in ("kind", "content", "vocab_size")
    }


@pytest.mark.usefixtures("tokens")
def test_what_is_not_said_is_asked_for(tokenmill, tmp_path):
    done = tokenmill("import", tmp_path / "b.bin", "--out", tmp_path / "ours")
    assert (done.code, done.out) == (1, "")
    assert re.match(
        r"error: .*b\.bin: the dtype of files without a header must be said, got none; say --dtype", done.err
    )
    assert not (tmp_path / "ours").exists()


def test_verify_says_what_it_checked_of_files_without_checksums(tokenmill, tmp_path, tokens):
    done = tokenmill("verify", tmp_path / "a.npy", "--vocab-size", 256)
    assert (done.code, done.err) == (0, "")
    assert "npy: the format has no checksums; sizes and boundaries are right, ids below the vocabulary" in done.out
    report = tokenmill("verify", tmp_path / "b.bin", "--dtype", "uint16", "--json").json
    assert (report["format"], report["tokens"]) == ("bin", tokens.size)
    assert report["checked"].endswith("no vocabulary was given")
    done = tokenmill("verify", tmp_path / "a.npy", "--vocab-size", 100)
    assert done.code == 1
    assert re.match(r"error: .*a\.npy: token ids must be below the vocabulary size 100, got", done.err)


def test_inspect_shows_foreign_files(tokenmill, tmp_path, tokens):
    done = tokenmill("inspect", tmp_path / "a.npy", "--json")
    assert done.json["a.npy"]["tokens"] == tokens.size
    shown = tokenmill("inspect", tmp_path / "a.npy")
    assert re.search(r"tokenizer +unknown, ids below 65,536\s*$", shown.out, re.MULTILINE)
    assert re.search(r"BOS / EOS +none / none\s*$", shown.out, re.MULTILINE)
    assert re.search(r"recipe +npy, read in place\s*$", shown.out, re.MULTILINE)


@pytest.mark.usefixtures("tokens")
def test_inspect_takes_the_same_word_for_foreign_files_as_verify(tokenmill, tmp_path):
    options = ["--dtype", "uint16", "--vocab-size", 256, "--eos-id", 0, "--format", "bin"]
    found = tokenmill("inspect", tmp_path / "b.bin", *options, "--json").json["b.bin"]
    assert (found["documents"], found["longest"]) == (10, {"sequence": 50})
    assert [one["without_eos"] for one in found["audit"]] == [0]
    shown = tokenmill("inspect", tmp_path / "b.bin", *options).out
    assert re.search(r"tokenizer +not named, 256 ids\s*$", shown, re.MULTILINE)
    assert re.search(r"BOS / EOS +none / id 0, ends every document\s*$", shown, re.MULTILINE)
    shown = tokenmill("inspect", tmp_path / "b.bin", "--dtype", "uint16", "--bos-id", 0).out
    assert re.search(r"id 0, not at the start of every document / none\s*$", shown, re.MULTILINE)
    done = tokenmill("inspect", tmp_path / "b.bin")
    assert (done.code, done.out) == (1, "")


@pytest.mark.usefixtures("tokens")
def test_without_an_eos_id_nothing_is_said_of_ends(tokenmill, tmp_path):
    (found,) = tokenmill("inspect", tmp_path / "a.npy", "--json").json["a.npy"]["audit"]
    assert (found["without_eos"], found["without_eos_percent"]) == (None, None)


@pytest.mark.usefixtures("tokens")
def test_what_was_imported_is_not_said_to_be_added(tokenmill, tmp_path):
    arguments = ["--out", tmp_path / "ours", "--vocab-size", 256, "--eos-id", 0]
    assert tokenmill("import", tmp_path / "a.npy", *arguments).code == 0
    shown = tokenmill("inspect", tmp_path / "ours").out
    assert re.search(r"tokenizer +not named, 256 ids\s*$", shown, re.MULTILINE)
    assert re.search(r"BOS / EOS +none / id 0, ends every document\s*$", shown, re.MULTILINE)
    assert re.search(r"recipe +imported from npy\s*$", shown, re.MULTILINE)


def test_files_that_are_not_there_are_said_to_be_missing(tokenmill, tmp_path):
    done = tokenmill("import", tmp_path / "no.npy", "--out", tmp_path / "ours")
    assert (done.code, done.out) == (2, "")
    assert done.err == (f"error: no store or token file at this path: {tmp_path}/no.npy; fix the path\n")


def test_export_says_what_was_written_and_who_read_it_back(tokenmill, folder, tmp_path):
    web = folder / "stores" / "web"
    done = tokenmill("export", web, "--format", "npy", "--out", tmp_path / "npy")
    assert (done.code, done.err) == (0, "")
    assert re.search(r"read back +[\d,]+ numbers, all equal to the store", done.out)
    report = tokenmill("export", web, "--format", "astrai-bin", "--out", tmp_path / "astrai", "--json").json
    assert (report["documents"], report["keys"]) == (60, ["sequence"])
    assert tokenmill("verify", tmp_path / "npy", tmp_path / "astrai").code == 0
    done = tokenmill("export", web, "--format", "npy", "--out", tmp_path / "npy")
    assert (done.code, done.out) == (1, "")
    assert "must be a new or an empty folder" in done.err


def test_upload_copies_a_store_and_says_what_it_sent(tokenmill, folder, tmp_path):
    store = next(path.parent for path in folder.rglob("manifest.json"))
    address = f"file://{tmp_path}/remote"
    first = tokenmill("upload", store, address, "--json").json
    assert first["sent_files"] == first["files"] > 2
    again = tokenmill("upload", store, address)
    assert "0 files" in again.out
    assert "all files, by reading them back" in again.out
    assert (store / "manifest.json").read_bytes() == (tmp_path / "remote" / "manifest.json").read_bytes()


def test_roles_turns_and_the_system_are_said_on_the_command_line(tokenmill, tmp_path):
    turns = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "Two."}]
    more = [{"role": "user", "content": "3?"}, {"role": "assistant", "content": "Three."}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": turns + more}) + "\n", encoding="utf-8")
    shared = ["prepare", tmp_path / "chat.jsonl", "--recipe", "chat", "--chat-template", "chatml", "--workers", 1]
    done = tokenmill(
        *shared, "--out", tmp_path / "a", "--system", "Hm.", "--train-turns", "last", "--mask", "user=train"
    )
    assert done.code == 0, done.err
    said = open_store(tmp_path / "a").manifest.recipe["recipe"]
    assert (said["system"], said["train_turns"], said["mask"]["user"]) == ("Hm.", "last", "train")
    done = tokenmill(*shared, "--out", tmp_path / "b", "--mask", "user")
    assert (
        done.err
        == "error: --mask: must be roles with train or mask, got 'user'; for example tool=train,user=mask\n"
    )


def test_lists_may_be_repeated_and_may_have_commas(tokenmill, tmp_path):
    records = [{"text": "a", "id": n, "url": f"u{n}", "date": "1"} for n in range(3)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for number, options in enumerate(
        (["--keep", "id,url,date"], ["--keep", "id", "--keep", "url,date"], ["--keep", "id", "--keep", "url"])
    ):
        done = tokenmill("prepare", tmp_path / "a.jsonl", "--out", tmp_path / str(number), "--workers", 1, *options)
        assert done.code == 0, done.err
    kept = [open_store(tmp_path / str(number)).origin(1).kept for number in range(3)]
    assert kept == [{"id": 1, "url": "u1", "date": "1"}] * 2 + [{"id": 1, "url": "u1"}]
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(chat) + "\n")
    shared = ("prepare", tmp_path / "chat.jsonl", "--recipe", "chat", "--chat-template", "chatml", "--workers", 1)
    trained = []
    for number, options in enumerate((["user=train,tool=train"], ["user=train", "--mask", "tool=train"])):
        done = tokenmill(*shared, "--out", tmp_path / f"chat{number}", "--mask", *options)
        assert done.code == 0, done.err
        trained.append(
            tokenmill("inspect", tmp_path / f"chat{number}", "--document", 0, "--json").json["parts"][0]["trained"]
        )
    assert trained[0] == trained[1]
    twice = tokenmill(*shared, "--out", tmp_path / "twice", "--mask", "user=train", "--mask", "user=mask")
    assert (twice.code, twice.err) == (2, "error: --mask: role set twice: 'user'; remove one\n")


def test_records_without_the_fields_of_a_recipe_are_told_which_it_wants(tokenmill, folder, tmp_path):
    done = tokenmill(
        *("prepare", folder / "web.jsonl", "--recipe", "chat", "--chat-template", "chatml"),
        *("--out", tmp_path / "chats", "--workers", 1),
    )
    assert done.code == 1
    assert done.err.endswith(
        "web.jsonl:1: a record must have the fields that are read, got no messages, nor system + conversations, "
        "nor conversations; name the fields in a recipe, or take the preset that has them with --recipe, or skip "
        "bad ones with --on-error skip\n"
    )


def test_without_a_tokenizer_the_report_says_that_ids_are_bytes(tokenmill, folder, tmp_path):
    done = tokenmill("prepare", folder / "web.jsonl", "--out", tmp_path / "web", "--workers", 1)
    assert "bytes: one id per byte; set --tokenizer for that of a model" in done.out


def test_the_help_has_every_option_once_in_its_group(tokenmill, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    panels = re.split(r"^╭─ (\w+) ─+╮$", tokenmill("prepare", "--help").out, flags=re.MULTILINE)
    assert tuple(panels[5::2]) == GROUPS
    texts = dict(zip(panels[1::2], panels[2::2], strict=True))
    flags = {"add_bos": "bos", "add_eos": "eos", "engine": "tokenizer_engine"}
    for item in fields(PrepareOptions):
        if "option" in item.metadata:
            flag = "--" + flags.get(item.name, item.name).replace("_", "-")
            assert [name for name, text in texts.items() if re.search(rf"{flag}\s", text)] == [
                item.metadata["option"].group
            ]


def test_help_texts_of_options_are_short_phrases():
    described = [item.metadata["option"] for item in fields(PrepareOptions) if "option" in item.metadata]
    assert [option.help for option in described if len(option.help.split()) > 10 or option.help.endswith(".")] == []


def test_a_default_of_the_command_is_that_of_python(tokenmill, folder):
    """Leaving all flags out gives the store that `tm.prepare` gives."""
    assert tokenmill("prepare", folder / "web.jsonl", "--out", folder / "new").code == 0
    assert (
        open_store(folder / "new").manifest.fingerprint
        == open_store(folder / "stores" / "web").manifest.fingerprint
    )
