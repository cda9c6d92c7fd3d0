"""nanochat's distributed loaders on live text: the same names and parameters, with exact resume."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeAlias, TypedDict, Unpack

import numpy as np
import xxhash

from tokenmill.adapters import ENDLESS, need

need("torch", extra="torch", adapter="tokenmill.adapters.nanochat")

import torch

from tokenmill.adapters.torch import find_rank, gather, is_running, to_device, to_torch
from tokenmill.errors import ConfigError, DocumentError, ResumeError, nearest
from tokenmill.live import ForeignTokenizer, LiveLoader, LiveOptions, open_live
from tokenmill.live import merge_states as merge_live
from tokenmill.live.lanes import LaneWindow, WindowRequest, find_window
from tokenmill.live.source import NanochatTokenizer
from tokenmill.loader import IGNORE, LoaderOptions
from tokenmill.loader.state import DrawnRows, LanePosition, live_json

if TYPE_CHECKING:
    from tokenmill.encode.tokenizer import Tokenizer

FOLDERS = ("base_data_climbmix", "base_data")
"""Folders of nanochat's Parquet files below its base folder: the current one, and the older one."""
LANE_FOLDER = "tokenmill_lanes"
"""Folder below the base folder in which ranks record the positions of their lanes."""
LIVE, ROWS = "live", "rows"
"""Keys of a state with the data for exact resume: the positions of lanes, and the rows that each lane had delivered
when the step started."""
AnyTokenizer: TypeAlias = "str | Tokenizer | NanochatTokenizer"
Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
State: TypeAlias = dict[str, Any]
Triple: TypeAlias = tuple[torch.Tensor, torch.Tensor, State]
P = ParamSpec("P")
_log = logging.getLogger("tokenmill")


class SplitError(ConfigError, AssertionError):
    """A split that nanochat does not have, which is an AssertionError in nanochat."""


class More(TypedDict, total=False):
    """Keyword arguments in addition to nanochat's parameters."""

    data_dir: str | os.PathLike[str]
    """Folder of the Parquet files; by default, nanochat's."""
    shuffle: bool
    seed: int
    crop: str
    """Fate of the rest of a cropped document: `discard` as in nanochat, or `return` to later rows."""
    lanes: int
    """Number of lanes over all ranks: by default that of the resumed state, otherwise B times the ranks; 1 for
    validation."""
    prefetched: bool
    """Whether a state resumes at the batch that it came with, not after it. The default is True, because base_train
    draws a batch ahead before it saves."""
    lane_dir: str | os.PathLike[str]
    """Folder, shared by all ranks, in which they record the positions of their lanes; by default in nanochat's base
    folder."""
    on_error: str
    """Action for a record that cannot be read: `stop` the run, or `skip` and count it."""
    ignore_index: int
    """Target of padding: -1, which nanochat's loss ignores."""
    rank: int
    """Rank and world size: by default those of torch.distributed, else of the environment, else a single rank."""
    world_size: int


def tokenizing_distributed_data_loader_with_state(  # noqa: PLR0913, PLR0917 - nanochat's own
    tokenizer: AnyTokenizer,
    B: int,
    T: int,
    split: str,
    tokenizer_threads: int = 4,
    tokenizer_batch_size: int = 128,  # noqa: ARG001 - texts are tokenized by size, which changes no batch
    device: str | torch.device = "cuda",
    resume_state_dict: Mapping[str, Any] | None = None,
    buffer_size: int = 1000,
    **more: Unpack[More],
) -> Iterator[Triple]:
    """Yield (inputs, targets, state) forever; rows cut the text at any token.

    `buffer_size` is the approximate number of documents that are packed together.
    """
    stream = _Stream("concat", tokenizer, (B, T), split, tokenizer_threads, buffer_size, resume_state_dict, more)
    return stream.batches(_device(device))


