"""Conversations to ids and masks: control strings, white space around them, edges, BOS."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tests.encode.chat.shapes import FEW, SHAPES, shaped, tools_of
from tests.encode.chat.stock import STOCK, stock_template, swept
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as HuggingFace

from tokenmill.encode import Refusal
from tokenmill.encode.chat.conversation import Conversation
from tokenmill.encode.chat.render import Rendered, render
from tokenmill.encode.chat.template import ChatTemplate, StripRule, load_template
from tokenmill.encode.chat.tokens import ChatEncoder, Controls, encode_all, segments_of
from tokenmill.encode.engines import open_tokenizer
from tokenmill.errors import ConfigError
from tokenmill.types import Refused

SPECIAL = {"<s>": 1, "<s>x": 2, "[A]": 3}


def cut(text: str, authored: list[tuple[int, int]], supervised: list[tuple[int, int]] = []) -> list:  # noqa: B006
    rendered = Rendered(text=text, supervised=tuple(supervised), authored=tuple(authored))
    return segments_of(rendered, Controls(ids=SPECIAL, rules={}, where="test"))


def shown(pieces: list) -> list[tuple[str, int | None]]:
    return [(piece.text, int(piece.parts[0][0]) if piece.parts else None) for piece in pieces]


def test_control_strings_are_found_only_where_the_template_wrote_all_of_them():
    text = "<s>a<s>[A]"
    assert shown(cut(text, [(0, 10)])) == [("<s>", 1), ("a", None), ("<s>", 1), ("[A]", 3)]
    assert shown(cut(text, [(0, 3), (8, 10)])) == [("<s>", 1), ("a<s>[A]", None)]
    assert shown(cut("<s>x", [(0, 4)])) == [("<s>x", 2)], "the longest of those that start there"
    assert cut("", []) == []
    plain = Rendered(text="a<s>", supervised=(), authored=((0, 4),))
    assert shown(segments_of(plain, Controls(ids={}, rules={}, where="test"))) == [("a<s>", None)]


def test_an_edge_inside_a_control_string_is_refused():
    with pytest.raises(Refusal) as caught:
        cut("<s>a", [(0, 4)], [(1, 4)])
    assert caught.value.reason == "straddles"


def marked_words(folder, *, lines: bool = False) -> object:
    """Train a tokenizer that puts a mark before every text, as those of SentencePiece do."""
    native = HuggingFace(models.BPE())
    native.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    native.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<e>"], show_progress=False)
    words = "user question assistant answer abcd"
    native.train_from_iterator([words + ("\nabcd" if lines else "")] * 20, trainer)
    native.save(str(folder / "tokenizer.json"))
    return open_tokenizer(str(folder), engine="tokenizers")


@pytest.mark.parametrize(
    ("text", "edge", "lines"),
    [
        # The edge lies between two words: whole and parts have the same tokens.
        ("user answer", 4, False),
        # A token lies across it, and to encode what is behind it alone would put a blank into the word.
        ("abcd", 2, False),
        ("abcd", 2, True),
    ],
)
def test_no_blank_is_put_into_a_word_that_is_cut_by_a_tokenizer_that_marks_every_text(text, edge, lines, tmp_path):
    tokenizer = marked_words(tmp_path, lines=lines)
    rendered = Rendered(text=text, supervised=((edge, len(text)),), authored=((0, len(text)),))
    (result,) = encode_all([rendered], tokenizer, Controls(ids=tokenizer.special_ids, rules={}, where="test"))
    found, mask = result
    assert tokenizer.decode(found) == text
    assert tokenizer.decode(found[mask == 1]) == text[edge:].strip()
    assert mask.tolist() == sorted(mask.tolist())


def test_a_word_is_on_the_side_of_its_letters_where_its_blank_is_on_the_other(tmp_path):
    """As in Vicuna's template with a tokenizer of SentencePiece: the header ends with the blank of the answer."""
    tokenizer = marked_words(tmp_path)
    text = "user question assistant answer abcd"
    begin, end = text.index("answer"), text.index("abcd")
    rendered = Rendered(text=text, supervised=((begin, end - 1),), authored=((0, len(text)),))
    (result,) = encode_all([rendered], tokenizer, Controls(ids=tokenizer.special_ids, rules={}, where="test"))
    assert not isinstance(result, Refusal)
    ids, mask = result
    assert ids.tolist() == tokenizer.encode([text]).ids.tolist(), "those of transformers"
    assert tokenizer.decode(ids[mask == 1]) == "answer"
    assert tokenizer.decode(ids[: int(mask.argmax())]) == "user question assistant"


