"""Batches as torch tensors, alone or under torch.distributed: rank, state of all ranks, and their agreement."""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import xxhash

from tokenmill.adapters import check_schedule, need

need("torch", extra="torch", adapter="tokenmill.torch")

import torch
import torch.distributed as dist

from tokenmill.errors import ConfigError, ResumeError, StoreCorruptError, TokenmillError
from tokenmill.fingerprint import canonical, digest, first_difference
from tokenmill.loader import Layout, Loader, row_digests
from tokenmill.loader.state import merge_states
from tokenmill.store.layout import key_file
from tokenmill.types import AnyArray, Batch

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from tokenmill.plan.lr import TokenSchedule
    from tokenmill.plan.plan import TokensSeen
    from tokenmill.run.evals import Eval
    from tokenmill.run.run import Run
    from tokenmill.store import Store

_MID_STEP = ("batches", "micro_batch", "world_size")
_NESTED = ("made_of", "live")
"""Entries of live-text states that are neither numbers nor text."""
Tensors = dict[str, torch.Tensor]


def to_torch(batch: Batch) -> Tensors:
    """Return the arrays of a batch as tensors that share its memory, without columns that are not numeric."""
    numbers = {name: array for name, array in batch.items() if array.dtype != object}
    return {name: torch.from_numpy(array) if array.ndim else torch.tensor(array) for name, array in numbers.items()}


def to_device(tensors: Tensors, device: torch.device) -> Tensors:
    """Copy tensors to a device; to a GPU from pinned memory, so that the caller does not wait for the copy."""
    if device.type == "cuda":
        return {name: tensor.pin_memory().to(device, non_blocking=True) for name, tensor in tensors.items()}
    return {name: tensor.to(device) for name, tensor in tensors.items()}


