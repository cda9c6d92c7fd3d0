"""Rank files: which encoding one is, and what is refused."""

import base64
from pathlib import Path

import numpy as np
import pytest
from tiktoken_ext import openai_public

from tokenmill.encode.engines import open_tokenizer
from tokenmill.encode.files import ENCODINGS, read_rank_file
from tokenmill.errors import TokenizerError


def ranks(tokens):
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


BYTES = [bytes([byte]) for byte in range(256)]


def write(tmp_path, data, name="mine"):
    path = tmp_path / name
    path.write_bytes(data)
    return f"tiktoken:{path}"


@pytest.mark.parametrize("name", list(ENCODINGS))
def test_the_table_is_what_tiktoken_defines(monkeypatch, name):
    # The definitions would download the ranks, which are not compared here.
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: {})
    monkeypatch.setattr(openai_public, "data_gym_to_mergeable_bpe_ranks", lambda *_, **__: {})
    theirs = openai_public.ENCODING_CONSTRUCTORS[name]()
    assert ENCODINGS[name].pattern == theirs["pat_str"]
    assert dict(ENCODINGS[name].special_ids) == theirs["special_tokens"]


def test_the_table_knows_every_encoding_of_tiktoken():
    assert set(ENCODINGS) == set(openai_public.ENCODING_CONSTRUCTORS)


@pytest.mark.parametrize(
    ("name", "vocab_size", "eos_id"),
    [("r50k", 50257, 50256), ("p50k", 50281, 50256), ("cl100k", 100277, 100257), ("o200k", 200019, 199999)],
)
def test_a_published_file_is_known_by_its_hash(specs, name, vocab_size, eos_id):
    path = Path(specs[name].removeprefix("tiktoken:"))
    vocabulary = read_rank_file(path, None, specs[name]).vocabulary
    assert (vocabulary.vocab_size, vocabulary.special_ids["<|endoftext|>"]) == (vocab_size, eos_id)
    assert (vocabulary.bos, vocabulary.eos) == (None, "<|endoftext|>")


def test_by_default_documents_end_with_endoftext(opened):
    identity = opened("r50k").identity
    assert (identity.bos_id, identity.eos_id, identity.add_bos, identity.add_eos) == (None, 50256, False, True)


def test_endoftext_may_start_documents_instead(specs):
    identity = open_tokenizer(specs["r50k"], bos_token="<|endoftext|>", add_bos=True).identity
    assert (identity.bos_id, identity.eos_id, identity.add_bos, identity.add_eos) == (50256, 50256, True, False)


def test_another_encoding_of_the_same_ranks_is_another_identity(specs):
    """T2.a."""
    path = Path(specs["p50k"].removeprefix("tiktoken:"))
    base, edit = (read_rank_file(path, name, "p50k").vocabulary for name in ("p50k_base", "p50k_edit"))
    assert (base.content, base.vocab_size, edit.vocab_size) == (edit.content, 50281, 50284)


def test_the_pattern_is_part_of_the_content(tmp_path):
    """T2.a."""
    spec = write(tmp_path, ranks(BYTES))
    contents = {open_tokenizer(f"{spec}?encoding={name}").identity.content for name in ("gpt2", "cl100k_base")}
    assert len(contents) == 2


@pytest.mark.parametrize("name", ["cl100k_base.tiktoken", "cl100k_base"])
def test_an_unknown_file_is_known_by_its_name(tmp_path, name):
    assert open_tokenizer(write(tmp_path, ranks(BYTES), name)).identity.eos_id == 100257


def test_an_unknown_file_names_the_way_out(tmp_path):
    with pytest.raises(TokenizerError, match=r"neither its hash nor its name.*mine\?encoding=cl100k_base"):
        open_tokenizer(write(tmp_path, ranks(BYTES)))


def test_an_unknown_encoding_names_the_nearest(tmp_path):
    with pytest.raises(TokenizerError, match=r"got 'cl100k'; did you mean 'cl100k_base'\?"):
        open_tokenizer(write(tmp_path, ranks(BYTES)) + "?encoding=cl100k")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cover every single byte, got 0 tokens"),
        (ranks(BYTES[:-1]), r"got 255 tokens without bytes \[255\]; is the download whole"),
        (ranks(BYTES) + b"YWI=", "line 257 must be 'base64 rank', got b'YWI='"),
        (ranks(BYTES) + b"YWI= x\n", "line 257 must be"),
        (ranks(BYTES) + b"Y!I= 256\n", "line 257 must be"),
        (ranks(BYTES) + b"YWI= 7\n", "must be unique"),
        (ranks(BYTES) + b"YWI= -7\n", "not negative"),
        (b'{"model": {}}', "line 1 must be"),
    ],
)
def test_a_broken_file_is_an_error_with_its_line(tmp_path, data, message):
    with pytest.raises(TokenizerError, match=message):
        open_tokenizer(write(tmp_path, data) + "?encoding=cl100k_base")


def test_ranks_on_the_control_ids_of_the_encoding_are_refused(tmp_path):
    data = ranks(BYTES) + b"YWI= 50256\n"
    with pytest.raises(TokenizerError, match=r"leave the control ids.*got ranks \[50256\].*\?encoding="):
        open_tokenizer(write(tmp_path, data) + "?encoding=gpt2")


@pytest.mark.parametrize("engine", ["fastokens", "tiktoken"])
def test_decode_shows_control_strings_and_marks_unused_ids(opened, engine):
    tokenizer = opened("cl100k", engine)
    ids = np.array([*tokenizer.encode(["hi é"]).ids.tolist(), 100257, 100276, 100261], dtype=np.uint32)
    assert tokenizer.decode(ids) == "hi é<|endoftext|><|endofprompt|>\ufffd"


def test_decode_replaces_what_is_not_utf8(opened):
    tokenizer = opened("r50k")
    half = tokenizer.encode(["\U00016d40"]).ids[:1]
    assert tokenizer.decode(half) == "\ufffd"


def test_an_encoding_that_the_bytes_contradict_is_refused(specs):
    """T2.a."""
    path = specs["p50k"].partition("?")[0]
    with pytest.raises(TokenizerError, match="must be p50k_base or p50k_edit, as its bytes say, got 'o200k_base'"):
        open_tokenizer(f"{path}?encoding=o200k_base")
