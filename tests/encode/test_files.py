"""What the files of a tokenizer say: `tokenizer.json` and what stands beside it, and rank files."""

import base64
from pathlib import Path

import numpy as np
import pytest
from tiktoken_ext import openai_public

from tokenmill.encode.engines import open_tokenizer
from tokenmill.encode.files import ENCODINGS, read_json_file, read_rank_file
from tokenmill.errors import TokenizerError


def specials(spec):
    identity = open_tokenizer(spec).identity
    return identity.bos_id, identity.eos_id, identity.pad_id


def only_special(*names):
    """Leave only these control strings in the file, each renamed from one that it has."""

    def change(value):
        kept = value["added_tokens"][: len(names)]
        for token, name in zip(kept, names, strict=True):
            value["model"]["vocab"][name] = value["model"]["vocab"].pop(token["content"])
            token["content"] = name
        value["added_tokens"] = kept
        value["post_processor"] = None

    return change


def test_well_known_names_are_found_without_siblings(write):
    assert specials(write()) == (0, 1, 2)


@pytest.mark.parametrize("name", ["<|begin_of_text|>", "<bos>", "<|bos|>", "[BOS]", "<｜begin▁of▁sentence｜>"])
def test_a_file_with_only_bos_adds_only_bos(write, name):
    identity = open_tokenizer(write(only_special(name))).identity
    assert (identity.bos_id, identity.eos_id, identity.add_bos, identity.add_eos) == (0, None, True, False)


@pytest.mark.parametrize("name", ["<|end_of_text|>", "<eos>", "<|eos|>", "<|endoftext|>", "[EOS]"])
def test_a_file_with_only_eos_adds_only_eos(write, name):
    identity = open_tokenizer(write(only_special(name))).identity
    assert (identity.bos_id, identity.eos_id, identity.add_bos, identity.add_eos) == (None, 0, False, True)


def test_a_file_without_control_strings_adds_nothing(write):
    identity = open_tokenizer(write(only_special())).identity
    assert (identity.bos_id, identity.eos_id, identity.add_bos, identity.add_eos) == (None, None, False, False)
    with pytest.raises(TokenizerError, match=r"to add BOS there must be one.*the file has no control strings"):
        open_tokenizer(write(only_special()), add_bos=True)
    with pytest.raises(TokenizerError, match="got '<bos>'; it has no control strings"):
        open_tokenizer(write(only_special()), bos_token="<bos>")


@pytest.mark.parametrize("sibling", ["tokenizer_config", "special_tokens_map"])
def test_a_sibling_says_what_bos_and_eos_are(write, sibling):
    content = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<pad>", "pad_token": None}
    assert specials(write(**{sibling: content})) == (3, 2, None)


def test_tokenizer_config_comes_before_special_tokens_map(write):
    spec = write(
        tokenizer_config={"bos_token": None}, special_tokens_map={"bos_token": "<s>", "eos_token": "<pad>"}
    )
    assert specials(spec) == (None, 2, 2)


def test_bos_equal_to_eos_adds_one(write):
    """T2.b."""
    identity = open_tokenizer(write(tokenizer_config={"bos_token": "</s>", "eos_token": "</s>"})).identity
    assert (identity.bos_id, identity.eos_id, identity.add_bos, identity.add_eos) == (1, 1, False, True)


def test_explicit_names_win_over_siblings(write):
    spec = write(tokenizer_config={"bos_token": "</s>", "eos_token": "</s>"})
    identity = open_tokenizer(spec, bos_token="<|im_start|>", eos_token="<pad>").identity
    assert (identity.bos_id, identity.eos_id) == (3, 2)


def test_a_sibling_that_names_nothing_known_is_an_error(write):
    with pytest.raises(
        TokenizerError, match=r"eos_token must be in the vocabulary, got '<im_start>'; did you mean"
    ):
        open_tokenizer(write(tokenizer_config={"eos_token": "<im_start>"}))


def test_a_sibling_of_another_shape_is_an_error(write):
    with pytest.raises(TokenizerError, match=r"tokenizer_config.json: eos_token must be a string.*got \['</s>'\]"):
        open_tokenizer(write(tokenizer_config={"eos_token": ["</s>"]}))


def test_vocab_size_is_one_more_than_the_largest_id(write, tiny):
    assert open_tokenizer(write()).identity.vocab_size == len(tiny["model"]["vocab"]) + 1  # and <tool>


def test_any_byte_of_the_file_is_in_the_identity(write):
    """T2.a."""
    before = open_tokenizer(write()).identity
    after = open_tokenizer(write(lambda value: value["model"]["merges"].pop())).identity
    assert (before.vocab_size, before.content == after.content) == (after.vocab_size, False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "must be JSON"),
        (b'{"model": ', "must be JSON.*is the download whole"),
        (b"[]", "must be a JSON object, got list"),
        (b'{"version": "1.0"}', r"must hold a model with a vocabulary, got keys \['version'\]"),
        (b'{"model": {"vocab": {}}}', "must hold a model with a vocabulary"),
        (b'{"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": "<s>"}]}', "must have an 'id'"),
        (b"\xff\xfe{}", "must be JSON"),
    ],
)
def test_a_broken_file_is_an_error_with_its_name(tmp_path, content, message):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(TokenizerError, match=f"tokenizer.json: .*{message}"):
        open_tokenizer(str(path))


def test_dropout_is_refused_because_ids_would_not_repeat(write):
    with pytest.raises(TokenizerError, match=r"model.dropout must be null, got 0.1.*set it to null"):
        open_tokenizer(write(lambda value: value["model"].update(dropout=0.1)))


def renumber(value):
    value["added_tokens"][-1]["id"] = 5000


def swap(value):
    first, second = value["added_tokens"][:2]
    first["id"], second["id"] = second["id"], first["id"]


@pytest.mark.parametrize(("change", "name"), [(renumber, "<tool>"), (swap, "<s>")])
def test_ids_that_the_reference_would_renumber_are_refused(write, change, name):
    """T2.a: Hugging Face tokenizers ignores the ids of the file here, so they would mean two things."""
    with pytest.raises(TokenizerError, match=f"added token '{name}' has id .* in the file, got .* from tokenizers"):
        open_tokenizer(write(change), engine="tokenizers")


def test_a_unigram_list_is_numbered_by_place(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(
        '{"model": {"type": "Unigram", "unk_id": 1, "vocab": [["a", -1.0], ["<unk>", 0.0], ["b", -2.0]]}}'
    )
    file = read_json_file(Path(path), "here")
    assert (file.vocabulary.vocab_size, file.vocabulary.ids["b"], file.unknown) == (3, 2, "<unk>")


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
