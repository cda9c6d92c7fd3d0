"""The control strings of a tokenizer, and the white space around them that goes with them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tokenmill.errors import ConfigError

if TYPE_CHECKING:
    import numpy.typing as npt

Ids: TypeAlias = "npt.NDArray[np.uint32]"

BLANKS = frozenset("\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000") | set(
    map(chr, range(0x2000, 0x200B))
)
"""White space to Hugging Face tokenizers; Python takes four control characters for it as well."""
_LOCAL = ("NFC", "NFD", "NFKC", "NFKD", "Lowercase")
"""Normalizers under which a control string is found wherever it stands, and which change nothing around it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Habit:
    """What a tokenizer's files say of a control string beyond its id."""

    lstrip: bool = False
    """Whether it takes the white space before it away."""
    rstrip: bool = False
    """Whether it takes the white space behind it away."""
    unlike: str = ""
    """What else it does that is not done here: a conversation that needs it raises `ConfigError`."""


def read_habits(tokenizer: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Habit]:
    """Return the added tokens of a `tokenizer.json` that are more to a template than a string and an id.

    Where the `tokenizer_config.json` beside it lists a control string, that counts, as it does for transformers.
    """
    added = {token["content"]: token for token in tokenizer.get("added_tokens") or []}
    listed = config.get("added_tokens_decoder")
    tokens = listed.values() if isinstance(listed, dict) else ()
    said = {token["content"]: token for token in tokens if isinstance(token, dict) and "content" in token}
    local = _is_local(tokenizer.get("normalizer"))
    made: dict[str, Habit] = {}
    for name in sorted({**added, **said}):
        known, token = added.get(name), said.get(name, added.get(name, {}))
        if known is None:
            made[name] = Habit(unlike="is a token by tokenizer_config.json alone")
        elif known.get("special"):
            made[name] = _habit(token, local)
        elif _habit(token, True) != _habit(known, True):
            # No control string: the engine finds it, and reads tokenizer.json only.
            made[name] = Habit(unlike="takes other white space away than tokenizer.json says")
    return {name: habit for name, habit in made.items() if habit != Habit()}


def _habit(token: Mapping[str, Any], local: bool) -> Habit:
    unlike = "stands only as a word of its own (single_word)" if token.get("single_word") else ""
    if token.get("normalized") and not local:
        unlike = "is looked for in normalized text (normalized)"
    return Habit(lstrip=bool(token.get("lstrip")), rstrip=bool(token.get("rstrip")), unlike=unlike)


def _is_local(normalizer: Mapping[str, Any] | None) -> bool:
    if normalizer is None or normalizer.get("type") in _LOCAL:
        return True
    return normalizer.get("type") == "Sequence" and all(map(_is_local, normalizer["normalizers"]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Control:
    """A control string that stands in a text, with the white space that it takes away."""

    begin: int
    end: int
    at: int
    """First character of the string itself."""
    stop: int
    """One after its last."""
    ids: Ids
    """Its id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Controls:
    """Finds the control strings of a tokenizer."""

    ids: Mapping[str, Ids]
    habits: Mapping[str, Habit]
    where: str
    _pattern: re.Pattern[str] | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # The first that stands somewhere, and of those that start together the longest, as Hugging Face does.
        odd = [name for name, habit in self.habits.items() if habit.unlike]
        names = sorted({*self.ids, *odd} - {""}, key=lambda name: (-len(name), name))
        object.__setattr__(self, "_pattern", re.compile("|".join(map(re.escape, names))) if names else None)

    @classmethod
    def of(cls, special_ids: Mapping[str, int], habits: Mapping[str, Habit], where: str) -> Controls:
        """Make one for a tokenizer."""
        ids = {name: np.array([id_], np.uint32) for name, id_ in special_ids.items()}
        return cls(ids=ids, habits=habits, where=where)

    def find(self, text: str, ranges: Iterable[tuple[int, int]]) -> list[Control]:
        """Return the control strings that lie within one of the ranges; white space around them may go beyond."""
        found: list[Control] = []
        done = 0
        for first, last in ranges if self._pattern is not None else ():
            assert self._pattern is not None
            for match in self._pattern.finditer(text, first, last):
                (begin, end), name = match.span(), match.group()
                if name in self.habits:
                    begin, end = self._with_blanks(text, done, match, self.habits[name])
                at, stop = match.span()
                found.append(Control(begin=begin, end=end, at=at, stop=stop, ids=self.ids[name]))
                done = end
        return found

    def _with_blanks(self, text: str, done: int, match: re.Match[str], habit: Habit) -> tuple[int, int]:
        if habit.unlike:
            raise ConfigError(
                f"chat template {self.where}: what it writes must have the ids that transformers gives, got "
                f"{match.group()!r}, which by the tokenizer's files {habit.unlike}; "
                "change that in a copy of the files, and use the copy wherever the model is used"
            )
        begin, end = match.span()
        while habit.lstrip and begin > done and text[begin - 1] in BLANKS:
            begin -= 1
        while habit.rstrip and end < len(text) and text[end] in BLANKS:
            end += 1
        return begin, end
