"""What the files of a tokenizer say: `tokenizer.json` and what stands beside it, and rank files."""

import base64
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from tests.encode.chat.conftest import REAL as TOKENIZERS
from tests.encode.conftest import trained_pieces
from tiktoken_ext import openai_public

from tokenmill.encode.engines import ADVERSARIAL, open_tokenizer, trusted
from tokenmill.encode.files import ENCODINGS, read_json_file, read_rank_file
from tokenmill.encode.tokenizer import split, with_policy
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


def named(spec):
    """Return BOS and EOS, each with what says so."""
    vocabulary = read_json_file(Path(spec), spec).vocabulary
    return [(vocabulary.bos, vocabulary.named_by["bos"]), (vocabulary.eos, vocabulary.named_by["eos"])]


def test_the_special_tokens_of_a_folder_of_astrai_are_read(write):
    config = {"special_tokens": {"bos_token": "<|im_start|>", "eos_token": "<pad>", "pad_token": "</s>"}}
    spec = write(tokenizer_config=config)
    assert specials(spec) == (3, 2, 1)
    where = "special_tokens of tokenizer_config.json"
    assert named(spec) == [("<|im_start|>", where), ("<pad>", where)]


def test_keys_at_the_top_come_before_those_of_special_tokens(write):
    spec = write(tokenizer_config={"eos_token": "</s>", "special_tokens": {"eos_token": "<pad>"}})
    assert named(spec)[1] == ("</s>", "tokenizer_config.json")


def template(single):
    return {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": {}}


def token(name):
    return {"SpecialToken": {"id": name, "type_id": 0}}


TEXT = {"Sequence": {"id": "A", "type_id": 0}}


@pytest.mark.parametrize(
    ("processor", "bos", "eos"),
    [
        (template([token("<|im_start|>"), TEXT]), "<|im_start|>", None),
        (template([TEXT, token("<pad>")]), None, "<pad>"),
        (template([token("<pad>"), TEXT, token("<|im_start|>")]), "<pad>", "<|im_start|>"),
        (
            {"type": "Sequence", "processors": [{"type": "ByteLevel"}, template([TEXT, token("<pad>")])]},
            None,
            "<pad>",
        ),
        ({"type": "BertProcessing", "cls": ["<pad>", 2], "sep": ["<|im_start|>", 3]}, "<pad>", "<|im_start|>"),
        (template([token("<s>"), token("<pad>"), TEXT]), None, None),  # two: it is not said which is BOS
        (template([token("<unheard of>"), TEXT]), None, None),
    ],
)
def test_a_post_processor_says_what_bos_and_eos_are(write, processor, bos, eos):
    """What it does not say is known by its name, as before."""
    spec = write(lambda value: value.update(post_processor=processor))
    known, placed = "its well-known name", "the post-processor of tokenizer.json"
    assert named(spec) == [
        (bos, placed) if bos else ("<s>", known),
        (eos, placed) if eos else ("</s>", known),
    ]


@pytest.mark.parametrize(
    ("processor", "flag", "adds"),
    [(None, False, False), (None, True, True), (None, None, True), ("own", False, True), ("own", None, True)],
)
def test_a_config_that_says_no_bos_counts_unless_the_post_processor_adds_one(write, tiny, processor, flag, adds):
    """As transformers has it: `add_bos_token` of Yi's config is false, and its post-processor adds nothing."""
    kept = tiny["post_processor"] if processor else None
    config = {"bos_token": "<s>"} | ({} if flag is None else {"add_bos_token": flag})
    spec = write(lambda value: value.update(post_processor=kept), tokenizer_config=config)
    assert open_tokenizer(spec).identity.add_bos is adds
    assert open_tokenizer(spec, add_bos=True).identity.add_bos


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
        (b"", "expected JSON"),
        (b'{"model": ', "expected JSON.*is the download whole"),
        (b"[]", "must be a JSON object, got list"),
        (b'{"version": "1.0"}', r"must hold a model with a vocabulary, got keys \['version'\]"),
        (b'{"model": {"vocab": {}}}', "must hold a model with a vocabulary"),
        (b'{"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": "<s>"}]}', "must have an 'id'"),
        (b"\xff\xfe{}", "expected JSON"),
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


@pytest.mark.parametrize("name", [name for name in ENCODINGS if name != "llama3"])
def test_the_table_is_what_tiktoken_defines(monkeypatch, name):
    # The definitions would download the ranks, which are not compared here.
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: {})
    monkeypatch.setattr(openai_public, "data_gym_to_mergeable_bpe_ranks", lambda *_, **__: {})
    theirs = openai_public.ENCODING_CONSTRUCTORS[name]()
    assert ENCODINGS[name].pattern == theirs["pat_str"]
    assert dict(ENCODINGS[name].special_ids) == theirs["special_tokens"]