def tokenizing_distributed_data_loader_with_state_bos_bestfit(  # noqa: PLR0913, PLR0917
    tokenizer: AnyTokenizer,
    B: int,
    T: int,
    split: str,
    tokenizer_threads: int = 4,
    tokenizer_batch_size: int = 128,  # noqa: ARG001
    device: str | torch.device = "cuda",
    resume_state_dict: Mapping[str, Any] | None = None,
    buffer_size: int = 1000,
    **more: Unpack[More],
) -> Iterator[Triple]:
    """Yield (inputs, targets, state) forever; rows start with BOS and are filled by best fit and cropping.

    `buffer_size` is the approximate number of documents that are packed together.
    """
    stream = _Stream(
        "bos_best_fit", tokenizer, (B, T), split, tokenizer_threads, buffer_size, resume_state_dict, more
    )
    return stream.batches(_device(device))


def _without_state(loader: Callable[P, Iterator[Triple]]) -> Callable[P, Iterator[Pair]]:
    def call(*args: P.args, **kwargs: P.kwargs) -> Iterator[Pair]:
        """Yield (inputs, targets) forever, like the loader of the same name with a state."""
        stream = loader(*args, **kwargs)  # now, not with the first batch
        return ((inputs, targets) for inputs, targets, _ in stream)

    return call


tokenizing_distributed_data_loader = _without_state(tokenizing_distributed_data_loader_with_state)
tokenizing_distributed_data_loader_bos_bestfit = _without_state(
    tokenizing_distributed_data_loader_with_state_bos_bestfit
)


def merge_states(states: Sequence[Mapping[str, Any]]) -> State:
    """Join the states of all ranks, each for the same batch, into one that any number of ranks can resume."""
    live = merge_live([_checked(state)[LIVE] for state in states])  # rejects an empty list
    return {**states[0], LIVE: live}


def gather_state(state: Mapping[str, Any]) -> State:
    """Join the states of all ranks of torch.distributed; each rank calls this with its state of the same batch."""
    return merge_states(gather(state, None) if is_running() else [state])


def list_parquet_files(data_dir: str | os.PathLike[str] | None = None) -> list[str]:
    """Return the Parquet files of a folder by name, by default of nanochat's folder."""
    if data_dir is None:
        base = _base_dir()
        data_dir = next((base / name for name in FOLDERS if (base / name).is_dir()), base / FOLDERS[0])
    if not os.path.isdir(data_dir):
        raise DocumentError(f"{data_dir}: must be a folder of Parquet files, got none; say data_dir")
    return [os.path.join(data_dir, name) for name in sorted(os.listdir(data_dir)) if name.endswith(".parquet")]


def _base_dir() -> Path:
    return Path(os.environ.get("NANOCHAT_BASE_DIR") or Path.home() / ".cache" / "nanochat")


