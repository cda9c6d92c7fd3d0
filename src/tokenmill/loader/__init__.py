"""Rows to arrays, for one rank.

1. In: a compiled plan of stored or live rows, a layout of ranks, and a micro-batch size.
2. Does: computes the rows of the rank's slice, finds their spans, and copies them into arrays by kernels that
   release the GIL, ahead of the caller with threads.
3. Out: dicts of arrays, in order, or of any step of stored rows; a small state; digests.
"""

from tokenmill.loader.attribution import NO_DOCUMENT, Attribution
from tokenmill.loader.buffers import RECORD_ARRAYS
from tokenmill.loader.digests import DIGEST_ARRAYS, batch_digest, count_tokens, row_digests, stack
from tokenmill.loader.kernels import IGNORE
from tokenmill.loader.layout import Layout, RankSlice
from tokenmill.loader.loader import Loader, usual_arrays
from tokenmill.loader.options import LoaderOptions
from tokenmill.types import ARRAYS

__all__ = [
    "ARRAYS",
    "DIGEST_ARRAYS",
    "IGNORE",
    "NO_DOCUMENT",
    "RECORD_ARRAYS",
    "Attribution",
    "Layout",
    "Loader",
    "LoaderOptions",
    "RankSlice",
    "batch_digest",
    "count_tokens",
    "row_digests",
    "stack",
    "usual_arrays",
]
