"""What a tokenizer is, when the ids of two tokenizers mean the same, and where BOS, EOS and control strings go."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import chain, pairwise
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeAlias, get_args

import numpy as np
import xxhash

from tokenmill.errors import ConfigError, TokenizerError, nearest
from tokenmill.fields import surrogate_in
from tokenmill.fingerprint import digest
from tokenmill.types import AnyArray, BoolArray, Encoded, Int64Array

KINDS = ("bytes", "tokenizer.json", "tiktoken", "sentencepiece")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerIdentity:
    """Identity of a tokenizer: ids of equal identities mean the same. The engine is not part of it."""

    kind: str
    """One of `KINDS`."""
    content: str
    """32 hex digits of the bytes that define the tokenizer: the file, or the rank file and its pattern."""
    vocab_size: int
    """One more than the largest id it can give, control ids included."""
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    add_bos: bool
    """Whether every document starts with BOS."""
    add_eos: bool
    """Whether every document ends with EOS."""

    def __post_init__(self) -> None:
        where = f"tokenizer identity of kind {self.kind!r}"
        if self.kind not in KINDS:
            raise TokenizerError(f"{where}: kind must be known, got {self.kind!r}; {nearest(self.kind, KINDS)}")
        if not re.fullmatch(r"[0-9a-f]{32}", self.content):
            raise TokenizerError(
                f"{where}: content must be 32 hex digits, got {self.content!r}; it is `content_digest` of the "
                "bytes that define the tokenizer"
            )
        if not 1 <= self.vocab_size <= 2**32:
            raise TokenizerError(
                f"{where}: vocab_size must be from 1 to 2**32, got {self.vocab_size}; "
                "it is one more than the largest id"
            )
        for name, value in (("bos_id", self.bos_id), ("eos_id", self.eos_id), ("pad_id", self.pad_id)):
            if value is not None and not 0 <= value < self.vocab_size:
                raise TokenizerError(
                    f"{where}: {name} must be below vocab_size {self.vocab_size}, got {value}; "
                    "count the control ids in vocab_size"
                )
        for name, added, value in (("BOS", self.add_bos, self.bos_id), ("EOS", self.add_eos, self.eos_id)):
            if added and value is None:
                raise TokenizerError(
                    f"{where}: to add {name} there must be one, got none; "
                    f"name it with {name.lower()}_token=..., or say add_{name.lower()}=False"
                )
        if self.add_bos and self.add_eos and self.bos_id == self.eos_id:
            raise TokenizerError(
                f"{where}: only one of BOS and EOS may be added where both are one id, got {self.bos_id} for both, "
                "two in a row between documents; say add_bos=False or add_eos=False"
            )

    def to_json(self) -> dict[str, int | str | bool | None]:
        """Return the identity as a JSON object, as a store's manifest holds it."""
        return asdict(self)

    @property
    def digest(self) -> str:
        """32 hex digits of the whole identity."""
        return digest(self.to_json())


class Tokenizer(Protocol):
    """Turns texts into ids and back."""

    @property
    def identity(self) -> TokenizerIdentity:
        """What its ids mean."""

    @property
    def engine(self) -> str:
        """Name and version of what does the work; the first word is what `open_tokenizer(engine=...)` takes."""

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Control strings and their ids. `encode` never gives these ids; `frame` and recipes place them."""

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Return the bare ids of each text: control strings as ordinary text, no BOS or EOS, nothing cut off.

        A text that is not valid Unicode (a lone surrogate) raises `TokenizerError` with its index.
        """

    def encode_with_controls(self, texts: Sequence[str]) -> Encoded:
        """Return the ids of each text, in which control strings have become their ids."""

    def decode(self, ids: AnyArray) -> str:
        """Return the text of ids: U+FFFD for bytes that are not UTF-8, special ids as their strings.

        An id outside the vocabulary raises `TokenizerError`.
        """


