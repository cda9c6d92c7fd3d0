from __future__ import annotations

import re

import numpy as np
import pytest

from tokenmill.store import open_store


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
    assert re.search(r"compared +500 numbers, all as in the files", done.out)
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
        r"error: .*b\.bin: the dtype of files without a header must be said, got none; add dtype", done.err
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
    assert (done.code, done.out) == (1, "")
    assert done.err == (
        f"error: {tmp_path}/no.npy: must be a store, or a file, folder or glob of token files, got nothing there; "
        "fix the path\n"
    )
