"""Text to ids: tokenizers behind one small protocol.

1. In: the text of documents, as `str`; and what names a tokenizer: `"bytes"`, a `tokenizer.json`, a `.model`, a
   folder that holds one, `"tiktoken:<rank file>"`.
2. Does: reads the files of the tokenizer (`files`), opens it and proves its fast engine against the reference
   (`engines`), encodes batches of texts, and places BOS and EOS (`tokenizer`). Control strings in raw text are
   ordinary text. `recipe/` and `chat/` do the same for records and conversations.
3. Out: `Encoded`, flat ids of the smallest unsigned dtype with offsets; and `TokenizerIdentity`, which says when
   two ids mean the same. A record that cannot be encoded is a `Refusal`, by one of `reasons.REASONS`.
"""

from __future__ import annotations

from tokenmill.errors import DocumentError
from tokenmill.reasons import REASONS


class Refusal(DocumentError):
    """A record that cannot be encoded: its reason, one of `REASONS`, and the detail."""

    def __init__(self, reason: str, detail: str) -> None:
        assert reason in REASONS, reason
        super().__init__(f"record: refused as {reason}: {detail}")
        self.reason = reason
        self.detail = detail
