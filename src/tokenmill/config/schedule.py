"""The schedule of a run: its stages and edits, the steps that tokens come to, and the parts that a plan is made of.

A token is an input slot: a step has `global_batch_size` * `seq_len` of them, padding and skipped steps included, so
that no edit of a run moves a step. What is given in tokens begins with the first step before which so many, or
more, have passed. A batch ramp cuts a stage into runs of steps, each with a batch size of its own. Wherever what
is drawn changes, a part of a stage ends, and another begins.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, InvalidOperation
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from tokenmill.config.spelling import OLD_ON_LONG, takes_old_keys
from tokenmill.errors import ConfigError
from tokenmill.tables import (
    MAX_LIST_BYTES,
    MAX_NUMBER,
    Number,
    check_choice,
    check_fields,
    check_keys,
    check_positive,
    check_seed,
    read_text,
)
from tokenmill.types import (
    CROPS,
    ON_CHANGE,
    PACKINGS,
    WHOLE_PACKINGS,
    Int64Array,
)

if TYPE_CHECKING:
    from tokenmill.config.run import Config, RunConfig

ON_LONG = ("split", "truncate_end", "truncate_start", "drop", "stop")
"""What can become of a document longer than a row."""
SHUFFLES = ("full", "window", "none")
"""Orders in which rows can be read."""
RAMPS = ("linear", "cosine")
"""How weights can change within a stage."""
WEIGHINGS = ("rows", "tokens")
"""What weights can be shares of."""
Tokens: TypeAlias = int | str
"""A number of tokens: 2000000, "2M", "1.5B", "800B", "2T"."""
BatchSize: TypeAlias = int | Mapping[str, int | str]
"""Rows of a step; or a ramp: `from`, `to`, `step`, and `over_tokens` or `over_steps`."""
Sizes: TypeAlias = Literal["tokens", "rows", "documents"]
"""Measure of a source's size, instead of numeric weights."""
UNSAID = -1
"""A step that is given in tokens instead."""
MAX_SEQ_LEN = 1 << 24
MAIN_STAGE: Mapping[str, Any] = {"name": "main", "start_step": 0}
"""The table of the one stage that a run has where it writes none."""
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_MOST_SIZES = 4096
"""Sizes that a batch ramp may have: each is a part of the plan."""


def read_tokens(where: str, key: str, value: Tokens) -> int:
    """Return how many tokens are meant.

    >>> read_tokens("run", "tokens", "1.5B"), read_tokens("run", "tokens", 4096)
    (1500000000, 4096)
    """
    text = str(value).strip().replace("_", "")
    unit = text[-1:].upper() if text[-1:].isalpha() else ""
    try:
        number = Decimal(text[: len(text) - len(unit)]) * _UNITS.get(unit, 0)
    except InvalidOperation:
        number = Decimal(0)
    if not number.is_finite() or number < 1 or number != int(number) or isinstance(value, bool):
        raise ConfigError(
            f'{where}: {key} must be a whole number of tokens, as 2000000, "2M", "1.5B" or "2T", got {value!r}; '
            "write it so"
        )
    return int(number)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRamp:
    """A batch size that grows from one to another, in equal stretches of tokens, or of steps."""

    first: int
    last: int
    by: int
    over: int
    """Tokens, or steps, after which the last size is reached."""
    in_tokens: bool

    def sizes(self) -> list[int]:
        """Return all sizes, in order."""
        way = range(self.first, self.last, self.by if self.last > self.first else -self.by)
        return [*way, self.last]


