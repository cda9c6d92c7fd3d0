"""Rules for single values of a config."""

from __future__ import annotations

from tokenmill.errors import ConfigError, nearest
from tokenmill.types import CROPS, PACKINGS, SPLITS, WEIGHINGS

MAX_NUMBER = 1 << 40
"""Steps and rows of a batch, so that positions of a run fit 64 bits many times over."""


def check_positive(where: str, name: str, value: int) -> None:
    """Refuse a number below 1, or beyond all reason."""
    if value < 1:
        raise ConfigError(f"{where}: {name} must be at least 1, got {value}; raise it")
    if value > MAX_NUMBER:
        raise ConfigError(f"{where}: {name} must be at most {MAX_NUMBER}, got {value}; lower it")


def check_seed(where: str, seed: int) -> None:
    """Refuse a seed that is no unsigned 63-bit number."""
    if not 0 <= seed < 1 << 63:
        raise ConfigError(f"{where}: seed must lie within 0 and 2^63, got {seed}; choose a smaller one")


def check_packing(where: str, packing: str, split: str, crop: str) -> None:
    """Refuse choices of packing that do not go together."""
    check_choice(where, "packing", packing, PACKINGS)
    check_choice(where, "split", split, SPLITS)
    check_choice(where, "crop", crop, CROPS)
    if split != "allow" and packing not in ("best_fit", "padded"):
        raise ConfigError(
            f"{where}: split is for packing best_fit and padded, got {split!r} with {packing!r}; leave it out"
        )
    if crop != "return" and packing != "bos_best_fit":
        raise ConfigError(f"{where}: crop is for packing bos_best_fit, got {crop!r} with {packing!r}; leave it out")


def check_weighing(where: str, temperature: float | None, weigh_by: str | None) -> None:
    """Refuse a temperature or measure of weights that means nothing."""
    if temperature is not None and not 0 < temperature < float("inf"):
        raise ConfigError(f"{where}: temperature must be positive, got {temperature}; leave it out for 1")
    if weigh_by is not None:
        check_choice(where, "weigh_by", weigh_by, WEIGHINGS)


def check_choice(where: str, name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuse what is not among the choices."""
    if value not in choices:
        raise ConfigError(
            f"{where}: {name} must be one of {', '.join(choices)}, got {value!r}; {nearest(value, choices)}"
        )
