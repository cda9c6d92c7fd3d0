"""The compiled plan: every batch of a run as a pure function of the step."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from tokenmill.errors import PlanError, nearest, whole
from tokenmill.fingerprint import digest
from tokenmill.hooks import attached
from tokenmill.plan.seen import SourceCounts, SourceSeen, total
from tokenmill.plan.stages import Stage, as_step, rows_at, stage_at
from tokenmill.plan.uses import DocumentUses, RowUse, as_row_uses, find_uses
from tokenmill.types import Int64Array

PLAN_VERSION = 2
"""Changes when the same description would give other batches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensSeen:
    """Counts of what the model was trained on before a step; skipped steps do not count."""

    slots: int
    """Input slots of all rows, over all their arrays, padding among them."""
    count: Callable[[], Mapping[str, SourceSeen]] = field(repr=False, compare=False)

    @property
    def by_source(self) -> Mapping[str, SourceSeen]:
        """Rows, slots, tokens, labels and epochs of each source.

        Counted when it is asked for: whole epochs at once, of others every row since the step that was last asked
        for, at about a microsecond each; masks are read for it.
        """
        return self.count()

    @property
    def trained(self) -> int | None:
        """Labels that masks leave, of all sources; None where a run draws from live text. Counts as `by_source`."""
        return total(source.trained for source in self.by_source.values() if source.rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """Stage, weights and counts at a step."""

    step: int
    stage: str
    """Name of the stage."""
    index: int
    """Index of the stage, from 0."""
    progress: float
    """Fraction of the stage that is done: 0 at its first step, less than 1 at its last."""
    lr_scale: float
    """Factor of the learning rate."""
    shares: Mapping[str, float]
    """Share of rows that the weights ask for from each source."""
    global_batch_size: int
    seq_len: int
    skipped: str | None
    """Reason that the step is skipped; None if it is trained on."""
    tokens_seen: TokensSeen
    """Counts before the step: input slots and labels."""


MAX_SHOWN = 4
"""Stages and sources that a `repr` names; the others are counted."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """All stages of a run, compiled: which rows each step reads. `Run.plan` makes one.

    A plan opens no file. It knows rows and spans, while `Run.what` adds their text and origin.

    Args:
        sources: Names of all sources.
        stages: Compiled stages in order.
        max_epochs: Limit of passes per source.
        contract: Choices of delivery that change what a batch holds.

    Raises:
        PlanError: A step, source or document is outside the plan; raised by its methods.

    Examples:
        >>> import tokenmill as tm
        >>> plan = tm.Run.from_toml("run.toml").plan()
        >>> plan.steps, plan.tokens_seen(10).slots
        (132, 10240)
        >>> [use.step for use in plan.when("demo", document=17)]
        [96, 104]
    """

    sources: tuple[str, ...]
    """Names of all sources; `rows` speaks of them by index."""
    stages: tuple[Stage, ...]
    """In order; those that are parts of one stage of the config share its name and number."""
    max_epochs: Mapping[str, float]
    contract: Mapping[str, str] = field(default_factory=dict)
    """Choices of delivery that change what a batch holds."""

    def __repr__(self) -> str:
        """Describe the plan in at most five lines: its size, then a line per stage."""
        firsts = list({stage.spec.number: stage for stage in reversed(self.stages)}.values())[::-1]
        lines = [f"Plan {self.fingerprint[:8]}: {self.steps:,} steps"]
        for stage in firsts if len(firsts) <= MAX_SHOWN else firsts[: MAX_SHOWN - 1]:
            begin, end = self.span(stage.spec.number)
            shares = describe_shares(stage.shares(begin))
            size = f"{stage.spec.global_batch_size} rows of {stage.spec.seq_len:,} tokens"
            lines.append(f"{stage.spec.name}, steps {begin}:{end}: {size}, {shares}")
        if len(firsts) > MAX_SHOWN:
            lines.append(f"and {len(firsts) - MAX_SHOWN + 1} more stages")
        body = "\n ".join(lines)
        return f"<{body}>"

    def _repr_html_(self) -> str | None:
        """Show a picture and a table of the stages in a notebook."""
        html: str | None = attached("compiled_plan_html")(self)
        return html

    @property
    def steps(self) -> int:
        """Number of steps of the run."""
        return self.stages[-1].end_step

    def at(self, step: int) -> Moment:
        """Return what a step belongs to, and what it asks for."""
        step = as_step(step)
        stage = self.stage(step)
        begin, end = self.span(stage.spec.number)
        return Moment(
            step=step,
            stage=stage.spec.name,
            index=stage.spec.number,
            progress=(step - begin) / (end - begin),
            lr_scale=stage.spec.lr_scale,
            shares=stage.shares(step),
            global_batch_size=stage.spec.global_batch_size,
            seq_len=stage.spec.seq_len,
            skipped=stage.spec.skipped,
            tokens_seen=self.tokens_seen(step),
        )

    def tokens_seen(self, step: int) -> TokensSeen:
        """Return what was trained on before a step, or by the end of the run."""
        step = as_step(step)
        return TokensSeen(
            slots=self.slots_before(step, skipped=False),
            count=lambda: self.seen(step),
        )

    def seen(self, step: int, *, held: bool = True) -> Mapping[str, SourceSeen]:
        """Return what each source has given before a step; without `held`, nothing that must be counted by row."""
        return self._counts.before(as_step(step), held=held)

    @cached_property
    def _counts(self) -> SourceCounts:
        return SourceCounts(self.sources, self.stages)

    def stage(self, step: int) -> Stage:
        """Return the stage, or the part of one, that a step belongs to."""
        return stage_at(self.stages, self.starts, as_step(step))

    @cached_property
    def starts(self) -> list[int]:
        """First step of each part of a stage."""
        return [stage.spec.start_step for stage in self.stages]

    def slots_before(self, step: int, *, skipped: bool) -> int:
        """Return the input slots of all steps before a step; those of skipped steps only with `skipped`."""
        stage = self.stages[max(0, bisect_left(self.starts, step) - 1)]
        everything, trained = self.slots_before_stages
        before = (everything if skipped else trained)[stage.index]
        if not skipped and not stage.is_trained:
            return before
        return before + (min(step, stage.end_step) - stage.spec.start_step) * stage.step_slots

    @cached_property
    def slots_before_stages(self) -> tuple[list[int], list[int]]:
        """Input slots before each part of a stage: of all steps, and of the steps that are trained on."""
        slots = [stage.num_steps * stage.step_slots for stage in self.stages]
        trained = [number * stage.is_trained for number, stage in zip(slots, self.stages, strict=True)]
        return list(accumulate(slots, initial=0)), list(accumulate(trained, initial=0))

    def span(self, number: int) -> tuple[int, int]:
        """Return the first step of a stage, given by its index, and its end, exclusive."""
        first, last = self._parts[number]
        return self.stages[first].spec.start_step, self.stages[last].end_step

    @cached_property
    def _parts(self) -> dict[int, tuple[int, int]]:
        """Indices of the first and the last part of each stage of the config."""
        parts: dict[int, tuple[int, int]] = {}
        for index, stage in enumerate(self.stages):
            first, _ = parts.get(stage.spec.number, (index, index))
            parts[stage.spec.number] = first, index
        return parts

    def rows(self, step: int) -> tuple[Int64Array, Int64Array]:
        """Return (source ids, row ids) of the global batch of a step, in order.

        Args:
            step: Step of the run, from 0.

        Returns:
            Indices into `sources`, and the index of each row in its source.

        Raises:
            PlanError: The run has no such step, or skips it.
        """
        step = as_step(step)
        stage = self.trained_stage(step)
        slots = np.arange(stage.spec.global_batch_size)
        return rows_at(stage, np.full_like(slots, step), slots)

    def what(self, step: int) -> tuple[RowUse, ...]:
        """Return the rows of the global batch of a step, each with its spans of documents.

        Raises:
            PlanError: The run has no such step, or skips it.
        """
        step = as_step(step)
        stage = self.trained_stage(step)
        source_ids, rows = self.rows(step)
        uses: list[RowUse] = []
        for source in np.unique(source_ids).tolist():
            name, slots = self.sources[source], np.flatnonzero(source_ids == source)
            spans = stage.rows[name].spans(rows[slots])
            uses += [
                RowUse(step=step, slot=int(slot), source=name, row=int(rows[slot]), spans=spans.row(i))
                for i, slot in enumerate(slots)
            ]
        return tuple(sorted(uses, key=lambda use: use.slot))

    def trained_stage(self, step: int) -> Stage:
        """Return the stage, or the part of one, of a step; refuse a step that is skipped."""
        step = as_step(step)
        stage = self.stage(step)
        if not stage.is_trained:
            raise PlanError(
                f"step: must be one that is trained on, got {step}, which the run skips "
                f"({stage.spec.skipped or 'no reason given'}); the next one is {self.next_trained(step)}"
            )
        return stage

    def next_trained(self, step: int) -> int:
        """Return the first step from `step` on that is not skipped; the number of steps, if there is none."""
        step = as_step(step)
        index = bisect_right(self.trained_stages, step, key=lambda stage: stage.end_step)
        if index == len(self.trained_stages):
            return self.steps
        return max(step, self.trained_stages[index].spec.start_step)

    def last_trained(self, step: int) -> int | None:
        """Return the last step before `step` that is not skipped; None if there is none."""
        index = bisect_left(self.trained_stages, step, key=lambda stage: stage.spec.start_step) - 1
        return min(step, self.trained_stages[index].end_step) - 1 if index >= 0 else None

    def nth_trained(self, number: int) -> int:
        """Return the n-th step that is not skipped, from 0; the number of steps, if there are fewer."""
        index = bisect_right(self._trained_before, number) - 1
        if index == len(self.trained_stages):
            return self.steps
        return self.trained_stages[index].spec.start_step + number - self._trained_before[index]

    @cached_property
    def _trained_before(self) -> list[int]:
        """Steps that are not skipped before each of the trained stages, and all of them."""
        return list(accumulate((stage.num_steps for stage in self.trained_stages), initial=0))

    @cached_property
    def trained_stages(self) -> tuple[Stage, ...]:
        """Parts of stages whose steps are trained on, in order."""
        return tuple(stage for stage in self.stages if stage.is_trained)

    def when(self, source: str, document: int) -> tuple[RowUse, ...]:
        """Return every step and slot of the run that uses a document, with the spans of that document alone.

        Args:
            source: Name of the source.
            document: Number of the document in the source, from 0.

        Raises:
            PlanError: There is no such source or document, or the source is live text.
        """
        document = whole("document", document, PlanError, "count from 0")
        return tuple(as_row_uses(self.when_many(source, np.array([document])), source))

    def when_many(
        self,
        source: str,
        documents: Int64Array,
        starts: Int64Array | None = None,
        ends: Int64Array | None = None,
    ) -> DocumentUses:
        """Return every use of token ranges of documents of a source, over the whole run.

        Args:
            source: Name of the source.
            documents: Number of the document of each range.
            starts: First token of each range, counted from the first token of its document; by default 0.
            ends: End of each range, exclusive; by default the end of the document.

        Returns:
            Arrays with one entry per span that holds a token of a range in a step that is trained on. Rows of
            pairs and groups are found by the tokens of their first array.

        Raises:
            PlanError: A source, document or range does not exist, or the source is live text.
        """
        if source not in self.sources:
            raise PlanError(f"unknown source: {source!r}; {nearest(source, self.sources)}")
        return find_uses(self.trained_stages, source, documents, starts, ends)

    def describe(self, step: int | None = None) -> dict[str, Any]:
        """Return what decides the batches before `step` (default: all of them), as JSON."""
        number = self._num_described(self.steps if step is None else step)
        return {
            "version": PLAN_VERSION,
            "contract": dict(self.contract),
            "stages": [described for _, described in self._described[:number]],
        }

    @cached_property
    def _described(self) -> list[tuple[int, dict[str, Any]]]:
        """First step and description of every part of a stage that does not just continue the previous one."""
        described: list[tuple[int, dict[str, Any]]] = []
        for number, part in enumerate(self.stages):
            if number and part.continues(self.stages[number - 1]):
                continue
            sources = {
                name: {**source, "id": self.sources.index(name)}
                for name, source in part.description["sources"].items()
            }
            described.append((part.spec.start_step, {**part.description, "sources": sources}))
        return described

    def _num_described(self, step: int) -> int:
        """Return how many of the described stages decide the batches before a step."""
        return bisect_left(self._described, step, key=lambda item: item[0])

    @cached_property
    def _digests(self) -> dict[int, str]:
        return {}

    def fingerprint_at(self, step: int) -> str:
        """Return the digest of what decides the batches before `step`: equal digests, equal batches."""
        number = self._num_described(step)
        if number not in self._digests:
            self._digests[number] = digest(self.describe(step))
        return self._digests[number]

    @cached_property
    def fingerprint(self) -> str:
        """Digest of what decides all batches, and their number."""
        return digest([self.steps, self.describe()])


def describe_shares(shares: Mapping[str, float]) -> str:
    """Return the shares of sources as percentages, the largest first.

    >>> describe_shares({"web": 0.7, "code": 0.3})
    'web 70%, code 30%'
    """
    largest = sorted(shares.items(), key=lambda share: -share[1])
    named = [f"{name} {share:.3g}%" for name, share in ((name, 100 * share) for name, share in largest[:MAX_SHOWN])]
    return ", ".join([*named, *([f"{len(largest) - MAX_SHOWN} more"] if len(largest) > MAX_SHOWN else [])])
