"""Why a conversation cannot be encoded, and how much work a template may do for one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from tokenmill.errors import DocumentError

ROLES = (
    *("system", "developer", "user", "assistant", "tool", "function"),
    *("ipython", "observation", "model", "chatbot"),
)
"""What chat templates know: they write the role into their control strings, so a role is no free text."""
RULES: Mapping[str, str] = {
    "no_messages": "a conversation must be a list of messages",
    "role": "every message must be an object with a role that chat templates know",
    "media": "a message must hold nothing but text",
    "parts": "a content in parts must be written as the texts of the parts",
    "not_json": "a conversation must hold nothing but JSON",
    "not_unicode": "a message must be valid Unicode",
    "options": "an option must not replace what the chat template is given",
    "template_error": "the chat template must take the conversation",
    "too_many_steps": "a chat template must not work longer than a render may",
    "too_large": "a chat template must not make more than a render may hold",
    "untracked": "of every character it must be known whether the chat template wrote it",
    "changed": "a text must be the same whether its characters are followed or not",
    "no_trained_message": "a conversation must have a message to train on",
    "no_supervision": "a record must have a token to train on",
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
"""Reason for which a conversation is refused -> the rule it breaks."""
MAX_STEPS = 2_000_000
"""Loop rounds and blocks of 256 characters that one render may take; a call counts as 16."""
MAX_CHARS = 1 << 24
"""Characters that one string of a render may have."""

_left: ContextVar[list[int]] = ContextVar("steps left")


class Refusal(DocumentError):
    """A conversation that cannot be encoded: a word to count by, and what happened."""

    def __init__(self, reason: str, detail: str) -> None:
        assert reason in RULES, reason
        super().__init__(f"conversation: refused as {reason}: {detail}")
        self.reason = reason
        self.detail = detail


@contextmanager
def budget(steps: int = MAX_STEPS) -> Iterator[None]:
    """Give a render so many steps; nothing is counted outside of one."""
    token = _left.set([steps])
    try:
        yield
    finally:
        _left.reset(token)


def charge(steps: int = 1) -> None:
    """Take steps from the budget; refuse when it is used up."""
    # A list, so that to count is not to set a context variable, which costs more than the string it is for.
    left = _left.get(None)
    if left is not None:
        left[0] -= steps
        if left[0] < 0:
            raise Refusal("too_many_steps", "the template takes more steps than a render may")


def charge_size(num_chars: int) -> None:
    """Take the cost of making a string or list of this length; refuse one that is too long."""
    if num_chars > MAX_CHARS:
        raise Refusal("too_large", f"the template makes {num_chars} characters or items, over {MAX_CHARS}")
    charge(1 + num_chars // 256)


def charge_join(num_chars: int, num_parts: int) -> None:
    """Take the cost of a string that is made of parts, or of the parts of a string."""
    if num_chars > MAX_CHARS:
        raise Refusal("too_large", f"the template makes {num_chars} characters or items, over {MAX_CHARS}")
    charge(1 + num_parts + num_chars // 256)
