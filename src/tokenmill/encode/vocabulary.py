"""Which ids are BOS, EOS and PAD, and whether documents are framed with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tokenmill.encode.tokenizer import TokenizerIdentity
from tokenmill.errors import TokenizerError, nearest

# In order of preference, where no file beside the tokenizer says it.
BOS_NAMES = (
    "<|begin_of_text|>",
    "<s>",
    "<bos>",
    "<|bos|>",
    "[BOS]",
    "<BOS>",
    "<｜begin▁of▁sentence｜>",
    "<|startoftext|>",
    "<sos>",
    "<SOS>",
)
EOS_NAMES = (
    "</s>",
    "<|end_of_text|>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<EOS>",
    "<｜end▁of▁sentence｜>",
    "<|endoftext|>",
    "<EOT>",
)
PAD_NAMES = (
    "<pad>",
    "<|pad|>",
    "[PAD]",
    "<PAD>",
    "<｜▁pad▁｜>",
    "<|finetune_right_pad_id|>",
    "<|padding|>",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """The strings and ids of a tokenizer, before anyone said how documents are framed."""

    where: str
    """What the user called it, for messages."""
    kind: str
    content: str
    vocab_size: int
    ids: Mapping[str, int]
    """Every string that may be named as BOS or EOS."""
    special_ids: Mapping[str, int]
    """The control strings among them."""
    bos: str | None
    eos: str | None
    pad: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What the caller says of BOS and EOS; None leaves it to the tokenizer."""

    add_bos: bool | None = None
    add_eos: bool | None = None
    bos_token: str | None = None
    eos_token: str | None = None


def well_known(names: Iterable[str], special_ids: Mapping[str, int]) -> str | None:
    """Return the first of the names that is a control string."""
    return next((name for name in names if name in special_ids), None)


def identify(vocabulary: Vocabulary, wanted: Wanted) -> TokenizerIdentity:
    """Settle BOS, EOS and PAD: what the caller wants, else what the tokenizer has.

    By default a document gets the BOS and the EOS that there are. Where both are one id only EOS is added, or
    only BOS if that is asked for: never two in a row.
    """
    bos_id = _id_of("bos_token", wanted.bos_token or vocabulary.bos, vocabulary)
    eos_id = _id_of("eos_token", wanted.eos_token or vocabulary.eos, vocabulary)
    one_id = bos_id is not None and bos_id == eos_id
    add_bos, add_eos = wanted.add_bos, wanted.add_eos
    if add_eos is None:
        add_eos = eos_id is not None and not (one_id and add_bos)
    if add_bos is None:
        add_bos = bos_id is not None and not (one_id and add_eos)
    for name, added, known in (("bos", add_bos, bos_id), ("eos", add_eos, eos_id)):
        if added and known is None:
            raise TokenizerError(
                f"tokenizer {vocabulary.where!r}: to add {name.upper()} there must be one, got add_{name}=True; "
                f"name it with {name}_token=..., {_options(vocabulary)}"
            )
    return TokenizerIdentity(
        kind=vocabulary.kind,
        content=vocabulary.content,
        vocab_size=vocabulary.vocab_size,
        bos_id=bos_id,
        eos_id=eos_id,
        # Padding is never stored or trained on: a PAD that the files name but do not hold is no PAD, no error.
        pad_id=vocabulary.ids.get(vocabulary.pad) if vocabulary.pad is not None else None,
        add_bos=add_bos,
        add_eos=add_eos,
    )


def _id_of(role: str, name: str | None, vocabulary: Vocabulary) -> int | None:
    if name is None:
        return None
    if name not in vocabulary.ids:
        raise TokenizerError(
            f"tokenizer {vocabulary.where!r}: {role} must be in the vocabulary, got {name!r}; "
            f"{nearest(name, vocabulary.special_ids) if vocabulary.special_ids else 'it has no control strings'}"
        )
    return vocabulary.ids[name]


def _options(vocabulary: Vocabulary) -> str:
    names = list(vocabulary.special_ids)
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"one of {', '.join(names[:8])}{more}" if names else "but the file has no control strings"