def test_the_table_knows_every_encoding_of_tiktoken():
    assert set(ENCODINGS) - {"llama3"} == set(openai_public.ENCODING_CONSTRUCTORS)


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
    with pytest.raises(TokenizerError, match=r"ids of gpt2 free, got \[50256\]; .* fit cl100k_base, o200k_base"):
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


# Rank files that others than OpenAI publish, and own ones.


@pytest.fixture(scope="module")
def llama3(tmp_path_factory):
    """Make the `tokenizer.model` that Meta publishes from the tokenizer.json of Hugging Face, byte for byte."""
    folder = TOKENIZERS / "llama3_1"
    if not folder.is_dir():
        pytest.skip("the tokenizer llama3_1 is not there: run tools/fetch_tokenizers.py")
    vocab = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that stand for themselves as letters
    others = enumerate(byte for byte in range(256) if byte not in plain)
    letters = {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in others}
    tokens = [bytes(map(letters.__getitem__, token)) for token in sorted(vocab, key=vocab.__getitem__)]
    path = tmp_path_factory.mktemp("llama3") / "tokenizer.model"
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(tokens)))
    return path


@pytest.mark.slow
def test_the_rank_file_of_llama3_is_known_and_has_the_ids_of_its_tokenizer_json(llama3):
    from tokenizers import Tokenizer as HuggingFace

    native = HuggingFace.from_file(str(TOKENIZERS / "llama3_1" / "tokenizer.json"))
    native.encode_special_tokens = True
    expected = [native.encode(text, add_special_tokens=False).ids for text in ADVERSARIAL]
    added = {token.content: id_ for id_, token in native.get_added_tokens_decoder().items()}
    for spec in (str(llama3), str(llama3.parent), f"tiktoken:{llama3}", f"tiktoken:{llama3}?encoding=llama3"):
        tokenizer = open_tokenizer(spec)
        assert dict(tokenizer.special_ids) == added
        identity = tokenizer.identity
        assert (identity.kind, identity.vocab_size, identity.bos_id, identity.eos_id) == (
            *("tiktoken", 128_256),
            *(128_000, 128_001),
        )
        assert [ids.tolist() for ids in split(tokenizer.encode(ADVERSARIAL))] == expected
    assert [
        ids.tolist() for ids in split(open_tokenizer(str(llama3), engine="tiktoken").encode(ADVERSARIAL))
    ] == expected


OWN = {"pattern": "[^ ]+| ", "special_tokens": {"<end>": 300, "<start>": 301}, "eos_token": "<end>"}


def own_encoding(tmp_path, **changes):
    (tmp_path / "mine.json").write_text(json.dumps({**OWN, **changes}))
    return write(tmp_path, ranks(BYTES) + b"YWI= 256\n") + f"?encoding={tmp_path / 'mine.json'}"


@pytest.mark.parametrize("engine", ["fastokens", "tiktoken"])
def test_a_rank_file_may_have_a_pattern_and_control_strings_of_its_own(tmp_path, engine):
    tokenizer = open_tokenizer(own_encoding(tmp_path, bos_token="<start>"), engine=engine)
    identity = tokenizer.identity
    assert (identity.vocab_size, identity.bos_id, identity.eos_id) == (302, 301, 300)
    ids = tokenizer.encode(["ab <end>"]).ids.tolist()
    assert ids == [256, *b" <end>"]
    assert tokenizer.encode_with_controls(["ab<end>"]).ids.tolist() == [256, 300]
    native = tiktoken.Encoding(
        "own", pat_str=OWN["pattern"], mergeable_ranks=dict(tokenizer_ranks()), special_tokens=OWN["special_tokens"]
    )
    texts = ["aab ab", "b a", "ab" * 9, ""]
    assert [part.tolist() for part in split(tokenizer.encode(texts))] == [native.encode(text) for text in texts]


def tokenizer_ranks():
    yield from ((bytes([byte]), rank) for rank, byte in enumerate(range(256)))
    yield b"ab", 256


def test_another_pattern_or_control_string_is_another_tokenizer(tmp_path):
    """T2.a."""
    contents = [
        open_tokenizer(own_encoding(tmp_path, **change)).identity.content
        for change in ({}, {"pattern": "[^ ]+| +"}, {"special_tokens": {"<end>": 300, "<begin>": 301}})
    ]
    assert len(set(contents)) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patern": ""}, "patern.*did you mean 'pattern'"),
        (
            {"special_tokens": {"<end>": 3}},
            r"control ids of .*mine.json free, got \[3\]; give them other",
        ),
        ({"special_tokens": {"<end>": 300, "<x>": 300}}, "must have different ids"),
        ({"eos_token": "<ende>"}, "eos_token must be one of special_tokens, got '<ende>'; did you mean '<end>'"),
    ],
)
def test_an_own_encoding_that_cannot_be_right_is_refused(tmp_path, changes, message):
    with pytest.raises(TokenizerError, match=message):
        open_tokenizer(own_encoding(tmp_path, **changes))