class TorchLoader:
    """The batches of a loader as tensors. It is saved and resumed like the loader, with any world size.

    It is Stateful, as torch.distributed.checkpoint expects: `dcp.save({"loader": loader, ...}, ...)`.
    """

    def __init__(
        self,
        loader: Loader,
        *,
        device: torch.device | str | None = None,
        check_ranks: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.loader = loader
        self.device = torch.device(device) if device is not None else None
        self.group = group
        """Group of all data-parallel ranks; None means all ranks."""
        self._check = RankCheck(loader, group) if check_ranks else None

    def __repr__(self) -> str:
        """Describe the plan, the step and the rank."""
        return repr(self.loader).replace("Loader", "TorchLoader", 1)

    def __len__(self) -> int:
        """Return the number of micro-batches of the whole run; the same on every rank."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Tensors]:
        for batch in self.loader if self._check is None else self._check.batches():
            tensors = to_torch(batch)
            yield tensors if self.device is None else to_device(tensors, self.device)

    @property
    def step(self) -> int:
        """Step of the next batch."""
        return self.loader.step

    @property
    def tokens_seen(self) -> TokensSeen:
        """Input slots and labels that all ranks received before that step."""
        return self.loader.tokens_seen

    def metrics(
        self, *, prefix: str | None = None, labels: bool = True, texts: bool = False, digest: bool = False
    ) -> dict[str, int | float | str]:
        """Return where the run stands as a flat dict of numbers: `Loader.metrics`."""
        return self.loader.metrics(prefix=prefix, labels=labels, texts=texts, digest=digest)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the run, as JSON, the same on every rank.

        Under torch.distributed, all ranks of live text must call it together, because each knows only its own
        lanes.
        """
        return dict(flat_state(self.loader, self.group))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, of this class or of the loader; a running iteration continues from there."""
        self.loader.load_state_dict(own_state(state))


def torch_loader(  # noqa: PLR0913 - all that a process may say of itself
    run: Run | Eval,
    *,
    micro_batch: int = 1,
    rank: int | None = None,
    world_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    layout: Layout | None = None,
    device: torch.device | str | None = None,
    check_ranks: bool = False,
    arrays: Sequence[str] | None = None,
) -> TorchLoader:
    """Return the loader of this process, for a run or for one of its evals.

    Rank and world size are those of torch.distributed if it is initialized (of `group`, the data-parallel one),
    otherwise those of the environment that torchrun sets, otherwise one rank alone. `rank` and `world_size`
    override them. A `layout`, for example from `mesh_layout`, replaces all of these. `group` is then its
    data-parallel ranks, which `check_ranks` and live text need.
    """
    if isinstance(run, str | os.PathLike):
        raise ConfigError(
            f"torch_loader: must be given a Run or an eval of one, got {run!r}; open it with Run.from_toml"
        )
    if layout is None:
        layout = Layout(dp=find_rank(group, rank=rank, world_size=world_size))
    elif rank is not None or world_size is not None:
        raise ConfigError(
            f"torch_loader: must have a layout, or rank and world_size, got both, rank {rank} of {world_size}; "
            "say it in the layout"
        )
    loader = run.loader(layout=layout, micro_batch=micro_batch, arrays=arrays)
    return TorchLoader(loader, device=device, check_ranks=check_ranks, group=group)


MESH_NAMES = {
    "dp": ("dp", "dp_replicate", "dp_shard", "ddp", "fsdp", "hsdp", "data", "batch", "replicate", "shard"),
    "cp": ("cp", "context"),
    "tp": ("tp", "tensor"),
    "pp": ("pp", "pipeline", "stage"),
}
"""Kind of group -> names of its mesh dimensions, in torchtitan and elsewhere."""


def mesh_layout(
    mesh: DeviceMesh, *, names: Mapping[str, str] | None = None, cut: str = "zigzag", needs: str = "everything"
) -> Layout:
    """Return the position of this process in a mesh of named dimensions, such as `("dp_shard", "cp", "tp")`.

    Several data-parallel dimensions are one group, in their order. `names` maps other names, such as `{"ep":
    "dp"}`. `cut` and `needs` are those of a `Layout`.
    """
    kinds = {name: kind for kind, known in MESH_NAMES.items() for name in known} | dict(names or {})
    places: Any = dict.fromkeys(MESH_NAMES, (0, 1))
    for name in mesh.mesh_dim_names or ():
        if kinds.get(name) not in MESH_NAMES:
            raise ConfigError(
                f"mesh: its dimensions must be named after what they are for, got {name!r}; pass for example "
                f'names={{"{name}": "dp"}}, with one of {", ".join(MESH_NAMES)}'
            )
        rank, size = places[kinds[name]]
        own, members = mesh.get_local_rank(name), mesh[name].size()
        places[kinds[name]] = rank * members + own, size * members
    if not mesh.mesh_dim_names:
        raise ConfigError(
            "mesh: must name its dimensions, got none; pass mesh_dim_names to init_device_mesh, or make a Layout"
        )
    return Layout(cut=cut, needs=needs, **places)


def lr_scheduler(optimizer: torch.optim.Optimizer, schedule: TokenSchedule) -> torch.optim.lr_scheduler.LambdaLR:
    """Return a scheduler that follows the tokens of a run: `lr_scheduler(optimizer, run.lr_schedule(...))`."""
    check_schedule(schedule)

    def factor(number: int) -> float:
        return schedule.nth(number)

    # A function: the scheduler would store the attributes of any other object, here the plan, in its state.
    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


# Ranks, and the state of all of them.


def find_rank(
    group: dist.ProcessGroup | None = None, *, rank: int | None = None, world_size: int | None = None
) -> tuple[int, int]:
    """Return rank and world size: the given ones, else those of torch.distributed or the launcher, or (0, 1)."""
    if rank is None or world_size is None:
        own = _own_rank(group)
        rank, world_size = own[0] if rank is None else rank, own[1] if world_size is None else world_size
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"rank: must lie within 0 and the {world_size} ranks, got {rank}; give both rank and number of ranks"
        )
    return rank, world_size


def _own_rank(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return rank and world size of torch.distributed if initialized, else of RANK and WORLD_SIZE, else (0, 1)."""
    if is_running():
        return dist.get_rank(group), dist.get_world_size(group)
    launcher = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    if not launcher:
        return 0, 1
    if len(launcher) == 1 or not all(value.isdecimal() for value in launcher.values()):
        raise ConfigError(
            f"environment: RANK and WORLD_SIZE must both be whole numbers, or not be set, got {launcher}; "
            "start with torchrun, or pass rank and world_size"
        )
    return int(launcher["RANK"]), int(launcher["WORLD_SIZE"])


def is_running() -> bool:
    """Return whether there is a process group."""
    return bool(dist.is_available() and dist.is_initialized())


def gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:  # noqa: ANN401 - any JSON value
    """Return the values of all ranks of a group, on each of them."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def check_rank(loader: Loader, rank: int, world_size: int, *, where: str, way_out: str) -> None:
    """Reject a loader of another rank, which would train on rows twice."""
    part = loader.part
    if (part.rank, part.world_size) != (rank, world_size):
        raise ConfigError(
            f"{where}: the loader must be that of rank {rank} of {world_size}, got rank {part.rank} of "
            f"{part.world_size}; {way_out}"
        )


def joined_state(loader: Loader, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Return the position of all ranks, as JSON.

    A rank of live text, alone or next to stores, knows only its own lanes. Under torch.distributed, all ranks must
    call this together, and each gets the lanes of all.
    """
    state: dict[str, Any] = dict(loader.state_dict())
    if not loader.lanes or not is_running():
        return state
    part = loader.part
    states: list[tuple[int, Mapping[str, Any]]] = gather((part.rank, state), group)
    missing = sorted(set(range(part.world_size)) - {rank for rank, _ in states})
    if missing:
        raise ResumeError(
            f"state: must have the lanes of all {part.world_size} ranks, got none of {missing} from the process "
            "group; pass the group that has every data-parallel rank"
        )
    return merge_states([own for _, own in states])


def flat_state(loader: Loader, group: dist.ProcessGroup | None = None) -> dict[str, int | str]:
    """Return the position of all ranks with the same keys at any time, each a number or a text.

    A distributed checkpoint loads only the keys that a new loader has.
    """
    state = joined_state(loader, group)
    # A loader of live text without a recorded plan is identified by its source, and by the batch within a step.
    mid_step = (*_MID_STEP, "global_batch_size") if "made_of" in state else _MID_STEP
    always = {key: value for key, value in state.items() if key not in mid_step}
    texts = {key: json.dumps(value) if isinstance(value, Mapping) else value for key, value in always.items()}
    return texts | {key: state.get(key, 0) for key in mid_step}


def own_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state in the loader's form; one that already is stays unchanged."""
    if not isinstance(state, Mapping):
        return state  # the loader raises the error
    nested = dict(state)
    for key in _NESTED:
        if isinstance(nested.get(key), str):
            try:
                nested[key] = json.loads(nested[key])
            except ValueError as error:
                raise ResumeError(
                    f"state: {key} must be JSON, got {nested[key]!r}; use a state that was not edited"
                ) from error
    return nested


# Common parts of the datasets of several projects.


def read_windows(store: Store, key: str, begins: Sequence[int], length: int) -> Iterator[tuple[int, AnyArray]]:
    """Yield windows of an array with `length` values, each with the index of its start; a shard is opened once.

    A window must be copied before the next one is requested.
    """
    edges = store.axes[store.axis(key)].values
    inner_edges, by_shard = edges[1:-1], dict[int, list[int]]()
    for index, begin in enumerate(begins):
        by_shard.setdefault(bisect_right(inner_edges, begin), []).append(index)
    for shard, indices in by_shard.items():
        first, end = int(edges[shard]), int(edges[shard + 1])
        mapped = store._maps.open([] if store._by_ranges else [store.file(shard, key_file(key))])
        values = mapped[0].data.view(store.dtype(key)) if mapped else None
        for index in indices:
            begin = begins[index]
            if values is None or begin + length > end:  # not on this machine, or in several shards
                yield index, store.fetch(begin, begin + length, key)
            else:
                yield index, values[begin - first : begin - first + length]
        store._maps.check(mapped)


# Check that all ranks read the same.

View: TypeAlias = dict[str, str]
"""Rows that a rank reads at a step, as computed by any rank: source -> digest of its rows."""
_OF_THE_BATCH = frozenset(("cu_seqlens", "cu_seqlens_unpadded", "max_seqlen", "num_loss_tokens"))
"""Arrays without a line per row."""
_STEP, _RUN, _RANK, _OWN, _NEXT = range(5)
"""Columns of the records that ranks compare."""


@dataclass(eq=False)
class RankCheck:
    """Compares the ranks at every step, by a record of 40 bytes from each, and stops all of them if they disagree.

    A record has the step, a digest of the plan, the rank, a digest of the rows that it delivered, and one of the
    rows that the next rank must deliver. For the last, each rank also reads the rows of the next one. For live
    text, ranks compare step, files, tokenizer and options, but no rows.
    """

    loader: Loader
    group: dist.ProcessGroup | None = None
    """Group of all data-parallel ranks; None means all ranks."""
    _seen: list[bytes] = field(default_factory=list, init=False)
    """Digests of the rows of the step that were delivered."""
    _others: dict[int, Loader] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.loader.options.pad_to != "row":
            raise ConfigError(
                "check_ranks: rows of all ranks must be padded alike to be compared, got pad_to = "
                f"{self.loader.options.pad_to!r}; leave out one of the two"
            )
        ranks = self.loader.part.world_size
        if ranks > 1 and not is_running():
            raise ConfigError(
                f"check_ranks: torch.distributed must run to compare {ranks} ranks, got none; "
                "call init_process_group first, or leave check_ranks out"
            )

    def batches(self) -> Iterator[Batch]:
        """Yield the batches of the loader; the last one of a step only after all ranks were compared."""
        stream = iter(self.loader)
        self._seen = []
        self._compare(self.loader.step)  # plans and ranks, before the first batch
        expected = self.loader.position
        while True:
            position = self.loader.position
            if position != expected or position.batch == 0:
                self._seen = []  # a state was loaded, or a step starts
            batch = next(stream, None)
            if batch is None:
                return
            if not self.loader.lanes:  # no other rank can read rows of live text
                self._seen += self._digests(batch)
            expected = self.loader.position
            if expected.step != position.step:
                self._compare(position.step)
            yield batch

    def _compare(self, step: int) -> None:
        if not is_running():
            return
        part = self.loader.part
        views = [self._view(step, rank) for rank in (part.rank, (part.rank + 1) % part.world_size)]
        record = [step, _number(self._run), part.rank, *map(_number, views)]
        own = torch.tensor(record, dtype=torch.int64, device=_device(self.group))
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(gathered, own, group=self.group)
        error = self._disagreement(step, torch.stack(gathered).tolist())
        if error is not None:
            raise error

    @cached_property
    def _run(self) -> str:
        return digest(self.loader.describe())

    def _digests(self, batch: Batch) -> list[bytes]:
        names = [name for name, array in batch.items() if name not in _OF_THE_BATCH and array.dtype != object]
        return row_digests(batch, names) if names else []  # a rank may need no array of a batch

    def _view(self, step: int, rank: int) -> View:
        """Return the digests of the delivered rows of a rank in a step, as computed by this rank."""
        if not self._seen:
            return {}
        loader, digests = self.loader, self._seen
        if rank != loader.part.rank:
            loader = self._other(rank)
            digests = self._digests(loader.batch_at(step))[-len(self._seen) :]
        sources = loader.plan.rows(step)[0][loader.slots(step)][-len(digests) :]
        folded = {source: xxhash.xxh3_64() for source in np.unique(sources).tolist()}
        for source, row in zip(sources.tolist(), digests, strict=True):
            folded[source].update(row)
        return {loader.plan.sources[source]: state.hexdigest() for source, state in folded.items()}

    def _other(self, rank: int) -> Loader:
        """Return the loader of another rank."""
        if rank not in self._others:
            part, options = self.loader.part.of_rank(rank), replace(self.loader.options, threads=0)
            self._others[rank] = Loader(self.loader.plan, part, options)
        return self._others[rank]

    def _disagreement(self, step: int, records: Sequence[Sequence[int]]) -> TokenmillError | None:
        """Return an error if records disagree, the same on all ranks; they gather what it names."""
        ranks = [record[_RANK] for record in records]
        steps = [record[_STEP] for record in records]
        if len(set(steps)) > 1:
            return ResumeError(
                f"ranks: all must be at one step, got {_spread(ranks, steps)}; load the same state on every rank"
            )
        odd = _odd(ranks, [record[_RUN] for record in records])
        if odd:
            return _difference(step, ranks, gather(self.loader.describe(), self.group), odd)
        size = self.loader.part.world_size
        if sorted(ranks) != sorted([*range(size)] * (len(ranks) // size)):
            return ConfigError(
                f"ranks: each of the {size} must be taken by one process, got {ranks}; "
                "pass the rank in the data-parallel group"
            )
        delivered = {record[_RANK]: record[_OWN] for record in records}
        following = (
            (rank + 1) % size
            for rank, record in zip(ranks, records, strict=True)
            if record[_NEXT] != delivered[(rank + 1) % size]
        )
        rank = next(following, None)
        if rank is None:
            return None
        views: list[View] = gather(self._view(step, rank), self.group)
        names = sorted({name for view in views for name in view})
        source = next(name for name in names if len({view.get(name) for view in views}) > 1)
        odd = _odd(ranks, [view.get(source) for view in views])
        return StoreCorruptError(
            f"source {source!r}: all ranks must read the same tokens at step {step}, got others on {_ranks(odd)}; "
            "run `tokenmill verify` on the copy of the store there, and put it right"
        )


def _number(value: object) -> int:
    """Return a digest of a JSON value that fits a tensor of int64."""
    return xxhash.xxh3_64_intdigest(canonical(value)) >> 1


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device of a tensor that ranks exchange."""
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")


def _odd(ranks: Sequence[int], values: Sequence[object]) -> list[int]:
    """Return the ranks whose value differs from the majority; all of them without a majority.

    >>> _odd([0, 1, 2], ["a", "b", "a"]), _odd([0, 1], ["a", "b"]), _odd([0, 1], ["a", "a"])
    ([1], [0, 1], [])
    """
    value, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(values):
        return list(ranks)
    return [rank for rank, own in zip(ranks, values, strict=True) if own != value]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _spread(ranks: Sequence[int], values: Sequence[object]) -> str:
    """Return the values of the ranks that differ from the majority, and that of the others, as text.

    >>> _spread([0, 1, 2], [5, 6, 5]), _spread([0, 1], [5, 6])
    ('6 on rank 1, 5 on the others', '5 on rank 0, 6 on rank 1')
    """
    odd = _odd(ranks, values)
    pairs = list(zip(ranks, values, strict=True))
    rest = [f"{value} on the others" for rank, value in pairs if rank not in odd]
    return ", ".join([*(f"{value} on rank {rank}" for rank, value in pairs if rank in odd), *rest[:1]])


def _difference(
    step: int, ranks: Sequence[int], descriptions: Sequence[Mapping[str, Any]], odd: Sequence[int]
) -> TokenmillError:
    """Return an error that names the first difference between two ranks."""
    sides = list(zip(ranks, descriptions, strict=True))
    first, old = next(side for side in sides if len(odd) == len(ranks) or side[0] not in odd)
    other, new = next(side for side in sides if side[0] in odd and digest(side[1]) != digest(old))
    difference = first_difference(dict(old), dict(new))
    assert difference is not None
    path, old_value, new_value = difference
    also = f", and {_ranks(odd)} unlike the others" if 1 < len(odd) < len(ranks) else ""
    return ConfigError(
        f"{path}: must be the same on all ranks, got {new_value!r} on rank {other} and {old_value!r} on rank "
        f"{first} at step {step}{also}; give every rank the same config and stores"
    )
