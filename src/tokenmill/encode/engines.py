"""Engines of tokenizers: the fast engine, the references, and the check that they agree."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from itertools import count, filterfalse, groupby
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tokenmill.encode import files
from tokenmill.encode.hub import pinned
from tokenmill.encode.tokenizer import (
    ByteTokenizer,
    Framing,
    NamedFraming,
    Tokenizer,
    TokenizerIdentity,
    Vocabulary,
    bytes_vocabulary,
    checked_ids,
    control_pattern,
    encode_between,
    engine_errors,
    identify,
    join,
    named_framing,
    num_shared,
    refuse_surrogates,
    split,
)
from tokenmill.errors import ConfigError, TokenizerError, nearest, warn
from tokenmill.tables import check_types, path_of
from tokenmill.types import AnyArray, BoolArray, Encoded

if TYPE_CHECKING:
    import tokenizers


# Control strings of a `tokenizer.json` that are also words of its model.


def mark_framing(file: files.JsonFile, identity: TokenizerIdentity) -> files.JsonFile:
    """Make BOS and EOS control strings, where the file has them as ordinary words."""
    ids = file.vocabulary.ids
    unmarked = {identity.bos_id, identity.eos_id} - {None, *file.vocabulary.special_ids.values()}
    if not unmarked:
        return file
    marked = {name: id_ for name, id_ in ids.items() if id_ in unmarked}
    value = msgspec.json.decode(file.text)
    added = {token["content"]: token for token in value.get("added_tokens") or []}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for name, id_ in marked.items():
        added[name] = {**plain, **added.get(name, {}), "id": id_, "content": name, "special": True}
    value["added_tokens"] = sorted(added.values(), key=lambda token: int(token["id"]))
    vocabulary = replace(file.vocabulary, special_ids={**file.vocabulary.special_ids, **marked})
    return replace(
        file,
        text=msgspec.json.encode(value).decode(),
        vocabulary=vocabulary,
        added_ids={**file.added_ids, **marked},
    )


def control_ids(file: files.JsonFile, identity: TokenizerIdentity) -> dict[str, int]:
    """Return what raw text must not be able to spell: the control strings, BOS and EOS."""
    controls = dict(file.vocabulary.special_ids)
    # Text that the model has no token for may well become the unknown token, unless that is also BOS or EOS.
    if file.unknown is not None and controls.get(file.unknown) not in {identity.bos_id, identity.eos_id}:
        controls.pop(file.unknown, None)
    return controls


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """Keeps control ids out of raw text where they are words of the model: T5's `</s>`, or one that BPE merges.

    Engines do not look for control strings, but a model that has one as a word gives its id all the same. A text
    whose ids hold one is encoded again, by the reference, with a model without those words; SentencePiece does not
    take them for words either. A text whose ids hold none is the same under both models.
    """

    where: str
    is_control: BoolArray
    """Of each id."""
    open_without: Callable[[int], tokenizers.Tokenizer] = field(repr=False)
    """Opens the reference, once, with the words replaced by the placeholder of that number."""

    def applied(self, texts: Sequence[str], encoded: Encoded) -> Encoded:
        """Return the ids of texts without control ids, from those that an engine gave."""
        tokens = np.flatnonzero(self.is_control[encoded.ids])
        if not tokens.size:
            return encoded
        documents = split(encoded)
        for index in np.unique(np.searchsorted(encoded.offsets, tokens, side="right") - 1).tolist():
            documents[index] = self._encode(texts[index])
        return join(documents)

    def _encode(self, text: str) -> AnyArray:
        number = next(number for number in count() if placeholder(number) not in text)
        native = self.open_without(number)
        ids = np.array(native.encode(text, add_special_tokens=False).ids, dtype=np.uint32)
        spelled = ids[self.is_control[ids]]
        if spelled.size:
            raise TokenizerError(
                f"tokenizer {self.where!r}: raw text must not give control ids, got id {int(spelled[0])} "
                f"({native.id_to_token(int(spelled[0]))!r}) for {text[:40]!r}; name another BOS or EOS with "
                "bos_token=... or eos_token=...: the model gives this one to text that it does not know"
            )
        return ids


def guard_of(
    file: files.JsonFile, identity: TokenizerIdentity, open_native: Callable[[str], tokenizers.Tokenizer]
) -> Guard | None:
    """Return what keeps control ids out of raw text; None where the model has no control string as a word."""
    controls = control_ids(file, identity)
    words = file.words(controls) - {file.unknown}
    if not words and file.unknown not in controls:
        return None
    is_control = np.zeros(identity.vocab_size, np.bool_)
    is_control[list(controls.values())] = True
    opened: dict[int, tokenizers.Tokenizer] = {}

    def open_without(number: int) -> tokenizers.Tokenizer:
        # What is left of the model must be able to spell the words: BPE leaves out a letter that it lacks.
        lacking = {letter for word in words for letter in word} - (file.model_ids.keys() - words)
        if lacking & words or (lacking and file.unknown is None):
            raise TokenizerError(
                f"tokenizer {file.vocabulary.where!r}: a control string in text must be spelled letter by letter, "
                f"got a model without {min(lacking)!r}; name another BOS or EOS with bos_token=... or eos_token=..."
            )
        if number not in opened:
            opened[number] = open_native(_without_words(file.text, words, number))
        return opened[number]

    return Guard(where=file.vocabulary.where, is_control=is_control, open_without=open_without)


def placeholder(number: int, word: int | str = "") -> str:
    """Return what replaces a word in a model; it must occur in no text that is encoded with that model."""
    return f"\U0010ffff{number}.{word}"


def _without_words(text: str, words: set[str], number: int) -> str:
    """Return a `tokenizer.json` in which placeholders replace some words of the model.

    Every id stays the same, and every other word keeps its score, or its place among the merges.
    """
    value = msgspec.json.decode(text)
    names = {word: placeholder(number, index) for index, word in enumerate(sorted(words))}
    model: dict[str, Any] = value["model"]
    if isinstance(model["vocab"], list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {names.get(word, word): id_ for word, id_ in model["vocab"].items()}
    if model.get("merges"):
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if names.keys().isdisjoint((*pair, "".join(pair)))]
    for token in value.get("added_tokens") or []:
        token["content"] = names.get(token["content"], token["content"])
    return msgspec.json.encode({**value, "post_processor": None}).decode()


# The fast engine: fastokens, for `tokenizer.json` and rank files.

# fastokens 0.3.5 splits texts that hold these unlike the references: the first is white space to its PCRE2 and
# to nobody else, the second is an 's' to the references where a pattern ignores case, as o200k does after an
# apostrophe. The first was found by comparing every character below U+323B0 under the patterns of nine known
# tokenizers, the second by random texts; there may be more, which is what `trusted` is for. Such texts are left
# to the reference: it costs next to nothing to look for them, and one of them would else make a whole job slow.
DIVERGENT = ("\u180e", "\u017f")

_REFERENCE = "take the slower reference: engine='tokenizers', or 'tiktoken' for rank files"


@dataclass(frozen=True, kw_only=True, slots=True)
class FastTokenizer:
    """A tokenizer run by fastokens; texts that it is known to split differently go to the reference."""

    identity: TokenizerIdentity
    special_ids: Mapping[str, int]
    engine: str
    native: Any = field(repr=False)
    """`fastokens.Tokenizer`, which ships no types."""
    reference: Callable[[], Tokenizer] = field(repr=False)
    """Returns the reference, opened at the first call."""
    to_text: Callable[[AnyArray], str] = field(repr=False)
    guard: Guard | None = field(repr=False)
    controls: re.Pattern[str] = field(repr=False)
    """Finds the texts that may hold a control string."""

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Return the bare ids of each text as uint32."""
        if any(map(_is_divergent, filterfalse(str.isascii, texts))):
            divergent = [index for index, text in enumerate(texts) if _is_divergent(text)]
            return self._encode_around(texts, divergent, self.reference().encode)
        encoded = self._encode(list(texts))
        return encoded if self.guard is None else self.guard.applied(texts, encoded)

    def encode_with_controls(self, texts: Sequence[str]) -> Encoded:
        """Return the ids of each text, and of control strings: texts that hold one are left to the reference."""
        if self.identity.kind == "tiktoken":
            return encode_between(self, texts)
        with_controls = [index for index, text in enumerate(texts) if self.controls.search(text)]
        if not with_controls:
            return self.encode(texts)
        return self._encode_around(texts, with_controls, self.reference().encode_with_controls)

    def _encode_around(
        self, texts: Sequence[str], others: list[int], encode_others: Callable[[Sequence[str]], Encoded]
    ) -> Encoded:
        """Encode texts, but for some that are encoded in another way."""
        refuse_surrogates(texts)
        bare = list(texts)
        for index in others:
            bare[index] = ""
        documents = split(self.encode(bare))
        for index, ids in zip(others, split(encode_others([texts[index] for index in others])), strict=True):
            documents[index] = ids
        return join(documents)

    def decode(self, ids: AnyArray) -> str:
        """Return the text of ids."""
        return self.to_text(checked_ids(ids, self.identity))

    def _encode(self, texts: list[str]) -> Encoded:
        try:
            with engine_errors(self.engine, f"encode {len(texts)} texts", _REFERENCE):
                ids, offsets = self.native.encode_batch_flat(
                    texts, add_special_tokens=False, split_special_tokens=True
                )
        except TokenizerError:
            refuse_surrogates(texts)
            raise
        return Encoded(
            ids=np.frombuffer(ids, dtype="<u4"),
            offsets=np.frombuffer(offsets, dtype="<u8").astype(np.int64),
        )