def test_an_own_encoding_that_is_not_there_says_what_to_write(tmp_path):
    spec = own_encoding(tmp_path).replace("mine.json", "none.json")
    with pytest.raises(TokenizerError, match=r"none.json must name a file, got none; write into it .*pattern"):
        open_tokenizer(spec)


# Files of SentencePiece.

PIECE_TEXTS = [*ADVERSARIAL, "the <s> mill</s>", "<start>grain<start>"]


@pytest.fixture(scope="module", params=["bpe", "unigram", "char"])
def pieces(request, tmp_path_factory):
    """Train a model of each kind, with a symbol of its own that text may spell."""
    data = trained_pieces(request.param, user_defined_symbols=["<start>"], byte_fallback=request.param == "bpe")
    path = tmp_path_factory.mktemp("pieces") / "tokenizer.model"
    path.write_bytes(data)
    return path


@pytest.mark.slow
def test_a_model_of_sentencepiece_opens_directly_with_its_ids(pieces):
    import sentencepiece

    native = sentencepiece.SentencePieceProcessor(model_file=str(pieces))
    for spec in (str(pieces), str(pieces.parent)):
        tokenizer, warning = trusted(spec)
        assert (tokenizer.engine, warning) == (f"sentencepiece {sentencepiece.__version__}", None)
        identity = tokenizer.identity
        assert (identity.kind, identity.vocab_size) == ("sentencepiece", len(native))
        assert (identity.bos_id, identity.eos_id, identity.pad_id) == (1, 2, None)
        assert dict(tokenizer.special_ids) == {"<s>": 1, "</s>": 2}
        found = [ids.tolist() for ids in split(tokenizer.encode(PIECE_TEXTS))]
        assert found == [native.encode(text) for text in PIECE_TEXTS]
        assert not {1, 2} & {id_ for ids in found for id_ in ids}, "control strings are text"
        for text, ids in zip(PIECE_TEXTS, found, strict=True):
            assert tokenizer.decode(np.array(ids, np.uint32)) == native.decode(native.encode(text))


def test_control_strings_of_sentencepiece_may_become_ids_or_be_dropped(pieces):
    import sentencepiece

    native = sentencepiece.SentencePieceProcessor(model_file=str(pieces))
    tokenizer = open_tokenizer(str(pieces))
    encode, drop = with_policy(tokenizer, "encode"), with_policy(tokenizer, "drop")
    ids = encode.encode(["the mill</s>the mill"]).ids
    assert ids.tolist() == [*native.encode("the mill"), 2, *native.encode("the mill")]
    assert tokenizer.decode(ids) == "the mill</s>the mill"
    assert drop.encode(["the</s> mill<s>"]).ids.tolist() == native.encode("the mill")


def test_an_eos_that_text_of_sentencepiece_can_spell_is_refused(pieces):
    """S.i: a symbol that SentencePiece looks for in every text."""
    with pytest.raises(TokenizerError, match=r"raw text must not give control ids, got id 3 for .*'<start>'"):
        open_tokenizer(str(pieces), eos_token="<start>")


def test_a_broken_model_is_one_line(tmp_path):
    pytest.importorskip("sentencepiece")
    (tmp_path / "a.model").write_bytes(b"\x00 no model")
    with pytest.raises(TokenizerError, match=r"sentencepiece .*: must load .*a.model', got .*; is it a file"):
        open_tokenizer(str(tmp_path / "a.model"))


def test_without_sentencepiece_a_model_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    (tmp_path / "a.model").write_bytes(b"\x00")
    with pytest.raises(TokenizerError, match=r"pip install 'tokenmill\[sentencepiece\]'"):
        open_tokenizer(str(tmp_path / "a.model"))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"added_tokens": 3}, "added_tokens must be a list"),
        (
            {"model": {"type": "BPE", "vocab": {"a": "0"}, "merges": []}},
            "ids of the vocabulary must be whole numbers",
        ),
        ({"model": {"type": "BPE", "vocab": {"a": 2**40}, "merges": []}}, "ids of the vocabulary must be whole"),
        ({"model": {"type": "Unigram", "vocab": [3]}}, "a piece of the vocabulary must be a list"),
        ({"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 7}}, "unk_id must be the place of a piece"),
        ({"pre_tokenizer": "ByteLevel"}, "pre_tokenizer must be an object or null"),
    ],
)
def test_the_shape_of_a_file_is_checked_before_it_is_used(tmp_path, change, rule):
    value = {"added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(value | change))
    with pytest.raises(TokenizerError, match=rf"tokenizer\.json: {rule}"):
        open_tokenizer(str(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_file_beside_it_that_is_no_file_is_refused_not_overlooked(write, tmp_path, name):
    """As in a cache of models whose files were cleared away: it may have said what BOS is."""
    path = Path(write())
    (path.parent / name).unlink(missing_ok=True)
    (path.parent / name).symlink_to(tmp_path / "gone")
    with pytest.raises(TokenizerError, match=rf"{name}: a broken symlink; copy the tokenizer again"):
        open_tokenizer(str(path))
