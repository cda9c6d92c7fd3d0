"""Batches for JAX: NumPy arrays, or global arrays that are sharded over the devices of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.adapters import check_schedule, need
from tokenmill.types import AnyArray

need("jax", extra="jax", adapter="tokenmill.adapters.jax")

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from tokenmill.errors import ConfigError

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from tokenmill.loader import Loader
    from tokenmill.plan.lr import TokenSchedule
    from tokenmill.plan.plan import TokensSeen
    from tokenmill.types import Batch

Arrays = dict[str, jax.Array]


def data_parallel(mesh: Mesh, axis: str = "data") -> tuple[int, int]:
    """Return (rank, world size) of this process along an axis of a mesh, for the loader.

    Processes whose devices have the same positions on the axis, as in tensor parallelism, are one rank.
    """
    if axis not in mesh.shape:
        raise ConfigError(f"axis: expected one of the mesh, {', '.join(mesh.axis_names)}, got {axis!r}; name one")
    size = mesh.shape[axis]
    places = NamedSharding(mesh, PartitionSpec(axis)).addressable_devices_indices_map((size,))
    own = sorted({place for (index,) in places.values() for place in range(*index.indices(size))})
    if own != list(range(own[0], own[0] + len(own))) or own[0] % len(own) or size % len(own):
        raise ConfigError(
            f"mesh: the devices of a process must be neighbours along {axis!r}, as many in each, got places {own} "
            f"of {size}; order them by process, as jax.devices() does"
        )
    return own[0] // len(own), size // len(own)


def optax_schedule(schedule: TokenSchedule, peak: float) -> Callable[[Any], jax.Array]:
    """Return the learning rate for optax, as a function of the updates: `peak` times the schedule in tokens."""
    check_schedule(schedule)
    factors = jnp.asarray(schedule.table())

    def rate(step: Any) -> jax.Array:  # noqa: ANN401 - a number, traced or not
        return peak * factors[jnp.minimum(step, factors.size - 1)]

    return rate


class JaxLoader(Iterator[Any]):
    """The batches of a loader, as NumPy arrays or as global arrays. It is saved and resumed like the loader.

    With a mesh, each array contains the micro-batches of all ranks, in the order of ranks, sharded along `axis`.
    Arrays without a line per row, such as `num_loss_tokens`, are on every device.
    """

    def __init__(self, loader: Loader, *, mesh: Mesh | None = None, axis: str = "data") -> None:
        self.loader = loader
        self.mesh = mesh
        self.axis = axis
        if mesh is not None:
            _check(loader, mesh, axis)
            self._rows = NamedSharding(mesh, PartitionSpec(axis))
            self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._stream: Iterator[Batch] | None = None

    def __len__(self) -> int:
        """Return the number of micro-batches of the whole run; the same on every rank."""
        return len(self.loader)

    def __iter__(self) -> JaxLoader:
        self._stream = None  # an eval restarts; a run continues from the current step
        return self

    def __next__(self) -> Batch | Arrays:
        if self._stream is None:
            self._stream = iter(self.loader)
        batch = next(self._stream)
        if self.mesh is None:
            return batch
        return {name: self._place(array) for name, array in batch.items()}

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
        """Return the position of the loader, as JSON."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position of a state; the next batch is the first one after it."""
        self.loader.load_state_dict(state)
        self._stream = None

    get_state = state_dict
    set_state = load_state_dict

    def _place(self, array: AnyArray) -> jax.Array:
        """Return this rank's part of the global array, in the widest type that JAX is configured for."""
        part = np.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype))
        return jax.make_array_from_process_local_data(self._rows if array.ndim else self._everywhere, part)


def _check(loader: Loader, mesh: Mesh, axis: str) -> None:
    """Reject a loader whose batches do not fit a mesh."""
    part, arrays = loader.part, loader.options.arrays
    rank, world_size = data_parallel(mesh, axis)
    if (part.rank, part.world_size) != (rank, world_size):
        raise ConfigError(
            f"loader: must be that of rank {rank} of {world_size} along {axis!r}, got rank {part.rank} of "
            f"{part.world_size}; pass it what data_parallel(mesh) says"
        )
    shards = mesh.shape[axis] // world_size
    if part.micro_batch % shards:
        raise ConfigError(
            f"loader: micro_batch must be divisible by the {shards} devices of a rank along {axis!r}, got "
            f"{part.micro_batch}; use {-(-part.micro_batch // shards) * shards}"
        )
    if {"cu_seqlens", "cu_seqlens_unpadded"} & set(arrays):
        raise ConfigError(
            "arrays: must be of one shape in every batch to be shared out, got cu_seqlens; doc_ids are segment ids"
        )
