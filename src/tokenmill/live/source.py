"""Files and a tokenizer, opened to be trained on as they are: which documents are packed together, and when.

Files are cut into units as for a build, and large units into parts: document i belongs to part i % parts. Every
epoch shuffles all windows and assigns them to lanes in turn: lane l of L reads windows l, l + L, l + 2L.

Windows have about the same size, so all lanes would reach the end of theirs at the same step. With shuffling, lane
l therefore starts an epoch with a share of its first window, (l + 1) / L of it, and reads the rest of that window
last. The ends are then spread over the steps, and one or two threads can keep up with them.
"""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, runtime_checkable

import numpy as np

from tokenmill.documents import (
    InputFile,
    Piece,
    ReadOptions,
    Unit,
    cut_files,
    file_digest,
    find_files,
    format_of,
    place,
    sample_texts,
)
from tokenmill.encode.engines import engines_of, trusted
from tokenmill.encode.fim import Fim
from tokenmill.encode.tokenizer import Framing, TokenizerIdentity, checked_ids, engine_errors, join
from tokenmill.errors import ConfigError, DocumentError, TokenizerError, nearest
from tokenmill.fingerprint import digest, first_difference, key64
from tokenmill.loader.state import RowFormat
from tokenmill.packing.packers import Policy
from tokenmill.plan.permute import permute
from tokenmill.tables import as_json
from tokenmill.types import ON_ERROR, AnyArray, Int64Array

if TYPE_CHECKING:
    from tokenmill.encode.tokenizer import Tokenizer
    from tokenmill.types import Encoded


# A tokenizer object of another project, as nanochat has it.

PROBES = (
    "Once upon a time, a miller ground 1,234 bags of grain.",
    "  def f(x):\n\treturn {'a': x ** 2}  # café, 中文, 👍🏽\r\n",
    "don't DON'T 3.14159 <|endoftext|> <|bos|> https://example.org/?q=%20",
)
"""Texts whose ids stand for a tokenizer that has no file to take a digest of."""


@runtime_checkable
class NanochatTokenizer(Protocol):
    """Methods of the tokenizer object."""

    def get_bos_token_id(self) -> int:
        """Return the id that documents start with."""

    def get_vocab_size(self) -> int:
        """Return one more than the largest id."""

    def encode(self, text: list[str], *, prepend: int, num_threads: int) -> list[list[int]]:
        """Return the ids of each text, `prepend` before each."""

    def decode(self, ids: list[int]) -> str:
        """Return the text of ids."""


@dataclass(frozen=True, kw_only=True)
class ForeignTokenizer:
    """An object with nanochat's methods as a tokenizer; every document starts with its BOS.

    The name of its class, the size of its vocabulary and the ids of a few texts identify it. Other changes are not
    noticed.
    """

    inner: NanochatTokenizer = field(repr=False)
    num_threads: int = 4

    @cached_property
    def identity(self) -> TokenizerIdentity:
        """Identity of the tokenizer."""
        vocab_size, bos = self.inner.get_vocab_size(), self.inner.get_bos_token_id()
        ids = self.inner.encode(list(PROBES), prepend=bos, num_threads=self.num_threads)
        return TokenizerIdentity(
            kind="tiktoken",  # what nanochat's is made of
            content=digest(["foreign", self.engine, vocab_size, [list(map(int, line)) for line in ids]]),
            vocab_size=vocab_size,
            bos_id=bos,
            eos_id=None,
            pad_id=None,
            add_bos=True,
            add_eos=False,
        )

    @property
    def engine(self) -> str:
        """The name of its class."""
        return type(self.inner).__name__

    @property
    def special_ids(self) -> Mapping[str, int]:
        """Its control strings are not known; BOS is placed by its id."""
        return {}

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Return the bare ids of each text, as wide as Python's: what is no id of its vocabulary must show."""
        bos = self.identity.bos_id
        assert bos is not None
        with engine_errors(self.engine, f"encode {len(texts)} texts", "look at the tokenizer that was given"):
            lists = self.inner.encode(list(texts), prepend=bos, num_threads=self.num_threads)
        if len(lists) != len(texts) or any(not ids or ids[0] != bos for ids in lists):
            raise TokenizerError(
                f"{self.engine}: encode must give a list of ids for each text, with prepend={bos} before them, "
                f"got {len(lists)} lists for {len(texts)} texts, or another first id; look at its encode"
            )
        return join([np.array(ids[1:], np.int64) for ids in lists])

    def encode_with_controls(self, texts: Sequence[str]) -> Encoded:
        """Return the bare ids of each text: no control string is known."""
        return self.encode(texts)

    def decode(self, ids: AnyArray) -> str:
        """Return the text of ids."""
        return self.inner.decode(checked_ids(ids, self.identity).tolist())


