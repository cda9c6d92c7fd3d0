"""What a tokenizer.json and the files beside it say."""

from pathlib import Path

import pytest

from tokenmill.encode.engines import open_tokenizer
from tokenmill.encode.files import read_json_file
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
