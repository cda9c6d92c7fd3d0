"""The loader of a run that draws from live text, alone or beside stores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np

from tokenmill.errors import ConfigError, PlanError, ResumeError
from tokenmill.live.assemble import join_rows
from tokenmill.live.lanes import AheadOptions, Cursor, Lanes, LiveRows, Mark, SkippedText, padding_id
from tokenmill.live.mixed_state import LIVE, LanePlaces, read_places
from tokenmill.live.state import check_turns, own_skipped
from tokenmill.loader.assemble import Block, Drawn, Given, StoredRows
from tokenmill.loader.loader import AnyBlock, Loader, LoaderOptions
from tokenmill.loader.state import Explain, Position, load_state
from tokenmill.plan.order import rows_at
from tokenmill.types import Int64Array

if TYPE_CHECKING:
    from tokenmill.loader.loader import RankSlice
    from tokenmill.plan.plan import Plan
    from tokenmill.plan.stages import Stage
    from tokenmill.types import Batch

MAX_MAPS = 64
"""Shards of stored sources that are held at a time."""
_SOME_STEPS = 256
"""Skipped steps that are gone through at a time."""


class MixedLoader(Loader):
    """Batches of one rank, as of any loader; each row of live text is the next one of a lane.

    Slot s of a batch of B rows draws from lane s * L // B of each of its sources. A rank has the same part of the
    lanes as of the batch, so no other rank draws from them, whatever the number of ranks. Lanes are gone through
    in order: what is ahead of them cannot be looked at, nor can a step be gone to but by a state.
    """

    def __init__(
        self,
        plan: Plan,
        part: RankSlice,
        options: LoaderOptions,
        explain: Explain | None = None,
        ahead: AheadOptions | None = None,
    ) -> None:
        # One batch is assembled at a time; threads work ahead where the time goes, at reading and tokenizing.
        super().__init__(plan, part, replace(options, threads=0), explain)
        if "num_loss_tokens" in options.arrays:
            raise ConfigError(
                "arrays: num_loss_tokens needs the rows of all ranks, got it with live text, of which a rank knows "
                "its own; sum the labels of each rank with an all-reduce"
            )
        self._ahead = ahead or AheadOptions(threads=options.threads, timeout=options.timeout)
        found = live_rows(plan)
        self.lanes = {name: self._open(name, rows) for name, rows in found.items()}
        self._crossing = any(rows.cross_document_labels for rows in found.values())
        self._pad = padding_id(next(iter(found.values())).source.tokenizer.identity)
        self._at = 0
        self._before = self._mark()

    def _open(self, name: str, rows: LiveRows) -> Lanes:
        if rows.lanes % self.part.world_size:
            raise ConfigError(
                f"source {name!r}: world_size must divide its {rows.lanes} lanes, got {self.part.world_size}; use "
                "another number of ranks, or say lanes at the start of a run"
            )
        each = rows.lanes // self.part.world_size
        own = range(self.part.rank * each, (self.part.rank + 1) * each)
        return Lanes(rows.source, rows.source.windows(rows.lanes), own, self._ahead)

    @property
    def waited(self) -> float:
        """Seconds that the caller had to wait for text."""
        return sum(lanes.waited for lanes in self.lanes.values())

    @property
    def skipped(self) -> dict[str, SkippedText]:
        """What was left out of what this loader has delivered, of each source."""
        return {name: lanes.skipped for name, lanes in self.lanes.items()}

    def close(self) -> None:
        """Stop the threads and let go of all windows; who goes on drawing starts them again."""
        for lanes in self.lanes.values():
            lanes.close()

    def __getitem__(self, step: int) -> Batch:
        """Refuse to look at a step: what it holds depends on all before it."""
        self._refuse(step)

    def seek(self, step: int) -> None:
        """Go back to the start; any other step needs a state."""
        if step == 0:
            self._stand(Position(step=0), LanePlaces(at=0, cursors={}))
        elif self._position() != Position(step=step):
            self._refuse(step)

    def _refuse(self, step: int) -> NoReturn:
        raise PlanError(
            f"step: must be 0 or come from a state where a run draws from live text, got {step}; load a state, or "
            "leave out live = true, and the text is prepared once"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return where this rank stands, with its lanes; `merge_states` joins those of all ranks."""
        return {**super().state_dict(), LIVE: self._places().to_json()}

    def _places(self) -> LanePlaces:
        return LanePlaces(
            at=self._at,
            cursors={name: lanes.cursors for name, lanes in self.lanes.items()},
            skipped={name: Counter(lanes.skipped.counts) for name, lanes in self.lanes.items()},
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a state says; a running iteration goes on from there."""
        known = isinstance(state, Mapping)
        plain = {key: value for key, value in state.items() if key != LIVE} if known else state
        position = load_state(plain, self.plan, self.part, self._explain)
        places = read_places(state[LIVE]) if LIVE in state else self._before_live(position)
        self._check(position, places)
        self._stand(position, places)

    def _before_live(self, position: Position) -> LanePlaces:
        """Return where lanes stand at a step before which nothing was drawn from them, as a state without says."""
        if any(drawn_before(self.plan, name, position.covered) for name in self.lanes):
            raise ResumeError(
                f"state: must have the lanes of live text, which is drawn before step {position.covered}, got "
                "none; use a state that was not edited"
            )
        at = position.step
        while at and self.plan.stage(at - 1).spec.skipped is not None:
            at = self.plan.stage(at - 1).spec.start_step
        return LanePlaces(at=at, cursors={})

    def _check(self, position: Position, places: LanePlaces) -> None:
        if self.plan.next_trained(places.at) != self.plan.next_trained(position.step) or places.at > position.step:
            raise ResumeError(
                f"state: live.at must be its step {position.step}, or have skipped steps alone up to it, got "
                f"{places.at}; use a state that was not edited"
            )
        for name, lanes in self.lanes.items():
            cursors = places.cursors.get(name, {})
            missing = [lane for lane in lanes.lanes if lane not in cursors]
            # A source that is new, or comes later, stands at its start.
            if missing and (cursors or drawn_before(self.plan, name, position.covered)):
                raise ResumeError(
                    f"state: must have the lanes {min(lanes.lanes)}:{max(lanes.lanes) + 1} of {name!r} for rank "
                    f"{self.part.rank} of {self.part.world_size}, got none of {missing}; join the states of all "
                    "ranks with merge_states first"
                )
            check_turns({lane: cursors[lane] for lane in lanes.lanes if lane in cursors}, lanes.windows)

    def _stand(self, position: Position, places: LanePlaces) -> None:
        for name, lanes in self.lanes.items():
            cursors = places.cursors.get(name, {})
            lanes.stand({lane: cursors.get(lane, Cursor()) for lane in lanes.lanes})
            alone = len(cursors) <= len(lanes.lanes)
            lanes.count_skipped(own_skipped(places.skipped.get(name, {}), self.part.rank, alone=alone))
        self._at = places.at
        self._go_to(position)

    def _runs(self, drawn: int) -> Iterator[tuple[Stage, int, int]]:
        """Yield (stage, micro-batch, 1) from a point of the run on: rows are taken when they are delivered."""
        for stage, begin in zip(self.plan.stages, self._first_batch.tolist(), strict=False):
            for first in range(max(0, drawn - begin), self._num_batches(stage)):
                yield stage, first, 1
        self.close()

    def _block(self, stage: Stage, first: int, count: int) -> Block:
        step, batch = divmod(first, self.part.batches(stage))
        step += stage.spec.start_step
        names = self.plan.sources
        index = {
            names.index(name): cast(StoredRows, rows)
            for name, rows in stage.rows.items()
            if not isinstance(rows, LiveRows)
        }
        self._before = self._mark()
        with self._kept():
            if not batch:
                self._catch_up(step)
                self._enter(stage, step)
            block = Block(
                stage,
                index,
                self.part.places(stage, first, count),
                self.options.arrays,
                MAX_MAPS,
                continuous=self.options.positions == "row",
                given=self._given(stage),
            )
        self._at = step + (batch + 1 == self.part.batches(stage))
        return block

    def _batch(self, block: AnyBlock, number: int) -> Batch:
        with self._kept():
            return super()._batch(block, number)

    def _given(self, stage: Stage) -> Given:
        return Given(
            draw=lambda source, slots: self._draw(stage, self.plan.sources[source], slots),
            pad=self._pad,
            crossing=self._crossing,
        )

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """Leave the lanes where they stood before the batch if what is done fails."""
        try:
            yield
        except BaseException:
            self._at, marks = self._before
            for name, mark in marks.items():
                self.lanes[name].back(mark)
            raise

    def _mark(self) -> tuple[int, dict[str, Mark]]:
        return self._at, {name: lanes.mark(lanes.lanes) for name, lanes in self.lanes.items()}

    def _catch_up(self, step: int) -> None:
        """Go through the rows of skipped steps that lie between what the lanes have given and a step."""
        while self._at < step:
            stage = self.plan.stage(self._at)
            self._enter(stage, self._at)
            end = min(stage.end_step, step, self._at + _SOME_STEPS)
            rows = self.part.rows(stage)
            steps = np.repeat(np.arange(self._at, end), rows)
            slots = np.tile(np.arange(rows) + self.part.rank * rows, end - self._at)
            sources, _ = rows_at(stage, steps, slots)
            for source in np.unique(sources).tolist():
                name = self.plan.sources[source]
                if name in self.lanes:
                    self._draw(stage, name, slots[sources == source])
            self._at = end

    def _enter(self, stage: Stage, step: int) -> None:
        """Start sources again where a stage does."""
        if step == stage.spec.start_step:
            for name in stage.restarted & self.lanes.keys():
                self.lanes[name].restart()

    def _draw(self, stage: Stage, name: str, slots: Int64Array) -> Drawn:
        """Take the next rows of the lanes that slots of a batch belong to."""
        rows = cast(LiveRows, stage.rows[name])
        numbers = slots * rows.lanes // stage.spec.global_batch_size
        picked = [self.lanes[name].next_row(number, rows.format) for number in numbers.tolist()]
        lines, spans = join_rows(picked)
        return Drawn(rows=lines, spans=spans, held=picked)


def live_rows(plan: Plan) -> dict[str, LiveRows]:
    """Return the sources of live text that a plan draws from, as the first stage of each has them."""
    found: dict[str, LiveRows] = {}
    for stage in plan.stages:
        for name, rows in stage.rows.items():
            if isinstance(rows, LiveRows):
                found.setdefault(name, rows)
    return found


def drawn_before(plan: Plan, name: str, step: int) -> int:
    """Return how many rows of a source all batches before a step hold."""
    found = 0
    for stage in plan.stages:
        if name in stage.names and stage.spec.start_step < step:
            positions = (min(step, stage.end_step) - stage.spec.start_step) * stage.spec.global_batch_size
            line = stage.names.index(name)
            found += int(stage.mixture.counts(stage.origin + positions)[line]) - stage.bases[line]
    return found
