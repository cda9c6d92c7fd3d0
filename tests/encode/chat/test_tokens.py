from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer as HuggingFace
from tokenizers import decoders, models, pre_tokenizers, trainers

from tokenmill.encode.chat.render import Rendered
from tokenmill.encode.chat.tokens import Controls, encode_all, segments_of
from tokenmill.encode.engines import open_tokenizer
from tokenmill.encode.refusal import Refusal

SPECIAL = {"<s>": 1, "<s>x": 2, "[A]": 3}


def cut(text: str, authored: list[tuple[int, int]], supervised: list[tuple[int, int]] = []) -> list:  # noqa: B006
    rendered = Rendered(text=text, supervised=tuple(supervised), authored=tuple(authored))
    return segments_of(rendered, Controls.of(SPECIAL, {}, "test"))


def shown(pieces: list) -> list[tuple[str, int | None]]:
    return [(piece.text, int(piece.parts[0][0]) if piece.parts else None) for piece in pieces]


def test_control_strings_are_found_only_where_the_template_wrote_all_of_them():
    text = "<s>a<s>[A]"
    assert shown(cut(text, [(0, 10)])) == [("<s>", 1), ("a", None), ("<s>", 1), ("[A]", 3)]
    assert shown(cut(text, [(0, 3), (8, 10)])) == [("<s>", 1), ("a<s>[A]", None)]
    assert shown(cut("<s>x", [(0, 4)])) == [("<s>x", 2)], "the longest of those that start there"
    assert cut("", []) == []
    plain = Rendered(text="a<s>", supervised=(), authored=((0, 4),))
    assert shown(segments_of(plain, Controls.of({}, {}, "test"))) == [("a<s>", None)]


def test_an_edge_inside_a_control_string_is_refused():
    with pytest.raises(Refusal) as caught:
        cut("<s>a", [(0, 4)], [(1, 4)])
    assert caught.value.reason == "straddles"


def marked_words(folder) -> object:
    """Train a tokenizer that puts a mark before every text, as those of SentencePiece do."""
    native = HuggingFace(models.BPE())
    native.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    native.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=["<e>"], show_progress=False)
    native.train_from_iterator(["user question assistant answer abcd"] * 20, trainer)
    native.save(str(folder / "tokenizer.json"))
    return open_tokenizer(str(folder), engine="tokenizers")


@pytest.mark.parametrize(
    ("text", "edge", "provable"),
    [
        # The edge lies between two words: whole and parts have the same tokens.
        ("user answer", 4, True),
        # A token lies across it, and to cut there would put a blank into the word.
        ("abcd", 2, False),
    ],
)
def test_a_word_is_not_cut_by_a_tokenizer_that_marks_every_text(text, edge, provable, tmp_path):
    tokenizer = marked_words(tmp_path)
    rendered = Rendered(text=text, supervised=((edge, len(text)),), authored=((0, len(text)),))
    (result,) = encode_all([rendered], tokenizer, Controls.of(tokenizer.special_ids, {}, "test"))
    if not provable:
        assert isinstance(result, Refusal)
        assert result.reason == "straddles"
    else:
        found, mask = result
        assert tokenizer.decode(found) == text
        assert tokenizer.decode(found[mask == 1]) == text[edge:].strip()
        assert mask.tolist() == sorted(mask.tolist())


def test_every_character_may_be_an_edge():
    tokenizer = open_tokenizer("bytes")
    text = "aé中\U0001f600b"
    for begin in range(len(text)):
        for end in range(begin + 1, len(text) + 1):
            rendered = Rendered(text=text, supervised=((begin, end),), authored=())
            ((ids, mask),) = encode_all([rendered], tokenizer, Controls.of({}, {}, "test"))
            assert tokenizer.decode(ids) == text
            assert tokenizer.decode(ids[mask == 1]) == text[begin:end]
            assert ids.dtype == np.uint32
