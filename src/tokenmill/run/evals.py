"""Evals of a run: documents that it is evaluated on, the same batches every time, and never trained on.

An eval is a plan of one epoch: its sources one after another, each in its own order. The last batches are filled up
with rows without labels, so that every rank has as many batches as the others and the mean loss is exact.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.config.evals import EvalConfig, EvalSource
from tokenmill.config.schedule import check_multiple, long_documents, read_tokens
from tokenmill.errors import ConfigError, nearest
from tokenmill.loader import Layout, Loader, LoaderOptions, RankSlice, usual_arrays
from tokenmill.loader.layout import find_layout
from tokenmill.packing import Policy, RecordRows, pack_rows
from tokenmill.packing.holes import digest_numbers
from tokenmill.packing.index import chosen_documents
from tokenmill.packing.joined import take_rows
from tokenmill.packing.stored import StoredRows, count_held
from tokenmill.plan.compile import compile_in_turn
from tokenmill.plan.mixture import exact_weight
from tokenmill.plan.order import Shuffle
from tokenmill.plan.plan import Plan
from tokenmill.plan.rows import NOTHING, TokenCounts
from tokenmill.plan.stages import StageSpec
from tokenmill.run.loading import check_columns
from tokenmill.store import Store
from tokenmill.tables import names_of
from tokenmill.types import MASK_KEYS, RECORD_TYPES, Batch, Int64Array

if TYPE_CHECKING:
    from tokenmill.run.run import Run

logger = logging.getLogger("tokenmill")


class EvalLoader(Loader):
    """Batches of one rank of an eval. Every `iter()` restarts and yields the same batches."""

    def __iter__(self) -> Iterator[Batch]:
        self.seek(0)
        return super().__iter__()

    @property
    def metrics_prefix(self) -> str:
        """Prefix of the keys of `metrics`, which differ from those of the run."""
        return f"eval/{self.plan.stages[0].spec.name}/"


class Evals(dict[str, "Eval"]):
    """The evals of a run, by name."""

    def __getitem__(self, name: str) -> Eval:
        if isinstance(name, str) and name in self:
            return super().__getitem__(name)
        if not self:
            raise ConfigError(f"evals: must be in the config, got {name!r} and no [[evals]] there; add one")
        raise ConfigError(f"evals: name must be one of the run's, got {name!r}; {nearest(name, self)}")


@dataclass(frozen=True, kw_only=True)
class EvalPart:
    """Rows that an eval takes from one place."""

    config: EvalSource
    store: Store
    documents: Int64Array | None
    """Documents of the store, ascending. None: all."""
    rows: StoredRows
    taken: int
    """Number of its rows that are taken, from the first one."""

    @property
    def name(self) -> str:
        """Name in batches and reports."""
        return self.config.name

    @property
    def num_documents(self) -> int:
        """Number of documents that it may take."""
        return self.store.num_documents if self.documents is None else int(self.documents.size)


@dataclass(frozen=True, repr=False)
class Eval:
    """Documents that a run is evaluated on."""

    run: Run
    config: EvalConfig

    def __repr__(self) -> str:
        """Describe where its documents come from; opens no store."""
        places = ", ".join(str(part.source or part.store) for part in self.config.parts)
        return f"<Eval {self.name!r}: rows of {self.seq_len:,} tokens from {places}>"

    @property
    def name(self) -> str:
        """Name of the table in the config."""
        return self.config.name

    @property
    def every(self) -> int | None:
        """Number of steps between evaluations. None if the config does not set it."""
        return self.config.every

    @property
    def every_tokens(self) -> int | None:
        """Number of input slots of the run between evaluations. None if the config does not set it."""
        tokens = self.config.every_tokens
        return None if tokens is None else read_tokens(f"eval {self.name!r}", "every_tokens", tokens)

    def due(self, step: int) -> bool:
        """Return whether to evaluate after `step` steps: every `every`, or each time `every_tokens` have passed."""
        tokens, clock = self.every_tokens, self.run.config.clock
        if tokens is None:
            return self.every is not None and step > 0 and step % self.every == 0
        return step > 0 and clock.tokens_at(step) // tokens > clock.tokens_at(step - 1) // tokens

    @property
    def seq_len(self) -> int:
        """Number of inputs per row."""
        return self.config.seq_len or self.run.config.run.seq_len

    @property
    def num_rows(self) -> int:
        """Number of rows, without those that only fill the last batches."""
        return sum(part.taken for part in self.parts)

    @cached_property
    def held(self) -> TokenCounts:
        """Tokens and labels of all its rows; masks are read for it, but no token."""
        total = NOTHING
        for part in self.parts:
            total += count_held(take_rows(part.rows, part.taken, part.taken))
        return total

    @cached_property
    def parts(self) -> tuple[EvalPart, ...]:
        """Rows of each place, in order. Stores are opened and packed."""
        packed = [self._part(source) for source in self.config.parts]
        taken = self._taken([part.rows.num_rows for part in packed])
        if not sum(taken):
            raise ConfigError(f"eval {self.name!r}: no rows; add documents")
        return tuple(replace(part, taken=rows) for part, rows in zip(packed, taken, strict=True))

    def _packing(self, store: Store) -> str:
        """Return how documents of a store become rows: pairs and groups are never packed."""
        return "padded" if store.manifest.kind in RECORD_TYPES else self.config.packing

    def _split(self, store: Store) -> str:
        """Return the fate of documents of a store that are longer than a row."""
        kind = store.manifest.kind if store.manifest.kind in RECORD_TYPES else None
        return long_documents(f"eval {self.name!r}", self.config.on_long, self._packing(store), kind)

    def long_records(self) -> Iterator[str]:
        """Yield what becomes of conversations, pairs and groups that do not fit a row."""
        fates = {
            "drop": "are left out",
            "forbid": "are refused",
            "truncate_end": "lose their end",
            "truncate_start": "lose their beginning",
        }
        cut = "are cut: what follows a cut is evaluated without what stood before"
        ways = 'raise seq_len of the eval, or say on_long = "drop" or "stop" there'
        for part in self.parts:
            longer, has_mask = part.rows.num_long, any(key in MASK_KEYS for key in part.store.keys)
            if longer and has_mask:
                yield (
                    f"eval {self.name!r}: {longer:,} of {part.num_documents:,} records of {part.name!r} are longer "
                    f"than a row of {self.seq_len:,} tokens and {fates.get(self._split(part.store), cut)}; {ways}"
                )

    @cached_property
    def _has_warned(self) -> bool:
        """Log once what becomes of long records."""
        for sentence in self.long_records():
            logger.warning("%s", sentence)
        return True

    def _part(self, source: EvalSource) -> EvalPart:
        where = f"eval {self.name!r}"
        store = self.run.sources.eval_store(source)
        documents = None if source.whole else source.numbers(self.run.folder, where)
        if documents is not None and documents.size and int(documents[-1]) >= store.num_documents:
            raise ConfigError(
                f"{where}: documents must be among the {store.num_documents} of {store.path}, got "
                f"{int(documents[-1])}; count from 0"
            )
        multiple = self.run.config.run.segment_multiple
        check_multiple(where, self.seq_len, multiple)
        policy = Policy(name=self._packing(store), split=self._split(store), multiple=multiple)
        rows: StoredRows
        if store.manifest.kind in RECORD_TYPES:
            rows = RecordRows(store=store, seq_len=self.seq_len, policy=policy, chosen=documents)
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
        """Return the plan of one epoch in batches of `batch` rows, over all ranks; the last one is filled up."""
        parts = [part for part in self.parts if part.taken]
        fill = -self.num_rows % batch
        rows = {
            part.name: take_rows(part.rows, part.taken, part.taken + (fill if part is parts[-1] else 0))
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
        columns: Sequence[str] = (),
    ) -> EvalLoader:
        """Return the batches of one rank: as many on every rank, the same whenever they are asked for.

        The n-th batches of all ranks, rank by rank, are the next rows of the eval; behind the last stand rows
        without labels. `num_loss_tokens` counts the labels of the n-th batches of all ranks together, so that
        losses summed over batches and ranks, divided by its sum over batches, are the mean over all labels.
        `columns` are fields that its stores keep of records.
        """
        layout = find_layout(layout, rank, world_size)
        _ = not layout.leads or self._has_warned
        plan = self.plan(layout.dp[1] * micro_batch)
        if arrays is None:
            usual, written = usual_arrays(plan), self.run.config.run.arrays
            sequences = "labels" in usual
            arrays = (*dict.fromkeys((*written, "num_loss_tokens")),) if sequences else usual
        arrays = names_of("arrays", arrays)
        columns = names_of("columns", columns)
        check_columns(columns, arrays, {part.name: part.store for part in self.parts})
        return EvalLoader(
            plan,
            RankSlice(layout=layout, micro_batch=micro_batch),
            LoaderOptions(
                arrays=arrays,
                threads=threads,
                prefetch=prefetch,
                positions=self.run.config.run.positions,
                horizon=self.run.config.run.horizon,
                columns=columns,
            ),
        )


def find_evals(given: object, trained: object, *, where: str, beside: str) -> dict[str, Eval]:
    """Return the evals that an adapter is given, by name, one alone without; none where it is given others.

    `given` is an eval, a store, the path of one, or several of them by name; `trained` is the run beside which a
    store is evaluated on, with rows of its length. Errors call the two `where` and `beside`.
    """
    if isinstance(given, list | tuple) and any(isinstance(i, Eval | Store | str | os.PathLike) for i in given):
        raise ConfigError(
            f"{where}: several evals must have names, got a list; pass a dict, such as dict(run.evals)"
        )
    if not isinstance(given, Mapping):
        item = _eval_of(given, trained, where, beside)
        return {} if item is None else {"": item}
    evals = {str(name): _eval_of(item, trained, where, beside) for name, item in given.items()}
    ours = {name: item for name, item in evals.items() if item is not None}
    if ours and len(ours) < len(evals):
        raise ConfigError(
            f"{where}: must be evals of a run or stores, or else datasets, got {sorted(evals)} of both; "
            "evaluate on them one after another"
        )
    return ours


def _eval_of(given: object, trained: object, where: str, beside: str) -> Eval | None:
    """Return the eval of one value: the eval itself, or that of a store, with rows as the trained run has them."""
    from tokenmill.run.run import Run

    if isinstance(given, Eval):
        return given
    if isinstance(given, Run):
        raise ConfigError(
            f"{where}: must be an eval of a run or a store, got a run, whose rows never end; pass run.evals[...], "
            "or the path of a store"
        )
    if isinstance(given, Loader):
        raise ConfigError(f"{where}: must be an eval of a run or a store, got a loader; pass run.evals[...]")
    place = given.path if isinstance(given, Store) else given
    if not isinstance(place, str | os.PathLike):
        return None
    if not isinstance(trained, Run):
        raise ConfigError(
            f"{where}: a store must go with a run as {beside}, got {trained!r}, which says no rows; "
            "pass the run, or run.evals[...]"
        )
    path = os.fspath(place)
    return Eval(trained, EvalConfig(name="eval", store=path if "://" in path else str(Path(path).absolute())))


def _apportion(shares: Sequence[Fraction], rows: int) -> list[int]:
    """Return whole numbers that sum to `rows`, each less than one from its share."""
    ends = accumulate((share * rows for share in shares), initial=Fraction(0))
    return [int(end) - int(begin) for begin, end in pairwise(ends)]
