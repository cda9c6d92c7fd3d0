"""The distributed loaders of nanochat on live text: same names and parameters, resumed exactly."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypedDict, Unpack

import numpy as np

from tokenmill.adapters import need

need("torch", extra="torch", adapter="tokenmill.adapters.nanochat")

import torch

from tokenmill.adapters.torch import find_rank, gather, is_running, to_device, to_torch
from tokenmill.errors import ConfigError, DocumentError, ResumeError, nearest
from tokenmill.live import ForeignTokenizer, LiveLoader, LiveOptions, open_live
from tokenmill.live import merge_states as merge_live
from tokenmill.live.source import NanochatTokenizer
from tokenmill.loader import IGNORE

if TYPE_CHECKING:
    from tokenmill.encode.tokenizer import Tokenizer

FOLDERS = ("base_data_climbmix", "base_data")
"""Where nanochat keeps its Parquet files below its base folder: now, and before."""
ENDLESS = 1 << 40
"""Steps of a stream that has no end."""
LIVE = "live"
"""The key of a state under which there is what exactness needs."""
AnyTokenizer: TypeAlias = "str | Tokenizer | NanochatTokenizer"
Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
State: TypeAlias = dict[str, Any]
Triple: TypeAlias = tuple[torch.Tensor, torch.Tensor, State]
P = ParamSpec("P")


class More(TypedDict, total=False):
    """What may be given by name beside nanochat's parameters."""

    buffer_size: int
    """About how many documents are packed together: 1000."""
    data_dir: str | os.PathLike[str]
    """Folder of the Parquet files: where nanochat keeps them."""
    shuffle: bool
    seed: int
    crop: str
    """What becomes of the rest of a cropped document: `discard` as in nanochat, or `return` to later rows."""
    lanes: int
    """Streams over all ranks: those of the state that is resumed, else B times the ranks."""
    prefetched: bool
    """Whether a state resumes at the batch that it came with, not after it: for loops that draw before saving."""
    ignore_index: int
    """Target of padding: -1, which nanochat's loss leaves out."""
    rank: int
    """That of torch.distributed, else of the environment, else the only one."""
    world_size: int


def tokenizing_distributed_data_loader_with_state(
    tokenizer: AnyTokenizer,
    B: int,
    T: int,
    split: str,
    tokenizer_threads: int = 4,
    tokenizer_batch_size: int = 128,  # noqa: ARG001 - texts are tokenized by size, which changes no batch
    device: str | torch.device = "cuda",
    resume_state_dict: Mapping[str, Any] | None = None,
    **more: Unpack[More],
) -> Iterator[Triple]:
    """Yield (inputs, targets, state) for ever; rows cut the text wherever they end."""
    return _stream("concat", tokenizer, (B, T), split, tokenizer_threads, device, resume_state_dict, more)


def tokenizing_distributed_data_loader_with_state_bos_bestfit(
    tokenizer: AnyTokenizer,
    B: int,
    T: int,
    split: str,
    tokenizer_threads: int = 4,
    tokenizer_batch_size: int = 128,  # noqa: ARG001
    device: str | torch.device = "cuda",
    resume_state_dict: Mapping[str, Any] | None = None,
    **more: Unpack[More],
) -> Iterator[Triple]:
    """Yield (inputs, targets, state) for ever; rows start with BOS and are filled by best fit and cropping."""
    return _stream("bos_best_fit", tokenizer, (B, T), split, tokenizer_threads, device, resume_state_dict, more)


def _without_state(loader: Callable[P, Iterator[Triple]]) -> Callable[P, Iterator[Pair]]:
    def call(*args: P.args, **kwargs: P.kwargs) -> Iterator[Pair]:
        """Yield (inputs, targets) for ever, as the loader of the same name with state does."""
        stream = loader(*args, **kwargs)  # now, not with the first batch
        return ((inputs, targets) for inputs, targets, _ in stream)

    return call


tokenizing_distributed_data_loader = _without_state(tokenizing_distributed_data_loader_with_state)
tokenizing_distributed_data_loader_bos_bestfit = _without_state(
    tokenizing_distributed_data_loader_with_state_bos_bestfit
)


def merge_states(states: Sequence[Mapping[str, Any]]) -> State:
    """Join the states of all ranks, each of the same batch, into one that any number of ranks can resume."""
    live = merge_live([_live(state) for state in states])  # refuses an empty list
    return {**states[0], LIVE: live}


def gather_state(state: Mapping[str, Any]) -> State:
    """Join the states of all ranks of torch.distributed; each of them calls this with that of the same batch."""
    return merge_states(gather(state, None) if is_running() else [state])


def list_parquet_files(data_dir: str | os.PathLike[str] | None = None) -> list[str]:
    """Return the Parquet files of a folder by name; None: of nanochat's own folder."""
    if data_dir is None:
        base = Path(os.environ.get("NANOCHAT_BASE_DIR") or Path.home() / ".cache" / "nanochat")
        data_dir = next((base / name for name in FOLDERS if (base / name).is_dir()), base / FOLDERS[0])
    if not os.path.isdir(data_dir):
        raise DocumentError(f"{data_dir}: must be a folder of Parquet files, got none; say data_dir")
    return [os.path.join(data_dir, name) for name in sorted(os.listdir(data_dir)) if name.endswith(".parquet")]


