"""Proving that a store is what its manifest says: all of it byte for byte, or every page when it is read.

The manifest has one checksum a file, which proves all of it or nothing. `.sums/shard-00000.bin` beside a shard has
the XXH3-64 of every page of each of its files, and the checksums of the whole files that they were made of, so that
it fits no others. Of files of other projects, what can be proven is.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import xxhash

from tokenmill.errors import FULL, StoreCorruptError, StoreError
from tokenmill.store import layout
from tokenmill.store.files import make_folder, write_atomically
from tokenmill.store.hashes import check_hashes
from tokenmill.store.layout import (
    JOURNAL_FOLDER,
    MANIFEST,
    PAGE_BYTES,
    WAY_OUT,
    manifest_bytes,
    read_manifest,
)
from tokenmill.store.lease import leased_folder
from tokenmill.store.maps import FileRequest, MappedFile, map_file
from tokenmill.store.opening import open_store, read_ours, store_of
from tokenmill.store.origins import check_origins
from tokenmill.store.ranges import RangeRequest, Ranges, Request, merged, part_of, read_range, sparse_map
from tokenmill.store.sections import read_index, write_index, write_section
from tokenmill.store.store import Store, file_request
from tokenmill.tables import check_callable, check_instance, is_address, path_of
from tokenmill.types import RemoteOptions, Uint8Array, Uint64Array

if TYPE_CHECKING:
    from tokenmill.store.foreign.files import ForeignOptions

_BLOCK = 1 << 24
MAX_LISTED = 20
"""Problems that the message of an error lists; the report has them all."""
Progress = Callable[[int], None]
"""Called with the number of bytes that were read since its last call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """What was read, and what is wrong with it."""

    path: Path | str
    """A folder, or an address."""
    shards: int = 0
    files: int = 0
    bytes: int = 0
    documents: int = 0
    tokens: int = 0
    fingerprint: str = ""
    checked: str = "checksums, offsets and ids are right"
    """What was proven, in words, if nothing is wrong."""
    format: str = "tokenmill"
    problems: tuple[StoreError, ...] = ()
    """What is wrong, one for each file; counts are 0 where a store cannot even be opened."""


def verify(
    path: str | os.PathLike[str],
    *,
    progress: Progress = lambda _bytes: None,
    options: ForeignOptions | None = None,
    remote: RemoteOptions | None = None,
    add_page_sums: bool = False,
) -> VerifyReport:
    """Check every byte of a store: checksums, sizes, offsets, and ids below the vocabulary size.

    Third-party token files have no checksums. The report describes the checks that were made instead. Memory does
    not grow with the store.

    Args:
        path: Folder or address of the store, or third-party token files.
        progress: Function that is called with the number of bytes that were read.
        options: Facts that third-party token files do not record.
        remote: How an address is read.
        add_page_sums: Write page checksums next to every verified shard, for `verify_pages` and `upload`.

    Returns:
        Counts of files, bytes, documents and tokens, and the fingerprint.

    Raises:
        StoreMissingError: There is no store at the path.
        StoreError: Something is wrong. The message names the file; with several problems it has one line for each.

    Examples:
        >>> import tokenmill as tm
        >>> report = tm.verify("stores/demo")
        >>> report.documents, report.checked
        (324, 'checksums, offsets and ids are right')
    """
    check_callable("progress", progress)
    if options is not None:
        from tokenmill.store.foreign.files import ForeignOptions

        check_instance("options", options, ForeignOptions, "leave it out for a store of tokenmill")
    report = check_store(path, progress=progress, options=options, remote=remote, add_page_sums=add_page_sums)
    _raise_first(report.problems)
    return report


def add_page_sums_only(path: Path) -> None:
    """Verify a store on disk and write page sums next to its shards, as `verify` does; leave its manifest alone."""
    problems: list[StoreError] = []
    with collected(problems, path):
        _check_ours(path, {}, lambda _bytes: None, problems, add_page_sums=True)
    _raise_first(problems)


def _raise_first(problems: Sequence[StoreError]) -> None:
    """Raise an error of the kind of the first problem, with a line for each."""
    if problems:
        lines = [str(problem) for problem in problems[:MAX_LISTED]]
        if len(problems) > MAX_LISTED:
            lines.append(f"and {len(problems) - MAX_LISTED} more")
        raise type(problems[0])("\n".join(lines))


