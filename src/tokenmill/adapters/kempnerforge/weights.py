"""The weights of a mixture from a place on, and what was drawn before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, TypeGuard

import numpy as np

from tokenmill.checks import MAX_NUMBER
from tokenmill.errors import ConfigError, ResumeError
from tokenmill.plan.mixture import MAX_TOTAL, Mixture, build_mixture, draw_all, integer_weights

if TYPE_CHECKING:
    import numpy.typing as npt

_DIGITS = 12
"""Of a weight raised to a power: more would depend on the machine."""
_UNITS = 1 << 20
"""Parts of a row in which it is kept how far a source is ahead of its share: a state must stay small."""
_MOST_AHEAD = 2 * _UNITS
"""How far one can be ahead or behind, for each source that there is."""


@dataclass(frozen=True, kw_only=True)
class Weighing:
    """Whole weights of the sources from a place on."""

    start: int
    weights: tuple[int, ...]
    """One a source; 0 for one that is not drawn."""
    drawn: tuple[int, ...]
    """Samples that were drawn from each source before `start`."""
    ahead: tuple[int, ...]
    """How far each source is ahead of its share at `start`, in parts of a row."""

    @property
    def sources(self) -> list[int]:
        """The sources that are drawn."""
        return [source for source, weight in enumerate(self.weights) if weight]

    @cached_property
    def mixture(self) -> Mixture:
        """Who is drawn when."""
        lead = [Fraction(self.ahead[source], _UNITS) for source in self.sources]
        return build_mixture(tuple(weight for weight in self.weights if weight), lead)

    def draw(self, positions: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the source at each place, and how often it was drawn before, in the whole run."""
        local, drawn = draw_all(positions - self.start, self.mixture.nodes)
        sources = np.array(self.sources, np.int64)[local]
        return sources, drawn + np.array(self.drawn, np.int64)[sources]

    def change(self, position: int, weights: Sequence[int]) -> Weighing:
        """Return other weights from a place on; who is behind its share then is drawn first."""
        drawn, ahead = list(self.drawn), list(self.ahead)
        length = position - self.start
        lead = [Fraction(ahead[source], _UNITS) for source in self.sources]
        counts, leads = self.mixture.counts(length), self.mixture.ahead(length, lead)
        for source, count, more in zip(self.sources, counts, leads, strict=True):
            drawn[source] += count
            ahead[source] = round(more * _UNITS)
        return Weighing(start=position, weights=tuple(weights), drawn=tuple(drawn), ahead=tuple(ahead))

    def to_json(self) -> dict[str, int | list[int]]:
        """Return it as JSON."""
        return {
            "start": self.start,
            "weights": list(self.weights),
            "drawn": list(self.drawn),
            "ahead": list(self.ahead),
        }


def first_weighing(weights: Sequence[int]) -> Weighing:
    """Return the weights of a run from its first place on."""
    none = (0,) * len(weights)
    return Weighing(start=0, weights=tuple(weights), drawn=none, ahead=none)


def weighing_of(state: object, sources: int) -> Weighing:
    """Return what `to_json` gave, or refuse what it cannot have given."""
    said = state if isinstance(state, Mapping) else {}
    lists = [said.get(name) for name in ("drawn", "ahead")]
    drawn, ahead = (tuple(numbers) if _are_whole(numbers, sources) else () for numbers in lists)
    start = said.get("start")
    # Before its start every place has drawn one sample.
    fine = drawn and type(start) is int and sum(drawn) == start <= MAX_NUMBER and min(drawn) >= 0
    if not fine or not ahead or max(map(abs, ahead)) > _MOST_AHEAD * sources:
        raise ResumeError(
            f"state: weighing must have weights of {sources} sources, what was drawn of each, which is start "
            f"together, and how far each is ahead, got {state!r}; use a state that was not edited"
        )
    return Weighing(start=sum(drawn), weights=weights_of(said.get("weights"), sources), drawn=drawn, ahead=ahead)


def weights_of(numbers: object, sources: int) -> tuple[int, ...]:
    """Return the whole weights of a state, or refuse what they cannot be."""
    weights: tuple[int, ...] = tuple(numbers) if _are_whole(numbers, sources) else ()
    if not weights or min(weights) < 0 or not 0 < sum(weights) <= MAX_TOTAL:
        raise ResumeError(
            f"state: weights must be those of {sources} sources, whole numbers from 0 on, got {numbers!r}; use a "
            "state that was not edited"
        )
    return weights


def _are_whole(numbers: object, count: int) -> TypeGuard[list[int]]:
    return isinstance(numbers, list) and len(numbers) == count and all(type(number) is int for number in numbers)


def whole_weights(weights: Sequence[float], temperature: float, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return weights as whole numbers in proportion; 0 stays 0 at any temperature.

    >>> whole_weights([0.75, 0.25, 0], 1.0, [9, 9, 9]), whole_weights([16, 1], 2.0, [9, 9])
    ((3, 1, 0), (4, 1))
    """
    if len(weights) != len(sizes):
        raise ConfigError(
            f"weights: must be one for each of {len(sizes)} datasets, got {len(weights)}; add or drop"
        )
    if not 0 < temperature < float("inf"):
        raise ConfigError(f"temperature: must be positive, got {temperature}; leave it out for 1")
    for source, (weight, size) in enumerate(zip(weights, sizes, strict=True)):
        if not 0 <= weight < float("inf") or (weight and not size):
            raise ConfigError(
                f"weights: must be at least 0, and 0 for a dataset without samples, got {weight} for dataset "
                f"{source} with {size} samples; change it"
            )
    most = max(weights, default=0)
    if not most:
        raise ConfigError(f"weights: must leave a dataset to draw from, got {list(weights)}; raise one")
    tempered = weights
    if temperature != 1.0:
        # Of the largest, so that no power is beyond all numbers.
        tempered = [float(f"{(weight / most) ** (1 / temperature):.{_DIGITS}g}") for weight in weights]
    for source, (weight, after) in enumerate(zip(weights, tempered, strict=True)):
        if weight and not after:
            raise ConfigError(
                f"temperature: must leave every dataset its share, got {temperature}, which makes weight {weight} "
                f"of dataset {source} beside {most} nothing; raise temperature, or give that dataset weight 0"
            )
    named = {str(source): weight for source, weight in enumerate(tempered) if weight}
    whole = integer_weights(named)
    return tuple(whole.get(str(source), 0) for source in range(len(weights)))