def read_batch(where: str, value: BatchSize) -> int | BatchRamp:
    """Return a batch size as it is meant."""
    if isinstance(value, int):
        check_positive(where, "global_batch_size", value)
        return value
    check_keys(f"{where}.global_batch_size", value, ("from", "to", "step", "over_tokens", "over_steps"))
    over = [key for key in ("over_tokens", "over_steps") if key in value]
    missing = next((key for key in ("from", "to") if key not in value), None if over else "over_tokens")
    if missing is not None or len(over) > 1:
        raise ConfigError(
            f"{where}: global_batch_size: expected a number, or from, to, step, and over_tokens or over_steps, "
            f'got {sorted(value)}; for example {{ from = 256, to = 2048, over_tokens = "100B", '
            "step = 256 }"
        )
    numbers = {key: value.get(key, value["from"]) for key in ("from", "to", "step")}
    for key, number in numbers.items():
        if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= MAX_NUMBER:
            raise ConfigError(
                f"{where}.global_batch_size: {key} must be a whole number from 1 on, got {number!r}; change it"
            )
    first, last, by = (int(numbers[key]) for key in ("from", "to", "step"))
    if first == last or abs(last - first) // by > _MOST_SIZES:
        raise ConfigError(
            f"{where}: global_batch_size must go from one size to another in at most {_MOST_SIZES} sizes, got "
            f"{first} to {last} by {by}; raise step, or say one number"
        )
    return BatchRamp(
        first=first,
        last=last,
        by=by,
        over=read_tokens(where, over[0], value[over[0]]),
        in_tokens=over[0] == "over_tokens",
    )


# Stages, as they are written and with everything filled in