def content_digest(*parts: bytes) -> str:
    """Return 32 hex digits of the bytes that define a tokenizer."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def offsets_of(lengths: Iterable[int]) -> Int64Array:
    """Return where items of these lengths start, and the end of the last."""
    return np.cumsum(np.fromiter(chain((0,), lengths), np.int64))


def join(arrays: Sequence[AnyArray]) -> Encoded:
    """Lay the ids of several documents end to end."""
    ids = np.concatenate(arrays) if arrays else np.empty(0, dtype=np.uint32)
    return Encoded(ids=ids, offsets=offsets_of(array.size for array in arrays))


def split(encoded: Encoded) -> list[AnyArray]:
    """Return the ids of each document; what `join` was given."""
    return [encoded.ids[begin:end] for begin, end in pairwise(encoded.offsets.tolist())]


# The text of single tokens

REPLACEMENT = "\ufffd"
_MOST_BYTES = 4
"""Bytes of a character in UTF-8, and so the number of tokens that it can be spread over."""
TOKENS_AROUND = 8
"""Tokens before and after a part of a text that decide how the tokens at its edges read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTexts:
    """The text of each token, such that all of them together are the text of the tokens."""

    texts: tuple[str, ...]
    """A character that is spread over several tokens belongs to the first of them."""
    continues: tuple[bool, ...]
    """Whether a token only continues the character of the token before it; it has no text of its own."""


def token_texts(tokenizer: Tokenizer, ids: AnyArray) -> TokenTexts:
    """Return the text of each token. Bytes that are not UTF-8 stay U+FFFD."""
    alone = [tokenizer.decode(ids[place : place + 1]) for place in range(ids.size)]
    texts, continues = [""] * ids.size, [True] * ids.size
    is_whole = "".join(alone) == tokenizer.decode(ids)
    begin = 0
    while begin < ids.size:
        end = begin + 1 if is_whole else _character_end(tokenizer, ids, alone, begin)
        continues[begin] = False
        texts[begin] = alone[begin] if is_whole else text_between(tokenizer, ids, begin, end)
        begin = end
    return TokenTexts(texts=tuple(texts), continues=tuple(continues))


def text_between(tokenizer: Tokenizer, ids: AnyArray, begin: int, end: int) -> str:
    """Return the text of some tokens as it reads after the one before: SentencePiece drops a leading space."""
    before = tokenizer.decode(ids[max(0, begin - 1) : begin])
    text = tokenizer.decode(ids[max(0, begin - 1) : end])
    return text.removeprefix(before) if text.startswith(before) else tokenizer.decode(ids[begin:end])


def whole_edge(tokenizer: Tokenizer, ids: AnyArray, edge: int) -> int:
    """Return the first place from `edge` on where no character is cut."""
    first = max(0, edge - TOKENS_AROUND)
    continues = token_texts(tokenizer, ids[first : edge + _MOST_BYTES]).continues[edge - first :]
    return edge + (*continues, False).index(False)


def _character_end(tokenizer: Tokenizer, ids: AnyArray, alone: Sequence[str], begin: int) -> int:
    """Return the end of the tokens that share characters with the one at `begin`, each with the next."""

    def broken(first: int, end: int) -> int:
        return tokenizer.decode(ids[first:end]).count(REPLACEMENT)

    lead, end = begin, begin + 1
    """The token with the first byte of the last character, and the end of the tokens that share one."""
    while tokenizer.decode(ids[lead:end]).endswith(REPLACEMENT):
        for last in range(end + 1, min(lead + _MOST_BYTES, ids.size) + 1):
            if not alone[last - 1].startswith(REPLACEMENT):
                return end
            # Bytes belong together if fewer of them are broken then.
            if broken(lead, last) < broken(lead, end) + broken(end, last):
                break
        else:
            return end
        whole = tokenizer.decode(ids[lead:last]).rstrip(REPLACEMENT)
        if len(whole) > len(alone[lead].rstrip(REPLACEMENT)):
            lead = last - 1
        end = last
    return end


def num_shared(left: AnyArray, right: AnyArray) -> int:
    """Return the number of ids that two texts share at their start."""
    size = min(left.size, right.size)
    differs = np.flatnonzero(left[:size] != right[:size])
    return int(differs[0]) if differs.size else size


@cache
def control_pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that finds control strings in a text; of several that start together, the longest."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) if names else r"(?!)")