def check_store(
    path: str | os.PathLike[str],
    *,
    progress: Progress = lambda _bytes: None,
    options: ForeignOptions | None = None,
    remote: RemoteOptions | None = None,
    add_page_sums: bool = False,
) -> VerifyReport:
    """Read every byte of a store as `verify` does, but return what is wrong instead of raising it."""
    text, claims = path_of("store", path), options.given if options else {}
    place = Path(text)
    problems: list[StoreError] = []
    report = VerifyReport(path=text.partition("?")[0] if is_address(text) else place)
    with collected(problems, place):
        if is_address(text):
            store = open_store(text, remote=remote, **(asdict(options) if options else {}))
            report = _check_files(store, progress, problems, add_page_sums=add_page_sums)
            if add_page_sums and not problems:
                _mark_page_sums(store)
        elif layout.is_ours(place) or claims.get("format") == "tokenmill":
            report = _check_ours(place, claims, progress, problems, add_page_sums=add_page_sums)
            if add_page_sums and not problems:
                _mark_page_sums(open_store(place))
        else:
            from tokenmill.store.foreign.files import ForeignOptions
            from tokenmill.store.foreign.open import check_foreign

            report = check_foreign(place, options or ForeignOptions(), progress, problems)
    return replace(report, problems=tuple(problems))


@contextmanager
def collected(problems: list[StoreError], path: Path) -> Iterator[None]:
    """Add what is wrong to a list instead of raising it."""
    try:
        yield
    except StoreError as error:
        problems.append(error)
    except OSError as error:
        if error.errno in FULL:
            raise  # page sums are written: nothing is wrong with the store
        problems.append(StoreError(f"{error.filename or path}: must be readable, got {error}; check the disk"))


def _check_ours(
    path: Path,
    claims: Mapping[str, object],
    progress: Progress,
    problems: list[StoreError],
    *,
    add_page_sums: bool,
) -> VerifyReport:
    manifest = read_ours(path, claims)
    if (path / MANIFEST).read_bytes() != manifest_bytes(manifest):
        problems.append(
            StoreCorruptError(
                f"{path / MANIFEST}: must be as tokenmill writes it, got other white space; {WAY_OUT}"
            )
        )
    listed = {shard.name for shard in manifest.shards}
    problems += [
        StoreCorruptError(
            f"{child}: must be listed in {MANIFEST}, got a stranger; "
            f"if `tokenmill prepare` was interrupted, run it again, else remove it, or {WAY_OUT}"
        )
        for child in sorted(path.iterdir())
        if child.is_symlink() or (layout.is_shard_name(child.name) and child.name not in listed)
    ]
    return _check_files(store_of(path, manifest, None), progress, problems, add_page_sums=add_page_sums)


def _check_files(
    store: Store, progress: Progress, problems: list[StoreError], *, add_page_sums: bool
) -> VerifyReport:
    """Read all files that a manifest lists, wherever they are."""
    manifest = store.manifest
    for number in range(len(manifest.shards)):
        _check_shard(store, number, progress, problems, add_page_sums=add_page_sums)
    for files in store._remotes:
        files.bring_folder(layout.ORIGINS_FOLDER)
        files.bring_folder(layout.HASHES_FOLDER)
    for number in range(len(manifest.shards)) if not problems else ():  # they are read from shards that are whole
        with collected(problems, store.path):
            check_hashes(store, number)
    for file in sorted((store.path / layout.ORIGINS_FOLDER).glob("*.bin")):
        with collected(problems, store.path):
            check_origins(file)
    listed = [info for shard in manifest.shards for info in shard.files.values()]
    return VerifyReport(
        path=store.where if store._remotes else store.path,
        shards=len(manifest.shards),
        files=len(listed),
        bytes=sum(info.bytes for info in listed),
        documents=manifest.documents,
        tokens=manifest.tokens,
        fingerprint=store.fingerprint,
    )


def _check_meta(store: Store, number: int) -> None:
    """Refuse a `meta.json` in a shard, by which AstrAI reads it, that differs from the manifest."""
    file = store.path / store.manifest.shards[number].name / "meta.json"
    if store._remotes or not file.is_file():
        return
    from tokenmill.store.foreign.export import meta_of  # late: it needs this module

    if file.read_bytes() != meta_of(store, number):
        raise StoreCorruptError(
            f"{file}: must describe the arrays as {MANIFEST} does, got another text; run the Pipeline again"
        )


