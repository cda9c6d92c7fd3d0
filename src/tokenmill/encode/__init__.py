"""Text to ids: tokenizers behind one small protocol.

1. In: the text of documents, as `str`; and what names a tokenizer: `"bytes"`, a `tokenizer.json`, a `.model`, a
   folder that holds one, `"tiktoken:<rank file>"`.
2. Does: reads the files of the tokenizer (`files`), opens it and proves its fast engine against the reference
   (`engines`), encodes batches of texts, and places BOS and EOS (`tokenizer`). Control strings in raw text are
   ordinary text (`control`). `recipe/` and `chat/` do the same for records and conversations.
3. Out: `Encoded`, flat ids of the smallest unsigned dtype with offsets; and `TokenizerIdentity`, which says when
   two ids mean the same. A record that cannot be encoded is a `Refusal`, by one of `RULES`.
"""

from __future__ import annotations

from collections.abc import Mapping

from tokenmill.errors import DocumentError

RULES: Mapping[str, str] = {
    # What a recipe asks of a record.
    "missing_field": "a record must have the fields of the recipe",
    "not_text": "a field without template must be a string",
    "not_messages": "a field with template must be a list of messages",
    "unknown_role": "the speaker of a message must be known",
    "tools": "tools must be a list of objects, or the JSON of one",
    "no_template": "messages must have a chat template",
    "not_number": "rewards must be a list of numbers that fit float32",
    "empty_group": "a record must have at least one response",
    "lengths_differ": "a record must have as many rewards as responses",
    "prompts_differ": "the chat template must write the same prompt before every response",
    "prompt_too_long": "a prompt must not be longer than max_seq_len",
    "no_supervision": "a record must have a token to train on",
    "second_bos": "control strings in a text must not make BOS twice in a row",
    "utf8": "text must be valid Unicode",
    # What a chat template asks of a conversation.
    "no_messages": "a conversation must be a list of messages",
    "role": "every message must be an object with a role that chat templates know",
    "flag": "what a message says of its training must be clear",
    "media": "a message must hold nothing but text",
    "parts": "a content in parts must be written as the texts of the parts",
    "not_json": "a conversation must hold nothing but JSON",
    "not_unicode": "a message must be valid Unicode",
    "template_error": "the chat template must take the conversation",
    "too_many_steps": "a chat template must not work longer than a render may",
    "too_large": "a chat template must not make more than a render may hold",
    # What must be provable of the text that a chat template writes.
    "untracked": "of every character it must be known whether the chat template wrote it",
    "changed": "a text must be the same whether its characters are followed or not",
    "no_trained_message": "a conversation must have a message to train on",
    "missing": "every message that is trained on must be written by the chat template",
    "rewritten": "a message must be written once and in order",
    "interleaved": "a message that is trained on must be written in one piece",
    "header": "it must be provable where a message that is trained on begins",
    "end_of_turn": "it must be provable where a message that is trained on ends",
    "no_generation": "a chat template with generation blocks must reach one of them",
    "no_proof": "it must be provable which message a generation block belongs to",
    "overlap": "the turns of two messages must not overlap",
    "foreign": "what is trained on must be of the trained messages alone",
    "uncovered": "all of a trained message must be trained on",
    "straddles": "what is trained on must begin and end between two tokens",
    "bos": "a conversation must have one BOS at most, at its start",
}
"""Reason for which a record is refused -> the rule that it breaks."""


class Refusal(DocumentError):
    """A record that cannot be encoded: a word to count by, and what is so."""

    def __init__(self, reason: str, detail: str) -> None:
        assert reason in RULES, reason
        super().__init__(f"record: refused as {reason}: {detail}")
        self.reason = reason
        self.detail = detail