class _Stream:
    """The batches of one rank. Everything that it needs is opened at once, so errors are raised by the call.

    For training, each lane belongs to one rank. For validation, every rank reads the single lane, and keeps its
    part of the rows. The rows of all ranks then depend neither on B nor on the number of ranks.
    """

    def __init__(
        self,
        packing: str,
        tokenizer: AnyTokenizer,
        shape: tuple[int, int],
        split: str,
        threads: int,
        buffer_size: int,
        resume: Mapping[str, Any] | None,
        more: More,
    ) -> None:
        _check_call(split, more)
        files = _files(split, more)
        state = None if resume is None else _checked(resume)
        rank, world_size = find_rank(rank=more.get("rank"), world_size=more.get("world_size"))
        if min(shape) < 1:
            raise ConfigError(f"B, T: must be at least 1, got {shape[0]} and {shape[1]}; raise them")
        rows = shape[0] * world_size
        lanes = more.get("lanes") or _lanes(state) or (rows if split == "train" else 1)
        options = _options(packing, shape[1], files[0], lanes, buffer_size, more)
        if isinstance(tokenizer, str):
            options = replace(options, add_bos=True, add_eos=False)
        elif isinstance(tokenizer, NanochatTokenizer):
            tokenizer, threads = ForeignTokenizer(inner=tokenizer, num_threads=threads), 1  # has its own threads
        source = open_live(files, tokenizer=tokenizer, options=options)
        if not source.tokenizer.identity.add_bos:
            raise ConfigError(
                "tokenizer: must start documents with BOS, got one without; open it with add_bos=True"
            )
        self._kept, self._share = (rank, world_size) if split == "val" else (0, 1)
        # With more lanes than rows, a step has as many batches as are needed to use each lane once.
        batch = math.lcm(lanes, rows)
        self._each = batch // lanes
        """Rows that a lane delivers per step."""
        self.loader = LiveLoader(
            source,
            steps=ENDLESS,
            global_batch_size=batch,
            rank=rank if split == "train" else 0,
            world_size=world_size if split == "train" else 1,
            micro_batch=shape[0],
            options=LoaderOptions(threads=threads, arrays=("input_ids", "labels", "doc_ids")),
        )
        self.loader.announces = False
        if split == "train" and rank == 0:
            _announce(len(files), lanes, shape, world_size)
        self._lanes = LaneLog(
            Path(more.get("lane_dir") or _base_dir() / LANE_FOLDER),
            self.loader,
            name=f"rank-{rank}-of-{world_size}",
        )
        self._rows_before = 0
        """Rows that lanes delivered in steps of another size, if a run was resumed with another B."""
        if state is not None:
            self._load(state)
        self._prefetched, self._ignore = more.get("prefetched", True), more.get("ignore_index", -1)
        self._file_numbers = {file.path: number for number, file in enumerate(source.files)}

    def batches(self, device: torch.device) -> Iterator[Triple]:
        """Yield (inputs, targets, state) forever."""
        before, kept = self._state(), {}
        bos = self.loader.source.tokenizer.identity.bos_id
        assert bos is not None
        try:
            for number, batch in enumerate(self.loader):
                if number % self._share == self._kept:
                    kept = batch
                if number % self._share != self._share - 1:
                    continue
                after = self._state()
                if self.loader.part.world_size > 1:
                    self._note_windows()
                # The end of a document is followed by the BOS of the next one, as in one long stream.
                ends = kept["labels"] == IGNORE
                kept["labels"][ends] = np.where(kept["doc_ids"][ends] < 0, self._ignore, bos)
                tensors = to_device(to_torch({name: kept[name] for name in ("input_ids", "labels")}), device)
                yield tensors["input_ids"], tensors["labels"], before if self._prefetched else after
                before = after
        finally:
            self.loader.close()
            self._lanes.close()

    def _state(self) -> State:
        """Return the position of the rank; the keys that nanochat knows are those of its first lane."""
        text = self.loader.text
        lane = text.numbers.start
        position = text.lanes[lane].position
        piece = text.windows.at(lane, position.epoch, position.turn).unit.pieces[0]
        place = {"pq_idx": self._file_numbers[piece.file.path], "rg_idx": piece.begin, "epoch": position.epoch + 1}
        rows = self._rows_before + self.loader.step * self._each
        return {**place, ROWS: rows, LIVE: self.loader.state_dict()}

    def _rows_given(self, index: int, rows: int, batches: int) -> int:
        """Return the rows that the n-th lane of any rank has delivered, after some batches of a step."""
        return rows + min(max(0, batches * self.loader.part.micro_batch - index * self._each), self._each)

    def _note_windows(self) -> None:
        """Record the windows that the lanes have reached."""
        position = self.loader.position
        rows = self._rows_before + position.step * self._each
        for index, (number, lane) in enumerate(self.loader.text.lanes.items()):
            if lane.window is not None:
                self._lanes.note(number, self._rows_given(index, rows, position.batch) - lane.row, lane.window)

    def _load(self, state: State) -> None:
        """Continue from a state; lanes that are missing in it are those of other ranks, and are looked up."""
        live, rows, text = state[LIVE], state[ROWS], self.loader.text
        lanes = live["live"]["lanes"].get("text", {})
        missing = [number for number in text.numbers if str(number) not in lanes]
        made_by_this = live["fingerprint"] == self.loader.source.fingerprint(text.windows.lanes)
        if missing and lanes and made_by_this:
            batches = live.get("batches", 0)
            places = {
                number: self._lanes.position(number, self._rows_given(number - text.numbers.start, rows, batches))
                for number in missing
            }
            live = merge_live(
                [live, {**live, "live": live_json(live["live"]["at"], batches, {"text": places}, {})}]
            )
        self.loader.load_state_dict(live)
        self._rows_before = rows - live["step"] * self._each


