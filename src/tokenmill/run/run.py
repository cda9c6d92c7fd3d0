"""A run: a config with its stores, from which plan and loaders are made."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from tokenmill.config.run import (
    DEFAULT_ARRAYS,
    TABLES,
    Config,
    ResolvedStage,
    Sizes,
    SourceConfig,
    Translation,
    parse_config,
    read_tables,
)
from tokenmill.errors import ConfigError
from tokenmill.fingerprint import key64
from tokenmill.tables import path_of
from tokenmill.types import RECORD_TYPES, STORED_ARRAYS, Int64Array

if TYPE_CHECKING:
    from tokenmill.live.lanes import LiveRows
    from tokenmill.loader import Loader
    from tokenmill.packing import ConcatRows, PackedRows, Policy, RecordRows
    from tokenmill.plan import Plan, Rows
    from tokenmill.run.compare import Difference
    from tokenmill.run.fork import Fork
    from tokenmill.run.report import RunReport
    from tokenmill.store import Store

LIMIT_ROWS = 1 << 22
"""Rows that `diff` computes at most, before the first difference and after, unless it is told otherwise."""


@dataclass(frozen=True)
class Run:
    """What is trained on, in which order; reads manifests, never tokens, until a loader is asked for batches."""

    config: Config
    folder: Path = Path()
    """Where relative paths count from, and where plans are recorded."""
    name: str = "run"
    """Of the config file, without its ending: what the history of edits is kept under."""
    translation: Translation | None = None
    """How the config file was read, if it was."""

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str], *, world_size: int | None = None) -> Run:
        """Read a config file, our own, of KempnerForge or of torchtitan; stores are opened when the plan is made.

        `world_size` is for configs of others, which give the batch of one rank.
        """
        file = Path(path_of("config", path)).resolve()
        folder, name = file.parent, file.stem
        return cls.from_tables(read_tables(path), folder=folder, name=name, where=str(path), world_size=world_size)

    @classmethod
    def from_tables(
        cls,
        tables: Mapping[str, Any],
        *,
        folder: str | os.PathLike[str] = ".",
        name: str = "run",
        where: str = "config",
        world_size: int | None = None,
    ) -> Run:
        """Make a run of the tables of a config as plain Python values, by the same rules as a file of them.

        Relative paths count from `folder`, where plans are recorded under `name`; errors begin with `where`.
        """
        folder = Path(folder).resolve()
        translation = Translation(tables=dict(tables))
        if not tables or not tables.keys() <= set(TABLES):
            from tokenmill.config.dialects import translate
            from tokenmill.store.layout import is_ours

            translation = translate(
                tables, where=where, world_size=world_size, is_store=lambda place: is_ours(folder / place)
            )
            translation.log(where)
        config = parse_config(translation.tables, where=where)
        return cls(config=config, folder=folder, name=name, translation=translation)

    @cached_property
    def stores(self) -> dict[str, Store]:
        """The open store of each source; they share one bounded set of maps."""
        from tokenmill.store import open_store
        from tokenmill.store.maps import MapCache

        stored = [source for source in self.config.sources if not source.live]
        maps = MapCache() if stored else None
        stores = {
            source.name: open_store(
                self._store_places(source),
                maps=maps,
                dtype=source.dtype,
                vocab_size=source.vocab_size,
                eos_id=self._eos_id(source),
                bos_id=source.bos_id,
                format=source.format,
            )
            for source in stored
        }
        _check_tokenizers(
            {name: store.manifest.tokenizer for name, store in stores.items()}
            | {name: rows.source.tokenizer.identity.to_json() for name, rows in self.live.items()}
        )
        _check_kinds(stores, self.live)
        return stores

    @cached_property
    def live(self) -> dict[str, LiveRows]:
        """The sources of live text, with files listed and tokenizers open, as [run] makes rows of them."""
        return {source.name: self._open_live(source) for source in self.config.sources if source.live}

    def _open_live(self, source: SourceConfig) -> LiveRows:
        from tokenmill.live.lanes import LiveRows
        from tokenmill.live.source import LiveOptions, open_live

        run, lanes = self.config.run, self.config.num_lanes(source)
        options = LiveOptions(
            seq_len=run.seq_len,
            packing=run.packing,
            split=run.split,
            crop=run.crop,
            seed=key64(run.seed, "live", source.name) >> 1,  # or sources of one size would be walked in step
            shuffle=run.shuffle != "none",
            text_field=source.text_field,
            lanes=lanes,
            on_error=source.on_error or "stop",
            keep_empty=source.keep_empty,
            window_bytes=source.window_bytes,
        )
        return LiveRows(
            source=open_live(self._texts(source), tokenizer=self._tokenizer(source), options=options),
            lanes=lanes,
            format=options.format,
            cross_document_labels=run.cross_document_labels,
        )

    def _texts(self, source: SourceConfig) -> list[str]:
        return [text if text.startswith("hf:") else str(self.folder / text) for text in source.documents]

    def _tokenizer(self, source: SourceConfig) -> str:
        assert source.tokenizer is not None
        plain = source.tokenizer == "bytes" or ":" in source.tokenizer
        return source.tokenizer if plain else str(self.folder / source.tokenizer)

    def _eos_id(self, source: SourceConfig) -> int | None:
        """Return the id that ends the documents of token files: as the source says, else that of its tokenizer."""
        if source.eos_id is not None or source.store is None or source.tokenizer is None:
            return source.eos_id
        from tokenmill.encode.engines import read_identity

        eos_id = read_identity(self._tokenizer(source)).eos_id
        if eos_id is None:
            raise ConfigError(
                f"source {source.name!r}: its tokenizer must have an EOS, which ends documents, got none in "
                f"{source.tokenizer!r}; name it in the tokenizer_config.json beside it, or give eos_id = ..."
            )
        return eos_id

    def _store_places(self, source: SourceConfig) -> list[Path]:
        """Return where the stores of a source are; text is prepared first, once."""
        if source.store is not None:
            return [
                self.folder / path for path in ([source.store] if isinstance(source.store, str) else source.store)
            ]
        from tokenmill.build.cached import cached_store

        store = cached_store(
            self._texts(source),
            tokenizer=self._tokenizer(source),
            text_field=source.text_field,
            folder=self.folder / ".tokenmill" / "stores",
            where=f"source {source.name!r}",
            keep_empty=source.keep_empty,
        )
        return [store]

    @cached_property
    def _rows(self) -> dict[tuple[str, int, Policy, bytes], ConcatRows | PackedRows | RecordRows]:
        return {}

    def rows(
        self, source: str, seq_len: int, policy: Policy, excluded: Int64Array | None = None
    ) -> ConcatRows | PackedRows | RecordRows:
        """Return the rows of a source at a sequence length under a policy, without the `excluded` documents.

        Pairs and groups are never packed.
        """
        from tokenmill.packing import ConcatRows, RecordRows, pack_rows

        key = (source, seq_len, policy, b"" if excluded is None else excluded.tobytes())
        if key not in self._rows:
            crossing = self.config.run.cross_document_labels
            store = self.stores[source]
            if store.manifest.kind in RECORD_TYPES:
                self._rows[key] = RecordRows(store=store, seq_len=seq_len, policy=policy, excluded=excluded)
            elif policy.name == "concat":
                self._rows[key] = ConcatRows(
                    store=store, seq_len=seq_len, cross_document_labels=crossing, excluded=excluded
                )
            else:
                self._rows[key] = pack_rows(
                    store, seq_len=seq_len, policy=policy, cross_document_labels=crossing, excluded=excluded
                )
        return self._rows[key]

    def plan(self) -> Plan:
        """Compile and check the plan, once; no token is read."""
        return self._compiled[0]

    @property
    def compile_seconds(self) -> float:
        """How long it took to compile the plan: about what a start takes."""
        return self._compiled[1]

    @cached_property
    def _compiled(self) -> tuple[Plan, float]:
        from tokenmill.config.schedule import limits, schedule
        from tokenmill.plan.plan import compile_plan

        began = perf_counter()
        steps = self.config.run.steps
        errors, stops = limits(self.config)
        plan = compile_plan(
            schedule(self.config, self.folder, self._stage_rows, self._size),
            sources=self.config.source_names,
            steps=steps,
            max_epochs=errors,
            stops=stops,
            contract={"positions": self.config.run.positions},
        )
        return plan, perf_counter() - began

    def report(self) -> RunReport:
        """Report what the run will do, before its first step: all that `tokenmill plan` shows. No token is read."""
        from tokenmill.run.report import report_run

        return report_run(self)

    def diff(
        self, other: Run, *, limit_rows: int = LIMIT_ROWS, progress: Callable[[int], None] | None = None
    ) -> Difference:
        """Compare with another run: the first step whose batches differ, why, and how many rows do from there on.

        At most `limit_rows` rows are computed to find it, and as many after it; `progress` is told how many were.
        """
        from tokenmill.run.compare import compare

        configs = (self.config, other.config)
        return compare(self.plan(), other.plan(), configs=configs, limit_rows=limit_rows, progress=progress)

    def fork(
        self,
        *,
        at: int,
        to: str | os.PathLike[str],
        name: str | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> Fork:
        """Write the config `to` of a run that shares all batches before step `at`, and the state to go on from.

        A stage begins there, named `name`: a copy of the one that is running, with the given weights, if any. Where
        one begins there already, it is taken as it is. Nothing is written unless all batches before are proven to
        be the same, and no file is overwritten.
        """
        from tokenmill.run.fork import fork

        return fork(self, at=at, to=Path(to), name=name, weights=weights)

    def loader(
        self,
        *,
        rank: int = 0,
        world_size: int = 1,
        micro_batch: int = 1,
        threads: int = 1,
        prefetch: int = 8,
        arrays: Sequence[str] | None = None,
        timeout: float = 30.0,
    ) -> Loader:
        """Return the loader of one rank. `threads` and `prefetch` never change what a batch holds.

        A thread that reads live text, and comes to nothing within `timeout` seconds, is given up.
        """
        from tokenmill.loader import Loader, LoaderOptions, RankSlice

        plan = self.plan()
        arrays = arrays or self._arrays(plan)
        if rank == 0:
            self._record(plan)
        return Loader(
            plan,
            RankSlice(rank=rank, world_size=world_size, micro_batch=micro_batch),
            LoaderOptions(
                arrays=tuple(arrays),
                threads=threads,
                prefetch=prefetch,
                positions=self.config.run.positions,
                timeout=timeout,
            ),
            explain=lambda made_by, step: self._explain(plan, made_by, step),
        )

    def _stage_rows(self, name: str, stage: ResolvedStage, excluded: Int64Array) -> Rows:
        """Return the rows of a source in a stage."""
        from tokenmill.packing import Policy

        _ = self.stores  # checks that all sources go together
        policy = Policy(name=self._packing(stage), split=stage.split, crop=stage.crop)
        if name in self.live:
            return self.live[name].in_format(stage.seq_len, policy)
        return self.rows(name, stage.seq_len, policy, excluded if excluded.size else None)

    def _size(self, name: str, counted: Sizes, rows: Rows) -> int:
        """Return how many tokens, rows or documents a source has."""
        assert rows.counted is not None, "the config refuses such weights for live text"
        manifest = self.stores[name].manifest
        sizes = {"tokens": manifest.tokens, "documents": manifest.documents, "rows": rows.counted.num_rows}
        if not sizes[counted]:
            raise ConfigError(
                f'source {name!r}: must not be empty where weights = "{counted}", got no {counted}; leave it out'
            )
        return sizes[counted]

    def _packing(self, stage: ResolvedStage) -> str:
        """Return how a stage packs: as it says, but records of pairs and groups are rows as they are."""
        kinds = {store.manifest.kind for store in self.stores.values()} & RECORD_TYPES
        if not kinds:
            return stage.packing
        if stage.packing not in ("best_fit", "padded"):
            raise ConfigError(
                f"stage {stage.name!r}: packing is for stores of sequences, got {stage.packing!r} with stores of "
                f"{kinds.pop()}; leave it out, a record is a row"
            )
        return "padded"

    def _arrays(self, plan: Plan) -> tuple[str, ...]:
        """Return what the config says that a batch delivers, or what the training type has."""
        from tokenmill.loader import usual_arrays

        usual, written = usual_arrays(plan), self.config.run.arrays
        if set(usual) & set(DEFAULT_ARRAYS):
            return written
        if written != DEFAULT_ARRAYS:
            raise ConfigError(
                f"run: arrays is for stores of sequences, got {list(written)} where a batch has {list(usual)}; "
                "leave it out, or pass arrays to the loader"
            )
        return usual

    def _record(self, plan: Plan) -> None:
        """Keep the plan beside the config, and note in the history that it is the one, if another was before."""
        from tokenmill.run.history import record

        record(self.folder, self.name, plan, self.config)

    def _explain(self, plan: Plan, made_by: str, step: int) -> str | None:
        """Say what changed since the plan that made a state, if that one is on record."""
        from tokenmill.run.history import PlanRecord, explain, read_plan

        old = read_plan(self.folder, made_by)
        return explain(old, PlanRecord.of(plan, self.config), step) if old else None


def _check_kinds(stores: Mapping[str, Store], live: Iterable[str]) -> None:
    """Refuse sources whose rows do not fit one batch, and arrays that the kernels cannot read."""
    kinds = {name: store.manifest.kind for name, store in stores.items()} | dict.fromkeys(live, "seq")
    families = {name: kind if kind in RECORD_TYPES else "seq" for name, kind in kinds.items()}
    first, *others = families
    for other in others:
        if families[other] != families[first]:
            raise ConfigError(
                f"sources: all must be of one training type (seq and sft go together), got {first!r} of "
                f"{kinds[first]} and {other!r} of {kinds[other]}; make a run of each"
            )
    for store in stores.values():
        for key, dtype in store.manifest.keys.items():
            array = STORED_ARRAYS.get(key)
            if array is not None and array.holds in ("mask", "rewards") and dtype != array.dtype:
                raise ConfigError(
                    f"{store.path}: {key} must be {array.dtype} to be trained on, got {dtype}; "
                    "prepare the store again"
                )


def _check_tokenizers(tokenizers: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse sources whose ids do not mean the same."""
    from tokenmill.store.layout import tokenizer_difference

    first, *others = tokenizers
    for other in others:
        differing = tokenizer_difference(tokenizers[first], tokenizers[other])
        if differing:
            key, left, right, way_out = differing
            raise ConfigError(
                f"sources: all must be prepared with one tokenizer, got {first!r} and {other!r} that differ in "
                f"{key}: {left!r} and {right!r}; {way_out}"
            )
