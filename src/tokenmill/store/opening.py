"""From a path, an address or a glob to an open store; several stores as one."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from glob import has_magic, iglob
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.errors import ConfigError
from tokenmill.store import layout
from tokenmill.store.maps import MapCache
from tokenmill.store.ranges import Request
from tokenmill.store.store import Axis, Store
from tokenmill.tables import is_address, path_of
from tokenmill.types import RemoteOptions, natural_key

if TYPE_CHECKING:
    from tokenmill.store.remote.fetch import Network


def open_store(  # noqa: PLR0913 - what files of others do not say of themselves
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    maps: MapCache | None = None,
    dtype: str | None = None,
    vocab_size: int | None = None,
    eos_id: int | None = None,
    bos_id: int | None = None,
    format: str | None = None,
    remote: RemoteOptions | Network | None = None,
    verify_pages: bool = False,
) -> Store:
    """Open a store, or third-party token files in place. Of a store, only the manifest is read.

    Args:
        path: Folder or address of a store, such as `s3://bucket/web`. A list, or a glob of stores, is opened as one
            store with all their documents in that order. Token files may be a file, folder, glob or prefix.
        maps: Cache of open files, to share it with other stores.
        dtype: Type of the ids of token files, such as `uint16`, if the files do not record it.
        vocab_size: Vocabulary size of token files, if the files do not record it.
        eos_id: Id that ends each document of token files.
        bos_id: Id that starts each document of token files.
        format: Format of token files; detected by default.
        remote: How an address is read: cache, retries and limits.
        verify_pages: Verify every page of a store on disk when it is read.

    Returns:
        The open store.

    Raises:
        StoreMissingError: There is no store or token file at the path.
        StoreError: The store cannot be read, or an argument contradicts its manifest.
        ConfigError: An argument is wrong.

    Examples:
        >>> import tokenmill as tm
        >>> tm.open_store("stores/demo")
        <Store stores/demo: seq, 324 documents, 134,693 tokens, 1 shards, sequence uint16>
    """
    items = path if isinstance(path, Sequence) and not isinstance(path, str) else [path]
    places = [place for item in items for place in _places(item)]
    claims: dict[str, Any] = {
        "dtype": dtype,
        "vocab_size": vocab_size,
        "eos_id": eos_id,
        "bos_id": bos_id,
        "format": format,
    }
    if len(places) != 1:
        maps = maps or MapCache()
        return join_stores(
            [open_store(place, maps=maps, remote=remote, verify_pages=verify_pages, **claims) for place in places]
        )
    place = places[0]
    if isinstance(place, str):
        return _open_remote(place, claims, maps, remote)
    if layout.is_ours(place) or format == "tokenmill":
        store = store_of(place, read_ours(place, claims), maps)
        return _with_verified_pages(store) if verify_pages else store
    if verify_pages:
        raise ConfigError(f"{place}: verify_pages is for stores of ours, got files of another project; import them")
    from tokenmill.store.foreign.files import ForeignOptions
    from tokenmill.store.foreign.open import open_foreign

    return open_foreign(place, ForeignOptions(**claims), maps)


def _with_verified_pages(store: Store) -> Store:
    """Return a store whose pages are verified when they are read."""
    from tokenmill.store.sums import VerifiedFiles, missing_sums

    if not (store.path / layout.SUMS_FOLDER).is_dir():
        raise missing_sums(store.path / layout.SUMS_FOLDER)
    return replace(store, _verified=VerifiedFiles(folder=store.path, manifest=store.manifest))


def _open_remote(
    text: str, claims: Mapping[str, object], maps: MapCache | None, remote: RemoteOptions | Network | None
) -> Store:
    """Open the store at an address by reading its manifest."""
    from tokenmill.store.remote.fetch import Network
    from tokenmill.store.remote.files import open_remote

    files = open_remote(text, remote if isinstance(remote, Network) else Network(remote))
    _check_claims(str(files.address), files.manifest, claims)
    return replace(store_of(files.folder, files.manifest, maps), _remotes=(files,))


def _places(path: str | os.PathLike[str]) -> Sequence[Path | str]:
    """Return the stores of ours that a glob stands for, in the natural order of their names; else the path.

    An address stays a string.
    """
    text = path_of("store", path)
    if is_address(text):
        return [text]
    is_glob = has_magic(text) and not os.path.lexists(text)
    # One match tells whether it is for files of others, of which there may be very many.
    if not is_glob or not any(layout.is_ours(Path(match)) for match in islice(iglob(text, recursive=True), 1)):
        return [Path(path)]
    stores = [Path(match) for match in sorted(iglob(text, recursive=True), key=natural_key)]
    return stores if all(map(layout.is_ours, stores)) else [Path(path)]


def join_stores(stores: Sequence[Store]) -> Store:
    """Return several stores of one tokenizer and training type as one: the documents of each after those before it.

    It stands for the same tokens as one store with all their shards would; only manifests are read.
    """
    if not stores:
        raise ConfigError("store: must name at least one, got an empty list; add the folder of a store")
    places = [store.path.resolve() for store in stores]
    for number, place in enumerate(places):
        if place in places[:number]:
            raise ConfigError(f"{place}: the store is named twice in a source; remove one")
    for store in stores[1:]:
        _check_alike(stores[0], store)
    shards: list[layout.ShardInfo] = []
    requests: dict[tuple[int, str], Request] = {}
    for store in stores:
        for number, shard in enumerate(store.manifest.shards):
            requests.update({(len(shards), name): store.file(number, name) for name in shard.files})
            shards.append(replace(shard, name=f"{store.path.name}/{shard.name}"))
    # Of token files of other projects, whether all their documents have BOS and EOS is found out file by file.
    framed = {name: all(store.manifest.tokenizer.get(name) for store in stores) for name in ("add_bos", "add_eos")}
    tokenizers = [store.manifest.tokenizer for store in stores]
    identity = next((known for known in tokenizers if known.get("kind") != layout.GIVEN), tokenizers[0])
    manifest = replace(
        stores[0].manifest,
        tokenizer={**identity, **framed},
        shards=tuple(shards),
        inputs=tuple(item for store in stores for item in store.manifest.inputs),
        skipped={},
    )
    joined = store_of(stores[0].path, manifest, stores[0]._maps, requests)
    return replace(joined, _remotes=tuple(files for store in stores for files in store._remotes))


def _check_alike(first: Store, other: Store) -> None:
    """Refuse a store of another tokenizer or training type, or with other arrays, than the first of its source."""
    ours, theirs = first.manifest, other.manifest
    difference = layout.tokenizer_difference(ours.tokenizer, theirs.tokenizer)
    for name, left, right in (("training type", ours.kind, theirs.kind), ("keys", ours.keys, theirs.keys)):
        if left != right:
            difference = (name, left, right, "make a source of each")
    if difference:
        name, left, right, way_out = difference
        if name == "content":
            name = "tokenizer"
            left, right = (
                layout.describe_tokenizer(each.tokenizer, each.recipe.get("tokenizer")) for each in (ours, theirs)
            )
        raise ConfigError(
            f"{other.path}: stores of one source must be alike, got {right!r} as its {name} where "
            f"{first.path} has {left!r}; {way_out}"
        )


def read_ours(path: Path, claims: Mapping[str, object]) -> layout.Manifest:
    """Read the manifest of a store of ours; claims of the caller that contradict it are refused."""
    manifest = layout.read_manifest(path)
    _check_claims(str(path), manifest, claims)
    return manifest


def _check_claims(where: str, manifest: layout.Manifest, claims: Mapping[str, object]) -> None:
    facts = {**manifest.tokenizer, "dtype": np.dtype(manifest.keys[manifest.token_key]).name, "format": "tokenmill"}
    for name, value in claims.items():
        if value not in (None, facts.get(name)):
            raise ConfigError(
                f"{where}: {name} must be as the manifest says, {facts.get(name)!r}, got {value!r}; leave it out"
            )


def store_of(
    path: Path,
    manifest: layout.Manifest,
    maps: MapCache | None,
    requests: dict[tuple[int, str], Request] | None = None,
) -> Store:
    """Make an open store of a manifest, read or made up; `requests` says where files are that it does not name."""
    sizes = {
        axis: [shard.size_of(axis) for shard in manifest.shards]
        for axis in layout.axes_of(manifest.kind, manifest.keys)
    }
    return Store(
        path=path,
        manifest=manifest,
        _maps=maps or MapCache(),
        axes={
            axis: Axis(
                items=np.cumsum([0, *(items for items, _ in size)], dtype=np.int64),
                values=np.cumsum([0, *(values for _, values in size)], dtype=np.int64),
            )
            for axis, size in sizes.items()
        },
        fingerprint=manifest.fingerprint,
        _requests=requests or {},
    )