def _check_call(split: str, more: More) -> None:
    """Reject an unknown split or unknown parameters."""
    for name in set(more) - set(More.__annotations__):
        known = [*More.__annotations__, "buffer_size"]
        raise ConfigError(f"loader: parameters must be known, got {name!r}; {nearest(name, known)}")
    if split not in ("train", "val"):
        raise SplitError(f"split: must be 'train' or 'val', got {split!r}; use one of these")


def _announce(files: int, lanes: int, shape: tuple[int, int], ranks: int) -> None:
    numbers = ((files, "file"), (lanes, "lane"), (ranks, "rank"))
    shown = [f"{number} {noun}{'s' * (number != 1)}" for number, noun in numbers]
    _log.info("nanochat: %s in %s, %s rows of %s tokens per batch on %s", *shown[:2], *shape, shown[2])


class _Window(NamedTuple):
    """A window of a lane, as recorded in a line of the log."""

    start: int
    """Rows that the lane had delivered before it."""
    epoch: int
    turn: int
    rows: int
    check: str
    """Digest of its content."""


class LaneLog:
    """Log of the windows that lanes reached after a number of rows, so that the state of one rank is enough.

    nanochat saves the state of rank 0. The number of rows that the lanes of other ranks have delivered is known,
    because all ranks have the same step. Their windows are known only to the rank that has read the text. So every
    rank writes a line for each window that its lanes reach. A line is a fact of the text, the same in every run of
    it. Text without a line is read again.
    """

    def __init__(self, folder: Path, loader: LiveLoader, *, name: str) -> None:
        self._source, self._text = loader.source, loader.text
        self._made_of = self._source.fingerprint(self._text.windows.lanes)
        self._folder = folder / self._made_of[:16]
        self._name = name
        self._file: int | None = None
        self._noted: dict[int, int] = {}
        """Lane -> start of the window that was last recorded."""
        self._warned = False

    def note(self, number: int, start: int, window: LaneWindow) -> None:
        """Record a window that a lane has reached, once; if the log cannot be written, recording stops."""
        if self._noted.get(number) == start or self._file == -1:
            return
        self._noted[number] = start
        line = f"{number} {start} {window.epoch} {window.turn} {window.rows.num_rows} {window.rows.tokenized.check}"
        try:
            if self._file is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self._folder / self._name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.write(self._file, f"{line} {self._sum(line)}\n".encode())
        except OSError as error:
            self.close()
            self._file = -1
            _log.warning(
                "%s: cannot be written (%s), so a resume from the state of one rank has to read the text from the "
                "start; say a lane_dir that all ranks can write to, or save gather_state(state)",
                self._folder,
                error,
            )

    def position(self, number: int, rows: int) -> LanePosition:
        """Return the position of a lane that has delivered a number of rows."""
        window = max((window for window in self._known.get(number, ()) if window.start <= rows), default=None)
        start, place = 0, LanePosition()
        while window is not None or start < rows:
            window = window or self._find(number, start, place)
            if rows < window.start + window.rows:
                drawn = (DrawnRows(self._source.options.format, rows - window.start),)
                stands = (drawn, window.check) if rows > window.start else ((), "")
                return LanePosition(window.epoch, window.turn, *stands)
            start = window.start + window.rows
            place = LanePosition(*self._text.windows.after(number, window.epoch, window.turn))
            window = None
        return place

    def _find(self, number: int, start: int, place: LanePosition) -> _Window:
        """Read the next window of a lane."""
        if not self._warned:
            self._warned = True
            _log.warning(
                "lane %d: reads text again from row %d on, which %s has no line for", number, start, self._folder
            )
        request = WindowRequest(lane=number, position=place, format=self._source.options.format)
        window = find_window(self._source, self._text.windows, request, lambda _: None)
        return _Window(start, window.epoch, window.turn, window.rows.num_rows, window.rows.tokenized.check)

    @cached_property
    def _known(self) -> dict[int, list[_Window]]:
        """Lane -> its recorded windows; lines that are torn, or of other text, are ignored."""
        windows: dict[int, list[_Window]] = {}
        for file in self._folder.glob("rank-*"):
            for line in file.read_text("utf-8", errors="replace").splitlines():
                fields, _, seen = line.rpartition(" ")
                if seen == self._sum(fields):
                    *numbers, check = fields.split(" ")
                    number, start, epoch, turn, rows = map(int, numbers)
                    windows.setdefault(number, []).append(_Window(start, epoch, turn, rows, check))
        return windows

    def _sum(self, line: str) -> str:
        return xxhash.xxh3_64_hexdigest(f"{self._made_of} {line}".encode())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None and self._file >= 0:
            os.close(self._file)
        self._file = None


