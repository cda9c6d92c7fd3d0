"""Text to ids: tokenizers behind one small protocol.

1. In: the text of documents, as `str`; and what names a tokenizer: `"bytes"`, a `tokenizer.json` or a folder that
   holds one, `"tiktoken:<rank file>"`.
2. Does: reads the files of the tokenizer (`files`), opens it and proves its fast engine against the reference
   (`engines`), encodes batches of texts, and places BOS and EOS (`frame`). Control strings in raw text are ordinary
   text. `recipe/` and `chat/` do the same for records and conversations.
3. Out: `Encoded`, flat ids of the smallest unsigned dtype with offsets; and `TokenizerIdentity`, which says when
   two ids mean the same.
"""