def test_every_character_may_be_an_edge():
    tokenizer = open_tokenizer("bytes")
    text = "aé中\U0001f600b"
    for begin in range(len(text)):
        for end in range(begin + 1, len(text) + 1):
            rendered = Rendered(text=text, supervised=((begin, end),), authored=())
            ((ids, mask),) = encode_all([rendered], tokenizer, Controls(ids={}, rules={}, where="test"))
            assert tokenizer.decode(ids) == text
            assert tokenizer.decode(ids[mask == 1]) == text[begin:end]
            assert ids.dtype == np.uint32


OPTIONS = {"now": "2025-01-31"}


def talk(*contents: str) -> Conversation:
    roles = itertools.cycle(("user", "assistant"))
    return Conversation(
        messages=[{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    )


def opened(template: ChatTemplate, tokenizer, **options: object) -> ChatEncoder:
    """Open an encoder with a template that was written here, and not loaded for a tokenizer."""
    content = tokenizer.identity.content if tokenizer.identity.kind == "tokenizer.json" else None
    return ChatEncoder(template=replace(template, tokenizer=content), tokenizer=tokenizer, **options)


def each(encoded) -> list[tuple[np.ndarray, np.ndarray]]:
    offsets = encoded.encoded.offsets
    return [(encoded.encoded.ids[a:b], encoded.masks[a:b]) for a, b in itertools.pairwise(offsets)]


@pytest.mark.parametrize("shapes", [FEW, pytest.param(tuple(SHAPES), marks=pytest.mark.deep)], ids=("few", "all"))
@pytest.mark.parametrize("name", swept(STOCK))
def test_supervised_ids_decode_to_what_the_assistant_wrote_and_its_end(name, shapes, small):
    """[T1.a, T1.b]"""
    template = stock_template(name)
    encoder = opened(template, small, kwargs=OPTIONS)
    given = [Conversation(messages=shaped(name, shape), tools=tools_of(shape)) for shape in shapes]
    encoded = encoder.encode(given)
    assert encoded.encoded.ids.dtype == np.uint32
    assert encoded.masks.dtype == np.uint8
    assert encoded.masks.size == encoded.encoded.ids.size
    assert encoded.kept.size >= 4
    assert sorted([*encoded.kept.tolist(), *(one.index for one in encoded.refused)]) == list(range(len(given)))
    for index, (ids, mask) in zip(encoded.kept.tolist(), each(encoded), strict=True):
        shape = shapes[index]
        found = render(template, shaped(name, shape), tools=tools_of(shape), kwargs=OPTIONS)
        assert small.decode(ids) == found.text
        assert mask.any()
        assert small.decode(ids[mask == 1]) == "".join(found.text[a:b] for a, b in found.supervised)
        for word in ("USER", "SYSTEM", "RESULT", "TOOLTEXT"):
            assert word not in small.decode(ids[mask == 1])
    for one in encoded.refused:
        assert one.detail


def test_one_at_a_time_gives_what_all_at_once_give(small):
    """[T1.c]"""
    encoder = opened(stock_template("qwen3"), small)
    given = [Conversation(messages=SHAPES[shape], tools=tools_of(shape)) for shape in SHAPES]
    together = each(encoder.encode(given))
    alone = [pair for one in given for pair in each(encoder.encode([one]))]
    assert len(together) == len(alone) > 10
    for (ids, mask), (other_ids, other_mask) in zip(together, alone, strict=True):
        assert ids.tolist() == other_ids.tolist()
        assert mask.tolist() == other_mask.tolist()


@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma", "qwen3_training", "gptoss", "gemma4", "glm4moe"])
def test_control_strings_of_the_record_are_ordinary_text(name, small):
    """[S.i, T2.b]"""
    template = load_template("chatml", tokenizer=None) if name == "chatml" else stock_template(name)
    encoder = opened(template, small, kwargs=OPTIONS)
    names = [one for one in small.special_ids if one not in ("<|channel>", "<channel|>")]  # gemma4 strips those
    given = [talk("hi", "yes"), *(talk(f"see {one} and {one}", f"{one}is {one}") for one in names)]
    encoded = encoder.encode(given)
    assert encoded.refused == []
    (plain, _), *others = each(encoded)
    control = list(small.special_ids.values())
    wanted = plain[np.isin(plain, control)].tolist()
    for one, (ids, mask) in zip(names, others, strict=True):
        assert ids[np.isin(ids, control)].tolist() == wanted
        assert f"see {one} and {one}" in small.decode(ids)
        assert f"{one}is {one}" in small.decode(ids[mask == 1])


def test_a_token_that_straddles_an_edge_is_cut_there(small):
    # The tokenizer has a token for two line ends: the header ends after the first, the answer begins with the next.
    encoder = opened(load_template("chatml", tokenizer=None), small)
    ((ids, mask),) = each(encoder.encode([talk("x", "\n\nANSWER")]))
    whole, header = (small.encode([text]).ids.tolist() for text in ("assistant\n\n\nANSWER", "assistant\n"))
    assert whole[: len(header)] != header
    assert small.decode(ids[mask == 1]) == "\n\nANSWER<|im_end|>"
    assert small.decode(ids) == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n\n\nANSWER<|im_end|>\n"
    prompt = render(load_template("chatml", tokenizer=None), talk("x").messages, add_generation_prompt=True)
    tail = small.encode([prompt.text.rpartition("<|im_start|>")[2]]).ids
    before = ids[: int(np.flatnonzero(mask)[0])]
    assert before[-tail.size :].tolist() == tail.tolist(), "what comes before is what the model sees when asked"


BOS = "{{ bos_token }}"


def bare(*sources: str) -> ChatTemplate:
    body = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    return ChatTemplate(source="".join(sources) + body, where="test", special_tokens={"bos_token": "<s>"})


@pytest.mark.parametrize(
    ("before", "adds", "asked", "wanted"),
    [
        # What the template writes is all, as for transformers, whatever the tokenizer puts before texts.
        *[("", False, None, 0), ("", True, None, 0), (BOS, False, None, 1), (BOS, True, None, 1)],
        *[(BOS * 2, False, None, 1), (BOS * 3, True, None, 1)],
        # To say so puts it there once.
        *[("", True, True, 1), (BOS, True, True, 1), ("", True, False, 0)],
    ],
)
def test_there_is_one_bos_if_the_template_writes_it_or_it_is_asked_for(
    before, adds, asked, wanted, small, small_with_bos
):
    """[T2.b]"""
    tokenizer = small_with_bos if adds else small
    assert tokenizer.identity.add_bos is adds
    encoder = opened(bare(before), tokenizer, add_bos=asked)
    assert encoder.lacks_bos is (adds and not wanted)
    encoded = encoder.encode([talk("<s>a", "<s><s>b"), talk("c", "d")])
    for ids, mask in each(encoded):
        is_bos = ids == tokenizer.identity.bos_id
        assert is_bos.sum() == is_bos[:1].sum() == wanted
        assert not mask[is_bos].any()
        assert ids[wanted] == tokenizer.special_ids["<|im_start|>"]


def test_the_built_in_template_leaves_bos_to_the_tokenizer(small, small_with_bos):
    for tokenizer, wanted in ((small, 0), (small_with_bos, 1)):
        encoder = opened(load_template("chatml", tokenizer=None), tokenizer)
        ((ids, _),) = each(encoder.encode([talk("a", "b")]))
        assert ((ids == tokenizer.identity.bos_id).sum(), encoder.lacks_bos) == (wanted, False)


@pytest.mark.parametrize("before", ["\n" + BOS, BOS + "\n" + BOS, "x" + BOS + BOS])
def test_a_bos_that_cannot_be_one_is_refused(before, small_with_bos):
    """[T2.b]"""
    (one,) = opened(bare(before), small_with_bos, add_bos=True).encode([talk("a", "b")]).refused
    assert one.reason == "bos"


def test_eos_is_not_added_behind_a_conversation(small_folder):
    tokenizer = open_tokenizer(str(small_folder), add_eos=True)
    ((ids, _),) = each(opened(bare(), tokenizer).encode([talk("a", "b")]))
    assert ids[-1] == tokenizer.special_ids["<|im_end|>"]


def test_what_is_refused_is_told_by_index_and_the_rest_is_kept(small):
    encoder = opened(stock_template("gemma"), small)
    system = Conversation(messages=[{"role": "system", "content": "x"}, *talk("a", "b").messages])
    encoded = encoder.encode([system, talk("a", "b"), talk("a"), talk("c", "d"), Conversation(messages=[])])
    assert encoded.kept.tolist() == [1, 3]
    assert encoded.encoded.num_documents == 2
    assert encoded.refused[0] == Refused(
        index=0,
        reason="template_error",
        detail="the template fails with TemplateError: System role not supported",
    )
    assert [(one.index, one.reason) for one in encoded.refused[1:]] == [
        (2, "no_trained_message"),
        (4, "no_messages"),
    ]
    nothing = encoder.encode([])
    assert (nothing.encoded.num_documents, nothing.masks.size, nothing.kept.size, nothing.refused) == (0, 0, 0, [])


def test_an_option_is_ordinary_text_and_replaces_nothing_that_the_template_is_given(small):
    source = "{{ effort }}|" + bare().source
    encoder = opened(ChatTemplate(source=source, where="test"), small, kwargs={"effort": "<|im_end|>"})
    ((ids, _),) = each(encoder.encode([talk("a", "b")]))
    assert small.decode(ids).partition("|<|im_start|>")[0] == "<|im_end|>"
    assert (ids == small.special_ids["<|im_end|>"]).sum() == 2
    with pytest.raises(
        ConfigError, match=r"must not replace what the template is given, got 'tools'; leave it out"
    ):
        opened(encoder.template, small, kwargs={"tools": []})


def test_an_option_that_the_template_does_not_read_is_refused_with_the_nearest(small):
    template = replace(stock_template("qwen3"), tokenizer=small.identity.content)
    with pytest.raises(ConfigError, match=r"got 'enable_thinkin'; did you mean 'enable_thinking'\?"):
        ChatEncoder(template=template, tokenizer=small, kwargs={"enable_thinkin": False})
    ChatEncoder(template=template, tokenizer=small, kwargs={"enable_thinking": False, "now": "2025-01-31"})


@pytest.mark.parametrize("roles", ["assistant", (), ("",)])
def test_roles_must_be_named(small, roles):
    with pytest.raises(ConfigError, match="train_on must name roles"):
        opened(load_template("chatml", tokenizer=None), small, train_on=roles)


def test_a_tokenizer_without_the_control_strings_spells_them():
    tokenizer = open_tokenizer("bytes", add_bos=False)
    encoder = opened(load_template("chatml", tokenizer="bytes"), tokenizer)
    ((ids, mask),) = each(encoder.encode([talk("é", "ü")]))
    assert tokenizer.decode(ids) == "<|im_start|>user\né<|im_end|>\n<|im_start|>assistant\nü<|im_end|>\n"
    assert tokenizer.decode(ids[mask == 1]) == "ü<|im_end|>"
    unmarked = opened(stock_template("qwen2_5"), tokenizer)
    ((ids, mask),) = each(unmarked.encode([talk("é", "ü")]))
    assert tokenizer.decode(ids[mask == 1]) == "ü<|im_end|>"


@pytest.mark.parametrize(
    ("name", "spelled"),
    [
        ("chatml", ("<|im_end|>",)),
        ("qwen3", ("<|im_end|>",)),
        ("llama3", ("<|eot_id|>",)),
        ("gemma", ("<end_of_turn>",)),
        ("cohere2", ("<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>")),
        ("smolvlm", ("<end_of_utterance>",)),
        ("glm4moe", ()),
    ],
)
def test_ends_of_turns_that_the_tokenizer_does_not_know_are_told(name, spelled, small):
    """[S.i]"""
    template = load_template("chatml", tokenizer=None) if name == "chatml" else stock_template(name)
    tokenizer = open_tokenizer("bytes")
    assert opened(template, tokenizer).spelled == spelled
    # It can be spelled: what ends the turn and what the record says are the same ids.
    talks = [[{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"))]]
    if spelled and name != "smolvlm":
        ((ids, mask),) = each(opened(template, tokenizer).encode([Conversation(messages=talks[0])]))
        assert tokenizer.decode(ids[mask == 1]).endswith(spelled[-1])
        assert not np.isin(ids[mask == 1], list(tokenizer.special_ids.values())).any()
    assert opened(template, small).spelled == (), "one that has them spells nothing"


def test_a_template_must_be_loaded_for_the_tokenizer_that_encodes(small, small_folder):
    """[T2.b]"""
    with pytest.raises(
        ConfigError, match=r"must be loaded for the tokenizer that encodes, .* got one for none, not "
    ):
        ChatEncoder(template=load_template("chatml", tokenizer=None), tokenizer=small)
    template = load_template("chatml", tokenizer=str(small_folder))
    assert template.tokenizer == small.identity.content
    assert each(ChatEncoder(template=template, tokenizer=small).encode([talk("a", "b")]))
    with pytest.raises(ConfigError, match=r"got one for 0{32}, not for [0-9a-f]{32}; name it: load_template"):
        ChatEncoder(template=replace(template, tokenizer="0" * 32), tokenizer=small)


def test_an_error_of_one_record_says_why_as_a_document_error():
    with pytest.raises(Refusal, match=r"^record: refused as role: message 1 of 1 with the unknown role 'x'$"):
        render(load_template("chatml", tokenizer=None), [{"role": "x", "content": ""}])


LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content | trim + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('user and assistant only') }}{% endif %}{% endfor %}"
)
# The templates that real tokenizers carry, and stock ones of the same family.
FAMILIES = {
    "qwen3": ("tokenizer", "qwen3", "qwen3_training", "qwen3_instruct_2507", "qwen3_8", "chatml"),
    "qwen2_5": ("tokenizer", "qwen2_5", "qwen2_5_training"),
    "llama3_1": ("tokenizer", "llama3", "llama3_1", "llama3_2", "llama3_training"),
    "mistral_nemo": ("tokenizer",),
    "deepseek_v3": ("tokenizer", "deepseekv3", "deepseekv3_training", "deepseek_r1_distill"),
    "llama2": ("llama2",),
}
QUICK = (("qwen3", "tokenizer"), ("qwen3", "qwen3_training"), ("llama2", "llama2"))


def _families() -> Iterator[object]:
    for family, names in FAMILIES.items():
        # The large ones take seconds to open, and half a second for each template.
        marks = {name: [] if (family, name) in QUICK else [pytest.mark.deep] for name in names}
        yield from (pytest.param(family, name, marks=marks[name]) for name in names)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), list(_families()))
