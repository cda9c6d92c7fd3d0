"""Which ids are BOS and EOS, and whether they are added."""

import pytest

from tokenmill.encode.tokenizer import Framing, Vocabulary, identify, well_known
from tokenmill.errors import TokenizerError

SPECIAL = {"<s>": 0, "</s>": 1, "<|im_end|>": 2}


def vocabulary(bos="<s>", eos="</s>", pad=None):
    return Vocabulary(
        where="web.json",
        kind="tokenizer.json",
        content="0" * 32,
        vocab_size=10,
        ids={**SPECIAL, "word": 9},
        special_ids=SPECIAL,
        bos=bos,
        eos=eos,
        pad=pad,
    )


@pytest.mark.parametrize(
    ("bos", "eos", "wanted", "ids", "added"),
    [
        ("<s>", "</s>", {}, (0, 1), (True, True)),
        ("<s>", None, {}, (0, None), (True, False)),
        (None, "</s>", {}, (None, 1), (False, True)),
        (None, None, {}, (None, None), (False, False)),
        ("<s>", "</s>", {"add_bos": False}, (0, 1), (False, True)),
        ("<s>", "</s>", {"add_eos": False}, (0, 1), (True, False)),
        # One id for both, T2.b: EOS alone, unless BOS is asked for.
        ("</s>", "</s>", {}, (1, 1), (False, True)),
        ("</s>", "</s>", {"add_bos": True}, (1, 1), (True, False)),
        ("</s>", "</s>", {"add_eos": False}, (1, 1), (True, False)),
        ("</s>", "</s>", {"add_bos": False, "add_eos": False}, (1, 1), (False, False)),
        # Named by the caller, which wins.
        ("<s>", "</s>", {"eos_token": "<|im_end|>"}, (0, 2), (True, True)),
        (None, "</s>", {"bos_token": "<s>"}, (0, 1), (True, True)),
        (None, None, {"bos_token": "word"}, (9, None), (True, False)),
    ],
)
def test_policy(bos, eos, wanted, ids, added):
    identity = identify(vocabulary(bos, eos), Framing(**wanted))
    assert (identity.bos_id, identity.eos_id) == ids
    assert (identity.add_bos, identity.add_eos) == added


def test_both_asked_for_with_one_id_is_refused():
    """T2.b."""
    with pytest.raises(TokenizerError, match="two in a row"):
        identify(vocabulary("</s>", "</s>"), Framing(add_bos=True, add_eos=True))


@pytest.mark.parametrize("name", ["bos", "eos"])
def test_asking_for_what_is_not_there_names_the_way_out(name):
    with pytest.raises(
        TokenizerError, match=rf"got add_{name}=True; name it with {name}_token=..., one of <s>, </s>"
    ):
        identify(vocabulary(None, None), Framing(**{f"add_{name}": True}))


@pytest.mark.parametrize("role", ["bos_token", "eos_token"])
def test_a_name_outside_the_vocabulary_gets_the_nearest(role):
    with pytest.raises(
        TokenizerError, match=rf"'web.json': {role} .*got '<im_end>'; did you mean '<\|im_end\|>'\?"
    ):
        identify(vocabulary(), Framing(**{role: "<im_end>"}))


@pytest.mark.parametrize(("pad", "pad_id"), [(None, None), ("<|im_end|>", 2), ("[PAD]", None)])
def test_a_pad_that_is_not_in_the_vocabulary_is_no_pad(pad, pad_id):
    assert identify(vocabulary(pad=pad), Framing()).pad_id == pad_id


def test_the_first_known_name_is_taken():
    assert well_known(("<bos>", "</s>", "<s>"), SPECIAL) == "</s>"
    assert well_known(("<bos>",), SPECIAL) is None