def _is_divergent(text: str) -> bool:
    return any(character in text for character in DIVERGENT)


def _open_fast(
    file: files.JsonFile | files.RankFile, identity: TokenizerIdentity, open_reference: Callable[[], Tokenizer]
) -> FastTokenizer:
    """Load a file in fastokens; raise `TokenizerError` for what it does not support, such as a gap in the ranks."""
    try:
        from fastokens import Tokenizer as Native
    except ImportError as error:
        raise TokenizerError(
            f"fastokens: must be installed for engine='fastokens', got {error}; pip install fastokens, "
            f"or {_REFERENCE}"
        ) from error
    engine = fast_engine()
    reference = _once(open_reference, identity)
    with engine_errors(engine, f"load {file.vocabulary.where!r}", _REFERENCE):
        if isinstance(file, files.RankFile):
            encoding = file.encoding
            pattern = {"encoding": encoding.preset} if encoding.preset else {"pattern": encoding.pattern}
            special_ids = dict(encoding.special_ids)
            native = Native.from_tiktoken(str(file.path), special_tokens=special_ids, **pattern)
        else:
            native = Native.from_json_str(file.text)
            # What the file says of cutting and padding is for inference; here no token may be lost or invented.
            native.no_truncation()
            native.no_padding()
            engine_ids = {token["content"]: token["id"] for token in native.added_tokens()}
            files.refuse_other_ids(file.vocabulary.where, engine, file.added_ids, engine_ids)
    return FastTokenizer(
        identity=identity,
        special_ids=file.vocabulary.special_ids,
        engine=engine,
        native=native,
        reference=reference,
        to_text=_decoder(file, reference),
        guard=guard_of(file, identity, _native_json) if isinstance(file, files.JsonFile) else None,
        controls=_control_finder(file),
    )


