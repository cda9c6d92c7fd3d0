from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tests.encode.chat.stock import STOCK
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as HuggingFace

from tokenmill.encode.chat.conversation import Conversation
from tokenmill.encode.chat.render import render
from tokenmill.encode.chat.template import StripRule, load_template
from tokenmill.encode.chat.tokens import ChatEncoder, Controls
from tokenmill.encode.engines import open_tokenizer
from tokenmill.errors import ConfigError

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


def encoder(folder: Path, template: str = "phi3") -> ChatEncoder:
    return ChatEncoder(
        template=load_template(str(STOCK[template]), tokenizer=str(folder)),
        tokenizer=open_tokenizer(str(folder), add_bos=False, engine="tokenizers"),
    )


def talk(*contents: str) -> Conversation:
    roles = ("system", "user", "assistant", "user", "assistant")
    return Conversation(
        messages=[{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    )


TALKS = [
    talk("be brief", "white  space?", "words", "and?", "more words"),
    talk(" \n\t", "\n\nwords ", " \u3000words\xa0\n", "\x1cwords\x1c", "\r\n words \n\n"),
    talk("words", "", "words\n", " ", "\x85\u2028words\u200b \x1f"),
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
    chat = encoder(tmp_path, template)
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
    chat = encoder(tmp_path)
    spaced, bare = chat.encode([talk("s", "\n q", " a")]), chat.encode([talk("s", "q", "a")])
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
    done = encoder(tmp_path).encode([talk("s", "q", "a")])
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
    chat = encoder(tmp_path)
    given = talk("be brief", "words", "white space")
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
        assert chat.encode([talk("s", "q", "a")]).kept.tolist() == [0]
    else:
        with pytest.raises(ConfigError, match=reason):
            chat.encode([talk("s", "q", "a")])
        assert encoder(tmp_path).encode([talk("s", "q <|lone|> <|word|>", "a")]).kept.tolist() == [0]


def test_a_control_string_that_the_template_does_not_write_may_do_as_it_likes(tmp_path):
    save(tmp_path, {**dict.fromkeys(PHI3, PLAIN), "<|word|>": PLAIN | {"single_word": True}})
    done = encoder(tmp_path).encode([talk("s", "q <|word|> q", "a")])
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
    controls = Controls.of({"<a>": 1, "<b>": 2}, rules, "test")
    text = " <b> <a>  <b>\x1c <b>x"
    found = controls.find(text, [(0, len(text))])
    assert [text[one.begin : one.end] for one in found] == [" <b>", "<a>  ", "<b>", " <b>"]
    assert [text[one.at : one.stop] for one in found] == ["<b>", "<a>", "<b>", "<b>"]
    assert np.concatenate([one.ids for one in found]).tolist() == [2, 1, 2, 2]
    assert controls.find(text, []) == []