def _stream(
    packing: str,
    tokenizer: AnyTokenizer,
    shape: tuple[int, int],
    split: str,
    threads: int,
    device: str | torch.device,
    resume: Mapping[str, Any] | None,
    more: More,
) -> Iterator[Triple]:
    """Open all that is needed now, so that what is wrong is said now and not with the first batch."""
    for name in set(more) - set(More.__annotations__):
        raise ConfigError(f"loader: parameters must be known, got {name!r}; {nearest(name, More.__annotations__)}")
    if split not in ("train", "val"):
        raise ConfigError(f"split: must be 'train' or 'val', got {split!r}; use one of these")
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device: must be one of this machine, got 'cuda' and no GPU; say device='cpu'")
    files = _files(split, more)
    live = None if resume is None else _live(resume)
    rank, world_size = find_rank(rank=more.get("rank"), world_size=more.get("world_size"))
    if min(shape) < 1:
        raise ConfigError(f"B, T: must be at least 1, got {shape[0]} and {shape[1]}; raise them")
    lanes = more.get("lanes") or _lanes(live) or shape[0] * world_size
    options = _options(packing, shape[1], files[0], lanes, more)
    if isinstance(tokenizer, str):
        options = replace(options, add_bos=True, add_eos=False)
    elif isinstance(tokenizer, NanochatTokenizer):
        tokenizer, threads = ForeignTokenizer(inner=tokenizer, num_threads=threads), 1  # has threads of its own
    source = open_live(files, tokenizer=tokenizer, options=options)
    if not source.tokenizer.identity.add_bos:
        raise ConfigError("tokenizer: must start documents with BOS, got one without; open it with add_bos=True")
    loader = LiveLoader(
        source,
        steps=ENDLESS,
        # With more lanes than rows, a step is as many batches as it takes to ask each lane once.
        global_batch_size=math.lcm(lanes, shape[0] * world_size),
        rank=rank,
        world_size=world_size,
        micro_batch=shape[0],
        threads=threads,
        arrays=("input_ids", "labels", "doc_ids"),
    )
    if live is not None:
        loader.load_state_dict(live)
    return _batches(loader, device, more)


def _batches(loader: LiveLoader, device: torch.device, more: More) -> Iterator[Triple]:
    numbers = {file.path: number for number, file in enumerate(loader.source.files)}
    prefetched, before = more.get("prefetched", False), _state(loader, numbers)
    bos, ignore = loader.source.tokenizer.identity.bos_id, more.get("ignore_index", -1)
    assert bos is not None
    try:
        for batch in loader:
            after = _state(loader, numbers)
            # The end of a document is followed by the BOS of another, as in one long stream.
            ends = batch["labels"] == IGNORE
            batch["labels"][ends] = np.where(batch["doc_ids"][ends] < 0, ignore, bos)
            tensors = to_device(to_torch({name: batch[name] for name in ("input_ids", "labels")}), device)
            yield tensors["input_ids"], tensors["labels"], before if prefetched else after
            before = after
    finally:
        loader.close()


def _state(loader: LiveLoader, numbers: Mapping[str, int]) -> State:
    """Return where the rank stands; the keys of nanochat say where its first lane does."""
    lane = loader.text.numbers.start
    position = loader.text.lanes[lane].position
    piece = loader.text.windows.at(lane, position.epoch, position.turn).unit.pieces[0]
    place = {"pq_idx": numbers[piece.file.path], "rg_idx": piece.begin, "epoch": position.epoch + 1}
    return {**place, LIVE: loader.state_dict()}


def _live(state: Mapping[str, Any]) -> State:
    if not isinstance(state, Mapping) or not isinstance(state.get(LIVE), Mapping):
        shown = list(state) if isinstance(state, Mapping) else type(state).__name__
        raise ResumeError(
            f"resume_state_dict: must be a state of this loader, with {LIVE!r}, got {shown}; one of nanochat's own "
            "does not say what was trained on: start without it, with the files that it has not come to in data_dir"
        )
    return merge_live([state[LIVE]])  # checks its shape


def _lanes(live: Mapping[str, Any] | None) -> int | None:
    """Return how many lanes a state was made with; what it says otherwise wrong, the loader finds."""
    options = None if live is None else live.get("made_of", {}).get("options")
    lanes = options.get("lanes") if isinstance(options, Mapping) else None
    return lanes if isinstance(lanes, int) and lanes > 0 else None


def _files(split: str, more: More) -> list[str]:
    files = list_parquet_files(more.get("data_dir"))
    if len(files) < 2:
        raise DocumentError(f"data_dir: must have two Parquet files, the last to validate, got {files}; add some")
    return files[:-1] if split == "train" else files[-1:]


def _options(packing: str, seq_len: int, first: str, lanes: int, more: More) -> LiveOptions:
    import pyarrow.parquet as pq

    documents = more.get("buffer_size", 1000)
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
        # Less than was asked for, so that a row group of about as many documents is one window.
        window_bytes=max(int(0.75 * documents * each), 1),
    )
