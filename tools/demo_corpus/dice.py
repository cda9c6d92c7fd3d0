"""Draws that are the same on every machine and every Python version, and templates filled in by them."""

import random
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

T = TypeVar("T")

SLOT = re.compile(r"\{(\w+)\}")
# "a useful", "a European", "a one-way": spelled with a vowel, spoken with a consonant.
A_BEFORE_VOWEL = re.compile(r"\b([Aa]) (?=[aeiouAEIOU])(?!use|uni|eu|Eu|one\b|one-)")

LENGTHS = (
    # of a hundred documents, shortest and longest wanted length in characters: roughly log-normal
    (16, 20, 90),
    (37, 90, 200),
    (30, 200, 400),
    (12, 400, 800),
    (2, 800, 1_600),
    (2, 1_600, 4_500),
    (1, 5_000, 9_500),
)
HUNDRED = tuple((low, high) for share, low, high in LENGTHS for _ in range(share))


def items(text: str) -> tuple[str, ...]:
    r"""Split a block at its empty lines; the lines of one item are joined by spaces.

    >>> items("one\nitem\n\nanother")
    ('one item', 'another')
    """
    return tuple(" ".join(block.split()) for block in text.strip().split("\n\n"))


def words(text: str) -> tuple[str, ...]:
    """Split a comma-separated list.

    >>> words("oats, winter rye")
    ('oats', 'winter rye')
    """
    return tuple(" ".join(word.split()) for word in text.split(","))


def scenes(text: str) -> tuple[str, ...]:
    """Split a block at lines of `---`, keeping the line breaks inside each scene."""
    return tuple(scene.strip("\n") for scene in text.strip("\n").split("\n---\n"))


class Dice:
    """A seeded source of choices that goes through all of a list before it repeats any of it."""

    def __init__(self, seed: str, vocabulary: Mapping[str, tuple[str, ...]]) -> None:
        # Of all methods of Random only random() promises the same numbers in every Python version.
        self._random = random.Random(seed).random
        self._vocabulary = vocabulary
        self._decks: dict[tuple[object, ...], list[int]] = {}
        self._last: dict[tuple[object, ...], int] = {}

    def below(self, n: int) -> int:
        """Return an integer from 0 to n, n exclusive."""
        return int(self._random() * n)

    def between(self, low: int, high: int) -> int:
        """Return an integer from low to high, both inclusive."""
        return low + self.below(high - low + 1)

    def chance(self, share: float) -> bool:
        """Return true in this share of calls."""
        return self._random() < share

    def shuffled(self, sequence: tuple[T, ...]) -> list[T]:
        """Return the same things in another order."""
        rest = list(sequence)
        return [rest.pop(self.below(len(rest))) for _ in sequence]

    def draw(self, sequence: tuple[T, ...]) -> T:
        """Return one of a list; none comes twice before all have come once, nor twice in a row."""
        deck = self._decks.get(sequence)
        if not deck:
            deck = self.shuffled(tuple(range(len(sequence))))
            if deck[-1] == self._last.get(sequence):
                deck.reverse()
            self._decks[sequence] = deck
        self._last[sequence] = deck.pop()
        return sequence[self._last[sequence]]

    def some(self, sequence: tuple[T, ...], count: int) -> list[T]:
        """Return `count` different things of a list."""
        return self.shuffled(sequence)[:count]

    def wanted_length(self) -> int:
        """Return how long the next document should be, in characters."""
        return self.between(*self.draw(HUNDRED))

    def fill(self, template: str, bound: Mapping[str, str] | None = None) -> str:
        """Put a word into every `{slot}`: the bound one, or a drawn one; `{Slot}` starts it with a capital."""
        given = bound or {}

        def word(match: re.Match[str]) -> str:
            slot = match[1]
            name = slot[0].lower() + slot[1:]
            found = given[name] if name in given else self.draw(self._vocabulary[name])
            found = self.fill(found, given)
            return found[0].upper() + found[1:] if slot != name else found

        return A_BEFORE_VOWEL.sub(r"\1n ", SLOT.sub(word, template))


def endless(make: Callable[[], str]) -> Iterator[str]:
    """Yield what `make` returns, again and again."""
    while True:
        yield make()


def grow(pieces: Iterator[str], length: int, between: str) -> str:
    """Join pieces until they are `length` characters long or used up; there is always at least one."""
    text = next(pieces)
    while len(text) < length and (piece := next(pieces, None)) is not None:
        text += between + piece
    return text