def without_controls(text: str, names: tuple[str, ...]) -> str:
    """Remove the first control string of a text, of several that start together the longest, until none is left.

    A removal may join the halves of another one. Only the characters around it are looked at again, so that the
    time grows with the length of the text, however deep the control strings are nested.

    >>> without_controls("a<|e<|b|>|>c", ("<|b|>", "<|e|>"))
    'ac'
    """
    pattern = control_pattern(names)
    match = pattern.search(text)
    if match is None:
        return text
    reach = max(map(len, names)) - 1
    kept = array("q")  # begin and end of each range of the text that is kept so far; none holds a control string
    end = 0
    while match is not None:
        if match.start() > end:
            kept.extend((end, match.start()))
        end = match.end()
        while reach:
            before = ""
            for index in range(len(kept) - 2, -2, -2):
                before = text[max(kept[index], kept[index + 1] + len(before) - reach) : kept[index + 1]] + before
                if len(before) == reach:
                    break
            joined = pattern.search(before + text[end : end + reach])
            if joined is None or joined.start() >= len(before):
                break
            end += joined.end() - len(before)
            surplus = len(before) - joined.start()
            while surplus:
                size = min(surplus, kept[-1] - kept[-2])
                kept[-1] -= size
                surplus -= size
                if kept[-1] == kept[-2]:
                    del kept[-2:]
        match = pattern.search(text, end)
    kept.extend((end, len(text)))
    return "".join(text[begin:end] for begin, end in zip(kept[::2], kept[1::2], strict=True))


def encode_between(tokenizer: Tokenizer, texts: Sequence[str]) -> Encoded:
    """Map special tokens to their ids, and encode each piece of text before, between and after them on its own."""
    pattern = control_pattern(tuple(tokenizer.special_ids))
    controls = [[tokenizer.special_ids[name] for name in pattern.findall(text)] for text in texts]
    pieces = split(tokenizer.encode([piece for text in texts for piece in pattern.split(text)]))
    documents = []
    first = 0
    for control_ids in controls:
        between = [piece.astype(np.uint32, copy=False) for piece in pieces[first : first + len(control_ids) + 1]]
        first += len(between)
        places = np.cumsum([piece.size for piece in between[:-1]], dtype=np.int64)
        documents.append(np.insert(np.concatenate(between), places, control_ids))
    return join(documents)


def checked_ids(ids: AnyArray, identity: TokenizerIdentity) -> AnyArray:
    """Return ids that `decode` may look up; one outside the vocabulary raises `TokenizerError`."""
    array = np.asarray(ids).reshape(-1)
    if array.size and not 0 <= int(array.min()) <= int(array.max()) < identity.vocab_size:
        bad = array[(array < 0) | (array >= identity.vocab_size)]
        raise TokenizerError(
            f"decode: ids must be below the vocabulary size {identity.vocab_size}, got {int(bad[0])}; "
            "open the tokenizer that gave them"
        )
    return array


def refuse_surrogates(texts: Sequence[str]) -> None:
    """Raise `TokenizerError` with the index of the first text that holds a lone surrogate."""
    for index, text in enumerate(texts):
        at = surrogate_in(text)
        if at is not None:
            raise TokenizerError(
                f"encode: text {index} of the batch must be valid Unicode, got a lone surrogate {text[at]!r} at "
                f"character {at}; replace it with U+FFFD when the document is read"
            )


@contextmanager
def engine_errors(engine: str, doing: str, way_out: str) -> Iterator[None]:
    """Raise whatever an engine raises as a `TokenizerError` of one line; its own errors have no common type."""
    try:
        yield
    except TokenizerError:
        raise
    except BaseException as error:
        # A panic in Rust arrives as a BaseException that no module exports.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{engine}: must {doing}, got {error}; {way_out}") from error


# Which ids are BOS, EOS and PAD, and whether documents are framed with them.

