"""Uploads of units while a build runs, so that a store in object storage needs little local room.

Units are uploaded in input order, because the number of a shard depends on the units before it. After its objects
are verified, a unit keeps its counts and a record of its shards, and its arrays are removed. So the local disk
holds only units that are being written or uploaded. The manifest is written last.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

from tokenmill.build.journal import ROUTES, UPLOADED, Journal, read_record, route_folder, write_signed
from tokenmill.build.publish import UnitShards, UploadedUnit
from tokenmill.errors import StoreError
from tokenmill.store import layout
from tokenmill.store.files import sync_folder
from tokenmill.store.layout import FileInfo
from tokenmill.store.origins import origins_file, publish_origins
from tokenmill.store.remote.client import Client, parse_address
from tokenmill.store.remote.upload import THREADS, checksum_of, send_file
from tokenmill.store.writer import published_files
from tokenmill.tables import as_json

MAX_UNITS = 32
"""Number of units that are being written or wait for their upload, which bounds the local room."""


class UnitUploads:
    """Uploads the units of a build to an address, one after the other, in order."""

    def __init__(self, journal: Journal, address: str) -> None:
        self._journal = journal
        self._client = Client(parse_address(address))
        self._client.check_redirect(layout.MANIFEST)
        self._sizes = {info.name: info.bytes for info in self._client.list()}
        self._next: dict[str, int] = {}
        """Route -> number of its next shard."""

    def send(self, unit: UnitShards, tick: Callable[[], None] = lambda: None) -> None:
        """Upload a unit, unless an earlier build has; its arrays are removed."""
        folder = self._journal.units / unit.key
        firsts = {route: self._next.get(route, 0) for route in unit.shards}
        for route, shards in unit.shards.items():
            self._next[route] = firsts[route] + len(shards)
        done = read_record(UploadedUnit, folder / UPLOADED)
        if done is None:
            done = self._upload(unit, folder, firsts, tick)
        shutil.rmtree(folder / ROUTES, ignore_errors=True)
        names = {route: [shard.name for shard in shards] for route, shards in done.shards.items()}
        if names != {
            route: [layout.shard_name(firsts[route] + number) for number in range(len(shards))]
            for route, shards in unit.shards.items()
        }:
            self._drop_uploaded_from(unit.key)

    def _upload(
        self, unit: UnitShards, folder: Path, firsts: Mapping[str, int], tick: Callable[[], None]
    ) -> UploadedUnit:
        shards: dict[str, tuple[layout.ShardInfo, ...]] = {}
        files: dict[str, tuple[Path, FileInfo]] = {}
        for route, route_shards in unit.shards.items():
            source, first = route_folder(folder, route), firsts[route]
            named = []
            for number, shard in enumerate(route_shards, first):
                named.append(replace(shard, name=layout.shard_name(number)))
                files |= {
                    f"{route}/{name}" if route else name: file for name, file in _files(shard, source, number)
                }
            shards[route] = tuple(named)
            origins = source / ".tmp-origins"
            if publish_origins(source, origins, sum(shard.documents for shard in route_shards), unit.pieces):
                name = origins_file(Path(route), first).as_posix()
                files[name] = origins, FileInfo(bytes=origins.stat().st_size, xxh3=checksum_of(origins))
        self._send_all(files, tick)
        done = UploadedUnit(shards=shards)
        write_signed(folder / UPLOADED, as_json(done))
        return done

    def _send_all(self, files: Mapping[str, tuple[Path, FileInfo]], tick: Callable[[], None]) -> None:
        """Upload files, several at once; each is verified."""
        with ThreadPoolExecutor(THREADS, thread_name_prefix="tokenmill-upload") as executor:
            try:
                work = [
                    executor.submit(send_file, self._client, local, name, info, self._sizes.get(name))
                    for name, (local, info) in files.items()
                ]
                for finished in as_completed(work):
                    finished.result()
                    tick()
            except BaseException:
                self._client.stop()
                executor.shutdown(wait=True, cancel_futures=True)
                raise

    def _drop_uploaded_from(self, key: str) -> None:
        """Remove units whose objects have the numbers of other shards, because an earlier unit has changed."""
        for record in list(self._journal.units.glob(f"*/{UPLOADED}")):
            shutil.rmtree(record.parent)
        sync_folder(self._journal.units)
        raise StoreError(
            f"{self._client.address}: the inputs have changed since unit {key} was uploaded; "
            "run again: its units are uploaded under their new numbers"
        )


def _files(shard: layout.ShardInfo, folder: Path, number: int) -> Iterator[tuple[str, tuple[Path, FileInfo]]]:
    """Yield the files of a shard: name in the store, local file, size and checksum."""
    stored = dict(shard.stored_files)
    for local, name in published_files(shard, folder, number):
        info = stored.get(local.relative_to(folder).as_posix())
        yield name, (local, info or FileInfo(bytes=local.stat().st_size, xxh3=checksum_of(local)))
