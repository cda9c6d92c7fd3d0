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
<<<<<<< Updated upstream
from tokenmill.reasons import REASONS
=======

RULES: Mapping[str, str] = {
    # What a recipe asks of a record.
    "missing_field": "a record must have the fields of the recipe",
    "not_text": "a field without template must be a string",
    "not_messages": "a field with template must be a list of messages",
    "two_systems": "a record must have one text of the system, in a field of its own or as the first message",
    "unknown_role": "the speaker of a message must be known",
    "tools": "tools must be a list of objects, or the JSON of one",
    "no_template": "messages must have a chat template",
    "not_number": "rewards must be a list of numbers that fit float32",
    "empty_group": "a record must have at least one response",
    "lengths_differ": "a record must have as many rewards as responses",
    "prompts_differ": "the chat template must write the same prompt before every response",
    "prompt_too_long": "a prompt must not be longer than max_seq_len",
    "map": "the map function must keep the record",
    "map_failed": "the map function must return a record, a list of records, True, False or None",
    "too_many_tokens": "a record must not be longer than max_seq_len",
    "no_supervision": "a record must have a token to train on",
    "second_bos": "control strings in a text must not make BOS twice in a row",
    "utf8": "text must be valid Unicode",
    # What a chat template asks of a conversation.
    "no_messages": "a conversation must be a list of messages",
    "role": "every message must be an object with a role that chat templates know",
    "flag": "what a message says of its training must be clear",
    "options": "the `chat_template_kwargs` of a record must be an object with names that the chat template reads",
    "media": "a message must hold nothing but text",
    "parts": "a content in parts must be written as the texts of the parts",
    "not_json": "a conversation must hold nothing but JSON",
    "not_unicode": "a message must be valid Unicode",
    "template_error": "the chat template must take the conversation",
    "too_large": "a chat template must not write more than 16,777,216 characters",
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

WAYS_OUT: Mapping[str, str] = {
    "missing_field": "name the fields in a recipe, or take the preset that has them with recipe=...",
    "not_text": "make the field a string, or add `template = true` if it holds messages",
    "not_messages": "make the field a list of objects with `role` and `content`, or `from` and `value`",
    "two_systems": "leave one of the two texts of the system",
    "unknown_role": "call the speaker `human`, `gpt`, `system` or `tool`, or say in `names.roles` who it is",
    "tools": "make `tools` a list of objects, or the JSON of one",
    "no_template": "set chat_template=...: `chatml`, or the path of a .jinja file",
    "not_number": "make rewards numbers",
    "empty_group": "give the record a response, or leave it out",
    "lengths_differ": "give every response a reward",
    "prompts_differ": "use a template that writes one prompt, whatever is answered",
    "prompt_too_long": "raise `max_seq_len`, or shorten the prompt",
    "map": "nothing: the function left it out on purpose",
    "map_failed": "fix the function or the record",
    "too_many_tokens": 'raise `max_seq_len`, or say `on_long = "drop"` or `"cut"`',
    "no_supervision": "raise `max_seq_len` if the record was cut, else see that an answer has a text",
    "second_bos": 'leave BOS out of the texts, or say `control_strings = "text"`',
    "utf8": "replace what is no Unicode by U+FFFD",
    "no_messages": "give the record messages, or leave it out",
    "role": "use a role of chat templates, or name your own in `mask`",
    "flag": "write `train: true` or `train: false`, and no other flag",
    "options": "leave out of `chat_template_kwargs` what the template does not read, or name the field otherwise",
    "media": "leave out images, sound and video: texts alone are stored",
    "parts": "write the content as one text",
    "not_json": "leave out values that JSON does not have, and keys that are no strings",
    "not_unicode": "replace what is no Unicode by U+FFFD",
    "template_error": "give the template what its message asks for, such as roles in turn, or use another",
    "too_large": "shorten the conversation, or use a simpler template",
    "untracked": "write the template without what changes a text unseen, such as `title`",
    "changed": "write the template without `safe` and what else makes another text",
    "no_trained_message": "give the record an answer, or say in `mask` which roles are trained",
    "missing": "use a template that writes tool calls or reasoning, or leave those out of the record",
    "rewritten": "use a template that writes an answer once",
    "interleaved": "leave out the text beside the tool calls, or use a template with `{% generation %}`",
    "header": "see that a user or a tool speaks before each answer, or use a template with `{% generation %}`",
    "end_of_turn": "use a template that ends turns by a control string, or one with `{% generation %}`",
    "no_generation": "put `{% generation %}` around what the assistant says, in every branch of the template",
    "no_proof": "leave out turns without a text, or put one `{% generation %}` around a whole turn",
    "overlap": "put one `{% generation %}` around each turn",
    "foreign": "keep other messages out of `{% generation %}`",
    "uncovered": "put all that the assistant says into `{% generation %}`",
    "straddles": "end the header of a turn with a control string or a line end, not within a word",
    "bos": "let the template write BOS once, before everything else, and leave add_bos=True out",
}
"""Reason -> what to do about it."""

NOTES: Mapping[str, str] = {
    "answers_cut": "an answer was cut off",
    "arguments_converted": "the template got arguments of tool calls in another form than the record has",
    "content_not_written": "the template leaves out the content of a message, or a part of it",
    "empty_answers": "an answer without a text is trained on, as a bare end of turn",
    "flags_of_training": "messages say themselves whether they are trained on",
    "reasoning_dropped": "the template leaves out the reasoning of a message",
    "system_field": "the system text was taken from a field of its own",
    "system_prompt_not_read": "nothing reads the field `system_prompt`; name it with `names.fields` of a recipe",
    "tool_calls_not_written": "the template leaves out tool calls",
    "tools_not_written": "the template does not write the tools of the record",
}
"""What is counted of records that are stored -> what it means."""
>>>>>>> Stashed changes


class Refusal(DocumentError):
    """A record that cannot be encoded: its reason, one of `REASONS`, and the detail."""

    def __init__(self, reason: str, detail: str) -> None:
        assert reason in REASONS, reason
        super().__init__(f"record: refused as {reason}: {detail}")
        self.reason = reason
        self.detail = detail
