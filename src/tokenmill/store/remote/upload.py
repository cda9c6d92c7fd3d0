"""Uploading a store to object storage: every file verified on both sides, the manifest last.

There is no state. Objects that are right are left alone and others are sent again, so the next call resumes an
interrupted upload. The manifest makes it a store. One request writes it, which does not overwrite another.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path

import xxhash

from tokenmill.errors import ConfigError, StoreCorruptError, StoreExistsError
from tokenmill.store import layout
from tokenmill.store.layout import FileInfo
from tokenmill.store.opening import read_ours
from tokenmill.store.remote.client import Client, parse_address
from tokenmill.store.sums import read_sums, sums_file
from tokenmill.tables import check_callable, check_instance, is_address, path_of
from tokenmill.types import RemoteOptions

THREADS = 8
"""Files that are on their way at a time; the parts of a large one are, too."""
Progress = Callable[[int, int], None]
"""Called with the bytes that are there and proven, and all there are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UploadReport:
    """What is in object storage now."""

    store: str
    address: str
    files: int
    bytes: int
    sent_files: int
    sent_bytes: int
    """The others were there already, and right."""
    fingerprint: str
    read_back: bool
    """Whether files were read back; otherwise the server compared their checksums."""


def upload(
    store: str | os.PathLike[str],
    address: str,
    *,
    options: RemoteOptions | None = None,
    read_back: bool | None = None,
    progress: Progress = lambda _done, _all: None,
) -> UploadReport:
    """Copy a finished store to object storage. Call it again to resume an interrupted upload.

    Each file is verified before it is sent. AWS S3 compares it with a checksum that is sent along. From other
    object storage it is read back. The manifest is sent last.

    Args:
        store: Folder of the store.
        address: `s3://bucket/path`, `gs://`, `az://` or `file:///folder`.
        options: Retries and limits of requests.
        read_back: Read each file back after it was sent; by default, unless the address is in AWS S3. False relies
            on the server, which must compare SHA-256 checksums of uploads, as MinIO and SeaweedFS do.
        progress: Function that is called with the bytes that were handled, and all bytes.

    Returns:
        Numbers of files and bytes, and how many of them were sent now.

    Raises:
        ConfigError: The address is wrong.
        StoreExistsError: There is another store at the address. It is not overwritten.
        StoreError: The store is damaged, or object storage cannot be reached.

    Examples:
        >>> import tokenmill as tm
        >>> from pathlib import Path
        >>> report = tm.upload("stores/demo", f"file://{Path.cwd()}/remote/demo")
        >>> report.files == report.sent_files
        True
    """
    path = Path(path_of("store", store))
    check_callable("progress", progress)
    if options is not None:
        check_instance("options", options, RemoteOptions, "leave it out")
    if not is_address(address):
        raise ConfigError(
            f"address: expected one of object storage, got {address!r}; write s3://bucket/path, or copy the folder"
        )
    place = parse_address(address, options)
    if read_back is False and place.scheme != "s3":
        raise ConfigError(f"read_back: {place.scheme}:// has no checksums of uploads; leave it out")
    manifest = read_ours(path, {})
    for shard in manifest.shards:
        read_sums(path / sums_file(shard.name), shard)
    is_aws = place.scheme == "s3" and place.endpoint is None
    client = Client(place, options, checksums=is_aws if read_back is None else not read_back)
    client.check_redirect(layout.MANIFEST)
    body = layout.manifest_bytes(manifest)
    there = client.get(layout.MANIFEST) if client.head(layout.MANIFEST) is not None else None
    if there is not None and there != body:
        raise _another(str(place))
    files = _files(path, manifest)
    total, done = sum(info.bytes for info in files.values()) + len(body), 0
    sent: list[FileInfo] = []
    for info, was_sent in _send_all(client, path, files):
        sent += [info] if was_sent else []
        done += info.bytes
        progress(done, total)
    if there is None:
        _publish(client, body)
    progress(total, total)
    return UploadReport(
        store=str(path),
        address=str(place),
        files=len(files) + 1,
        bytes=total,
        sent_files=len(sent) + (there != body),
        sent_bytes=sum(info.bytes for info in sent) + (len(body) if there != body else 0),
        fingerprint=manifest.fingerprint,
        read_back=not client.checksums,
    )


def _send_all(client: Client, path: Path, files: Mapping[str, FileInfo]) -> Iterator[tuple[FileInfo, bool]]:
    """Upload files that are missing or wrong, several at once; yield each with whether it was sent."""
    sizes = {info.name: info.bytes for info in client.list()}
    with ThreadPoolExecutor(THREADS, thread_name_prefix="tokenmill-upload") as executor:
        try:
            work = {
                executor.submit(send_file, client, path / name, name, info, sizes.get(name)): info
                for name, info in files.items()
            }
            for finished in as_completed(work):
                yield work[finished], finished.result()
        except BaseException:
            client.stop()
            executor.shutdown(wait=True, cancel_futures=True)
            raise


