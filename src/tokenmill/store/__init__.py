"""Token ids on disk.

1. In: the tokens of documents, in order, as flat arrays with offsets; or files that other projects wrote.
2. Does: writes them as shards of flat little-endian files, each with a checksum, and a manifest last;
   opens a store by reading its manifest alone; maps files when tokens are asked for, a bounded number at a time.
3. Out: any run of tokens or any document, as arrays; addresses for the kernels of `packing` and `loader`.

`docs/reference/store-format.md` is the byte layout.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from tokenmill.store.layout import Manifest, ShardInfo, read_manifest
from tokenmill.store.opening import open_store
from tokenmill.store.origins import Origin
from tokenmill.store.records import Record, RecordSlice
from tokenmill.store.store import Store
from tokenmill.store.verify import VerifyReport, check_store, verify
from tokenmill.store.writer import StoreSpec, StoreWriter

if TYPE_CHECKING:
    from tokenmill.store.foreign.convert import ImportReport, import_store
    from tokenmill.store.foreign.export import ExportReport, export_store
    from tokenmill.store.foreign.files import ForeignOptions, detect_format

# Imported late: stores of ours need none of it, and it is a third of what this room takes to load.
_FOREIGN = {
    "ExportReport": "export",
    "ForeignOptions": "files",
    "ImportReport": "convert",
    "detect_format": "files",
    "export_store": "export",
    "import_store": "convert",
}

__all__ = [
    "ExportReport",
    "ForeignOptions",
    "ImportReport",
    "Manifest",
    "Origin",
    "Record",
    "RecordSlice",
    "ShardInfo",
    "Store",
    "StoreSpec",
    "StoreWriter",
    "VerifyReport",
    "check_store",
    "detect_format",
    "export_store",
    "import_store",
    "open_store",
    "read_manifest",
    "verify",
]


def __getattr__(name: str) -> object:
    if name not in _FOREIGN:
        raise AttributeError(f"module 'tokenmill.store' has no attribute {name!r}")
    return getattr(import_module(f"tokenmill.store.foreign.{_FOREIGN[name]}"), name)
