"""Builds from and for object storage: inputs are copied to a local disk, and units are uploaded as they finish.

The local folder is a build like any other, without the arrays of units that were uploaded (see `uploads`). A build
that was killed continues there. There is no store in object storage before its manifest, which is written last.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill.build.downloads import copy_inputs
from tokenmill.documents import InputFile
from tokenmill.documents.inputs import suffix_of
from tokenmill.errors import ConfigError, StoreExistsError
from tokenmill.fingerprint import digest
from tokenmill.store.layout import MANIFEST
from tokenmill.store.remote.client import Client, parse_address
from tokenmill.store.remote.upload import remaining_files, upload_manifest
from tokenmill.tables import is_address, path_of

if TYPE_CHECKING:
    from tokenmill.build.build import PrepareReport
    from tokenmill.build.job import PrepareOptions
    from tokenmill.build.progress import Show

FOLDER = Path(".tokenmill") / "staging"
"""Folder of copied inputs and of builds, below the working folder, unless `staging` names another."""


def build_remote(
    build: Callable[..., PrepareReport],
    inputs: Sequence[str | os.PathLike[str]] | InputFile,
    out: str | os.PathLike[str],
    staging: str | os.PathLike[str] | None,
    options: PrepareOptions,
    show: Show,
    *,
    rebuild: bool,
) -> PrepareReport:
    """Build a store whose inputs, or which itself, is in object storage; `build` builds it on a local disk."""
    copies = inputs if isinstance(inputs, InputFile) else local_inputs(inputs, staging, options, show)
    if not is_address(out):
        return build(copies, out=out, rebuild=rebuild)
    folder = staging_folder(str(out), staging, rebuild=rebuild)
    return _publish(build(copies, out=folder, rebuild=False, address=str(out)), folder, str(out), show)


def _publish(report: PrepareReport, folder: Path, address: str, show: Show) -> PrepareReport:
    """Upload the manifests of a build, remove its folder, and return the report with addresses for folders."""
    done_bytes = 0
    files = [file for store in report.stores for file in remaining_files(Path(store.path)).values()]
    size = sum(file.stat().st_size for file in files)
    stores = []
    with show("upload", size, lambda: (done_bytes, report.documents, report.tokens)) as tick:
        for store in report.stores:
            place = _below(address, store.route)
            done_bytes += upload_manifest(Path(store.path), place)
            tick()
            stores.append(replace(store, path=str(parse_address(place))))
    shutil.rmtree(folder)
    return replace(report, path=str(parse_address(address)), stores=stores)


def staging_folder(out: str, staging: str | os.PathLike[str] | None, *, rebuild: bool) -> Path:
    """Return where a store for an address is built; refuse an address that has one, unless its upload goes on."""
    address = parse_address(out)
    if rebuild:
        raise ConfigError(
            f"{address}: rebuild does not work for object storage, where other processes may read the "
            "store; choose another address"
        )
    name = f"{address.name}-{digest({'address': str(address), 'endpoint': address.endpoint})[:12]}"
    folder = _folder(staging) / name
    if not folder.exists():
        names = [info.name for info in Client(address).list()]
        if any(name == MANIFEST or name.endswith(f"/{MANIFEST}") for name in names):
            raise StoreExistsError(
                f"{address}: there is a store, and stores in object storage are not added to; choose "
                "another address, or prepare it on a disk and upload it"
            )
    return folder


def staging_parent(out: str | os.PathLike[str], staging: str | os.PathLike[str] | None) -> Path:
    """Return the folder in which the folder of a build is: that of `out`, or `staging` for an address."""
    return _folder(staging) if is_address(out) else Path(path_of("out", out)).expanduser().absolute().parent


def local_inputs(
    items: Sequence[str | os.PathLike[str]],
    staging: str | os.PathLike[str] | None,
    options: PrepareOptions,
    show: Show,
) -> Sequence[str | os.PathLike[str]]:
    """Return inputs with local copies in place of addresses; the copies stay, for files that are added later."""
    done_bytes, total_bytes = 0, 0
    with show("copy the inputs", lambda: total_bytes, lambda: (done_bytes, 0, 0)) as tick:

        def count(copied_bytes: int, total: int) -> None:
            nonlocal done_bytes, total_bytes
            done_bytes, total_bytes = copied_bytes, total
            tick()

        return copy_inputs(
            items,
            (_folder(staging) / "inputs").absolute(),
            is_known=lambda name: suffix_of(name, options.format) is not None,
            progress=count,
        )


def _folder(staging: str | os.PathLike[str] | None) -> Path:
    return FOLDER if staging is None else Path(path_of("staging", staging)).expanduser()


def _below(text: str, route: str) -> str:
    """Return an address with a name added to its path, before the query."""
    path, mark, query = text.partition("?")
    return f"{path.rstrip('/')}/{route}{mark}{query}" if route else text
