"""Pieces of an SVG picture: text that is safe in XML, ticks, colours, and labels that do not overlap."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, log10

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999")
"""Of Okabe and Ito, told apart by readers of every colour vision, and a grey."""
ON_COLOURS = ("#ffffff", "#000000", "#ffffff", "#000000", "#000000", "#000000", "#000000", "#000000")
"""What is read best on each."""
TEXTURES = (
    "",
    '<path d="M-1 1l2-2M0 6l6-6M5 7l2-2" class="tm-texture"/>',
    '<circle cx="3" cy="3" r="1.1" class="tm-dot"/>',
    '<path d="M0 3h6" class="tm-texture"/>',
    '<path d="M3 0v6" class="tm-texture"/>',
    '<path d="M-1 5l2 2M0 0l6 6M5-1l2 2" class="tm-texture"/>',
    '<path d="M0 3h6M3 0v6" class="tm-texture"/>',
)
"""Laid over the colours where there are more sources than colours."""


def colour(number: int) -> str:
    """Return the colour of a source."""
    return COLOURS[number % len(COLOURS)]


def texture(number: int) -> int:
    """Return which texture a source has; 0 is none."""
    return number // len(COLOURS) % len(TEXTURES)


def patterns(sources: int) -> str:
    """Return the textures that so many sources need, as definitions."""
    used = sorted({texture(number) for number in range(sources)} - {0})
    size = 'width="6" height="6" patternUnits="userSpaceOnUse"'
    return "".join(f'<pattern id="tm-p{one}" {size}>{TEXTURES[one]}</pattern>' for one in used)


def text_of(value: str) -> str:
    """Return a text as XML may hold it: escaped, and without characters that XML forbids.

    >>> text_of("a<b" + chr(27))
    'a&lt;b\ufffd'
    """
    allowed = "".join(
        character if character in "\t\n" or _is_allowed(ord(character)) else "\ufffd" for character in value
    )
    return escape(allowed)


def _is_allowed(code: int) -> bool:
    return 0x20 <= code < 0x7F or 0xA0 <= code <= 0xD7FF or 0xE000 <= code <= 0xFFFD or code >= 0x10000


def number(value: float) -> str:
    """Return a coordinate, short.

    >>> number(12.0), number(1 / 3)
    ('12', '0.33')
    """
    return f"{value:.2f}".rstrip("0").rstrip(".")


def width_of(text: str, size: float) -> float:
    """Return about how wide a text is; rather too wide than too narrow, as the font is the reader's."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return size * (0.6 * (len(text) - wide) + 1.1 * wide)


def shortened(text: str, size: float, room: float) -> str:
    """Return a text, or its beginning, that fits into some room; nothing if hardly any of it does."""
    if width_of(text, size) <= room:
        return text
    end = len(text)
    while end and width_of(text[:end] + "…", size) > room:
        end -= 1
    return text[:end] + "…" if end >= 3 else ""


def ticks(end: int, most: int) -> list[int]:
    """Return round numbers from 0 to `end`, at most so many and one more, whole and evenly spaced.

    >>> ticks(1000, 5), ticks(3, 8)
    ([0, 200, 400, 600, 800, 1000], [0, 1, 2, 3])
    """
    least = max(1.0, end / max(1, most))
    power = 10 ** floor(log10(least))
    step = next(ceil(power * factor) for factor in (1, 2, 2.5, 5, 10) if ceil(power * factor) >= least)
    return list(range(0, end + 1, step))


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A place that something takes up."""

    left: float
    top: float
    width: float
    height: float

    def meets(self, other: Box) -> bool:
        """Say whether two places overlap."""
        return (
            self.left < other.left + other.width
            and other.left < self.left + self.width
            and self.top < other.top + other.height
            and other.top < self.top + self.height
        )


@dataclass(slots=True)
class Places:
    """What is taken on a picture; a label gets the first place that is free, or none."""

    frame: Box
    taken: list[Box] = field(default_factory=list)

    def take(self, wanted: Iterable[Box]) -> Box | None:
        """Take and return the first of some places that lies within the frame and is free."""
        for box in wanted:
            inside = (
                box.left >= self.frame.left
                and box.top >= self.frame.top
                and box.left + box.width <= self.frame.left + self.frame.width
                and box.top + box.height <= self.frame.top + self.frame.height
            )
            if inside and not any(box.meets(other) for other in self.taken):
                self.taken.append(box)
                return box
        return None


def polygon(corners: Sequence[tuple[float, float]]) -> str:
    """Return a closed outline as the data of a path."""
    return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in corners) + "Z"