@takes_old_keys
@dataclass(frozen=True, kw_only=True, slots=True)
class StageConfig:
    """A table of [[stages]]: a range of steps with its own mixture or sizes. Omitted keys are those of [run].

    The arguments are the keys of [[stages]] in docs/reference/config.md. `name` is required, and `start_step` or
    `start_tokens`.

    Raises:
        ConfigError: A value has the wrong type, is out of range, or contradicts another one.

    Examples:
        >>> StageConfig(name="anneal", start_step=900, weights={"web": 3, "math": 1}).weights["math"]
        1
    """

    name: str
    start_step: int = UNSAID
    """This, or `start_tokens`."""
    start_tokens: Tokens | None = None
    """Number of input slots before the first step of the stage, such as "800B", instead of a step."""
    weights: Mapping[str, Number] | Sizes | None = None
    seed: int | None = None
    global_batch_size: BatchSize | None = None
    seq_len: int | None = None
    packing: str | None = None
    on_long: str | None = None
    crop: str | None = None
    shuffle: str | None = None
    on_change: str = "unseen"
    """Rows after a change of seq_len or packing: the tokens that the previous stage left (`unseen`), or a `restart`
    of the sources."""
    lr_scale: Number = 1.0
    """Factor of the learning rate, passed on to the trainer. Batches do not depend on it."""
    ramp: str | None = None
    """Shape of a change from the previous stage's weights over the first `ramp_steps` steps: `linear` or
    `cosine`."""
    ramp_steps: int | None = None
    ramp_tokens: Tokens | None = None
    """Length of the ramp in input slots, instead of steps."""
    ramp_from: Mapping[str, Number] | None = None
    """Weights at the start of the ramp; by default those of the previous stage."""
    temperature: Number | None = None
    weigh_by: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, "stages.")
        where = f"stage {self.name!r}"
        if not self.name.isprintable() or not self.name.strip():
            raise ConfigError(f"stages.name: must be letters that can be printed, got {self.name!r}; rename it")
        if self.start_step < 0 and self.start_tokens is None:
            raise ConfigError(f"{where}: start_step must not be negative, got {self.start_step}; count from 0")
        if not 0 < self.lr_scale < inf:
            raise ConfigError(f"{where}: lr_scale must be positive, got {self.lr_scale}; leave it out for 1")
        if self.ramp is not None:
            check_choice(where, "ramp", self.ramp, RAMPS)
            if self.ramp_tokens is not None:
                read_tokens(where, "ramp_tokens", self.ramp_tokens)
            elif self.ramp_steps is None or self.ramp_steps < 1:
                got = "none" if self.ramp_steps is None else self.ramp_steps
                raise ConfigError(f"{where}: a ramp must have ramp_steps of at least 1, got {got}; say how many")
        for key in ("ramp_steps", "ramp_tokens", "ramp_from") if self.ramp is None else ():
            if getattr(self, key) is not None:
                raise ConfigError(f'{where}: {key} is for a ramp, got no ramp; add ramp = "linear" or "cosine"')
        if self.on_long is not None:
            long_documents(where, self.on_long, self.packing or "best_fit")
        if self.shuffle is not None:
            check_choice(where, "shuffle", self.shuffle, SHUFFLES)
        check_weighing(where, self.temperature, self.weigh_by)
        check_sizes(where, self.global_batch_size, self.seq_len)
        if self.seed is not None:
            check_seed(where, self.seed)
        check_choice(where, "on_change", self.on_change, ON_CHANGE)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedStage:
    """A run of steps with everything filled in: by the stage itself, or else by [run]."""

    name: str
    start_step: int
    end_step: int
    """First step that is no longer of the stage."""
    weights: Mapping[str, Number]
    sizes: Sizes | None
    """Measure of size that each weight, 1 here, is multiplied by. None: weights are used as written."""
    seed: int
    batches: tuple[tuple[int, int], ...]
    """First step of each batch size, and the size; the first is that of the stage."""
    seq_len: int
    packing: str
    on_long: str | None
    crop: str
    shuffle: str
    temperature: Number
    weigh_by: str
    on_change: str
    lr_scale: Number
    ramp: str | None
    ramp_steps: int
    """0 without a ramp."""
    ramp_from: Mapping[str, Number] | None
    """None: the weights of the stage before."""

    def __post_init__(self) -> None:
        where = f"stage {self.name!r}"
        check_packing(where, self.packing, self.crop)
        long_documents(where, self.on_long, self.packing)
        if self.ramp_steps > self.end_step - self.start_step:
            raise ConfigError(
                f"{where}: ramp_steps must be at most the {self.end_step - self.start_step} steps of the stage, "
                f"got {self.ramp_steps}; shorten it"
            )
        if self.ramp and self.start_step == 0 and self.ramp_from is None:
            raise ConfigError(
                f"{where}: a ramp in the first stage needs weights to start from; add ramp_from = {{ ... }}"
            )

    @property
    def global_batch_size(self) -> int:
        """Rows of the largest step."""
        return max(size for _, size in self.batches)

    def batch_at(self, step: int) -> int:
        """Return how many rows a step has."""
        return next(size for first, size in reversed(self.batches) if first <= step)

    @property
    def sources(self) -> set[str]:
        """Names of the sources that some step of it draws from."""
        return {*self.weights, *(self.ramp_from or ())}


def check_sizes(where: str, global_batch_size: BatchSize | None, seq_len: int | None) -> None:
    """Reject an invalid batch size or sequence length; None is an omitted one."""
    if global_batch_size is not None:
        read_batch(where, global_batch_size)
    if seq_len is not None:
        check_positive(where, "seq_len", seq_len)
    if seq_len is not None and seq_len > MAX_SEQ_LEN:
        raise ConfigError(f"{where}: seq_len must be at most {MAX_SEQ_LEN}, got {seq_len}; shorten it")


def check_packing(where: str, packing: str, crop: str) -> None:
    """Reject keys of packing that cannot be combined."""
    check_choice(where, "packing", packing, PACKINGS)
    check_choice(where, "crop", crop, CROPS)
    if crop != "return" and packing != "bos_best_fit":
        raise ConfigError(f"{where}: crop is for packing bos_best_fit, got {crop!r} with {packing!r}; leave it out")


def check_multiple(where: str, seq_len: int, multiple: int) -> None:
    """Reject a row length that is not a multiple of the segment length."""
    if seq_len % multiple:
        raise ConfigError(
            f"{where}: seq_len must be divisible by segment_multiple, got {seq_len} and {multiple}; "
            f"use {-(-seq_len // multiple) * multiple}"
        )