# What a user may choose about live text.

MEMORY_BYTES = 256 << 20
"""Bytes of input that the windows of all lanes hold together, where `window_bytes` is left out."""
TEXT_OPTIONS = ("seed", "shuffle", "text_field", "lanes", "window_bytes", "keep_empty", "fim")
"""Keys that decide the order of documents; the other keys of `describe` decide how rows are made."""
MIN_WINDOW_BYTES, MAX_WINDOW_BYTES = 64 << 10, 8 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveOptions:
    """Options of live text."""

    seq_len: int
    packing: str = "best_fit"
    split: str = "allow"
    """Fate of a document longer than a row, as for a prepared store; `padded` does not cut."""
    crop: str = "return"
    """Fate of the rest of a cropped document under `bos_best_fit`."""
    seed: int = 0
    shuffle: bool = True
    """Whether windows, the documents of each, and its rows are put into a new order in every epoch."""
    text_field: str = "text"
    """Field of the text in a record; `a.b` is the field of that name, else field b of the object in field a."""
    lanes: int | None = None
    """Number of lanes; None for the rows of a global batch."""
    on_error: str = "stop"
    """Fate of an unreadable record or part of a file: `stop` the run, or `skip` and count it."""
    keep_empty: bool = False
    """Whether a text without a character is a document; else it is left out, counted as `empty`."""
    window_bytes: int | None = None
    """Bytes of a file that are packed together; None for 256 MiB divided by the lanes, 64 KiB to 8 MiB."""
    fim: Fim | None = None
    """Whether some documents are cut in three, to learn to fill in the middle; others in every epoch."""
    add_bos: bool | None = None
    """Whether documents start with BOS; None: as the tokenizer has it."""
    add_eos: bool | None = None
    bos_token: str | None = None
    """BOS string of the tokenizer, if it does not name one."""
    eos_token: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("seq_len", self.seq_len), ("lanes", self.lanes), ("window_bytes", self.window_bytes)):
            if value is not None and value < 1:
                raise ConfigError(f"{name}: must be at least 1, got {value}; raise it")
        if self.on_error not in ON_ERROR:
            raise ConfigError(
                f"on_error: expected one of {', '.join(ON_ERROR)}, got {self.on_error!r}; "
                f"{nearest(self.on_error, ON_ERROR)}"
            )
        _ = self.policy, self.reading

    @property
    def format(self) -> RowFormat:
        """Format of the rows, for a state."""
        return RowFormat(self.seq_len, self.packing, self.split, self.crop)

    def in_format(self, format: RowFormat) -> LiveOptions:
        """Return these options with rows made in another format."""
        return self if format == self.format else replace(self, **format._asdict())

    @property
    def policy(self) -> Policy:
        """Packing policy of the rows."""
        return Policy(name=self.packing, split=self.split, crop=self.crop)

    @property
    def reading(self) -> ReadOptions:
        """Options for reading records."""
        return ReadOptions(text_field=self.text_field)

    @property
    def framing(self) -> dict[str, Any]:
        """Options of the tokenizer: BOS and EOS."""
        return {
            "add_bos": self.add_bos,
            "add_eos": self.add_eos,
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
        }

    def window_size(self, lanes: int) -> int:
        """Return about how many bytes of a file a window has.

        >>> [LiveOptions(seq_len=8).window_size(lanes) >> 10 for lanes in (1, 512, 10**6)]
        [8192, 512, 64]
        """
        if self.window_bytes is not None:
            return self.window_bytes
        return min(max(MEMORY_BYTES // lanes, MIN_WINDOW_BYTES), MAX_WINDOW_BYTES)

    def describe(self, lanes: int) -> dict[str, int | str | bool]:
        """Return what decides the rows, in addition to files and tokenizer, as JSON.

        `on_error` is not included: it decides whether a run continues, and delivered rows do not depend on it.
        """
        return {
            **self.policy.describe(),
            "seq_len": self.seq_len,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "text_field": self.text_field,
            "lanes": lanes,
            "window_bytes": self.window_size(lanes),
            **({} if self.keep_empty else {"keep_empty": False}),
            **({} if self.fim is None else {"fim": digest(as_json(self.fim))[:16]}),
        }


# Windows: the documents that are packed together, and the lanes that read them.

WHOLE, HEAD, TAIL = "whole", "head", "tail"


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Documents that are packed together."""

    number: int
    """Index of the window among all of the source."""
    unit: Unit
    part: int
    parts: int
    take: str = WHOLE
    """Share of its documents: all, or those that a lane begins or ends an epoch with."""
    head: int = 1
    of: int = 1
    """Number of documents, of every `of`, in the share that comes first."""

    def members(self, first: int, count: int) -> Int64Array:
        """Return which of `count` documents of the unit belong to the window, counted from the `first` of them.

        >>> window = Window(number=0, unit=Unit(index=0, pieces=()), part=1, parts=2, take="head", head=2, of=3)
        >>> window.members(0, 14).tolist(), window.members(4, 10).tolist()
        ([1, 3, 7, 9, 13], [3, 5, 9])
        """
        index, part = np.divmod(np.arange(first, first + count), self.parts)
        mine = part == self.part
        if self.take != WHOLE:
            mine &= (index % self.of < self.head) == (self.take == HEAD)
        return np.flatnonzero(mine)

    def key(self, seed: int, epoch: int, what: str) -> np.uint64:
        """Return the key of an order of the things in this window, in one epoch."""
        return np.uint64(key64(seed, what, epoch, self.number, self.take))

    def __str__(self) -> str:
        first, last = self.unit.pieces[0], self.unit.pieces[-1]
        named = piece_name(first) if first is last else f"{piece_name(first)} to {piece_name(last)}"
        return named if self.parts == 1 else f"{named} (part {self.part + 1} of {self.parts})"


def piece_name(piece: Piece) -> str:
    """Name a part of a file for people."""
    path, counts = piece.file.path, format_of(piece.file.suffix).counts
    if piece.file.suffix == ".parquet":
        return f"{path} row groups {piece.begin}:{piece.end}"
    if piece.file.suffix == ".arrow":
        return f"{path} record batches {piece.begin}:{piece.end}"
    return f"{path} bytes {piece.begin}:{piece.end}" if counts == "line" and piece.end > 1 else path


def record_name(piece: Piece, line: int) -> str:
    """Name a record for people; `line` is counted from 0 at the start of the piece.

    The number of lines or rows before a piece is not known without reading them.
    """
    if piece.begin == 0:
        return place(piece, line)
    return f"{piece_name(piece)}, {format_of(piece.file.suffix).counts} {line + 1} of these"


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """All windows of a source, and the lanes that read them."""

    files: tuple[InputFile, ...]
    pieces: Int64Array
    """(file, begin, end, bytes) of each piece: a corpus may have millions."""
    units: Int64Array
    """First piece of each unit, and the end."""
    begins: Int64Array
    """First window of each unit, and the end."""
    lanes: int
    seed: int
    shuffle: bool

    @property
    def num_windows(self) -> int:
        """Number of windows; at least one for each lane."""
        return int(self.begins[-1])

    @property
    def max_parts(self) -> int:
        """Maximum number of times that a unit is read in an epoch."""
        return int(np.diff(self.begins).max())

    def num_turns(self, lane: int) -> int:
        """Return how many windows a lane reads in an epoch; the share that it begins with is one of its own."""
        return len(range(lane, self.num_windows, self.lanes)) + self._is_cut(lane)

    def at(self, lane: int, epoch: int, turn: int) -> Window:
        """Return what a lane reads at one turn of an epoch."""
        last = self.num_turns(lane) - 1
        assert 0 <= turn <= last
        cut = self._is_cut(lane)
        place = lane + self.lanes * (0 if cut and turn == last else turn)
        if self.shuffle:
            key = np.uint64(key64(self.seed, "windows", epoch))
            place = int(permute(place, self.num_windows, key))
        take = (HEAD if turn == 0 else TAIL if turn == last else WHOLE) if cut else WHOLE
        unit = int(np.searchsorted(self.begins, place, side="right")) - 1
        return Window(
            number=place,
            unit=self._unit(unit),
            part=place - int(self.begins[unit]),
            parts=int(self.begins[unit + 1] - self.begins[unit]),
            take=take,
            head=lane + 1,
            of=self.lanes,
        )

    def after(self, lane: int, epoch: int, turn: int) -> tuple[int, int]:
        """Return the turn that follows one, with its epoch."""
        return (epoch, turn + 1) if turn + 1 < self.num_turns(lane) else (epoch + 1, 0)

    def _is_cut(self, lane: int) -> bool:
        return self.shuffle and lane + 1 < self.lanes

    def _unit(self, index: int) -> Unit:
        pieces = self.pieces[self.units[index] : self.units[index + 1]].tolist()
        return Unit(
            index=index,
            pieces=tuple(
                Piece(file=self.files[file], begin=begin, end=end, bytes=size) for file, begin, end, size in pieces
            ),
        )


def cut_windows(files: Sequence[InputFile], *, window_bytes: int, lanes: int, seed: int, shuffle: bool) -> Windows:
    """Cut files into windows of about `window_bytes`, at least one for each lane; reads heads and footers only."""
    numbers = {file.path: number for number, file in enumerate(files)}
    pieces, units, sizes = array("q"), array("q", [0]), array("q")
    for unit in cut_files(files, chunk_bytes=window_bytes):
        for piece in unit.pieces:
            pieces.extend((numbers[piece.file.path], piece.begin, piece.end, piece.bytes))
        units.append(len(pieces) // 4)
        sizes.append(unit.bytes)
    if not sizes:
        raise DocumentError(f"{files[0].path}: the input must have records, got {len(files)} empty files; add some")
    parts = np.maximum(np.array(sizes, np.int64) // window_bytes, 1)
    parts *= -(-lanes // int(parts.sum()))
    return Windows(
        files=tuple(files),
        pieces=np.array(pieces, np.int64).reshape(-1, 4),
        units=np.array(units, np.int64),
        begins=np.concatenate([[0], np.cumsum(parts)]),
        lanes=lanes,
        seed=seed,
        shuffle=shuffle,
    )


# The files and the tokenizer.

MAX_GROUPS = 64
"""Digests of files that a state holds; where there are more files, each digest is of several."""
MANY_PARTS = 16
_log = logging.getLogger("tokenmill")


@dataclass(frozen=True, kw_only=True)
class LiveSource:
    """Text that can be trained on as it is."""

    files: tuple[InputFile, ...] = field(repr=False)
    digests: tuple[str, ...] = field(repr=False)
    """Digest of the size and of a sample of the content of each file."""
    tokenizer: Tokenizer
    options: LiveOptions

    def windows(self, lanes: int) -> Windows:
        """Cut the files into windows for a number of lanes."""
        options = self.options
        windows = cut_windows(
            self.files,
            window_bytes=options.window_size(lanes),
            lanes=lanes,
            seed=options.seed,
            shuffle=options.shuffle,
        )
        if windows.max_parts > MANY_PARTS:
            _log.warning(
                "%d windows are parts of one row group or compressed file, which is read that many times an epoch; "
                "write smaller row groups or files, raise window_bytes, or use fewer lanes",
                windows.max_parts,
            )
        return windows

    def made_of(self, lanes: int) -> dict[str, Any]:
        """Return what decides every row, as JSON of at most some 2 kB."""
        return {name: dict(facts) for name, facts in self._facts(lanes, formats=True)[0].items()}

    def fingerprint(self, lanes: int, *, formats: bool = True) -> str:
        """Return 32 hex digits that stand for every row of every lane; or for their text, however rows are made."""
        return self._facts(lanes, formats=formats)[1]

    def _facts(self, lanes: int, *, formats: bool) -> tuple[dict[str, Any], str]:
        """Return both of the above; made once, as a state is saved often, and there may be thousands of files."""
        if (lanes, formats) not in self._known:
            options = self.options.describe(lanes)
            if not formats:
                options = {name: value for name, value in options.items() if name in TEXT_OPTIONS}
            groups = file_groups(len(self.files))
            names, tokenizer = [file.name for file in self.files], self.tokenizer.identity.to_json()
            files = {
                "count": len(names),
                "names": digest(names)[:16],
                "samples": [digest(self.digests[begin:end])[:8] for begin, end in groups],
            }
            made_of = {"files": files, "tokenizer": tokenizer, "options": options}
            self._known[lanes, formats] = made_of, digest([names, self.digests, tokenizer, options])
        return self._known[lanes, formats]

    def refusal(self, made_of: Mapping[str, Any], lanes: int) -> str:
        """Return the error for a state that another source made, with the first difference."""
        difference = first_difference(dict(made_of), self.made_of(lanes))
        way_out = "resume with what made it, or start at step 0"
        if difference is None:
            return f"state: files must be those that made it, got others of the same names and sizes; {way_out}"
        path, then, now = difference
        if path.startswith("files.samples["):
            group = int(path.removeprefix("files.samples[").removesuffix("]"))
            begin, end = file_groups(len(self.files))[group]
            names = [file.name for file in self.files[begin:end]]
            which = names[0] if len(names) == 1 else f"one of {names[0]} to {names[-1]}"
            way_out = f"put it back, or {way_out}"
            return f"state: files must be those that made it, got {which} with other content; {way_out}"
        if path == "files.names":
            return f"state: files must be those that made it, got other names; put them back, or {way_out}"
        return f"state: {path} must be as when it was saved, {then!r}, got {now!r}; {way_out}"

    @cached_property
    def _known(self) -> dict[tuple[int, bool], tuple[dict[str, Any], str]]:
        return {}


def file_groups(count: int) -> list[tuple[int, int]]:
    """Divide files into at most `MAX_GROUPS` runs.

    >>> file_groups(2), len(file_groups(1000)), file_groups(1000)[-1]
    ([(0, 1), (1, 2)], 64, (984, 1000))
    """
    groups = min(count, MAX_GROUPS)
    return [(group * count // groups, (group + 1) * count // groups) for group in range(groups)]


def open_live(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    tokenizer: str | Tokenizer | NanochatTokenizer,
    options: LiveOptions,
) -> LiveSource:
    """List files and open a tokenizer; of the files a sample is read, of each.

    `tokenizer` is what `prepare` takes, an open tokenizer, or an object with the methods of nanochat's.
    """
    files = find_files(inputs).files
    opened = _open_tokenizer(tokenizer, files, options)
    if options.packing == "bos_best_fit" and not opened.identity.add_bos:
        raise ConfigError(
            "packing: bos_best_fit needs documents that start with BOS, got a tokenizer that adds none; "
            "say add_bos=True, or use packing='best_fit'"
        )
    if options.fim is not None:
        options.fim.find_ids(opened)  # refuses a tokenizer that lacks its tokens, before a window is made
    return LiveSource(files=files, digests=tuple(map(file_digest, files)), tokenizer=opened, options=options)


def _open_tokenizer(
    tokenizer: str | Tokenizer | NanochatTokenizer, files: Sequence[InputFile], options: LiveOptions
) -> Tokenizer:
    if isinstance(tokenizer, str):
        sample = _sample(files, options) if len(engines_of(tokenizer)) > 1 else []
        opened, note = trusted(tokenizer, sample, Framing(**options.framing))
        if note is not None:
            _log.warning("%s", note)
        return opened
    for name, value in options.framing.items():
        if value is not None:
            raise ConfigError(
                f"{name}: must be left to a tokenizer that is already open, got {value!r}; open it so"
            )
    if _is_ours(tokenizer):
        return tokenizer
    if isinstance(tokenizer, NanochatTokenizer):
        return ForeignTokenizer(inner=tokenizer)
    raise TokenizerError(
        "tokenizer: must be a name, an open tokenizer, or have get_bos_token_id, get_vocab_size, encode and "
        f"decode, got {type(tokenizer).__name__}; wrap it in a class with these methods"
    )


def _is_ours(tokenizer: Tokenizer | NanochatTokenizer) -> TypeGuard[Tokenizer]:
    return isinstance(getattr(tokenizer, "identity", None), TokenizerIdentity)


def _sample(files: Sequence[InputFile], options: LiveOptions) -> list[str]:
    """Return some of the text, by which engines are compared."""
    try:
        return sample_texts(files, options.text_field)
    except DocumentError as error:
        if options.on_error == "stop":
            raise
        _log.warning("engines are compared on hard texts alone, as a sample cannot be read: %s", error)
        return []