def test_real_tokenizers_with_templates_of_their_family(family, name, real, tmp_path):
    """[T1.a, T2.b, S.i]"""
    tokenizer = real(family)
    folder = real.folder / family
    spec = str(STOCK[name]) if name in STOCK else name
    if name == "llama2":
        spec = str(tmp_path / "llama2.jinja")
        (tmp_path / "llama2.jinja").write_text(LLAMA2, encoding="utf-8")
    template = load_template(spec, tokenizer=str(folder))
    encoder = opened(template, tokenizer, kwargs=OPTIONS)
    given = [Conversation(messages=SHAPES[shape], tools=tools_of(shape)) for shape in SHAPES]
    given.append(talk("".join(tokenizer.special_ids)[:2000], f"see {next(iter(tokenizer.special_ids))} é 中"))
    encoded = encoder.encode(given)
    assert encoded.kept.size >= 3
    for index, (ids, mask) in zip(encoded.kept.tolist(), each(encoded), strict=True):
        one = given[index]
        found = render(template, one.messages, tools=one.tools, kwargs=OPTIONS)
        wanted = "".join(found.text[a:b] for a, b in found.supervised)
        bos = tokenizer.identity.bos_id
        assert bos is None or not np.any((ids[1:] == bos) & (ids[:-1] == bos))
        written = template.special_tokens.get("bos_token")
        assert name == "chatml" or (ids[0] == bos) == (written is not None and found.text.startswith(written))
        if family != "llama2":  # which decodes the mark before every text as a blank
            assert tokenizer.decode(ids) == found.text
            assert tokenizer.decode(ids[mask == 1]) == wanted
        else:
            shown = tokenizer.decode(ids[mask == 1])
            assert shown.replace(" ", "") == wanted.replace(" ", "")
        assert not any(
            word in tokenizer.decode(ids[mask == 1]) for word in ("USER", "SYSTEM", "RESULT", "TOOLTEXT")
        )


