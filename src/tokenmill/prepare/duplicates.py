"""Which records have the same content as an earlier one, and which are beyond the number that is wanted.

Records are hashed in the workers first; the hashes of all are compared here, part by part, so that memory stays
bounded but for one byte a record; then the units are run knowing the fate of each of their records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from tokenmill.documents import Unit
from tokenmill.prepare.bench import Bench, joined
from tokenmill.prepare.select import DUPLICATE, SURPLUS, TAKEN
from tokenmill.prepare.unit import disk_errors_told
from tokenmill.store.durable import make_folder, write_parts_atomically

if TYPE_CHECKING:
    import numpy.typing as npt

_HASH = np.dtype([("high", "<u8"), ("low", "<u8")])
_HASHES_AT_ONCE = 1 << 22
"""How many hashes are compared at a time: 100 MB with what sorting them takes."""


def scan_unit(bench: Bench, unit: Unit, key: str, tick: Callable[[], None]) -> dict[str, Any]:
    """Write the hashes of the records of a unit that are eligible, in order (see `select`)."""
    scans = Path(bench.job.folder).parent / "scans"
    with disk_errors_told(unit, scans):
        make_folder(scans)
        write_parts_atomically(scans / key, _hashes(bench, unit, tick))
    return {"key": key}


def _hashes(bench: Bench, unit: Unit, tick: Callable[[], None]) -> Iterator[bytes]:
    rules = bench.rules
    for batch in joined(unit, bench.reading):
        records = batch.records or repeat(None)
        yield b"".join(
            xxhash.xxh3_128_digest(name)
            for content, name, record in zip(bench.contents(batch), bench.keys(batch), records, strict=False)
            if content is not None and rules.too_short_or_long(content) is None and rules.has_domain(record)
        )
        tick()


def fates_of(scans: Sequence[Path], *, deduplicate: bool, max_items: int | None) -> list[npt.NDArray[np.uint8]]:
    """Return for each scan what becomes of its records; those of scans that come first do not depend on later ones.

    The first record in order with a content is taken, later ones are duplicates; of those taken only the first
    `max_items` are, None for all.
    """
    sizes = [path.stat().st_size // _HASH.itemsize for path in scans]
    begins = np.cumsum([0, *sizes])
    fates: npt.NDArray[np.uint8] = np.full(int(begins[-1]), TAKEN, np.uint8)
    if deduplicate:
        num_parts = max(1, -(-int(begins[-1]) // _HASHES_AT_ONCE))
        for part in range(num_parts):
            _mark_duplicates(scans, begins, fates, part, num_parts)
    parts = [fates[int(begins[i]) : int(begins[i + 1])] for i in range(len(scans))]
    if max_items is not None:
        room = max_items
        for each in parts:
            taken = np.flatnonzero(each == TAKEN)
            each[taken[room:]] = SURPLUS
            room = max(0, room - taken.size)
    return parts


def _mark_duplicates(
    scans: Sequence[Path],
    begins: npt.NDArray[np.int64],
    fates: npt.NDArray[np.uint8],
    part: int,
    num_parts: int,
) -> None:
    """Compare the hashes of one part: those whose upper half leaves this rest."""
    hashes: list[npt.NDArray[Any]] = []
    places: list[npt.NDArray[np.int64]] = []
    for index, path in enumerate(scans):
        if not path.stat().st_size:
            continue
        found = np.memmap(path, _HASH, "r")
        mine = np.flatnonzero(found["high"] % np.uint64(num_parts) == part)
        hashes.append(found[mine])
        places.append(mine + begins[index])
    if not hashes:
        return
    values, where = np.concatenate(hashes), np.concatenate(places)
    order = np.lexsort((where, values["low"], values["high"]))
    ordered = values[order]
    fates[where[order[1:][ordered[1:] == ordered[:-1]]]] = DUPLICATE