def _check_shard(
    store: Store, number: int, progress: Progress, problems: list[StoreError], *, add_page_sums: bool
) -> None:
    """Read all files of a shard, each once; compare its page sums, or add them."""
    manifest, shard = store.manifest, store.manifest.shards[number]
    indexes = {layout.index_file(axis): axis for axis in store.axes}
    ids = {layout.key_file(key): manifest.keys[key] for key in layout.token_keys(manifest.keys)}
    # A copy on this machine does not count if the object is gone.
    name = sums_file(shard.name)
    has_file = all(files.has(name) for files in store._remotes) and store._bring(name).exists()
    if manifest.page_sums and not has_file:
        for files in store._remotes:  # each file is verified as a whole
            files.read_without_sums(shard)
        if not add_page_sums:
            problems.append(missing_sums(store.where, shard.name))
    # Page sums are computed beside the checksums, if they are there to be compared or shall be.
    sums = {name: array("Q") for name in shard.stored_files} if add_page_sums or has_file else {}
    before = len(problems)
    if shard.container is not None:
        with collected(problems, store.path):
            _check_checksum(_whole(store, shard), shard.container.xxh3, progress, sums.get(shard.name))
        if len(problems) > before:
            return  # its arrays are as broken as it is
    for part, info in shard.files.items():
        with collected(problems, store.path):
            request = store.file(number, part)
            file_sums = sums.get(f"{shard.name}/{part}")
            largest = _check_checksum(request, info.xxh3, progress, file_sums, dtype=ids.get(part))
            if part in indexes:
                _check_index(request, *shard.size_of(indexes[part]))
            elif part in ids:
                _check_ids(request, largest, int(manifest.tokenizer["vocab_size"]))
    with collected(problems, store.path):
        _check_meta(store, number)
    if sums and len(problems) == before:
        with collected(problems, store.path):
            computed = {of: np.array(pages, np.uint64) for of, pages in sums.items()}
            if has_file:
                _compare_sums(store.path / name, shard, computed)
            else:
                file = write_sums(store.path, shard, computed)
                for files in store._remotes:
                    files.send(name, file)


def _whole(store: Store, shard: layout.ShardInfo) -> Request:
    """Return the container of a shard as one file."""
    assert shard.container is not None
    if store._remotes:
        return store._remotes[0].whole(shard.name, shard.container.bytes)
    return FileRequest(store.path / shard.name, shard.container.bytes, 0, shard.container.bytes)


def _compare_sums(file: Path, shard: layout.ShardInfo, sums: Mapping[str, Uint64Array]) -> None:
    """Refuse page sums of a shard that are not those of its files."""
    for of, expected in read_sums(file, shard).items():
        wrong = np.flatnonzero(expected != sums[of])
        if wrong.size:
            raise StoreCorruptError(
                f"{file}: must have the checksum of every page of {of}, got another of page "
                f"{int(wrong[0])}; delete it, and run `tokenmill verify --add-page-sums`"
            )


def _mark_page_sums(store: Store) -> None:
    """Write into the manifest of a store that all its shards have page sums."""
    if store.manifest.page_sums or not store.manifest.shards:
        return
    body = manifest_bytes(replace(store.manifest, page_sums=True))
    for files in store._remotes:
        files.replace_manifest(body)
    if store._remotes:
        return
    # A build that adds to the store writes the manifest too. It holds the lease of the folder with its journal.
    above = (folder for folder in (store.path, *store.path.parents) if (folder / JOURNAL_FOLDER).is_dir())
    with leased_folder(next(above, store.path)):
        if read_manifest(store.path) != store.manifest:
            raise StoreError(
                f"{store.path / MANIFEST}: must stay the same while the store is verified, got another one; run "
                "`tokenmill verify --add-page-sums` again"
            )
        write_atomically(store.path / MANIFEST, body)


def _blocks(request: Request) -> Iterator[Uint8Array]:
    """Yield the bytes of a file in parts of whole pages; ranges of it are brought one after another."""
    if isinstance(request, RangeRequest):
        for begin in range(0, request.wanted, _BLOCK):
            yield read_range(request, begin, min(_BLOCK, request.wanted - begin))
        return
    file = map_file(request)
    for begin in range(0, file.data.size, _BLOCK):
        yield file.data[begin : begin + _BLOCK]
        file.check()


