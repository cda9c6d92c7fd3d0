"""Rows as spans of documents.

1. In: an open store and a sequence length T.
2. Does: says which spans of which documents make up each row of T + 1 tokens; tokens are never rewritten, so one
   store serves any T.
3. Out: a row index: number of rows, the spans of any rows, the rows of any document, what is dropped.
4. Must not know: the order in which rows are read, ranks, or what a batch delivers.
"""

from tokenmill.packing.concat import ConcatRows

__all__ = ["ConcatRows"]