def _control_finder(file: files.JsonFile | files.RankFile) -> re.Pattern[str]:
    """Return a pattern that finds every text in which the reference sees a control string, and perhaps more."""
    if isinstance(file, files.JsonFile) and file.normalized_controls:
        return re.compile("")  # it looks for them in normalized text, which another text may become
    return control_pattern(tuple(file.vocabulary.special_ids))


def _decoder(
    file: files.JsonFile | files.RankFile, reference: Callable[[], Tokenizer]
) -> Callable[[AnyArray], str]:
    """Return a function that decodes ids; its texts are for people, so it may be slow."""
    if isinstance(file, files.RankFile):
        strings = cache(file.strings)  # tens of MB that only decoding needs
        return lambda ids: files.text_of(ids, strings())
    # fastokens joins tokens otherwise where a file has no decoder.
    return lambda ids: reference().decode(ids)


def fast_engine() -> str:
    """Return the name and version of the engine, whether or not it can be used."""
    try:
        return f"fastokens {version('fastokens')}"
    except PackageNotFoundError:
        return "fastokens (not installed)"


def _once(open_reference: Callable[[], Tokenizer], identity: TokenizerIdentity) -> Callable[[], Tokenizer]:
    """Return a function that opens the reference once, and only if it is still the same tokenizer."""

    @cache
    def opened() -> Tokenizer:
        reference = open_reference()
        if reference.identity != identity:
            raise TokenizerError(
                f"{reference.engine}: the file must stay as it was when the tokenizer was opened, "
                f"got content {reference.identity.content} after {identity.content}; start the job again"
            )
        return reference

    return opened