PHI3 = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "</s>")
PLAIN = {"normalized": False}


def save(folder: Path, flags: dict[str, dict[str, bool]], normalizer: object = None) -> HuggingFace:
    """Train a byte-level BPE with these control strings."""
    native = HuggingFace(models.BPE())
    native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    native.decoder = decoders.ByteLevel()
    if normalizer is not None:
        native.normalizer = normalizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, show_progress=False)
    native.train_from_iterator(["words and words\n\n  white  space"] * 20, trainer)
    native.add_special_tokens([AddedToken(name, **said) for name, said in flags.items()])
    native.save(str(folder / "tokenizer.json"))
    return native


def phi3_encoder(folder: Path, template: str = "phi3") -> ChatEncoder:
    return ChatEncoder(
        template=load_template(str(STOCK[template]), tokenizer=str(folder)),
        tokenizer=open_tokenizer(str(folder), add_bos=False, engine="tokenizers"),
    )


def long_talk(*contents: str) -> Conversation:
    roles = ("system", "user", "assistant", "user", "assistant")
    return Conversation(
        messages=[{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    )


TALKS = [
    long_talk("be brief", "white  space?", "words", "and?", "more words"),
    long_talk(" \n\t", "\n\nwords ", " \u3000words\xa0\n", "\x1cwords\x1c", "\r\n words \n\n"),
    long_talk("words", "", "words\n", " ", "\x85\u2028words\u200b \x1f"),
]


@pytest.mark.parametrize("template", ["phi3", "phi3_training"])
@pytest.mark.parametrize(
    "said",
    [{"rstrip": True}, {"lstrip": True}, {"lstrip": True, "rstrip": True}, {}],
    ids="+".join,
)
def test_white_space_around_control_strings_goes_where_hugging_face_lets_it_go(said, template, tmp_path):
    """[T2.b]"""
    native = save(tmp_path, dict.fromkeys(PHI3, PLAIN | said))
    chat = phi3_encoder(tmp_path, template)
    done = chat.encode(TALKS)
    assert done.kept.tolist() == [0, 1, 2]
    for index, (begin, end) in enumerate(pairwise(done.encoded.offsets.tolist())):
        ids, mask = done.encoded.ids[begin:end], done.masks[begin:end]
        shown = render(chat.template, TALKS[index].messages)
        encoding = native.encode(shown.text, add_special_tokens=False)
        assert ids.tolist() == encoding.ids
        # Of a control string with white space around it, the string itself says whether it is trained on.
        names = {id_: name for name, id_ in chat.tokenizer.special_ids.items()}
        starts = [
            shown.text.index(names[id_], first) if id_ in names else first
            for id_, (first, _) in zip(encoding.ids, encoding.offsets, strict=True)
        ]
        wanted = [int(any(a <= start < b for a, b in shown.supervised)) for start in starts]
        assert mask.tolist() == wanted
        trained = ids[mask == 1].tolist()
        assert trained.count(chat.tokenizer.special_ids["<|end|>"]) == 2


def test_a_control_string_that_takes_white_space_away_leaves_none_for_training(tmp_path):
    save(tmp_path, dict.fromkeys(PHI3, PLAIN | {"rstrip": True}))
    chat = phi3_encoder(tmp_path)
    spaced, bare = chat.encode([long_talk("s", "\n q", " a")]), chat.encode([long_talk("s", "q", "a")])
    assert spaced.encoded.ids.tolist() == bare.encoded.ids.tolist()
    assert spaced.masks.tolist() == bare.masks.tolist()


def test_the_config_beside_a_tokenizer_counts_as_it_does_for_transformers(tmp_path):
    """[T2.b]"""
    native = save(tmp_path, {name: PLAIN | {"rstrip": name == "<|user|>"} for name in PHI3})
    listed = {
        str(native.token_to_id(name)): {
            "content": name,
            "special": True,
            "lstrip": False,
            "rstrip": name == "<|end|>",
        }
        for name in PHI3
    }
    before = load_template("chatml", tokenizer=str(tmp_path))
    assert dict(before.strip_rules) == {"<|user|>": StripRule(rstrip=True)}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    after = load_template("chatml", tokenizer=str(tmp_path))
    assert dict(after.strip_rules) == {"<|end|>": StripRule(rstrip=True)}
    assert before.to_json() != after.to_json(), "ids depend on it, and the tokenizer's identity does not hold it"
    done = phi3_encoder(tmp_path).encode([long_talk("s", "q", "a")])
    assert open_tokenizer(str(tmp_path)).decode(done.encoded.ids) == (
        "<|system|>\ns<|end|><|user|>\nq<|end|><|assistant|>\na<|end|></s>"
    )


PREPENDS = normalizers.Sequence([normalizers.Prepend("_"), normalizers.Replace(" ", "_")])


@pytest.mark.parametrize(
    ("said", "normalizer", "refused"),
    [
        ({"normalized": True}, None, False),
        ({"normalized": True}, normalizers.NFC(), False),
        ({"normalized": True}, normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]), False),
        ({"normalized": False}, PREPENDS, False),
        ({"normalized": True}, PREPENDS, True),
        ({"normalized": True}, normalizers.Strip(), True),
        ({"normalized": False, "single_word": True}, None, True),
    ],
)
def test_what_a_control_string_does_otherwise_is_done_or_refused(said, normalizer, refused, tmp_path):
    """[T2.b]"""
    native = save(tmp_path, {name: said if name == "<|end|>" else PLAIN for name in PHI3}, normalizer)
    chat = phi3_encoder(tmp_path)
    given = long_talk("be brief", "words", "white space")
    if not refused:
        done = chat.encode([given])
        text = render(chat.template, given.messages).text
        assert done.encoded.ids.tolist() == native.encode(text, add_special_tokens=False).ids
        return
    with pytest.raises(
        ConfigError, match=r"must have the ids .*, got '<\|end\|>', which .*; change that in a copy"
    ):
        chat.encode([given])


