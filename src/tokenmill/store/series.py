"""Writing shards one after another, each up to its size."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.errors import StoreCorruptError
from tokenmill.store.layout import axis_of, token_keys
from tokenmill.store.manifest import ShardInfo, shard_from_json, shard_to_json
from tokenmill.store.shard import ShardWriter, StoreSpec, num_records

if TYPE_CHECKING:
    import numpy.typing as npt


class ShardSeries:
    """Appends records to shards `0`, `1`, ... in a folder.

    The files depend on the records and the spec alone, not on how records were grouped into `append` calls: a
    shard ends before the record that would take it over its size.
    """

    def __init__(self, folder: Path, spec: StoreSpec) -> None:
        self.folder = folder
        self.spec = spec
        self.shards: list[ShardInfo] = []
        self._open: ShardWriter | None = None

    def append(self, values: Mapping[str, npt.NDArray[Any]], offsets: Mapping[str, npt.NDArray[np.int64]]) -> None:
        """Add records: for each array its values end to end, for each axis where its items start."""
        starts = self._token_starts(offsets)
        begin, records = 0, num_records(offsets)
        while begin < records:
            shard = self._open = self._open or ShardWriter(self.folder / str(len(self.shards)), self.spec)
            room = self.spec.max_tokens_per_shard - shard.tokens
            end = int(np.searchsorted(starts, starts[begin] + room, side="right")) - 1
            if end <= begin and shard.documents == 0:
                end = begin + 1  # a record larger than a shard has one to itself
            if end > begin:
                shard.append(*self._cut(values, offsets, begin, end))
                begin = end
            if begin < records:
                self._close_shard()

    def rest(self) -> None:
        """Keep no file open until more is appended."""
        if self._open is not None:
            self._open.rest()

    def finish(self) -> list[ShardInfo]:
        """Close the last shard; return all, named after their files in the folder."""
        self._close_shard()
        return self.shards

    def checkpoint(self) -> dict[str, Any]:
        """Make all that was written durable, and return what `reopen` needs to go on from here."""
        return {
            "shards": [shard_to_json(shard) for shard in self.shards],
            "open": self._open.checkpoint() if self._open else None,
        }

    @classmethod
    def reopen(cls, folder: Path, spec: StoreSpec, checkpoint: Mapping[str, Any]) -> ShardSeries:
        """Go on from a checkpoint; StoreCorruptError if the files are not as it says.

        Of shards that were finished before it only the sizes are looked at; `verify` reads them.
        """
        series = cls(folder, spec)
        series.shards = [shard_from_json(shard) for shard in checkpoint["shards"]]
        for shard in series.shards:
            check_sizes(folder / shard.name, shard)
        _drop_later(folder, len(series.shards) + (checkpoint["open"] is not None))
        if checkpoint["open"] is not None:
            series._open = ShardWriter.reopen(folder / str(len(series.shards)), spec, checkpoint["open"])
        return series

    def _token_starts(self, offsets: Mapping[str, npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
        """Return how many token ids stand before each record, over all arrays."""
        total: npt.NDArray[np.int64] = np.zeros(num_records(offsets) + 1, np.int64)
        for key in token_keys(self.spec.keys):
            axis = axis_of(self.spec.kind, key)
            total += offsets[axis][offsets["groups"]] if axis == "responses" else offsets[axis]
        return total

    def _cut(
        self,
        values: Mapping[str, npt.NDArray[Any]],
        offsets: Mapping[str, npt.NDArray[np.int64]],
        begin: int,
        end: int,
    ) -> tuple[dict[str, npt.NDArray[Any]], dict[str, npt.NDArray[np.int64]]]:
        """Return records `begin` to `end` (exclusive)."""
        items = dict.fromkeys(offsets, (begin, end))
        if "responses" in offsets:
            groups = offsets["groups"]
            items["responses"] = int(groups[begin]), int(groups[end])
        starts = {axis: offsets[axis][first : last + 1] for axis, (first, last) in items.items()}
        kind = self.spec.kind
        return (
            {
                key: array[int(starts[axis_of(kind, key)][0]) : int(starts[axis_of(kind, key)][-1])]
                for key, array in values.items()
            },
            {axis: start - start[0] for axis, start in starts.items()},
        )

    def _close_shard(self) -> None:
        if self._open is not None:
            self.shards.append(self._open.commit())
            self._open = None


def check_sizes(path: Path, shard: ShardInfo) -> None:
    """Raise StoreCorruptError if the files of a finished shard are gone or of another size."""
    files = {path / name: info.bytes for name, info in shard.files.items()}
    if shard.container is not None:
        files = {path: shard.container.bytes}
    for file, size in files.items():
        if not file.is_file() or file.stat().st_size != size:
            raise StoreCorruptError(f"{file}: must have {size} bytes to go on, got others; the unit is done again")


def _drop_later(folder: Path, number: int) -> None:
    """Remove shards that were begun after a checkpoint."""
    for child in folder.glob("*") if folder.exists() else ():
        name = child.name.removesuffix(".h5")
        if name.isdigit() and int(name) >= number:
            shutil.rmtree(child) if child.is_dir() else child.unlink()
