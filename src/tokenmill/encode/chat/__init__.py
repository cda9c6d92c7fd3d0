"""Conversations to ids and a loss mask: one render of a chat template, and spans that are proven on it.

1. In: conversations (messages, tools, options of the template); a chat template: a `.jinja` file, that of a
   tokenizer's folder, or `"chatml"` (`template`); an open tokenizer.
2. Does: renders a conversation in a sandbox (`template`) with strings that know where each character came from
   (`tracked`); compares renders that stop before or behind a message (`conversation`), mostly those of a short
   conversation of the same kind (`sample`); finds and proves what the assistant has to produce (`render`). What was
   found once is used again for messages of the same kind, where the template treats them alike (`patterns`). Places
   control ids only where the template wrote them (`tokens`).
3. Out: `ChatEncoded`: ids, a mask of the same length, every conversation that was refused, with why, and what the
   template did not write of the others. What cannot be proven is refused, never masked by guess.
"""