def _check_checksum(
    request: Request,
    expected: str,
    progress: Progress = lambda _bytes: None,
    sums: array[int] | None = None,
    dtype: str | None = None,
) -> int:
    """Refuse a file of another checksum; add the sums of its pages to `sums`, and return its largest value.

    Values are read only if their dtype is given.
    """
    state, largest = xxhash.xxh3_128(), 0
    for block in _blocks(request):
        state.update(block.data)
        if sums is not None:
            sums.extend(page_sums(block))
        if dtype is not None:
            largest = max(largest, int(block.view(dtype).max()))
        progress(block.size)
    if state.hexdigest() != expected:
        raise StoreCorruptError(f"{request.path}: checksum must be {expected}, got {state.hexdigest()}; {WAY_OUT}")
    return largest


def _check_index(request: Request, items: int, values: int) -> None:
    path = request.path
    file = map_file(request)
    data = file.data
    split = (items + 1) * layout.OFFSET_DTYPE.itemsize
    offsets, anchors = data[:split].view(layout.OFFSET_DTYPE), data[split:].view(layout.ANCHOR_DTYPE)

    def require(ok: bool, rule: str) -> None:
        file.check()
        if not ok:
            raise StoreCorruptError(f"{path}: {rule}; {WAY_OUT}")

    require(int(offsets[0]) == 0, f"offsets must start at 0, got {int(offsets[0])}")
    require(int(offsets[-1]) == values, f"offsets must end at {values}, got {int(offsets[-1])}")
    for begin in range(0, offsets.size, _BLOCK):
        block = offsets[begin : begin + _BLOCK + 1]
        require(bool((block[1:] >= block[:-1]).all()), "offsets must not decrease, got some that do")
    right = np.array_equal(anchors, layout.anchors_of(offsets))
    require(right, "anchors must name the document of every 1,024th token, got others")


def _check_ids(request: Request, largest: int, vocab_size: int) -> None:
    if largest >= vocab_size:
        raise StoreCorruptError(
            f"{request.path}: token ids must be below the vocabulary size {vocab_size}, got {largest}; "
            "prepare the store again with the right tokenizer"
        )


# Checksums of pages.

SUMS_FORMAT = "tokenmill-sums-1"


def page_sums(data: Uint8Array | bytes) -> list[int]:
    """Return the checksum of each page of some bytes; the last page may be shorter."""
    view = memoryview(data)  # type: ignore[arg-type]
    pages = range(0, len(view), PAGE_BYTES)
    return [xxhash.xxh3_64_intdigest(view[begin : begin + PAGE_BYTES]) for begin in pages]


def wrong_page(sums: Uint64Array, begin: int, data: Uint8Array | bytes) -> int | None:
    """Return the first page of some bytes of a file that is not what its sums say; None where all are right.

    `begin` is where the bytes begin in the file: at a page.
    """
    first, extra = divmod(begin, PAGE_BYTES)
    assert not extra
    actual = page_sums(data)
    expected = sums[first : first + len(actual)].tolist()
    wrong = (page for page, pair in enumerate(zip(actual, expected, strict=True), first) if pair[0] != pair[1])
    return next(wrong, None)


def sums_file(shard: str) -> str:
    """Return the name of the file with the page sums of a shard.

    >>> sums_file("shard-00007")
    '.sums/shard-00007.bin'
    """
    return f"{layout.SUMS_FOLDER}/{shard}.bin"


@dataclass(frozen=True, kw_only=True, slots=True)
class _SumsFooter:
    """What stands at the end of a sums file, as JSON."""

    format: str
    page_bytes: int
    files: Mapping[str, tuple[layout.Count, layout.Count, str, str]]
    """File -> first byte and size of its sums, their XXH3-128, and the XXH3-128 of the file itself."""


