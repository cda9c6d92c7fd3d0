"""Rows as spans of documents.

1. In: an open store, a sequence length T, a policy, and the quarantined documents. The policies are `concat` (the
   stream, cut), `best_fit` (whole documents, packed in windows), `bos_best_fit` (every row starts with BOS and is
   full) and `padded` (one document per row).
2. Does: finds the spans of each row of T + 1 tokens. Tokens are never rewritten, so one store serves any T.
   `concat` is closed form. The others pack windows of documents into an index of a few bytes per document. When T
   or the policy changes within an epoch, the rest of it is packed again (`following`). A record of DPO pairs or
   GRPO groups is a row. Without quarantined documents, rows are those of a store that never had them.
3. Out: a row index: number of rows, the spans of any row, the rows of any document, and the fate of every token.
"""

from tokenmill.packing.concat import ConcatRows
from tokenmill.packing.packers import Policy
from tokenmill.packing.records import RecordRows
from tokenmill.packing.rows import PackedRows, pack_rows

__all__ = ["ConcatRows", "PackedRows", "Policy", "RecordRows", "pack_rows"]