# The references: Hugging Face tokenizers, tiktoken and SentencePiece, slower, and right by definition.

_LAST = "there is no other engine: the file does not fit the text"
_WHOLE = "is it a file of this kind, and whole?"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceTokenizer:
    """A tokenizer run by the library that says what its ids are."""

    identity: TokenizerIdentity
    special_ids: Mapping[str, int]
    engine: str
    to_ids: Callable[[str], Sequence[int] | AnyArray] = field(repr=False)
    """Takes one text: for many, some libraries start threads, and some then print a warning at every fork."""
    to_text: Callable[[AnyArray], str] = field(repr=False)
    to_ids_with_controls: Callable[[str], Sequence[int]] | None = field(default=None, repr=False)
    """None: the text between control strings is encoded piece by piece."""
    guard: Guard | None = field(default=None, repr=False)

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Return the bare ids of each text as uint32."""
        encoded = self._encode(self.to_ids, texts)
        return encoded if self.guard is None else self.guard.applied(texts, encoded)

    def encode_with_controls(self, texts: Sequence[str]) -> Encoded:
        """Return the ids of each text, and of control strings, as uint32."""
        if self.to_ids_with_controls is None:
            return encode_between(self, texts)
        return self._encode(self.to_ids_with_controls, texts)

    def _encode(self, to_ids: Callable[[str], Sequence[int] | AnyArray], texts: Sequence[str]) -> Encoded:
        refuse_surrogates(texts)  # tiktoken itself would put U+FFFD in their place and say nothing
        with engine_errors(self.engine, f"encode {len(texts)} texts", _LAST):
            return join([np.asarray(to_ids(text), dtype=np.uint32) for text in texts])

    def decode(self, ids: AnyArray) -> str:
        """Return the text of ids."""
        array = checked_ids(ids, self.identity)
        with engine_errors(self.engine, "decode", _LAST):
            return self.to_text(array)


@contextmanager
def _installed(name: str, where: str, package: str) -> Iterator[None]:
    """Raise a failed import as an error that says what to install."""
    try:
        yield
    except ImportError as error:
        raise TokenizerError(
            f"{name}: must be installed, it is the reference for {where!r}, got {error}; pip install {package}"
        ) from error


def _native_json(text: str, *, with_controls: bool = False) -> tokenizers.Tokenizer:
    """Give a `tokenizer.json` to Hugging Face tokenizers."""
    import tokenizers

    native = tokenizers.Tokenizer.from_str(text)
    native.encode_special_tokens = not with_controls
    native.no_truncation()
    native.no_padding()
    return native


def _open_reference_json(file: files.JsonFile, identity: TokenizerIdentity) -> ReferenceTokenizer:
    where = file.vocabulary.where
    with _installed("tokenizers", where, "tokenizers"):
        import tokenizers
    engine = f"tokenizers {tokenizers.__version__}"
    with engine_errors(engine, f"load {where!r}", _WHOLE):
        native = _native_json(file.text)
        engine_ids = {token.content: id_ for id_, token in native.get_added_tokens_decoder().items()}
    files.refuse_other_ids(where, engine, file.added_ids, engine_ids)
    with_controls = cache(partial(_native_json, file.text, with_controls=True))
    return ReferenceTokenizer(
        identity=identity,
        special_ids=file.vocabulary.special_ids,
        engine=engine,
        to_ids=lambda text: native.encode(text, add_special_tokens=False).ids,
        to_text=lambda ids: str(native.decode(ids.tolist(), skip_special_tokens=False)),
        to_ids_with_controls=lambda text: with_controls().encode(text, add_special_tokens=False).ids,
        guard=guard_of(file, identity, _native_json),
    )


def _open_reference_ranks(file: files.RankFile, identity: TokenizerIdentity) -> ReferenceTokenizer:
    where = file.vocabulary.where
    with _installed("tiktoken", where, "'tokenmill[tiktoken]'"):
        import tiktoken
    engine = f"tiktoken {tiktoken.__version__}"
    with engine_errors(engine, f"load {where!r}", _WHOLE):
        native = tiktoken.Encoding(
            file.path.name,
            pat_str=file.encoding.pattern,
            mergeable_ranks=file.ranks,
            special_tokens=dict(file.encoding.special_ids),
        )
    strings = file.strings()
    return ReferenceTokenizer(
        identity=identity,
        special_ids=file.vocabulary.special_ids,
        engine=engine,
        to_ids=lambda text: native.encode_to_numpy(text, allowed_special=set(), disallowed_special=()),
        to_text=lambda ids: files.text_of(ids, strings),
    )


def _open_reference_model(file: files.ModelFile, identity: TokenizerIdentity) -> ReferenceTokenizer:
    controls = {id_: name for name, id_ in file.vocabulary.special_ids.items()}

    def to_text(ids: AnyArray) -> str:
        """Show control ids as their strings, which SentencePiece would leave out."""
        runs = groupby(ids.tolist(), key=lambda id_: id_ in controls)
        return "".join(
            "".join(map(controls.__getitem__, run)) if is_control else str(file.native.decode(list(run)))
            for is_control, run in runs
        )

    return ReferenceTokenizer(
        identity=identity,
        special_ids=file.vocabulary.special_ids,
        engine=file.engine,
        to_ids=lambda text: file.native.encode(text, out_type=int),
        to_text=to_text,
    )


# From what names a tokenizer to an open one.

_ENGINES: Mapping[str, tuple[str, ...]] = {
    "tokenizer.json": ("fastokens", "tokenizers"),
    "tiktoken": ("fastokens", "tiktoken"),
    "sentencepiece": ("sentencepiece",),
}


def engines_of(spec: str) -> tuple[str, ...]:
    """Return the engines that can run a tokenizer: first the one that "auto" means, last the reference.

    >>> engines_of("bytes"), engines_of("models/tokenizer.json")
    (('bytes',), ('fastokens', 'tokenizers'))
    """
    return ("bytes",) if spec == "bytes" else _ENGINES[files.kind_of(spec)]


def open_tokenizer(
    spec: str | os.PathLike[str],
    *,
    add_bos: bool | None = None,
    add_eos: bool | None = None,
    bos_token: str | None = None,
    eos_token: str | None = None,
    engine: str = "auto",
) -> Tokenizer:
    """Open a tokenizer, to encode and decode as `prepare` does.

    Args:
        spec: `bytes`, a `tokenizer.json`, a `.model`, a folder with one of them, or `tiktoken:RANKFILE`.
            `hf:NAME[@REVISION]` is taken from the cache of the Hugging Face hub, or downloaded. If neither hash nor
            name of a rank file tells its encoding, add `?encoding=cl100k_base`. `?encoding=FILE.json` names a file
            with `pattern`, `special_tokens`, `bos_token` and `eos_token`.
        add_bos: Start each document with BOS; by default as the tokenizer does.
        add_eos: End each document with EOS; by default as the tokenizer does.
        bos_token: String of the BOS token, if the tokenizer does not name it.
        eos_token: String of the EOS token, if the tokenizer does not name it.
        engine: Implementation; `auto` takes the fast one if it can load the files.

    Returns:
        The tokenizer: `encode(texts)`, `decode(ids)`, `identity`, `special_ids`.

    Raises:
        TokenizerMissingError: There is no tokenizer at the path.
        TokenizerError: The tokenizer cannot be loaded.
        MissingExtraError: A library that it needs is not installed.

    Examples:
        >>> import tokenmill as tm
        >>> tokenizer = tm.open_tokenizer("bytes")
        >>> tokenizer.decode(tokenizer.encode(["a mill"]).ids)
        'a mill'
    """
    spec = pinned(path_of("tokenizer", spec))
    check_types(
        add_bos=(add_bos, bool | None),
        add_eos=(add_eos, bool | None),
        bos_token=(bos_token, str | None),
        eos_token=(eos_token, str | None),
        engine=(engine, str),
    )
    engines = engines_of(spec)
    if engine not in ("auto", *engines):
        known = ("auto", *engines)
        raise ConfigError(
            f"tokenizer {spec!r}: its engine must be one of {', '.join(known)}, got {engine!r}; "
            f"{nearest(engine, known)}"
        )
    framing = Framing(add_bos=add_bos, add_eos=add_eos, bos_token=bos_token, eos_token=eos_token)
    if engine != "auto":
        return _open(spec, framing, engine)
    *fast_engines, reference = engines
    reasons: list[str] = []
    for fast in fast_engines:
        try:
            return _open(spec, framing, fast)
        except TokenizerError as error:
            reasons.append(str(error))
    tokenizer = _open(spec, framing, reference)
    if reasons:
        why = reasons[0].partition(";")[0]
        warn(f"tokenizer {spec!r}: the slower engine {reference!r} is used, because the fast one fails: {why}")
    return tokenizer


def read_identity(spec: str) -> TokenizerIdentity:
    """Return the identity of a tokenizer, such as its EOS; reads its files, but opens no engine."""
    return identify(_vocabulary(spec), Framing())


def framing_of(spec: str, framing: Framing) -> NamedFraming:
    """Return which strings are BOS and EOS of a tokenizer that is opened so; opens no engine."""
    return named_framing(_vocabulary(spec), framing)


def _vocabulary(spec: str) -> Vocabulary:
    return bytes_vocabulary() if spec == "bytes" else files.read_tokenizer_file(spec).vocabulary


def _open(spec: str, framing: Framing, engine: str) -> Tokenizer:
    if engine == "bytes":
        return ByteTokenizer(identity=identify(bytes_vocabulary(), framing))
    file = files.read_tokenizer_file(spec)
    identity = identify(file.vocabulary, framing)
    tokenizer: Tokenizer
    if isinstance(file, files.ModelFile):
        tokenizer = _open_reference_model(file, identity)
        framed = {
            name: id_ for name, id_ in file.vocabulary.ids.items() if id_ in (identity.bos_id, identity.eos_id)
        }
        _refuse_spelled(tokenizer, {**file.vocabulary.special_ids, **framed}, spec)
        return tokenizer
    if isinstance(file, files.JsonFile):
        file = mark_framing(file, identity)
    if engine == "fastokens":
        reference = _ENGINES[identity.kind][-1]
        tokenizer = _open_fast(file, identity, partial(_open, spec, framing, reference))
    elif isinstance(file, files.RankFile):
        tokenizer = _open_reference_ranks(file, identity)
    else:
        tokenizer = _open_reference_json(file, identity)
    if isinstance(file, files.JsonFile):
        _refuse_spelled(tokenizer, control_ids(file, identity), spec)
    return tokenizer


def _refuse_spelled(tokenizer: Tokenizer, controls: Mapping[str, int], spec: str) -> None:
    """Raise `TokenizerError` if raw text that spells a control string gets its control id.

    Any web page could then end a document. `Guard` should have kept such ids out.
    """
    names = list(controls)
    encoded = tokenizer.encode([shown for name in names for shown in (name, f"x{name}y", f"a {name} b")])
    for index, name in enumerate(names):
        ids = encoded.ids[encoded.offsets[3 * index] : encoded.offsets[3 * index + 3]]
        if np.any(ids == controls[name]):
            raise TokenizerError(
                f"tokenizer {spec!r}: raw text must not give control ids, "
                f"got id {controls[name]} for the text {name!r} from {tokenizer.engine}; name another BOS or EOS "
                "with bos_token=... or eos_token=..., or take away from the file what spells it"
            )


# The check that the fast engine gives the ids of the reference, on a sample of the corpus and on hard texts.

_CONTROL_STRINGS = (
    "<s>", "</s>", "<unk>", "<pad>", "<mask>", "<bos>", "<eos>", "[BOS]", "[EOS]", "[PAD]", "[UNK]", "[CLS]",
    "[SEP]", "[MASK]", "<|endoftext|>", "<|endofprompt|>", "<|startoftext|>", "<|fim_prefix|>",
    "<|fim_middle|>", "<|fim_suffix|>", "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>",
    "<|start_header_id|>", "<|end_header_id|>", "<|im_start|>", "<|im_end|>", "<|bos|>", "<|eos|>", "<|pad|>",
    "<|user_start|>", "<|assistant_end|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "<<SYS>>",
    "<tool_call>", "<think>", "</think>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>",
    "<|channel|>", "<|return|>", "<0x0A>",
)  # fmt: skip

ADVERSARIAL: tuple[str, ...] = (
    "", " ", "\n",
    *_CONTROL_STRINGS,
    *(f"see {name}{name}in text" for name in _CONTROL_STRINGS),
    "".join(_CONTROL_STRINGS),
    # Parts of control strings, which must not be completed or swallowed.
    "<|endoftext", "|>", "<|endoftext|", "< |endoftext|>", "<|ENDOFTEXT|>", "<||endoftext||>",
    # White space: runs, kinds, and where they stand.
    "a  b   c    d", "  leading", "trailing  ", " \n \n\n x", "\n\n\n\n", "\t\tx\t y",
    "a\r\nb\r\n\r\nc", "\r\r\n\n\r", "a\x0bb\x0cc\x1cd\x1fe",
    "a\xa0b\u2003c\u3000d\u2028e\u2029f\x85g", "a\u200bb\u200c\u2060c", " " * 300 + "x", "x" + "\n" * 200,
    "\u180e a \u180e\u180e b\u180e c \t\u180ed", "b \u180e! \u180e/ \u180e_ \u180e\u05e9 \u180e\x00",
    # Apostrophes and case, which patterns treat as contractions.
    "I'll you're he'd we've don't it's I'M THEY'RE HE'S 'tis ''s' 'Sx",
    "\u017f'\u017f'LL a'\u017f b'\u017fx \u212a'\u212a", "\u017f'\u017f'LLLL \u6587'\u017f'SL",
    # Letters: composed (NFC) and decomposed (NFD), case pairs, marks alone, scripts without spaces.
    "caf\u00e9 cafe\u0301 \u00c5 A\u030a \u212b \ufb01 \ufb03 \u00bd \u2167 \u2460 \u00b2",
    "\u0301\u0301 a\u0301\u0323\u0307", "\u0130\u0131S\u00df\u1e9e\u01c5\u02b0\u00aa\u00ba",
    "한국어 \u1112\u1161\u11ab", "क्षि त्र ம் ক্ষ", "ไทยไม่มีวรรค", "中文、日本語。カタカナ", "Ωμέγα Жизнь қазақ",
    "\U0001d7d8\U0001d7d9 \U00020000\U0002a6df \U00016d40",
    # Right to left: vowel marks, Arabic digits, and the controls that turn the direction.
    "العَرَبِيَّةُ ١٢٣ ۴۵۶", "שָׁלוֹם \u202eabc\u202c \u2067x\u2069",
    # Emoji: surrogate pairs in UTF-16, joiners (ZWJ), modifiers, flags, variation selectors.
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308 \U0001f44d\U0001f3fd",
    "\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7 \u2764\ufe0f \u263a\ufe0e \U0001fae0",
    # Numbers, symbols, code.
    "1 12 123 1234 12345 3.14159e-10 1,000,000 0x1F 1_000", "!?!?...---===***###$$$", "a.b,c;d:e/f\\g|h",
    "https://example.org/a?b=c&d=%20#e user@example.org", "snake_case camelCase XMLHttpRequest v2Beta3",
    "def f(x):\n\treturn  {'a': [1, 2]}  # c\n\n\n", '{"k": "v\\n\\u00e9", "n": null}',
    "<p class='x'>&nbsp;</p><!-- c -->",
    # Long runs without a place to split.
    "a" * 2000, "Ab" * 700, "7" * 1000, "中" * 700, "a\u0301" * 300, "=" * 600,
    # Characters that end or start strings elsewhere, and such as no table knows.
    "\x00", "a\x00b\x00\x00", "\ufeff", "a\ufeffb\ufeff", "\ufffd\ufffe\uffff\U0010ffff",
    "\x01\x02\x7f\x80\x9f", "\ue000\U000f0000 \u0378 \U000e0041",
)  # fmt: skip
"""Texts on which tokenizers have been seen to differ, or could; a corpus sample may hold none of them."""


def texts_to_compare(tokenizer: Tokenizer, sample: Sequence[str]) -> list[str]:
    """Return the sample, `ADVERSARIAL`, and the tokenizer's own control strings, bare and inside text."""
    controls = [
        text for name in tokenizer.special_ids for text in (name, f"see {name}{name}in text", f"x {name} y")
    ]
    return [*sample, *ADVERSARIAL, *controls]


