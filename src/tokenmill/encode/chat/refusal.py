"""Why a conversation cannot be encoded, and how much work a template may do for one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tokenmill.errors import DocumentError

MAX_STEPS = 2_000_000
"""Loop rounds and blocks of 256 characters that one render may take; a call counts as 16."""
MAX_CHARS = 1 << 24
"""Characters that one string of a render may have."""

_left: ContextVar[list[int]] = ContextVar("steps left")


class Refusal(DocumentError):
    """A conversation that cannot be encoded: a word to count by, and what happened."""

    def __init__(self, reason: str, detail: str) -> None:
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
            raise Refusal("too_long", "the template takes more steps than a render may")


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
