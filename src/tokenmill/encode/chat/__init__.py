"""Conversations to ids and a loss mask: one render of a chat template, and ranges that are checked on it.

1. In: conversations (messages, tools, options of the template); a chat template: a `.jinja` file, that of a
   tokenizer's folder, or `"chatml"` (`template`); an open tokenizer.
2. Does: renders a conversation in a sandbox (`template`) with strings that record the origin of each character
   (`tracked`, `conversation`). Finds each turn by its header and its end, learned once from short samples, or by
   renders of parts of the conversation (`turns`). Checks that the trained ranges hold all characters of the trained
   messages and no others (`render`). Places special tokens only where the template wrote them (`tokens`). Limits
   the time and memory of templates in worker processes (`limits`, `sample`).
3. Out: `ChatEncoded`: ids, a mask of the same length, every rejected conversation with the reason, and notes of
   everything that the template did not write. A mask that cannot be verified is rejected, never guessed.
"""