# In order of preference, where no file of the tokenizer names them.
BOS_NAMES = (
    "<|begin_of_text|>", "<s>", "<bos>", "<|bos|>", "[BOS]", "<BOS>", "<｜begin▁of▁sentence｜>", "<|startoftext|>",
    "<sos>", "<SOS>", "<BOS_TOKEN>",
)  # fmt: skip
EOS_NAMES = (
    "</s>", "<|end_of_text|>", "<eos>", "<|eos|>", "[EOS]", "<EOS>", "<｜end▁of▁sentence｜>", "<|endoftext|>",
    "<EOT>", "<EOS_TOKEN>",
)  # fmt: skip
PAD_NAMES = ("<pad>", "<|pad|>", "[PAD]", "<PAD>", "<｜▁pad▁｜>", "<|finetune_right_pad_id|>", "<|padding|>")


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """A tokenizer's vocabulary, before the BOS and EOS options are applied."""

    where: str
    """Name of the tokenizer in messages, as the user wrote it."""
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
    named_by: Mapping[str, str] = field(default_factory=dict)
    """`bos` and `eos` -> what names the string, in words; without those that nothing names."""
    adds_bos: bool = True
    """Whether a text starts with BOS, where there is one and the caller does not say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Framing:
    """BOS and EOS options of the caller; None leaves the choice to the tokenizer."""

    add_bos: bool | None = None
    add_eos: bool | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    chat_bos: bool | None = None
    """Whether BOS is put before a conversation whose template writes none. None: only where `add_bos` says so, or
    before the built-in template if texts start with BOS."""


def identify(vocabulary: Vocabulary, framing: Framing) -> TokenizerIdentity:
    """Determine BOS, EOS and PAD: those of the caller, otherwise those of the tokenizer.

    By default a document gets BOS and EOS if there are any, but no BOS where the files of the tokenizer say so.
    Where both are one id only EOS is added, or only BOS if that is asked for: never two in a row.
    """
    bos_id = _id_of("bos_token", framing.bos_token or vocabulary.bos, vocabulary)
    eos_id = _id_of("eos_token", framing.eos_token or vocabulary.eos, vocabulary)
    one_id = bos_id is not None and bos_id == eos_id
    add_bos, add_eos = framing.add_bos, framing.add_eos
    if add_eos is None:
        add_eos = eos_id is not None and not (one_id and add_bos)
    if add_bos is None:
        add_bos = bos_id is not None and vocabulary.adds_bos and not (one_id and add_eos)
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


TURN_ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<end_of_turn>", "<turn|>", "<|end|>",
    "<|END_OF_TURN_TOKEN|>", "<|end_of_turn|>", "<|endofturn|>", "<|return|>", "<|call|>", "<|user|>",
    "<|observation|>", "<|assistant_end|>", "<|user_end|>", "<|role_end|>", "<end_of_utterance>", "[/INST]",
)  # fmt: skip
"""End-of-turn tokens. The tokenizers of instruct models use one of them as EOS."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedFraming:
    """The strings of BOS and EOS, and the source that names them."""

    line: str
    """Both, for people."""
    turn_end: str | None
    """EOS, if it is added, ends a turn of a chat, and the caller did not ask for it."""
    end_of_text: str | None
    """A special token that usually ends a text."""


