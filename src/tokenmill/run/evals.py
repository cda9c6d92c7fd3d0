"""Evals of a run: documents that it is evaluated on, the same batches every time, and never trained on.

An eval is a plan of one epoch: its sources one after another, each in its own order. What does not fill the last
batches of all ranks are rows without labels, so that every rank has as many batches and the mean loss is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.config.evals import EvalConfig, EvalSource
from tokenmill.config.tokens import read_tokens
from tokenmill.errors import ConfigError, nearest
from tokenmill.loader import Layout, Loader, LoaderOptions, RankSlice, usual_arrays
from tokenmill.loader.layout import find_layout
from tokenmill.packing import Policy, RecordRows, pack_rows
from tokenmill.packing.index import chosen_documents
from tokenmill.packing.stored import StoredRows, TakenRows, digest_numbers
from tokenmill.plan.compile import compile_in_turn
from tokenmill.plan.mixture import exact_weight
from tokenmill.plan.plan import Plan
from tokenmill.plan.shuffle import Shuffle
from tokenmill.plan.stages import NOTHING, Held, StageSpec
from tokenmill.types import RECORD_TYPES, Batch, Int64Array

if TYPE_CHECKING:
    from tokenmill.run.run import Run
    from tokenmill.store import Store

_BLOCK = 1 << 16
"""Rows that are counted at a time."""


class EvalLoader(Loader):
    """Batches of one rank of an eval; every `iter()` begins anew, and gives the same."""

    def __iter__(self) -> Iterator[Batch]:
        self.seek(0)
        return super().__iter__()


class Evals(dict[str, "Eval"]):
    """The evals of a run, by name."""

    def __missing__(self, name: str) -> Eval:
        way_out = nearest(name, self) if self else "add [[evals]] to the config"
        raise ConfigError(f"evals: name must be one of the run's {len(self)}, got {name!r}; {way_out}")


@dataclass(frozen=True, kw_only=True)
class EvalPart:
    """What an eval takes from one place."""

    config: EvalSource
    store: Store
    documents: Int64Array | None
    """Which documents of the store, ascending; None: all."""
    rows: StoredRows
    taken: int
    """How many of its rows, from the first on."""

    @property
    def name(self) -> str:
        """Under which it is spoken of."""
        return self.config.name

    @property
    def num_documents(self) -> int:
        """How many documents it may take."""
        return self.store.num_documents if self.documents is None else int(self.documents.size)


@dataclass(frozen=True)
class Eval:
    """Documents that a run is evaluated on."""

    run: Run
    config: EvalConfig

    @property
    def name(self) -> str:
        """Of the table in the config."""
        return self.config.name

    @property
    def every(self) -> int | None:
        """After how many steps to evaluate, if the config says."""
        return self.config.every

    @property
    def every_tokens(self) -> int | None:
        """After how many input slots of the run to evaluate, if the config says that."""
        said = self.config.every_tokens
        return None if said is None else read_tokens(f"eval {self.name!r}", "every_tokens", said)

    def due(self, step: int) -> bool:
        """Say whether to evaluate after so many steps: at each `every`-th, or where `every_tokens` have passed."""
        tokens, clock = self.every_tokens, self.run.config.clock
        if tokens is None:
            return self.every is not None and step % self.every == 0
        return step > 0 and clock.tokens_at(step) // tokens > clock.tokens_at(step - 1) // tokens

    @property
    def seq_len(self) -> int:
        """How many tokens of a row are inputs."""
        return self.config.seq_len or self.run.config.run.seq_len

    @property
    def num_rows(self) -> int:
        """How many rows there are, without those that only fill the last batches."""
        return sum(part.taken for part in self.parts)

    @cached_property
    def held(self) -> Held:
        """Tokens and labels of all its rows; masks are read for it, but no token."""
        total = NOTHING
        for part in self.parts:
            rows = TakenRows(rows=part.rows, taken=part.taken, num_rows=part.taken, chosen=_chosen(part))
            for begin in range(0, part.taken, _BLOCK):
                total += rows.held(np.arange(begin, min(begin + _BLOCK, part.taken)))
        return total

    @cached_property
    def parts(self) -> tuple[EvalPart, ...]:
        """What is taken from each place, in order; stores are open, and packed."""
        packed = [self._part(source) for source in self.config.parts]
        taken = self._taken([_num_rows(part) for part in packed])
        if not sum(taken):
            raise ConfigError(f"eval {self.name!r}: must have at least one row, got none; add documents")
        return tuple(replace(part, taken=rows) for part, rows in zip(packed, taken, strict=True))

    def _part(self, source: EvalSource) -> EvalPart:
        where = f"eval {self.name!r}"
        store = self.run.eval_store(source)
        documents = None if source.whole else source.numbers(self.run.folder, where)
        if documents is not None and documents.size and int(documents[-1]) >= store.num_documents:
            raise ConfigError(
                f"{where}: documents must be among the {store.num_documents} of {store.path}, got "
                f"{int(documents[-1])}; count from 0"
            )
        multiple = self.run.config.run.segment_multiple
        if self.seq_len % multiple:
            raise ConfigError(
                f"{where}: seq_len must be divisible by segment_multiple, got {self.seq_len} and {multiple}; "
                f"use {-(-self.seq_len // multiple) * multiple}"
            )
        policy = Policy(name=self.config.packing, split=self.config.split, multiple=multiple)
        rows: StoredRows
        if store.manifest.kind in RECORD_TYPES:
            rows = RecordRows(store=store, seq_len=self.seq_len, policy=replace(policy, name="padded"))
        elif documents is None:
            rows = pack_rows(store, seq_len=self.seq_len, policy=policy)
        else:
            fragments, after = chosen_documents(store, documents), f"chosen {digest_numbers(documents)}"
            rows = pack_rows(store, seq_len=self.seq_len, policy=policy, fragments_of=fragments, after=after)
        return EvalPart(config=source, store=store, documents=documents, rows=rows, taken=0)

    def _taken(self, sizes: Sequence[int]) -> list[int]:
        """Return how many rows are taken of each part: by their weights, or of one after another."""
        most, where = self.config.rows, f"eval {self.name!r}"
        weights = [part.weight for part in self.config.parts]
        if None in weights or len(weights) == 1:
            if most is not None and most > sum(sizes):
                raise ConfigError(
                    f"{where}: rows must be at most the {sum(sizes)} there are, got {most}; leave it out for all"
                )
            ends = np.minimum(np.cumsum(sizes), sum(sizes) if most is None else most)
            return [int(rows) for rows in np.diff(ends, prepend=0)]
        exact = [exact_weight(weight) for weight in weights if weight is not None]
        shares = [weight / sum(exact) for weight in exact]
        # As many rows as all sources have for their shares; no row is taken twice.
        room = min(int((size + 1) / share) for size, share in zip(sizes, shares, strict=True))
        if most is not None:
            room = most
        while (taken := _apportion(shares, room)) and any(map(int.__gt__, taken, sizes)):
            if most is not None:
                short = next(n for n, number in enumerate(taken) if number > sizes[n])
                raise ConfigError(
                    f"{where}: {self.config.parts[short].name!r} must have {taken[short]} rows for its share of "
                    f"{most}, got {sizes[short]}; lower rows or its weight"
                )
            room -= 1
        return taken

    def plan(self, batch: int = 1) -> Plan:
        """Return the plan of one epoch in batches of so many rows, over all ranks; the last one is filled up."""
        parts = [part for part in self.parts if part.taken]
        fill = -self.num_rows % batch
        rows = {
            part.name: TakenRows(
                rows=part.rows,
                taken=part.taken,
                num_rows=part.taken + (fill if part is parts[-1] else 0),
                chosen=_chosen(part),
            )
            for part in parts
        }
        spec = StageSpec(
            name=self.name,
            start_step=0,
            global_batch_size=batch,
            seq_len=self.seq_len,
            seed=0,
            shuffle=Shuffle(mode="none"),
            weights={name: Fraction(part.num_rows) for name, part in rows.items()},
            rows=rows,
        )
        return Plan(
            sources=tuple(rows),
            stages=(compile_in_turn(spec, tuple(rows)),),
            max_epochs={},
            contract={"positions": self.run.config.run.positions},
        )

    def loader(
        self,
        *,
        rank: int = 0,
        world_size: int = 1,
        micro_batch: int = 1,
        layout: Layout | None = None,
        threads: int = 1,
        prefetch: int = 8,
        arrays: Sequence[str] | None = None,
    ) -> EvalLoader:
        """Return the batches of one rank: as many on every rank, the same whenever they are asked for.

        The n-th batches of all ranks, rank by rank, are the next rows of the eval; behind the last stand rows
        without labels. `num_loss_tokens` counts the labels of the n-th batches of all ranks together, so that
        losses summed over batches and ranks, divided by its sum over batches, are the mean over all labels.
        """
        layout = find_layout(layout, rank, world_size)
        plan = self.plan(layout.dp[1] * micro_batch)
        if arrays is None:
            usual, written = usual_arrays(plan), self.run.config.run.arrays
            sequences = "labels" in usual
            arrays = (*dict.fromkeys((*written, "num_loss_tokens")),) if sequences else usual
        return EvalLoader(
            plan,
            RankSlice(layout=layout, micro_batch=micro_batch),
            LoaderOptions(
                arrays=tuple(arrays),
                threads=threads,
                prefetch=prefetch,
                positions=self.run.config.run.positions,
                horizon=self.run.config.run.horizon,
            ),
        )


def _chosen(part: EvalPart) -> Int64Array | None:
    """Return which rows are the chosen documents: of records, which are rows as they are."""
    return part.documents if isinstance(part.rows, RecordRows) else None


def _num_rows(part: EvalPart) -> int:
    chosen = _chosen(part)
    return part.rows.num_rows if chosen is None else int(chosen.size)


def _apportion(shares: Sequence[Fraction], rows: int) -> list[int]:
    """Return whole numbers that sum to `rows`, each less than one from its share."""
    ends = accumulate((share * rows for share in shares), initial=Fraction(0))
    return [int(end) - int(begin) for begin, end in pairwise(ends)]