def check_weighing(where: str, temperature: float | None, weigh_by: str | None) -> None:
    """Reject an invalid temperature or unit of weights; None is an omitted one."""
    if temperature is not None and not 0 < temperature < inf:
        raise ConfigError(f"{where}: temperature must be positive, got {temperature}; leave it out for 1")
    if weigh_by is not None:
        check_choice(where, "weigh_by", weigh_by, WEIGHINGS)


def long_documents(where: str, on_long: str | None, packing: str, kind: str | None = None) -> str:
    """Return what becomes of documents longer than a row, in the words of `Policy.split`.

    This is the one rule of `on_long`, for runs, stages and evals. Without a value, documents are split, but records
    that are rows stop the run: those of `padded`, and pairs and groups, whose training type is `kind`.
    """
    if on_long is None or on_long == "allow":
        return "allow"
    if on_long not in OLD_ON_LONG:
        check_choice(where, "on_long", on_long, ON_LONG)
    if packing not in WHOLE_PACKINGS:
        raise ConfigError(
            f"{where}: on_long = {on_long!r} cannot be combined with packing = {packing!r}, which cuts documents "
            "at any token; remove it"
        )
    is_row = kind is not None or packing == "padded"
    on_long = OLD_ON_LONG[on_long][is_row] if on_long in OLD_ON_LONG else on_long
    if on_long == "split" and is_row:
        rows = f"stores of {kind}" if kind else f"packing = {packing!r}"
        raise ConfigError(
            f"{where}: on_long = 'split' cannot be combined with {rows}, because a record is one row; use "
            "truncate_end, truncate_start, drop or stop"
        )
    return {"split": "allow", "stop": "forbid"}.get(on_long, on_long)


