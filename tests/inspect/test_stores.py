"""The texts of a store, wherever it and its tokenizer are; what the command line shows is tested there."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from tests.encode.conftest import trained_pieces
from tests.encode.test_files import BYTES, OWN, ranks

import tokenmill as tm
from tokenmill.demo import TOKENIZER_DIR
from tokenmill.errors import TokenizerError
from tokenmill.inspect.examples import examples
from tokenmill.inspect.stores import inspect_store, open_stores, tokenizer_of, why_no_texts
from tokenmill.store import open_store, verify

KINDS = ("folder", "tokenizer.json", "other name", "rank file", "own encoding", "model")
TEXT = "a mill grinds"


@pytest.fixture
def inputs(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"{TEXT} {index}"}) + "\n" for index in range(9)))
    return path


def spec_of(kind: str, folder: Path) -> str:
    """Write a tokenizer of a kind into a folder; return what names it."""
    folder.mkdir()
    if kind in ("folder", "tokenizer.json", "other name"):
        target = folder / ("mine.json" if kind == "other name" else "tokenizer.json")
        shutil.copy(TOKENIZER_DIR / "tokenizer.json", target)
        shutil.copy(TOKENIZER_DIR / "tokenizer_config.json", folder)
        return str(folder if kind == "folder" else target)
    if kind == "model":
        (folder / "tokenizer.model").write_bytes(trained_pieces("bpe"))
        return str(folder / "tokenizer.model")
    (folder / "mine").write_bytes(ranks(BYTES))
    (folder / "mine.json").write_text(json.dumps(OWN))
    return f"tiktoken:{folder / 'mine'}?encoding={folder / 'mine.json' if kind == 'own encoding' else 'gpt2'}"


@pytest.mark.parametrize("storage", ["bin", "h5"])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_shown_after_store_and_tokenizer_moved(tmp_path, inputs, kind, storage):
    spec = spec_of(kind, tmp_path / "tokenizer")
    options = tm.PrepareOptions(storage_format=storage)
    tm.prepare(inputs, out=tmp_path / "store", tokenizer=spec, options=options, progress=False)
    shown = examples(open_store(tmp_path / "store"), tokenizer_of(open_store(tmp_path / "store")))
    assert TEXT in "".join(piece.text for piece in shown[0].runs)
    shutil.rmtree(tmp_path / "tokenizer")
    shutil.move(tmp_path / "store", tmp_path / "moved")
    store = open_store(tmp_path / "moved")
    assert examples(store, tokenizer_of(store)) == shown
    assert verify(tmp_path / "moved").documents == 9


def test_texts_are_shown_from_another_folder(tmp_path, inputs, monkeypatch):
    """A tokenizer that was named by a relative path."""
    monkeypatch.chdir(tmp_path)
    tm.prepare(inputs.name, out="store", tokenizer=spec_of("folder", Path("mine")), progress=False)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert tokenizer_of(open_store(tmp_path / "store")) is not None


def test_stores_of_one_build_share_one_copy(tmp_path, inputs):
    """Each can be moved alone; none is larger for it."""
    spec = spec_of("folder", tmp_path / "tokenizer")
    options = tm.PrepareOptions(val_fraction=0.4)
    report = tm.prepare(inputs, out=tmp_path / "split", tokenizer=spec, options=options, progress=False)
    copies = [store.path / ".tokenizer" / "tokenizer.json" for store in report.stores]
    assert len(copies) == 2
    assert len({os.stat(copy).st_ino for copy in copies}) == 1


def test_a_store_without_a_copy_gets_one_when_files_are_added_and_keeps_its_fingerprint(tmp_path, inputs):
    spec = spec_of("folder", tmp_path / "tokenizer")
    report = tm.prepare(inputs, out=tmp_path / "store", tokenizer=spec, progress=False)
    shutil.rmtree(tmp_path / "store" / ".tokenizer")
    again = tm.prepare(inputs, out=tmp_path / "store", tokenizer=spec, progress=False)
    assert again.fingerprint == report.fingerprint
    assert (tmp_path / "store" / ".tokenizer" / "tokenizer.json").is_file()
    rebuilt = tm.prepare(inputs, out=tmp_path / "store", tokenizer="bytes", rebuild=True, progress=False)
    assert rebuilt.engine == "bytes"
    assert not (tmp_path / "store" / ".tokenizer").exists()


def test_a_copy_that_was_altered_is_not_taken_for_the_tokenizer(tmp_path, inputs):
    """[T2.a]"""
    spec = spec_of("folder", tmp_path / "tokenizer")
    tm.prepare(inputs, out=tmp_path / "store", tokenizer=spec, progress=False)
    copy = tmp_path / "store" / ".tokenizer" / "tokenizer.json"
    copy.write_text(copy.read_text(encoding="utf-8").replace("[", "[ ", 1), encoding="utf-8")
    store = open_store(tmp_path / "store")
    assert tokenizer_of(store) is not None, "the one that was given is still there"
    moved = shutil.move(tmp_path / "tokenizer", tmp_path / "other")
    assert tokenizer_of(store) is None
    assert why_no_texts(store) == (
        f"{store.path}: no text can be shown, as the tokenizer {spec!r} is not there any more, or is another now; "
        "name its tokenizer with tokenizer=..."
    )
    assert tokenizer_of(store, str(moved)).identity.content == store.manifest.tokenizer["content"]
    with pytest.raises(TokenizerError, match=r"tokenizer 'bytes': must be the one that made .*; name that one"):
        tokenizer_of(store, "bytes")


def test_a_folder_of_stores_opens_all_of_them_by_name(tmp_path, inputs):
    options = tm.PrepareOptions(val_fraction=0.5)
    tm.prepare(inputs, out=tmp_path / "web", tokenizer="bytes", options=options, progress=False)
    stores = open_stores(tmp_path / "web")
    assert {name: store.fingerprint for name, store in stores.items()} == {
        name: open_store(tmp_path / "web" / name).fingerprint for name in ("train", "val")
    }
    assert list(open_stores(tmp_path / "web" / "val")) == ["val"]


def test_a_folder_of_token_files_of_others_opens_as_one_store(tmp_path):
    (tmp_path / "tokens").mkdir()
    np.save(tmp_path / "tokens" / "a.npy", np.arange(9, dtype=np.uint16))
    assert {name: store.num_tokens for name, store in open_stores(tmp_path / "tokens").items()} == {"tokens": 9}


def test_the_facts_of_a_store_hold_the_strings_of_bos_and_eos(tmp_path, inputs):
    tm.prepare(inputs, out=tmp_path / "store", tokenizer="bytes", progress=False)
    store = open_store(tmp_path / "store")
    facts = inspect_store(store, tokenizer_of(store))
    assert (facts.bos, facts.eos) == ("<|bos|>", "<|eos|>")
    assert (inspect_store(store).bos, inspect_store(store).eos) == (None, None)


# What prepare says of BOS and EOS.


def test_the_report_says_which_strings_frame_documents_and_where_that_is_from(tmp_path, inputs):
    spec = spec_of("folder", tmp_path / "tokenizer")
    config = {"special_tokens": {"bos_token": None, "eos_token": "<|eos|>"}}
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
    names = json.loads((tmp_path / "tokenizer" / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    ids = {token["content"]: token["id"] for token in names}
    report = tm.prepare(inputs, out=tmp_path / "a", tokenizer=spec, progress=False)
    by = "named by special_tokens of tokenizer_config.json"
    assert report.framing == f"no BOS; EOS is '<|eos|>' (id {ids['<|eos|>']}, {by})"
    options = tm.PrepareOptions(bos_token="<|bos|>", add_bos=False, eos_token="<|eos|>")
    report = tm.prepare(inputs, out=tmp_path / "b", tokenizer=spec, options=options, progress=False)
    assert report.framing == (
        f"BOS is '<|bos|>' (id {ids['<|bos|>']}, as asked for), not added; "
        f"EOS is '<|eos|>' (id {ids['<|eos|>']}, as asked for)"
    )


def instruct(folder: Path) -> str:
    """Write a tokenizer whose files call the end of a turn EOS."""
    spec = spec_of("folder", folder)
    value = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    for old, new in (("<|eos|>", "<|im_end|>"), ("<|pad|>", "<|endoftext|>")):
        for token in value["added_tokens"]:
            if token["content"] == old:
                token["content"] = new
        if old in value["model"]["vocab"]:
            value["model"]["vocab"][new] = value["model"]["vocab"].pop(old)
    value["post_processor"] = None
    (folder / "tokenizer.json").write_text(json.dumps(value), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": None, "eos_token": "<|im_end|>"}))
    return spec


def test_an_eos_that_ends_turns_of_a_chat_is_told_where_documents_are_plain_text(tmp_path, inputs, capsys):
    spec = instruct(tmp_path / "instruct")
    tm.prepare(inputs, out=tmp_path / "a", tokenizer=spec, progress=False)
    told = capsys.readouterr().err
    assert "warning: every document of plain text will end with '<|im_end|>', which ends a turn of a chat" in told
    assert "named by tokenizer_config.json" in told
    assert "with eos_token=..., such as '<|endoftext|>'" in told


@pytest.mark.parametrize(
    "options", [{"eos_token": "<|im_end|>"}, {"eos_token": "<|endoftext|>"}, {"add_eos": False}]
)
def test_an_eos_that_was_asked_for_is_not_questioned(tmp_path, inputs, capsys, options):
    spec = instruct(tmp_path / "instruct")
    tm.prepare(inputs, out=tmp_path / "a", tokenizer=spec, options=tm.PrepareOptions(**options), progress=False)
    assert capsys.readouterr().err == ""


def test_conversations_may_end_as_their_turns_do(tmp_path, capsys):
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(chat))
    options = tm.PrepareOptions(chat_template="chatml")
    spec = instruct(tmp_path / "instruct")
    tm.prepare(
        tmp_path / "chat.jsonl", out=tmp_path / "a", tokenizer=spec, recipe="chat", options=options, progress=False
    )
    assert "turn of a chat" not in capsys.readouterr().err


def test_thoughts_without_a_word_are_no_example_of_reasoning(tmp_path):
    thoughts = ["\n\n", "\n\n", "it is even\n", "\n\n", "\n\n"]
    records = [{"prompt": "Is 2 even?", "completion": f"<think>\n{each}</think>\n\nYes."} for each in thoughts]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    tm.prepare(tmp_path / "a.jsonl", out=tmp_path / "a", recipe="completion", progress=False)
    store = open_store(tmp_path / "a")
    shown = examples(store, tokenizer_of(store))
    assert [example.item for example in shown if "reasoning" in example.why] == [2]
