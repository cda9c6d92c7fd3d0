"""Reasons for which records are left out: the rule that a record breaks, and the way out.

Readers, recipes, chat templates and builds count bad records by these words. Stores keep the words, so they stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Reason(NamedTuple):
    """The rule that a record breaks, as an error message has it after the place, and the way out."""

    rule: str
    way_out: str


REASONS: Mapping[str, Reason] = {
    # Reading a record from its file.
    "json": Reason("a line must be one JSON object", "fix the line"),
    "utf8": Reason("a text must be UTF-8", "replace what is not Unicode by U+FFFD"),
    "surrogate": Reason(
        "a string must be Unicode text, without half of a surrogate pair", "replace lone surrogates by U+FFFD"
    ),
    "not_object": Reason("a record must be a JSON object", "write each record as an object with fields"),
    "missing_field": Reason(
        "a record must have the fields that are read",
        "name the fields in a recipe, or take the preset that has them with recipe=...",
    ),
    "not_text": Reason(
        "a text must be a string", "make the field a string, or add `template = true` if it holds messages"
    ),
    "too_long": Reason(
        "a record must not be larger than max_record_bytes", "shorten the record, or raise max_record_bytes=..."
    ),
    "csv": Reason("a row must be well-formed CSV", "fix the quotes of the row, or convert the file to JSONL"),
    "columns": Reason("a row must have as many cells as the header", "give the row one cell per column"),
    "value": Reason("a value must be one that Python has an object for", "write the value as text"),
    "duplicate": Reason("a record must have each field once", "leave out one of the two"),
    "broken": Reason("a file must be intact", "copy or download the file again, or repair it"),
    # Turning its fields into texts, messages and numbers.
    "not_messages": Reason(
        "a field with template must be a list of messages",
        "make the field a list of objects with `role` and `content`, or `from` and `value`",
    ),
    "two_systems": Reason(
        "a record must have one system prompt: a `system` field or a first system message",
        "leave out one of the two system prompts",
    ),
    "unknown_role": Reason(
        "the speaker of a message must be known",
        "call the speaker `human`, `gpt`, `system` or `tool`, or say in `names.roles` who it is",
    ),
    "tools": Reason(
        "tools must be a list of objects, or the JSON of one", "make `tools` a list of objects, or the JSON of one"
    ),
    "no_template": Reason(
        "messages must have a chat template", "set chat_template=...: `chatml`, or the path of a .jinja file"
    ),
    "not_number": Reason("rewards must be a list of numbers that fit float32", "make rewards numbers"),
    "empty_group": Reason(
        "a record must have at least one response", "give the record a response, or leave it out"
    ),
    "lengths_differ": Reason("a record must have as many rewards as responses", "give every response a reward"),
    "prompts_differ": Reason(
        "the chat template must write the same prompt before every response",
        "use a template that writes one prompt, whatever is answered",
    ),
    "prompt_too_long": Reason(
        "a prompt must not be longer than max_seq_len", "raise `max_seq_len`, or shorten the prompt"
    ),
    "map": Reason("the map function must keep the record", "nothing: the function left it out on purpose"),
    "map_failed": Reason(
        "the map function must return a record, a list of records, True, False or None",
        "fix the function or the record",
    ),
    "too_many_tokens": Reason(
        "a record must not be longer than max_seq_len", 'raise `max_seq_len`, or say `on_long = "drop"` or `"cut"`'
    ),
    "no_supervision": Reason(
        "a record must have a token to train on",
        "raise `max_seq_len` if the record was cut, else see that an answer has a text",
    ),
    "second_bos": Reason(
        "special tokens in a text must not make BOS twice in a row",
        'leave BOS out of the texts, or say `control_strings = "text"`',
    ),
    # Rendering a conversation.
    "no_messages": Reason("a conversation must be a list of messages", "give the record messages, or leave it out"),
    "role": Reason(
        "every message must be an object with a role that chat templates know",
        "use a role of chat templates, or name your own in `mask`",
    ),
    "flag": Reason(
        "what a message says of its training must be clear",
        "write `train: true` or `train: false`, and no other flag",
    ),
    "options": Reason(
        "the `chat_template_kwargs` of a record must be an object with names that the chat template reads",
        "leave out of `chat_template_kwargs` what the template does not read, or name the field otherwise",
    ),
    "media": Reason(
        "a message must hold nothing but text", "leave out images, sound and video: texts alone are stored"
    ),
    "parts": Reason(
        "a content in parts must be written as the texts of the parts", "write the content as one text"
    ),
    "not_json": Reason(
        "a conversation must hold nothing but JSON",
        "leave out values that JSON does not have, and keys that are not strings",
    ),
    "not_unicode": Reason("a message must be valid Unicode", "replace what is not Unicode by U+FFFD"),
    "template_error": Reason(
        "the chat template must take the conversation",
        "give the template what its message asks for, such as roles in turn, or use another",
    ),
    "too_large": Reason(
        "a chat template must not write more than 16,777,216 characters",
        "shorten the conversation, or use a simpler template",
    ),
    # Locating what is trained in the text of a conversation.
    "untracked": Reason(
        "of every character it must be known whether the chat template wrote it",
        "write the template without what changes a text unseen, such as `title`",
    ),
    "changed": Reason(
        "a text must be the same whether its characters are followed or not",
        "write the template without `safe` and what else makes another text",
    ),
    "no_trained_message": Reason(
        "a conversation must have a message to train on",
        "give the record an answer, or say in `mask` which roles are trained",
    ),
    "missing": Reason(
        "every message that is trained on must be written by the chat template",
        "use a template that writes tool calls or reasoning, or leave those out of the record",
    ),
    "rewritten": Reason("a message must be written once and in order", "use a template that writes an answer once"),
    "interleaved": Reason(
        "a message that is trained on must be written in one piece",
        "leave out the text next to the tool calls, or use a template with `{% generation %}`",
    ),
    "header": Reason(
        "it must be provable where a message that is trained on begins",
        "see that a user or a tool speaks before each answer, or use a template with `{% generation %}`",
    ),
    "end_of_turn": Reason(
        "it must be provable where a message that is trained on ends",
        "use a template that ends turns by a special token, or one with `{% generation %}`",
    ),
    "no_generation": Reason(
        "a chat template with generation blocks must reach one of them",
        "put `{% generation %}` around what the assistant says, in every branch of the template",
    ),
    "no_proof": Reason(
        "it must be provable which message a generation block belongs to",
        "leave out turns without a text, or put one `{% generation %}` around a whole turn",
    ),
    "overlap": Reason("the turns of two messages must not overlap", "put one `{% generation %}` around each turn"),
    "foreign": Reason(
        "what is trained on must be of the trained messages alone", "keep other messages out of `{% generation %}`"
    ),
    "uncovered": Reason(
        "all of a trained message must be trained on", "put all that the assistant says into `{% generation %}`"
    ),
    "straddles": Reason(
        "what is trained on must begin and end between two tokens",
        "end the header of a turn with a special token or a line end, not within a word",
    ),
    "bos": Reason(
        "a conversation must have one BOS at most, at its start",
        "let the template write BOS once, at the start, and leave add_bos=True out",
    ),
    "domain": Reason("the domain must be a name", "make the field of the domain a short string"),
}

NOTES: Mapping[str, str] = {
    "answers_cut": "an answer was cut off",
    "arguments_converted": "the template got arguments of tool calls in another form than the record has",
    "content_not_written": "the template leaves out the content of a message, or a part of it",
    "empty_answers": "an answer without a text is trained as its end-of-turn token alone",
    "equal_pair": "chosen and rejected have the same tokens",
    "flags_of_training": "messages say themselves whether they are trained on",
    "kept_field_missing": "a field to keep is missing",
    "reasoning_dropped": "the template leaves out the reasoning of a message",
    "system_field": "the system text was taken from a field of its own",
    "system_prompt_not_read": "nothing reads the field `system_prompt`; name it with `names.fields` of a recipe",
    "tool_calls_not_written": "the template leaves out tool calls",
    "tools_not_written": "the template does not write the tools of the record",
    "unanswered": "the last message is a question without an answer",
}
"""Observation about stored records, which is counted -> its meaning."""