# The clock of a run


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """A run of steps of one batch size and sequence length, to the start of the next."""

    step: int
    tokens: int
    """Before its first step."""
    batch: int
    seq_len: int

    def step_at(self, tokens: int) -> int:
        """Return the first step with at least this many tokens before it, as if the range had no end."""
        return self.step + max(0, -(-(tokens - self.tokens) // (self.batch * self.seq_len)))

    def tokens_at(self, step: int) -> int:
        """Return how many tokens have passed before a step, were it without an end."""
        return self.tokens + (step - self.step) * self.batch * self.seq_len


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenClock:
    """Number of tokens before each step of a run, in closed form."""

    stretches: tuple[Stretch, ...]
    """Ranges of steps in order, from step 0. The last one has no end."""

    def tokens_at(self, step: int) -> int:
        """Return how many tokens have passed before a step."""
        return self.stretches[bisect_right(self.stretches, step, key=lambda s: s.step) - 1].tokens_at(step)

    def batches(self, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Return (first step, batch size) of each stretch from a step, at which one begins, to another."""
        return tuple((s.step, s.batch) for s in self.stretches if start <= s.step < end)

    def step_at(self, tokens: int) -> int:
        """Return the first step with at least this many tokens before it."""
        index = max(0, bisect_right(self.stretches, tokens, key=lambda s: s.tokens) - 1)
        return self.stretches[index].step_at(tokens)


def wind_clock(run: RunConfig, stages: Sequence[StageConfig]) -> tuple[TokenClock, list[int]]:
    """Return the clock of a run, and the first step of each of its stages."""
    stretches: list[Stretch] = []
    starts: list[int] = []
    of_run = read_batch("run", run.global_batch_size)
    for stage in stages:
        where = f"stage {stage.name!r}"
        clock = TokenClock(stretches=tuple(stretches)) if stretches else None
        start = stage.start_step
        if stage.start_tokens is not None:
            tokens = read_tokens(where, "start_tokens", stage.start_tokens) if stage.start_tokens else 0
            counted = clock.step_at(tokens) if clock else tokens
            start = agreed(where, "start_step", None if start < 0 else start, counted)
        starts.append(start)
        begun = clock.tokens_at(start) if clock and start >= 0 else 0
        stretches = [stretch for stretch in stretches if stretch.step < start]
        own = None if stage.global_batch_size is None else read_batch(where, stage.global_batch_size)
        seq_len = stage.seq_len or run.seq_len
        origin = (start, begun) if own is not None else (0, 0)  # that of [run] is counted from its first step
        stretches += _stretches(of_run if own is None else own, start, begun, seq_len, origin)
    return TokenClock(stretches=tuple(stretches)), starts


def _stretches(
    batch: int | BatchRamp, step: int, tokens: int, seq_len: int, origin: tuple[int, int]
) -> list[Stretch]:
    """Return the stretches of a stage that begins at a step, of a batch that counts from an origin."""
    if isinstance(batch, int):
        return [Stretch(step=step, tokens=tokens, batch=batch, seq_len=seq_len)]
    sizes = batch.sizes()
    stretches: list[Stretch] = []
    for number, size in enumerate(sizes):
        stretch = Stretch(step=step, tokens=tokens, batch=size, seq_len=seq_len)
        # All sizes but the last share `over` evenly, in tokens or steps.
        edge = -(-batch.over * (number + 1) // (len(sizes) - 1))
        if number == len(sizes) - 1:
            return [*stretches, stretch]
        end = stretch.step_at(origin[1] + edge) if batch.in_tokens else max(step, origin[0] + edge)
        if end > step:
            stretches.append(stretch)
            step, tokens = end, stretch.tokens_at(end)
    return stretches


def agreed(where: str, key: str, written: int | None, counted: int) -> int:
    """Return the step derived from tokens; reject an explicit value that contradicts it."""
    if written not in (None, counted):
        raise ConfigError(
            f"{where}: {key} must be what the tokens come to, {counted}, got {written}; leave one of the two out"
        )
    return counted


# Edits: steps that are skipped, documents in quarantine


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipConfig:
    """A table of [[skip]]: steps that are not trained on. Later steps keep their numbers and batches.

    The arguments are the keys of [[skip]] in docs/reference/config.md. `steps` or `tokens` is required.

    Raises:
        ConfigError: The range is empty or cannot be read.

    Examples:
        >>> SkipConfig(steps="1200:1240", reason="loss spike").range()
        (1200, 1240)
    """

    steps: str = ""
    """`a:b`, b exclusive."""
    tokens: str | None = None
    """Range `a:b` in input slots of the run, such as "10B:11B", instead of steps."""
    reason: str = ""

    def __post_init__(self) -> None:
        check_fields(self, "skip.")
        if self.tokens is None or self.steps:
            self.range()

    def resolved(self, clock: TokenClock) -> SkipConfig:
        """Return the skip with the steps that its tokens amount to."""
        if self.tokens is None:
            return self
        begin, _, end = self.tokens.partition(":")
        first, last = (
            clock.step_at(read_tokens("skip", "tokens", part) if part.strip("0 ") else 0) for part in (begin, end)
        )
        counted = f"{first}:{last}"
        if self.steps not in ("", counted):
            raise ConfigError(
                f"skip: steps must be what the tokens come to, {counted}, got {self.steps}; "
                "leave one of the two out"
            )
        return replace(self, steps=counted)

    def range(self) -> tuple[int, int]:
        """Return the first step and the one after the last."""
        steps = read_range(self.steps)
        if steps is None:
            raise ConfigError(
                f"skip: steps must be a:b with a below b, got {self.steps!r}; for example steps = '1200:1240'"
            )
        return steps


@dataclass(frozen=True, kw_only=True, slots=True)
class QuarantineConfig:
    """A table of [[quarantine]]: documents of a source, or all of it, that are removed from a step on.

    The arguments are the keys of [[quarantine]] in docs/reference/config.md. `source` is required, and `from_step`
    or `from_tokens`.

    Raises:
        ConfigError: A value has the wrong type or is out of range, or both documents and a file are given.

    Examples:
        >>> QuarantineConfig(source="web", from_step=500, documents=(17, 18)).whole
        False
    """

    source: str
    from_step: int = UNSAID
    """This, or `from_tokens`."""
    from_tokens: Tokens | None = None
    """Number of input slots before the first step of the edit, instead of a step."""
    documents: tuple[int, ...] | None = None
    """Numbers of documents in the store. Without these and a file, the whole source."""
    file: str | None = None
    """File with such numbers, one a line; a relative path counts from the folder of the config."""
    reason: str = ""

    def __post_init__(self) -> None:
        check_fields(self, "quarantine.")
        where = f"quarantine of {self.source!r}"
        if self.from_step < 0 and self.from_tokens is None:
            raise ConfigError(f"{where}: from_step must not be negative, got {self.from_step}; count from 0")
        if self.documents is not None and self.file is not None:
            raise ConfigError(f"{where}: `documents` cannot be combined with `file`; remove one")
        if self.documents is not None and not self.documents:
            raise ConfigError(
                f"{where}: documents must name some, got an empty list; leave the quarantine out, "
                "or documents to quarantine the whole source"
            )
        bad = [number for number in self.documents or () if not 0 <= number < MAX_NUMBER]
        if bad:
            raise ConfigError(f"{where}: documents must be numbers from 0 on, got {bad[0]}; count from 0")

    def resolved(self, clock: TokenClock) -> QuarantineConfig:
        """Return the quarantine with the step that its tokens amount to."""
        if self.from_tokens is None:
            return self
        where = f"quarantine of {self.source!r}"
        counted = clock.step_at(read_tokens(where, "from_tokens", self.from_tokens))
        written = None if self.from_step < 0 else self.from_step
        return replace(self, from_step=agreed(where, "from_step", written, counted))

    @property
    def whole(self) -> bool:
        """Whether the whole source is quarantined."""
        return self.documents is None and self.file is None

    def numbers(self, folder: Path) -> Int64Array:
        """Return the documents, sorted, each once; reads the file, if there is one."""
        if self.file is None:
            return np.unique(np.array(self.documents or (), np.int64))
        return read_numbers(folder / self.file, f"quarantine of {self.source!r}")


def read_range(text: str) -> tuple[int, int] | None:
    """Return a and b of `a:b`, where a is below b; None for anything else.

    >>> read_range("1200: 1240"), read_range("7:7")
    ((1200, 1240), None)
    """
    first, _, last = (part.strip() for part in text.partition(":"))
    if not all(part.isascii() and part.isdecimal() and len(part) < 20 for part in (first, last)):
        return None
    return (int(first), int(last)) if int(first) < int(last) <= MAX_NUMBER else None


def read_numbers(file: Path, where: str) -> Int64Array:
    """Return the document numbers that a file lists, ascending and distinct."""
    try:
        lines = read_text(file, MAX_LIST_BYTES).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: file must be a text with numbers of documents, got {error}; fix it") from None
    documents = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if text and not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) < MAX_NUMBER):
            raise ConfigError(
                f"{file}, line {number}: must be the number of a document, got {line.strip()!r}; "
                "write one a line, what follows # is not read"
            )
        documents += [int(text)] if text else []
    return np.unique(np.array(documents, np.int64))


def limits(config: Config) -> tuple[dict[str, float], dict[str, float]]:
    """Return the maximum epochs of sources: first of those where more is an error, then of those that stop."""
    errors: dict[str, float] = {}
    stops: dict[str, float] = {}
    for source in config.sources:
        policy = source.on_exhausted or ("repeat" if source.max_epochs is None else "error")
        if policy != "repeat":
            (errors if policy == "error" else stops)[source.name] = source.max_epochs or 1.0
    return errors, stops