@pytest.mark.parametrize(
    ("listed", "reason"),
    [
        ({"content": "<|end|>", "special": True, "rstrip": True}, None),
        ({"content": "<|word|>", "special": True}, None),
        ({"content": "<|word|>", "special": False, "rstrip": True}, "takes other white space away"),
        ({"content": "<|lone|>", "special": True}, "is a token by tokenizer_config.json alone"),
    ],
)
def test_files_that_disagree_on_what_the_template_writes_are_refused(listed, reason, tmp_path):
    """[T2.b]"""
    native = save(tmp_path, dict.fromkeys(PHI3, PLAIN))
    native.add_tokens([AddedToken("<|word|>", special=False, normalized=False)])
    native.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"999": listed}}))
    source = f"{listed['content']} {STOCK['phi3'].read_text()}"
    (tmp_path / "a.jinja").write_text(source)
    chat = ChatEncoder(
        template=load_template(str(tmp_path / "a.jinja"), tokenizer=str(tmp_path)),
        tokenizer=open_tokenizer(str(tmp_path), add_bos=False),
    )
    if reason is None:
        assert chat.encode([long_talk("s", "q", "a")]).kept.tolist() == [0]
    else:
        with pytest.raises(ConfigError, match=reason):
            chat.encode([long_talk("s", "q", "a")])
        assert phi3_encoder(tmp_path).encode([long_talk("s", "q <|lone|> <|word|>", "a")]).kept.tolist() == [0]