def _publish(client: Client, body: bytes) -> None:
    """Write the manifest, if nobody has; the same one may be there from a request that seemed to have failed."""
    try:
        client.create(layout.MANIFEST, body)
    except StoreExistsError:
        if client.get(layout.MANIFEST) != body:
            raise _another(str(client.address)) from None


def _another(place: str) -> StoreExistsError:
    return StoreExistsError(
        f"{place}: must hold nothing, or a part of this store, got another store; choose another address"
    )


def _files(path: Path, manifest: layout.Manifest) -> dict[str, FileInfo]:
    """Return the files that a reader needs, by their paths in the store: of shards, and what lies beside them.

    Row indexes go along: a node fetches one in less time than it takes to build it.
    """
    files: dict[str, FileInfo] = {}
    for shard in manifest.shards:
        files |= shard.stored_files
    for folder, folders, names in os.walk(path):
        top = Path(folder) == path
        folders[:] = sorted(
            name
            for name in folders
            if not (top and (name == layout.JOURNAL_FOLDER or layout.is_shard_name(name) or _is_left(name)))
        )
        for name in sorted(names):
            if _is_left(name) or (top and (name == layout.MANIFEST or layout.is_shard_name(name))):
                continue
            file = Path(folder) / name
            place = file.relative_to(path).as_posix()
            files[place] = FileInfo(bytes=file.stat().st_size, xxh3=checksum_of(file))
    return files


def _is_left(name: str) -> bool:
    """Whether a name is of what builders leave: locks, and what was not finished."""
    return name.startswith(".tmp-") or name.endswith(".lock")


def send_file(client: Client, local: Path, name: str, info: FileInfo, size: int | None) -> bool:
    """Upload a file unless its object is right; return whether it was sent. `size`: that of the object, if any."""
    if size == info.bytes and _remote_checksum(client, name) == info.xxh3:
        return False
    if local.stat().st_size != info.bytes or checksum_of(local) != info.xxh3:
        raise StoreCorruptError(
            f"{local}: must be what the manifest says before it is uploaded, got other bytes; {layout.WAY_OUT}"
        )
    client.put(name, local)
    if not client.checksums and _remote_checksum(client, name) != info.xxh3:
        raise StoreCorruptError(
            f"{client.address / name}: must be read back as it was sent, got other bytes; upload it again"
        )
    return True


def upload_manifest(path: Path, address: str) -> int:
    """Make objects a store: upload what is next to its shards, then its manifest; return the bytes.

    The shards are in object storage already: StoreCorruptError if one of their objects is missing.
    """
    client, manifest = Client(parse_address(address)), read_ours(path, {})
    sizes = {info.name: info.bytes for info in client.list()}
    for shard in manifest.shards:
        for name, info in shard.stored_files.items():
            if sizes.get(name) != info.bytes:
                raise StoreCorruptError(
                    f"{client.address / name}: expected {info.bytes} bytes as uploaded, got {sizes.get(name)}; "
                    "let no other process write there, and prepare it again"
                )
    done = 0
    for name, file in remaining_files(path).items():
        info = FileInfo(bytes=file.stat().st_size, xxh3=checksum_of(file))
        send_file(client, file, name, info, sizes.get(name))
        done += info.bytes
    body = layout.manifest_bytes(manifest)
    _publish(client, body)
    return done + len(body)


def remaining_files(path: Path) -> dict[str, Path]:
    """Return the files of a store that are neither manifest, journal nor shards, such as those of the tokenizer."""
    own = (layout.JOURNAL_FOLDER, layout.MANIFEST)
    below = (file for file in sorted(path.rglob("*")) if file.is_file())
    names = {file.relative_to(path).as_posix(): file for file in below}
    return {
        name: file
        for name, file in names.items()
        if not (name.startswith(own) or layout.is_shard_name(name.split("/")[0]) or _is_left(file.name))
    }


def checksum_of(file: Path) -> str:
    """Return the XXH3-128 of a file."""
    with file.open("rb") as stream:
        return str(file_digest(stream, xxhash.xxh3_128).hexdigest())


def _remote_checksum(client: Client, name: str) -> str:
    """Return the checksum of an object; that of one that is cut meanwhile fits nothing."""
    checksum = xxhash.xxh3_128()
    for block in client.stream(name):
        checksum.update(block)
    return str(checksum.hexdigest())
