"""Rows as spans of documents.

1. In: an open store, a sequence length T, and a policy: `concat` (the stream, cut), `best_fit` (whole documents,
   packed in windows), `bos_best_fit` (every row starts with BOS and is full), `padded` (a document a row); and
   which documents are quarantined, if any.
2. Does: says which spans of which documents make up each row of T + 1 tokens. Tokens are never rewritten, so one
   store serves any T. `concat` is closed form; the others pack windows of documents, each a function of its lengths
   alone, into an index of a few bytes a document. When T or the policy changes in the middle of an epoch, what is
   left of it is packed anew (`following`). A store of DPO pairs or GRPO groups is not packed: a record is a row.
   Without quarantined documents the rows are those of a store that never had them, and the rest lacks them too.
3. Out: a row index: number of rows, the spans of any rows, the rows of any document, and what every token comes to.
"""

from tokenmill.packing.concat import ConcatRows
from tokenmill.packing.packers import Policy
from tokenmill.packing.records import RecordRows
from tokenmill.packing.rows import PackedRows, pack_rows

__all__ = ["ConcatRows", "PackedRows", "Policy", "RecordRows", "pack_rows"]
