"""Token ids on disk.

1. In: the tokens of documents, in order, as flat arrays with offsets; or files that other projects wrote.
2. Does: writes them as shards of flat little-endian files, each with a checksum, and a manifest last;
   opens a store by reading its manifest alone; maps files when tokens are asked for, a bounded number at a time.
3. Out: any run of tokens or any document, as arrays; addresses for the kernels of `packing` and `loader`.

`docs/format.md` is the byte layout.
"""

from tokenmill.store.foreign.convert import ImportReport, import_store
from tokenmill.store.foreign.export import ExportReport, export_store
from tokenmill.store.foreign.files import ForeignOptions, detect_format
from tokenmill.store.layout import Manifest, ShardInfo, read_manifest
from tokenmill.store.origins import Origin
from tokenmill.store.reader import Store, open_store
from tokenmill.store.verify import VerifyReport, check_store, verify
from tokenmill.store.writer import StoreSpec, StoreWriter

__all__ = [
    "ExportReport",
    "ForeignOptions",
    "ImportReport",
    "Manifest",
    "Origin",
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