def _device(device: str | torch.device) -> torch.device:
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: expected one of this machine, got 'cuda' and no GPU; say device='cpu'")
    return device


def _checked(state: Mapping[str, Any]) -> State:
    """Return a state of this loader, or reject another one."""
    rows = state.get(ROWS) if isinstance(state, Mapping) else None
    if not isinstance(rows, int) or rows < 0 or not isinstance(state.get(LIVE), Mapping):
        shown = list(state) if isinstance(state, Mapping) else type(state).__name__
        raise ResumeError(
            f"resume_state_dict: must be a state of this loader, with {LIVE!r} and {ROWS!r}, got {shown}; one of "
            "nanochat's own does not say what was trained on: start without it, with the files that it has not "
            "come to in data_dir"
        )
    return {**state, LIVE: merge_live([state[LIVE]])}  # checks its shape


def _lanes(state: State | None) -> int | None:
    """Return the number of lanes of a state; the loader checks the rest of it."""
    options = None if state is None else state[LIVE].get("made_of", {}).get("options")
    lanes = options.get("lanes") if isinstance(options, Mapping) else None
    return lanes if isinstance(lanes, int) and lanes > 0 else None


def _files(split: str, more: More) -> list[str]:
    files = list_parquet_files(more.get("data_dir"))
    if len(files) < 2:
        raise DocumentError(f"data_dir: must have two Parquet files, the last to validate, got {files}; add some")
    return files[:-1] if split == "train" else files[-1:]


def _options(packing: str, seq_len: int, first: str, lanes: int, documents: int, more: More) -> LiveOptions:
    import pyarrow.parquet as pq

    if documents < 1:
        raise ConfigError(f"buffer_size: must be at least 1, got {documents}; raise it")
    try:
        each = os.path.getsize(first) / max(pq.read_metadata(first).num_rows, 1)
    except (ValueError, OSError) as error:
        raise DocumentError(f"{first}: must be an intact Parquet file, got {error}; copy it again") from None
    return LiveOptions(
        seq_len=seq_len,
        packing=packing,
        crop=more.get("crop", "discard"),
        seed=more.get("seed", 0),
        shuffle=more.get("shuffle", False),
        lanes=lanes,
        on_error=more.get("on_error", "stop"),
        keep_empty=True,  # as in nanochat: a single BOS
        # Less than the given size, so that a row group with about this number of documents is one window.
        window_bytes=max(int(0.75 * documents * each), 1),
    )