def trusted(spec: str, sample: Sequence[str] = (), framing: Framing | None = None) -> tuple[Tokenizer, str | None]:
    """Open a tokenizer with the fast engine if it agrees with the reference, else with the reference.

    The second value is None, or a sentence for the user that says why the slower engine is used. A worker process
    opens the same engine with `open_tokenizer(spec, engine=tokenizer.engine.split()[0])`.
    """
    framing, spec = framing or Framing(), pinned(spec)
    *fast_engines, reference_engine = engines_of(spec)
    reference = _open(spec, framing, reference_engine)
    if not fast_engines:
        return reference, None
    texts = texts_to_compare(reference, sample)
    # What the reference cannot load or encode is an error of the file or the text, and stays one.
    expected = reference.encode(texts)
    try:
        fast = _open(spec, framing, fast_engines[0])
        difference = _difference(texts, fast.encode(texts), expected)
    except TokenizerError as error:
        return reference, (
            f"tokenizer {spec!r}: {fast_engine()} cannot be used ({error.__cause__ or error}), "
            f"so the slower engine {reference.engine} is used"
        )
    if difference is None:
        return fast, None
    return reference, (
        f"tokenizer {spec!r}: {fast.engine} and {reference.engine} differ on the text {difference}, "
        f"so the slower engine {reference.engine} is used"
    )


def _difference(texts: Sequence[str], fast: Encoded, reference: Encoded) -> str | None:
    """Return the first text that two engines encode differently, from which token and how; None: they agree."""
    for text, ids, expected in zip(texts, split(fast), split(reference), strict=True):
        if np.array_equal(ids, expected):
            continue
        first = num_shared(ids, expected)
        shown = repr(text) if len(text) <= 48 else f"{text[:48]!r}... ({len(text)} characters)"
        got, wanted = ids[first : first + 8].tolist(), expected[first : first + 8].tolist()
        return f"{shown} from token {first} ({got} instead of {wanted})"
    return None