def named_framing(vocabulary: Vocabulary, framing: Framing) -> NamedFraming:
    """Return which strings are BOS and EOS of a tokenizer, whether they are added, and what says so."""
    identity = identify(vocabulary, framing)
    parts = []
    for role, wanted, own, id_, added in (
        ("bos", framing.bos_token, vocabulary.bos, identity.bos_id, identity.add_bos),
        ("eos", framing.eos_token, vocabulary.eos, identity.eos_id, identity.add_eos),
    ):
        if id_ is None:
            parts.append(f"no {role.upper()}")
            continue
        by = "as asked for" if wanted else f"named by {vocabulary.named_by.get(role)}"
        parts.append(f"{role.upper()} is {wanted or own!r} (id {id_}, {by}){'' if added else ', not added'}")
    ends_turn = identity.add_eos and framing.eos_token is None and vocabulary.eos in TURN_ENDS
    return NamedFraming(
        line="; ".join(parts),
        turn_end=vocabulary.eos if ends_turn else None,
        end_of_text=next((name for name in EOS_NAMES if name in vocabulary.special_ids), None),
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


# BOS and EOS in each document, and the dtype that its ids are kept in.


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the smallest little-endian unsigned dtype that holds every id below `vocab_size`.

    >>> token_dtype(256), token_dtype(257), token_dtype(65536), token_dtype(65537)
    (dtype('uint8'), dtype('uint16'), dtype('uint16'), dtype('uint32'))
    """
    for width in (1, 2, 4):
        if 1 <= vocab_size <= 256**width:
            return np.dtype(f"<u{width}")
    raise TokenizerError(
        f"token dtype: vocab_size must be from 1 to 2**32, got {vocab_size}; it is one more than the largest id"
    )


def frame(encoded: Encoded, identity: TokenizerIdentity) -> Encoded:
    """Place BOS and EOS as the identity says, and cast the ids to `token_dtype`.

    A document that already starts with BOS, or ends with EOS, gets no second one, so framing twice is framing once.
    An id outside the vocabulary raises `TokenizerError`. About half a nanosecond a token, one where documents have
    some 50 tokens: a kernel would take half of that, and 0.4 s to load in every worker of a build.
    """
    _refuse_overflow(encoded, identity.vocab_size)
    starts, ends = encoded.offsets[:-1], encoded.offsets[1:]
    needs_bos = _lacks(encoded.ids, starts, starts < ends, identity.bos_id if identity.add_bos else None)
    needs_eos = _lacks(encoded.ids, ends - 1, starts < ends, identity.eos_id if identity.add_eos else None)
    return place(encoded, needs_bos, needs_eos, identity)


_LONG = 400
"""Mean tokens per document above which copying documents one by one is faster."""


def place(encoded: Encoded, needs_bos: BoolArray, needs_eos: BoolArray, identity: TokenizerIdentity) -> Encoded:
    """Insert BOS before some documents and EOS after some, and cast the ids to `token_dtype`."""
    dtype = token_dtype(identity.vocab_size)
    offsets = encoded.offsets.astype(np.int64)
    offsets[1:] += np.cumsum(needs_bos.astype(np.int64) + needs_eos)
    if int(offsets[-1]) == encoded.ids.size:
        return Encoded(ids=encoded.ids.astype(dtype, copy=False), offsets=offsets)
    if encoded.ids.size >= _LONG * needs_bos.size and _is_one(needs_bos) and _is_one(needs_eos):
        return Encoded(ids=_join(encoded, needs_bos[:1], needs_eos[:1], identity), offsets=offsets)
    at_bos = offsets[:-1][needs_bos]
    at_eos = offsets[1:][needs_eos] - 1
    framed = np.empty(int(offsets[-1]), dtype)
    is_bare = np.ones(framed.size, np.bool_)
    is_bare[at_bos] = False
    is_bare[at_eos] = False
    framed[is_bare] = encoded.ids  # casts on the way, without an array of its own
    framed[at_bos] = identity.bos_id or 0
    framed[at_eos] = identity.eos_id or 0
    return Encoded(ids=framed, offsets=offsets)


def _is_one(values: BoolArray) -> bool:
    return bool(values.all() == values.any())


def _join(encoded: Encoded, bos: BoolArray, eos: BoolArray, identity: TokenizerIdentity) -> AnyArray:
    """Join documents that all get the same BOS and EOS, so that the ids between two documents are the same."""
    dtype = token_dtype(identity.vocab_size)
    ids = np.ascontiguousarray(encoded.ids, dtype).data
    documents = [ids[begin:end] for begin, end in pairwise(encoded.offsets.tolist())]
    between = np.concatenate([np.full(eos.sum(), identity.eos_id or 0), np.full(bos.sum(), identity.bos_id or 0)])
    joined = np.frombuffer(bytearray(between.astype(dtype)).join([b"", *documents, b""]), dtype)
    return joined[eos.sum() : joined.size - bos.sum()]


def _lacks(ids: AnyArray, at: Int64Array, filled: BoolArray, wanted: int | None) -> BoolArray:
    """Return the documents whose id at `at` is not yet the wanted one; no document if no id is wanted."""
    if wanted is None:
        return np.zeros(at.size, np.bool_)
    lacks = np.ones(at.size, np.bool_)
    lacks[filled] = ids[at[filled]] != wanted
    return lacks


def _refuse_overflow(encoded: Encoded, vocab_size: int) -> None:
    """Refuse ids outside the vocabulary."""
    ids = encoded.ids
    if not ids.size or (int(ids.max()) < vocab_size and (ids.dtype.kind == "u" or int(ids.min()) >= 0)):
        return
    token = int(np.flatnonzero((ids >= vocab_size) | (ids < 0))[0])
    document = int(np.searchsorted(encoded.offsets, token, side="right")) - 1
    raise TokenizerError(
        f"document {document} of the batch: ids must be below the vocabulary size {vocab_size}, "
        f"got {int(ids[token])} at token {token - int(encoded.offsets[document])}; "
        "frame with the identity of the tokenizer that gave them"
    )


def with_second_bos(ids: AnyArray, offsets: Int64Array, identity: TokenizerIdentity) -> list[int]:
    """Return the documents in which BOS appears twice in a row, because of special tokens in a text."""
    if not identity.add_bos or identity.bos_id == identity.eos_id:
        return []
    is_bos = ids == identity.bos_id
    second_bos = np.flatnonzero(is_bos[1:] & is_bos[:-1]) + 1
    within = second_bos[~np.isin(second_bos, offsets)]
    documents: list[int] = np.unique(np.searchsorted(offsets, within, side="right") - 1).tolist()
    return documents


# What becomes of control strings, such as `<|endoftext|>`, that stand in raw text.

ControlPolicy: TypeAlias = Literal["text", "encode", "drop"]
"""They stay ordinary text, become control ids, or are removed."""
CONTROL_POLICIES: tuple[str, ...] = get_args(ControlPolicy)


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlTokenizer:
    """A tokenizer that gives control strings in raw text their ids, or removes them first."""

    identity: TokenizerIdentity
    engine: str
    special_ids: Mapping[str, int]
    tokenizer: Tokenizer = field(repr=False)
    policy: str

    def decode(self, ids: AnyArray) -> str:
        """Return the text of ids."""
        return self.tokenizer.decode(ids)

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Return the ids of each text."""
        if self.policy == "encode":
            return self.encode_with_controls(texts)
        names = tuple(self.special_ids)
        return self.tokenizer.encode([without_controls(text, names) for text in texts])

    def encode_with_controls(self, texts: Sequence[str]) -> Encoded:
        """Return the ids of each text, those of control strings among them."""
        return self.tokenizer.encode_with_controls(texts)


def with_policy(tokenizer: Tokenizer, policy: str) -> Tokenizer:
    """Return a tokenizer that treats control strings in raw text so; `text` is what every tokenizer does itself."""
    if policy not in CONTROL_POLICIES:
        raise ConfigError(
            f"control_strings: expected one of {', '.join(CONTROL_POLICIES)}, got {policy!r}; "
            f"{nearest(policy, CONTROL_POLICIES)}"
        )
    if policy == "text" or not tokenizer.special_ids:
        return tokenizer
    return ControlTokenizer(
        identity=tokenizer.identity,
        engine=tokenizer.engine,
        special_ids=tokenizer.special_ids,
        tokenizer=tokenizer,
        policy=policy,
    )


# The built-in tokenizer: one id a byte of UTF-8, and BOS, EOS, PAD above them.

BYTES_SPECIAL_IDS: Mapping[str, int] = MappingProxyType({"<|bos|>": 256, "<|eos|>": 257, "<|pad|>": 258})


def bytes_vocabulary() -> Vocabulary:
    """Return the vocabulary of the built-in tokenizer: 259 ids."""
    return Vocabulary(
        where="bytes",
        kind="bytes",
        content=content_digest(b"bytes-v1"),
        vocab_size=259,
        ids=BYTES_SPECIAL_IDS,
        special_ids=BYTES_SPECIAL_IDS,
        bos="<|bos|>",
        eos="<|eos|>",
        pad="<|pad|>",
        named_by=dict.fromkeys(("bos", "eos"), "the built-in tokenizer"),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ByteTokenizer:
    """Ids 0 to 255 are bytes; every text is encodable, nothing is unknown."""

    identity: TokenizerIdentity
    engine: str = "bytes"
    special_ids: Mapping[str, int] = field(default_factory=lambda: BYTES_SPECIAL_IDS)

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Return the UTF-8 bytes of each text, as uint8 ids."""
        try:
            encoded = [text.encode() for text in texts]
        except UnicodeEncodeError:
            refuse_surrogates(texts)
            raise
        return Encoded(ids=np.frombuffer(b"".join(encoded), np.uint8), offsets=offsets_of(map(len, encoded)))

    def encode_with_controls(self, texts: Sequence[str]) -> Encoded:
        """Return the UTF-8 bytes of each text, as uint32 ids, and those of control strings."""
        return encode_between(self, texts)

    def decode(self, ids: AnyArray) -> str:
        """Return the text of the bytes, control ids as their strings."""
        array = checked_ids(ids, self.identity)
        if not array.size or int(array.max()) < 256:
            return array.astype(np.uint8).tobytes().decode(errors="replace")
        strings = {id_: name for name, id_ in self.special_ids.items()}
        # Cut at the control ids, so that one inside a character leaves U+FFFD on both sides of it.
        cuts = np.flatnonzero(array >= 256)
        pieces: list[str] = []
        start = 0
        for cut in cuts.tolist():
            pieces.append(array[start:cut].astype(np.uint8).tobytes().decode(errors="replace"))
            pieces.append(strings[int(array[cut])])
            start = cut + 1
        pieces.append(array[start:].astype(np.uint8).tobytes().decode(errors="replace"))
        return "".join(pieces)