def test_a_control_string_that_the_template_does_not_write_may_do_as_it_likes(tmp_path):
    save(tmp_path, {**dict.fromkeys(PHI3, PLAIN), "<|word|>": PLAIN | {"single_word": True}})
    done = phi3_encoder(tmp_path).encode([long_talk("s", "q <|word|> q", "a")])
    assert done.kept.tolist() == [0]


def test_an_answer_of_nothing_but_white_space_that_goes_away_is_refused(tmp_path):
    """[T1.b]"""
    save(tmp_path, dict.fromkeys(PHI3, PLAIN | {"rstrip": True}))
    source = (
        "{% for m in messages %}<|{{ m.role }}|>\n{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    (tmp_path / "a.jinja").write_text(source)
    chat = ChatEncoder(
        template=load_template(str(tmp_path / "a.jinja"), tokenizer=str(tmp_path)),
        tokenizer=open_tokenizer(str(tmp_path), add_bos=False),
    )
    done = chat.encode([Conversation(messages=[{"role": "assistant", "content": text}]) for text in (" \n", " a")])
    assert [(one.index, one.reason) for one in done.refused] == [(0, "no_supervision")]
    assert chat.tokenizer.decode(done.encoded.ids) == "<|assistant|>a"


def test_two_control_strings_share_the_white_space_between_them():
    rules = {"<a>": StripRule(rstrip=True), "<b>": StripRule(lstrip=True)}
    controls = Controls(ids={"<a>": 1, "<b>": 2}, rules=rules, where="test")
    text = " <b> <a>  <b>\x1c <b>x"
    found = controls.find(text, [(0, len(text))])
    assert [text[one.begin : one.end] for one in found] == [" <b>", "<a>  ", "<b>", " <b>"]
    assert [text[one.at : one.stop] for one in found] == ["<b>", "<a>", "<b>", "<b>"]
    assert [one.id for one in found] == [2, 1, 2, 2]
    assert controls.find(text, []) == []