def write_sums(store: Path, shard: layout.ShardInfo, sums: Mapping[str, Uint64Array]) -> Path:
    """Write the page sums of the files of a shard beside it."""

    def write(out: BinaryIO) -> _SumsFooter:
        files = {}
        for name, info in shard.stored_files.items():
            section = write_section(out, [sums[name].astype("<u8").view(np.uint8)])
            files[name] = (*section, info.xxh3)
        return _SumsFooter(format=SUMS_FORMAT, page_bytes=PAGE_BYTES, files=files)

    file = store / sums_file(shard.name)
    make_folder(file.parent)
    write_index(file, write)
    return file


def read_sums(file: Path, shard: layout.ShardInfo) -> dict[str, Uint64Array]:
    """Read the page sums of each file of a shard; those of other files than the manifest lists are refused."""
    index = read_index(file, _SumsFooter)
    if index is None or (index[1].format, index[1].page_bytes) != (SUMS_FORMAT, PAGE_BYTES):
        raise _bad_sums(file, "a cut or changed one")
    data, footer = index[0].data, index[1]
    sums: dict[str, Uint64Array] = {}
    for name, info in shard.stored_files.items():
        begin, sums_bytes, proof, of = footer.files.get(name, (0, 0, "", ""))
        section = data[begin : begin + sums_bytes]
        if of != info.xxh3:
            raise _bad_sums(file, f"those of another {name}")
        if (
            section.size != -(-info.bytes // PAGE_BYTES) * 8
            or xxhash.xxh3_128_hexdigest(section.tobytes()) != proof
        ):
            raise _bad_sums(file, f"other ones for {name}")
        sums[name] = section.view("<u8")
    return sums


def missing_sums(store: str, shard: str) -> StoreCorruptError:
    """Return the error of page sums that the manifest promises and that cannot be found."""
    return StoreCorruptError(
        f"{store}/{sums_file(shard)}: page sums not found, although {MANIFEST} says that there are some; run "
        "`tokenmill verify --add-page-sums`, or copy the store again"
    )


def _bad_sums(file: Path, got: str) -> StoreCorruptError:
    return StoreCorruptError(
        f"{file}: must have the checksums of the pages of its shard, got {got}; delete it, and run "
        f"`tokenmill verify --add-page-sums`, or {WAY_OUT}"
    )


# Files on disk that are proven when they are read: bit rot in the middle of a run gives no wrong token. Pages are
# copied into memory of this process before they are proven, so that what is proven is what is used.


@dataclass(frozen=True, slots=True)
class _Ready:
    """Ranges that have been read."""

    files: list[MappedFile]
    is_here: bool = True

    def wait(self) -> list[MappedFile]:
        return self.files

    def release(self) -> None:
        self.files.clear()


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvenFiles:
    """The files of a store on disk that must have page sums."""

    folder: Path
    manifest: layout.Manifest
    _sums: dict[str, Uint64Array] = field(default_factory=dict)
    """Of each file of which ranges were read."""

    def request(self, shard: int, name: str) -> Request:
        """Return where a file of a shard is; an index is verified as a whole, when it is first used."""
        info = self.manifest.shards[shard]
        request = file_request(self.folder, info, name)
        if request.xxh3 is not None:
            return request
        place, size = info.place(name)
        return RangeRequest(str(request.path), self, place, size, request.begin, request.wanted)

    def begin(self, ranges: Sequence[Ranges], *, ahead: bool) -> _Ready:  # noqa: ARG002 - a disk is not waited for
        """Read ranges of some files, in whole pages, and prove them."""
        files = []
        for item in ranges:
            request = item.request
            sums = self._sums_of(request.name)
            begins, ends = merged(item.begins + request.begin, item.ends + request.begin, PAGE_BYTES, request.bytes)
            mapped = sparse_map(request.path, request.bytes)
            whole = FileRequest(self.folder / request.name, request.bytes)
            for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
                data = read_range(whole, begin, end - begin)
                page = wrong_page(sums, begin, data)
                if page is not None:
                    raise StoreCorruptError(
                        f"{request.path}: bytes {begin}:{end} must be what their checksums say, got others in page "
                        f"{page}; {WAY_OUT}"
                    )
                mapped.data[begin:end] = data
            files.append(part_of(mapped, request))
        return _Ready(files)

    def _sums_of(self, name: str) -> Uint64Array:
        if name not in self._sums:
            folder = name.partition("/")[0]
            shard = next(shard for shard in self.manifest.shards if shard.name == folder)
            self._sums.update(read_sums(self.folder / sums_file(shard.name), shard))
        return self._sums[name]
