"""Counts of a plan before its first step, and warnings about it.

Whole epochs are counted at once, so a run of any length is reported soon. `run/report.py` adds what only stores
know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import groupby, pairwise

import numpy as np

from tokenmill.plan.compile import rows_left
from tokenmill.plan.mixture import exact_weight, integer_weights
from tokenmill.plan.plan import Plan
from tokenmill.plan.rows import NOTHING, Rows, TokenCounts
from tokenmill.plan.seen import held_rows
from tokenmill.plan.stages import Stage
from tokenmill.types import Fates

COUNTED_ROWS = 1 << 20
"""Rows that are counted at most, of the epochs that a stage does not draw whole; for more, the mean must do."""
COUNTED_IN_ALL = 1 << 24
"""Rows that are counted at most, of all sources of all stages together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceShare:
    """Rows and tokens that one stage reads from one source."""

    stage: str
    source: str
    asked: float
    """Share of rows that the weights ask for: the mean over the steps that are trained on; 0 if none is."""
    realised: float
    """Share of rows that these steps draw."""
    asked_tokens: float
    """Share of tokens that the asked rows would hold, were each like the mean row of its source."""
    realised_tokens: float
    """Share of tokens that the drawn rows hold; padding is none."""
    rows: int
    tokens: int
    """Input slots of the rows, over all their arrays: trained + unlabelled + padding."""
    epochs: float | None
    """Epochs of the source by the end of the stage, with those of skipped steps; None for live text."""
    trained: int
    """Labels that the rows have, less those that a mask leaves out."""
    unlabelled: int
    """Tokens whose next one is no label: the last of a document, or of a row that is not full, and one before a
    token that a mask leaves out. Of pairs and groups: tokens that are not trained on."""
    padding: int
    """Input slots of the rows that hold no token."""
    counted: bool
    """Whether the three above are exact, or taken in part from the mean of an epoch."""
    dropped: Mapping[str, int]
    """Tokens of an epoch that no row of the stage holds, by reason."""
    skipped_rows: int
    """Rows of steps that are skipped: they count as read, and in nothing else here."""
    skipped_tokens: int
    """Input slots of these."""

    @property
    def held(self) -> int:
        """Tokens that the rows hold."""
        return self.trained + self.unlabelled


@dataclass(frozen=True, kw_only=True, slots=True)
class StageFacts:
    """One stage of the config at a glance."""

    name: str
    start_step: int
    end_step: int
    steps: int
    """Steps that are trained on."""
    skipped_steps: int
    start_tokens: int
    """Input slots of all steps before it, skipped ones among them."""
    global_batch_size: int
    """Rows of its first step."""
    last_batch_size: int
    """Rows of its last one: where it is another, a batch ramp runs in it."""
    seq_len: int
    lr_scale: float
    ramp_end: int | None
    """Step at which its ramp ends, if it has one."""
    rows: int
    tokens: int
    """Input slots of its rows, over all their arrays."""
    skipped_rows: int
    skipped_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StageChange:
    """Change within a stage, such as the end of a ramp."""

    stage: str
    step: int
    """The first that has it."""
    tokens: int
    """Input slots of all steps before it, skipped ones among them."""
    what: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFacts:
    """One source over the whole run."""

    name: str
    rows: int | None
    """Rows of one epoch, at `seq_len`; None of live text, which is counted when it is read."""
    seq_len: int | None
    """Sequence length of the last stage that draws from the source; None where no stage does."""
    drawn: int
    """Rows that are read: those that are trained on, and those of skipped steps."""
    skipped: int
    """Rows of skipped steps."""
    lanes: int | None
    """Streams of live text: the number of ranks must divide them, and they the batch of a later stage."""
    epochs: float | None
    first_repeat: int | None
    """Step at which a row of the source is read for the second time; what skipped steps read counts."""
    gone_from: int | None
    """Step from which it has no row left, if it stops then and the run goes on."""
    fates: Fates | None
    """Fate of its tokens in an epoch, as packed by the last stage that uses it."""


@dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class PlanReport:
    """Counts of a plan before its first step. Skipped steps are counted separately."""

    fingerprint: str
    steps: int
    """Steps of the run, with skipped ones."""
    rows: int
    tokens: int
    skipped_steps: int
    skipped_rows: int
    skipped_tokens: int
    stages: tuple[StageFacts, ...]
    changes: tuple[StageChange, ...]
    """Batch sizes, ends of ramps, skipped steps and quarantines, in the order of their steps."""
    shares: tuple[SourceShare, ...]
    sources: tuple[SourceFacts, ...]

    def __repr__(self) -> str:
        """Describe the size of the run in one line."""
        size = f"{self.steps:,} steps, {self.rows:,} rows, {self.tokens:,} tokens"
        counts = f"{len(self.stages)} stages, {len(self.sources)} sources"
        return f"<{type(self).__name__} of plan {self.fingerprint[:8]}: {size}; {counts}>"


def report(plan: Plan, *, stops: Mapping[str, float] | None = None) -> PlanReport:
    """Count what the plan draws. Reads no token, but masks where there are any.

    `stops` are the sources that leave the mixture, with how often they are read before; a plan does not know them.
    """
    stages = _stages(plan)
    facts = tuple(_stage_facts(plan, parts) for parts in stages)
    num_shares = sum(len({name for part in parts for name in part.names}) for parts in stages)
    most = min(COUNTED_ROWS, COUNTED_IN_ALL // num_shares)
    return PlanReport(
        fingerprint=plan.fingerprint,
        steps=plan.steps,
        rows=sum(stage.rows for stage in facts),
        tokens=sum(stage.tokens for stage in facts),
        skipped_steps=sum(stage.skipped_steps for stage in facts),
        skipped_rows=sum(stage.skipped_rows for stage in facts),
        skipped_tokens=sum(stage.skipped_tokens for stage in facts),
        stages=facts,
        changes=tuple(change for parts in stages for change in _changes(plan, parts)),
        shares=tuple(share for parts in stages for share in _shares(parts, most // len(parts))),
        sources=tuple(_source_facts(plan, name, stops or {}) for name in plan.sources),
    )


def _stages(plan: Plan) -> list[list[Stage]]:
    """Return the parts of each stage of the config."""
    return [list(parts) for _, parts in groupby(plan.stages, key=lambda part: part.spec.number)]


def _stage_facts(plan: Plan, parts: Sequence[Stage]) -> StageFacts:
    trained, skipped = _split(parts)
    spec = parts[0].spec
    return StageFacts(
        name=spec.name,
        start_step=spec.start_step,
        end_step=parts[-1].end_step,
        steps=sum(part.num_steps for part in trained),
        skipped_steps=sum(part.num_steps for part in skipped),
        start_tokens=plan.slots_before(spec.start_step, skipped=True),
        global_batch_size=spec.global_batch_size,
        last_batch_size=parts[-1].spec.global_batch_size,
        seq_len=spec.seq_len,
        lr_scale=spec.lr_scale,
        ramp_end=next((part.spec.ramp.end for part in parts if part.spec.ramp), None),
        rows=sum(part.num_positions for part in trained),
        tokens=sum(part.num_positions * part.row_slots for part in trained),
        skipped_rows=sum(part.num_positions for part in skipped),
        skipped_tokens=sum(part.num_positions * part.row_slots for part in skipped),
    )


def _changes(plan: Plan, parts: Sequence[Stage]) -> Iterator[StageChange]:
    """Yield what changes from one part of a stage to the next; a batch that grows begins with its first size."""
    grows = len({part.spec.global_batch_size for part in parts}) > 1
    for before, part in zip((None, *parts), parts, strict=False):
        spec, old = part.spec, before.spec if before else None
        changes = []
        if grows and (old is None or old.global_batch_size != spec.global_batch_size):
            changes.append(f"batch of {spec.global_batch_size:,}")
        if spec.ramp is None and old is not None and old.ramp is not None:
            changes.append("the ramp is over")
        if spec.skipped is not None and (old is None or old.skipped != spec.skipped):
            changes.append(f"skipped until step {part.end_step:,}: {spec.skipped}")
        tokens = plan.slots_before(spec.start_step, skipped=True)
        for what in changes:
            yield StageChange(stage=spec.name, step=spec.start_step, tokens=tokens, what=what)


def _split(parts: Sequence[Stage]) -> tuple[list[Stage], list[Stage]]:
    """Return the parts that are trained on, and those that are skipped."""
    return [part for part in parts if part.is_trained], [part for part in parts if not part.is_trained]


# What a stage draws from a source


@dataclass(frozen=True, kw_only=True, slots=True)
class _SourceDraws:
    """Sums of what the parts of a stage read from a source."""

    asked: Fraction
    """Rows."""
    asked_tokens: Fraction
    rows: int
    slots: int
    held: TokenCounts
    counted: bool


def _shares(parts: Sequence[Stage], most: int) -> list[SourceShare]:
    names = sorted({name for part in parts for name in part.names})
    using = {name: [part for part in parts if name in part.names] for name in names}
    trained, skipped = _split(parts)
    drawn = {name: _drawn([part for part in trained if name in part.names], name, most) for name in names}
    rows = sum(part.num_positions for part in trained)
    asked_tokens = sum(source.asked_tokens for source in drawn.values())
    tokens = sum(source.held.tokens for source in drawn.values())
    return [
        SourceShare(
            stage=parts[0].spec.name,
            source=name,
            asked=float(source.asked / rows) if rows else 0.0,
            realised=source.rows / rows if rows else 0.0,
            asked_tokens=float(source.asked_tokens / asked_tokens) if asked_tokens else 0.0,
            realised_tokens=source.held.tokens / tokens if tokens else 0.0,
            rows=source.rows,
            tokens=source.slots,
            epochs=_epochs_read(using[name][-1], name),
            trained=source.held.trained,
            unlabelled=source.held.tokens - source.held.trained,
            padding=source.slots - source.held.tokens,
            counted=source.counted,
            dropped=_dropped(using[name][-1], name),
            skipped_rows=sum(part.draws[name] for part in skipped if name in part.names),
            skipped_tokens=sum(part.draws[name] * part.row_slots for part in skipped if name in part.names),
        )
        for name, source in drawn.items()
    ]


def _epochs_read(part: Stage, name: str) -> float | None:
    """Return the epochs of a source by the end of a part; None without epochs."""
    return float(part.epochs(name)) if part.rows[name].has_epochs else None


def _dropped(part: Stage, name: str) -> dict[str, int]:
    """Return what an epoch of a source drops, by reason."""
    rows = part.rows[name]
    return dict(rows.fates().dropped) if rows.has_epochs else {}


def _drawn(parts: Sequence[Stage], name: str, most: int) -> _SourceDraws:
    held, counted = NOTHING, True
    for part in parts:
        if not part.rows[name].has_epochs:  # rows of live text are taken to be full
            slots = part.draws[name] * part.rows[name].row_slots
            more, exact = TokenCounts(tokens=slots, trained=slots), False
        else:
            more, exact = held_rows(part, name, range(part.draws[name]), most)
        held, counted = held + more, counted and exact
    asked = [(part.num_positions * part.asked()[name], part) for part in parts]
    return _SourceDraws(
        asked=sum((rows for rows, _ in asked), Fraction(0)),
        asked_tokens=sum((rows * _tokens_of_a_row(part, name) for rows, part in asked), Fraction(0)),
        rows=sum(part.draws[name] for part in parts),
        slots=sum(part.draws[name] * part.row_slots for part in parts),
        held=held,
        counted=counted,
    )


def _tokens_of_a_row(part: Stage, name: str) -> Fraction:
    """Return the mean number of tokens of a row of a source; rows of live text are taken to be full."""
    rows = part.rows[name]
    if not rows.has_epochs:
        return Fraction(rows.row_slots)
    fates = rows.fates()
    return Fraction(fates.rows * rows.row_slots - fates.padding, fates.rows)


# A source over the whole run


def _source_facts(plan: Plan, name: str, stops: Mapping[str, float]) -> SourceFacts:
    using = [part for part in plan.stages if name in part.names]
    rows = using[-1].rows[name] if using else None
    known = rows if rows is not None and rows.has_epochs else None
    return SourceFacts(
        name=name,
        rows=0 if rows is None else None if known is None else known.num_rows,
        seq_len=using[-1].spec.seq_len if using else None,
        lanes=int(rows.description["lanes"]) if rows is not None and known is None else None,
        drawn=sum(part.draws[name] for part in using),
        skipped=sum(part.draws[name] for part in _split(using)[1]),
        epochs=_epochs_read(using[-1], name) if using else 0.0,
        first_repeat=None if known is None else _first_repeat(using, name),
        gone_from=_gone_from(plan, using, name, exact_weight(stops[name])) if name in stops else None,
        fates=None if known is None else _fates(using[-1], known),
    )


def _fates(part: Stage, index: Rows) -> Fates:
    """Return the fates of a source, padded to the shape that the sources of a stage share."""
    fates = index.fates()
    return replace(fates, padding=fates.padding + fates.rows * (part.row_slots - index.row_slots))


def _first_repeat(using: Sequence[Stage], name: str) -> int | None:
    """Return the first step at which a row, or a token of one, is drawn that was drawn before."""
    for part in using:
        earlier = max(0, part.repeats_from[name] - part.carry(name))
        if earlier < part.draws[name]:
            return step_of(part, name, earlier)
    return None


def _gone_from(plan: Plan, using: Sequence[Stage], name: str, limit: Fraction) -> int | None:
    """Return the step after the one that draws the last row that a source may give, if the run goes on then."""
    drawing = [part for part in using if part.draws[name]]
    if not drawing or rows_left(drawing[-1], name, limit) > drawing[-1].draws[name]:
        return None
    step = step_of(drawing[-1], name, drawing[-1].draws[name] - 1) + 1
    return step if step < plan.steps else None


def step_of(part: Stage, name: str, draw: int) -> int:
    """Return the step of a draw of a source, counted from the first of the part."""
    position = part.positions_of(name, np.array([draw]))[0]
    return int(position) // part.spec.global_batch_size + part.spec.start_step


# What is legal in a plan, but seldom meant

MANY_EPOCHS = 4
"""Tokens that are repeated more often are worth less and less to a model."""
FEW_STEPS = 10
MUCH_PADDING = 0.01
FAR_OFF = 0.02
"""Difference between a share of tokens and the share of rows."""


def warnings(
    plan: Plan, facts: PlanReport, weigh_by: Mapping[str, str], quarantined: Sequence[str] = ()
) -> list[str]:
    """Return what a user should look at, a sentence each: where: what is odd; the way out.

    `weigh_by` says of each stage what its weights are shares of, `rows` or `tokens`; `quarantined` are the sources
    of which the config leaves nothing.
    """
    return [
        *_unused(plan, quarantined),
        *_epoch_warnings(facts),
        *_short(plan, facts),
        *_scales(plan),
        *_padding(plan, facts),
        *_token_shares(facts, weigh_by),
    ]


def _unused(plan: Plan, quarantined: Sequence[str]) -> Iterator[str]:
    used = {name for part in plan.stages for name in part.names}
    for name in plan.sources:
        if name not in used and name not in quarantined:
            yield f"source {name!r}: no stage uses it; give it a weight, or remove it from the run"


def _epoch_warnings(facts: PlanReport) -> Iterator[str]:
    for source in facts.sources:
        if source.epochs is not None and source.epochs > MANY_EPOCHS:
            shares = [share for share in facts.shares if share.source == source.name]
            stage = next(share.stage for share in shares if (share.epochs or 0) > MANY_EPOCHS)
            yield (
                f"source {source.name!r}: it is read {source.epochs:.2f} times, more than {MANY_EPOCHS} times from "
                f'stage {stage!r} on; lower its weight, add documents, or set max_epochs with on_exhausted = "stop"'
            )


def _short(plan: Plan, facts: PlanReport) -> Iterator[str]:
    for stage in facts.stages:
        steps = stage.end_step - stage.start_step
        if steps < FEW_STEPS and len(facts.stages) > 1:
            yield (
                f"stage {stage.name!r}: it has only {steps} step{'s' * (steps > 1)}; check its start_step and that "
                "of the stage after it"
            )
    ramps = {part.spec.number: (part.spec.name, part.spec.ramp) for part in plan.stages if part.spec.ramp}
    for name, ramp in ramps.values():
        if ramp.end - ramp.begin < 2:
            yield (
                f"stage {name!r}: a ramp of 1 step is a switch with one odd step; raise ramp_steps, or "
                "leave the ramp out"
            )


def _scales(plan: Plan) -> Iterator[str]:
    stages = _stages(plan)
    first = stages[0][0].spec
    if first.lr_scale != 1:
        yield (
            f"stage {first.name!r}: lr_scale {first.lr_scale:g} scales the run from its first step; set the "
            "learning rate of the trainer instead"
        )
    for before, after in pairwise(stages):
        old, new = before[-1].spec, after[0].spec
        if new.lr_scale != old.lr_scale and _draws_alike(before[-1], after[0]):
            yield (
                f"stage {new.name!r}: lr_scale goes from {old.lr_scale:g} to {new.lr_scale:g} and the data stays "
                "as it is; leave that to the schedule of the trainer, or change the data with it"
            )


def _draws_alike(before: Stage, after: Stage) -> bool:
    """Return whether a stage reads the same rows in the same shares as the stage before."""
    old, new = before.spec, after.spec
    if new.ramp or old.names != new.names:
        return False
    return (
        (old.seq_len, old.global_batch_size, old.seed, old.shuffle)
        == (new.seq_len, new.global_batch_size, new.seed, new.shuffle)
        and integer_weights(old.weights) == integer_weights(new.weights)
        and all(dict(old.rows[name].description) == dict(new.rows[name].description) for name in new.names)
    )


def _padding(plan: Plan, facts: PlanReport) -> Iterator[str]:
    for stage, shares in _by_stage(facts):
        slots, padding = sum(share.tokens for share in shares), sum(share.padding for share in shares)
        if padding > MUCH_PADDING * slots:
            worst = max(shares, key=lambda share: share.padding)
            part = next(part for part in plan.stages if part.spec.name == stage and worst.source in part.names)
            packing = str(part.rows[worst.source].description.get("packing"))
            yield (
                f"stage {stage!r}: {padding / slots:.1%} of its input slots are padding, most of it in "
                f"{worst.source!r}; {_LESS_PADDING.get(packing, 'shorten seq_len')}"
            )


_LESS_PADDING = {
    "padded": 'packing = "best_fit" puts several documents into a row',
    "records": 'pad_to = "batch" pads a micro-batch to its longest record',
    "best_fit": 'a longer seq_len has less if there are many rows; packing = "concat" or "bos_best_fit" has none, '
    "and cuts documents where a row is full",
}


def _token_shares(facts: PlanReport, weigh_by: Mapping[str, str]) -> Iterator[str]:
    for stage, shares in _by_stage(facts):
        worst = max(shares, key=lambda share: abs(share.realised_tokens - share.asked))
        if weigh_by.get(stage) == "rows" and abs(worst.realised_tokens - worst.asked) > FAR_OFF:
            yield (
                f"stage {stage!r}: {worst.source!r} has {worst.asked:.1%} of the rows but "
                f'{worst.realised_tokens:.1%} of the tokens, as rows are not equally full; weigh_by = "tokens" '
                "makes weights shares of tokens"
            )


def _by_stage(facts: PlanReport) -> Iterator[tuple[str, Sequence[SourceShare]]]:
    """Yield the shares of each stage that draws anything."""
    for stage, group in groupby(facts.shares, key=lambda share: share.stage):
        shares = list(group)
        if sum(share.tokens for share in shares):
            yield stage, shares
