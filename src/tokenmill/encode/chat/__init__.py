"""Conversations to ids and a loss mask: one render of a chat template, and spans that are proven on it.

1. In: conversations (messages, tools, options of the template); a chat template: a `.jinja` file, that of
   a tokenizer's folder, or `"chatml"`; an open tokenizer.
2. Does: renders each conversation in a sandbox (`sandbox`) with strings that know where each character came from
   (`tracked`); finds what the assistant has to produce (`spans`), by `{% generation %}` blocks or by comparing
   renders (`turns`) that are mostly those of a short conversation of the same kind (`sample`); places control ids
   only where the template wrote them (`tokens`), with the white space that goes with them (`controls`).
3. Out: `ChatEncoded`: ids, a mask of the same length, every conversation that was refused, with why, and how
   many lost something that the template does not write (`losses`). What cannot be proven is refused, never masked
   by guess.
"""

from tokenmill.encode.chat.render import ROLES
from tokenmill.encode.chat.tokens import ChatEncoder, Conversation

__all__ = ["ROLES", "ChatEncoder", "Conversation"]
