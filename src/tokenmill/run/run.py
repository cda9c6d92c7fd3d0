"""A run: a config with its sources, from which plan, loaders, evals and reports are made."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from tokenmill.config.run import TABLES, Config, Translation, parse_config, read_tables
from tokenmill.config.schedule import read_tokens
from tokenmill.config.spelling import respell
from tokenmill.errors import ConfigError, whole
from tokenmill.hooks import attached
from tokenmill.tables import check_instance, check_types, names_of, path_of

if TYPE_CHECKING:
    from tokenmill.config.schedule import Tokens
    from tokenmill.live.lanes import LiveRows
    from tokenmill.loader import Layout, Loader
    from tokenmill.plan import Plan
    from tokenmill.plan.lr import TokenSchedule
    from tokenmill.run.check import BatchCheck, BatchRecord
    from tokenmill.run.compare import Difference
    from tokenmill.run.evals import Evals
    from tokenmill.run.fork import Fork
    from tokenmill.run.reading import Link, Prices, ReadingReport
    from tokenmill.run.report import RunReport
    from tokenmill.run.sources import Sources
    from tokenmill.run.specs import EpochCount
    from tokenmill.run.starter import Stores
    from tokenmill.run.uses import BatchRow
    from tokenmill.store import Store
    from tokenmill.store.records import Viewer
    from tokenmill.store.remote.fetch import Network

logger = logging.getLogger("tokenmill")
LIMIT_ROWS = 1 << 22
"""Rows that `diff` computes at most by default, before the first difference and after."""


@dataclass(frozen=True, repr=False)
class Run:
    """A training run over stores: its config, and from it plan, loaders, evals and reports.

    `Run.from_toml`, `Run.from_tables` and `Run.build` make one. Manifests are read when the plan is made, tokens
    only when a loader is asked for batches.

    Args:
        config: The config as records.
        folder: Folder that relative paths start from, and that plans are recorded in.
        name: Name of the run in records.
        translation: How the config file was read, if it was of another project.
        records_plans: Record plans and their history in `.tokenmill` of the folder.

    Raises:
        ConfigError: The config is not a `Config`, or its epochs cannot be counted.

    Examples:
        >>> import tokenmill as tm
        >>> run = tm.Run.from_toml("run.toml")
        >>> run.plan().steps
        132
        >>> for batch in run.loader(micro_batch=8):
        ...     break
        >>> batch["input_ids"].shape
        (8, 128)
    """

    config: Config
    folder: Path = Path()
    """Folder that relative paths start from."""
    name: str = "run"
    """Name in records of plans: that of the config file, without its ending."""
    translation: Translation | None = None
    """Native tables and notes of the config file, if the run has one."""
    records_plans: bool = False
    """Whether loaders record the plan, and its history, in `.tokenmill` of the folder."""
    epochs: EpochCount | None = field(default=None, init=False)
    """Number of rows and steps of the epochs. The config then has steps instead of epochs."""

    def __post_init__(self) -> None:
        if not isinstance(self.config, Config):
            way_out = "from_tables" if isinstance(self.config, Mapping) else "from_toml"
            raise ConfigError(f"Run: expected a Config, got {self.config!r}; use Run.{way_out}(...)")
        if self.config.run.epochs is not None:
            from tokenmill.run.specs import count_epochs

            epochs, config = count_epochs(self.config, self.sources, self.config.run.epochs)
            object.__setattr__(self, "epochs", epochs)
            object.__setattr__(self, "config", config)

    def __repr__(self) -> str:
        """Describe the config in at most five lines; opens no store."""
        run, lines = self.config.run, []
        length = "no length yet" if run.steps is None else f"{run.steps:,} steps"
        stages = self.config.stages if run.steps is None else self.config.resolved_stages
        for stage in stages[:3]:
            weights = "by size" if isinstance(stage.weights, str) else ""
            if isinstance(stage.weights, Mapping):
                weights = ", ".join(f"{name} {weight:g}" for name, weight in list(stage.weights.items())[:8])
            lines.append(f"{stage.name}, from step {stage.start_step:,}: {weights or 'weights of [run]'}")
        lines += [f"and {len(stages) - 3} more stages"] if len(stages) > 3 else []
        sources = ", ".join(self.config.source_names[:8])
        more = f" and {len(self.config.sources) - 8} more" if len(self.config.sources) > 8 else ""
        lines[:0] = [f"Run {self.name!r}: {length}, sources {sources}{more}"]
        body = "\n ".join(lines)
        return f"<{body}>"

    def _repr_html_(self) -> str | None:
        """Show the plan in a notebook, as `tokenmill plan --html` does."""
        html: str | None = attached("run_html")(self)
        return html

    def view(self, *, port: int = 0, browser: bool | None = None) -> Viewer:
        """Serve the run in the viewer, from this process and to this machine alone; see `Store.view`."""
        viewer: Viewer = attached("open_viewer")(self, port=port, browser=browser)
        return viewer

    def lasting(self, *, steps: int | None = None, epochs: float | None = None) -> Run:
        """Return the same run with another length, in steps or in epochs."""
        weights = self.config.run.weights if self.epochs is None else None
        run = replace(self.config.run, steps=steps, tokens=None, epochs=epochs, weights=weights)
        return replace(self, config=replace(self.config, run=run))

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str], *, world_size: int | None = None) -> Run:
        """Read a config file: of tokenmill, KempnerForge or torchtitan.

        Args:
            path: The TOML file. Relative paths in it start at its folder.
            world_size: Number of ranks, for KempnerForge and torchtitan configs, which set the batch of one rank.

        Returns:
            The run. Stores are opened when the plan is made, or at once with `epochs`.

        Raises:
            ConfigError: The file does not exist, or a key or value is wrong.

        Examples:
            >>> import tokenmill as tm
            >>> tm.Run.from_toml("run.toml").config.source_names
            ('demo',)
        """
        file = Path(path_of("config", path)).resolve()
        folder, name = file.parent, file.stem
        return cls.from_tables(read_tables(path), folder=folder, name=name, where=str(path), world_size=world_size)

    @classmethod
    def from_tables(
        cls,
        tables: Mapping[str, Any],
        *,
        folder: str | os.PathLike[str] | None = None,
        name: str = "run",
        where: str = "config",
        world_size: int | None = None,
    ) -> Run:
        """Make a run of the tables of a config as plain Python values, by the same rules as a TOML file.

        Args:
            tables: Tables such as `{"run": {...}, "sources": [{...}]}`.
            folder: Folder that relative paths start from. If you pass one, loaders record plans in it under `name`;
                otherwise paths start from the current folder and nothing is recorded.
            name: Name of the run in records.
            where: Name of the config in errors.
            world_size: Number of ranks, for tables of KempnerForge and torchtitan.

        Returns:
            The run. Stores are opened when the plan is made, or at once with `epochs`.

        Raises:
            ConfigError: A key or value is wrong.

        Examples:
            >>> run = {"steps": 100, "global_batch_size": 8, "seq_len": 128}
            >>> sources = [{"name": "web", "store": "stores/web"}]
            >>> Run.from_tables({"run": run, "sources": sources})
            <Run 'run': 100 steps, sources web
             main, from step 0: web 1>
        """
        check_instance(where, tables, Mapping, "write {...}, or open a file with Run.from_toml")
        records_plans = folder is not None
        folder = Path(path_of("folder", "." if folder is None else folder)).resolve()
        translation = None
        if not tables or not tables.keys() <= set(TABLES):
            from tokenmill.config.dialects import translate
            from tokenmill.store.layout import is_ours

            translation = translate(
                tables, where=where, world_size=world_size, is_store=lambda place: is_ours(folder / place)
            )
            translation.log(where)
        config = parse_config(translation.tables if translation else tables, where=where)
        translation = translation or Translation(tables=respell(tables)[0])
        return cls(config=config, folder=folder, name=name, translation=translation, records_plans=records_plans)

    @classmethod
    def build(  # noqa: PLR0913 - the front door
        cls,
        stores: Stores,
        *,
        seq_len: int,
        global_batch_size: int,
        steps: int | None = None,
        tokens: Tokens | None = None,
        epochs: float | None = None,
        weights: Mapping[str, float] | str | None = None,
        seed: int = 0,
        packing: str | None = None,
        shuffle: str | None = None,
        folder: str | os.PathLike[str] | None = None,
        name: str = "run",
    ) -> Run:
        """Make a run of one store or several, the same run as a TOML file with these keys.

        Args:
            stores: Path or address of a store, a list of them, or a mapping from source name to store. A store
                without a name is named after the end of its path.
            seq_len: Tokens per row.
            global_batch_size: Rows per optimizer step, over all ranks.
            steps: Optimizer steps. Pass one of `steps`, `tokens` and `epochs`.
            tokens: Length of the run in tokens, such as "2B".
            epochs: Length of the run in passes over all rows.
            weights: Share of each source by name, or "tokens", "rows" or "documents" for shares by size. Several
                stores get "tokens" by default; with `epochs` every row is read equally often.
            seed: Decides the order of all rows.
            packing: How documents become rows; "best_fit" by default.
            shuffle: "full" (default), "window" or "none".
            folder: Folder that relative paths start from. If you pass one, loaders record plans in it under `name`;
                otherwise paths start from the current folder and nothing is recorded.
            name: Name of the run in records.

        Returns:
            The run. Stores are opened when the plan is made, or at once with `epochs`.

        Raises:
            ConfigError: A value is invalid, or two of them contradict each other.
            StoreError: A store cannot be opened.

        Examples:
            >>> Run.build("stores/web", seq_len=2048, global_batch_size=64, steps=1000).config.source_names
            ('web',)
        """
        from tokenmill.run.starter import source_tables

        sources = source_tables(stores)
        if weights is None and epochs is None and len(sources) > 1:
            weights = "tokens"
        given = {
            "seq_len": seq_len,
            "global_batch_size": global_batch_size,
            "steps": steps,
            "tokens": tokens,
            "epochs": epochs,
            "weights": weights,
            "seed": seed,
            "packing": packing,
            "shuffle": shuffle,
        }
        run = {key: value for key, value in given.items() if value is not None}
        return cls.from_tables({"run": run, "sources": sources}, folder=folder, name=name, where="Run.build")

    def to_toml(self, path: str | os.PathLike[str]) -> Path:
        """Write the config as native TOML. Relative paths are changed so that they lead to the same files.

        Args:
            path: File to write.

        Returns:
            The path of the file.

        Raises:
            ConfigError: A file of that name exists. Nothing is overwritten.
        """
        from tokenmill.run.fork import write_config

        return write_config(self, Path(path_of("to_toml", path)))

    @cached_property
    def sources(self) -> Sources:
        """Stores and live texts; each is opened when it is first needed."""
        from tokenmill.run.sources import Sources

        return Sources(config=self.config, folder=self.folder)

    @property
    def stores(self) -> dict[str, Store]:
        """Open store of each stored source, by name."""
        return self.sources.stores

    @property
    def live(self) -> dict[str, LiveRows]:
        """Rows of each source of live text, by name."""
        return self.sources.live

    @property
    def network(self) -> Network | None:
        """What all stores in object storage share: requests, memory, counters. None if all stores are local."""
        return self.sources.network

    @cached_property
    def evals(self) -> Evals:
        """Evals by name. Their stores are opened when an eval is first used."""
        from tokenmill.run.evals import Eval, Evals

        return Evals({config.name: Eval(self, config) for config in self.config.evals})

    def plan(self) -> Plan:
        """Return the compiled plan. No token is read.

        Raises:
            ConfigError: The stores do not fit the config, or each other.
            StoreError: A store cannot be opened.
        """
        return self._compiled[0]

    @property
    def compile_seconds(self) -> float:
        """Seconds that compiling the plan took, about as long as a start."""
        return self._compiled[1]

    @cached_property
    def _compiled(self) -> tuple[Plan, float]:
        from tokenmill.run.specs import compile_run

        began = perf_counter()
        plan = compile_run(self.config, self.sources)
        return plan, perf_counter() - began

    def what(self, step: int) -> tuple[BatchRow, ...]:
        """Return the rows of the global batch of a step. Their spans have `text`, `origin` and `fields`.

        Args:
            step: Step of the run, from 0.

        Raises:
            PlanError: The run has no such step, or skips it.

        Examples:
            >>> import tokenmill as tm
            >>> row = tm.Run.from_toml("run.toml").what(5)[4]
            >>> row.spans[0].document, str(row.spans[0].origin)
            (0, 'prose.jsonl:1')
        """
        from tokenmill.run.uses import with_texts

        return with_texts(self, self.plan().what(step))

    def when(self, source: str, document: int | None = None, **fields: object) -> tuple[BatchRow, ...]:
        """Return every use of a document by a source, or of all documents with some kept fields.

        Args:
            source: Name of the source.
            document: Number of the document in the source.
            fields: Kept fields in place of a number, such as `url="https://..."`; see `Store.find`.

        Raises:
            ConfigError: The store does not keep such a field.
            PlanError: There is no such source or document.
        """
        from tokenmill.run.uses import find_uses

        return find_uses(self, source, document, fields)

    def lr_schedule(
        self,
        *,
        warmup_tokens: Tokens = 0,
        decay: str = "cosine",
        decay_tokens: Tokens | None = None,
        final: float = 0.1,
    ) -> TokenSchedule:
        """Return what the learning rate is multiplied by at each step, going by tokens: `schedule(step)`.

        It rises over `warmup_tokens`, and goes down to `final` at the last step: over all that follows, or over the
        last `decay_tokens` of the run.
        """
        from tokenmill.plan.lr import TokenSchedule

        where = "lr_schedule"
        check_types(decay=(decay, str), final=(final, int | float))
        return TokenSchedule(
            plan=self.plan(),
            warmup=read_tokens(where, "warmup_tokens", warmup_tokens) if warmup_tokens else 0,
            decay=decay,
            decay_tokens=None if decay_tokens is None else read_tokens(where, "decay_tokens", decay_tokens),
            final=final,
        )

    def report(self) -> RunReport:
        """Return what the run will do, before its first step: all that `tokenmill plan` shows. No token is read.

        Raises:
            ConfigError: The stores do not fit the config, or each other.
            StoreError: A store cannot be opened.
        """
        from tokenmill.run.report import report_run

        return report_run(self)

    def reading(self, *, link: Link | None = None, prices: Prices | None = None) -> ReadingReport:
        """Report what reading the run from object storage takes, as if all of its stores were there."""
        from tokenmill.run.reading import Link, Prices, report_reading

        if link is not None:
            check_instance("link", link, Link, "make one with tokenmill.run.reading.Link(...)")
        if prices is not None:
            check_instance("prices", prices, Prices, "make one with tokenmill.run.reading.Prices(...)")
        return report_reading(self, link=link, prices=prices)

    def diff(
        self, other: Run, *, limit_rows: int = LIMIT_ROWS, progress: Callable[[int], None] | None = None
    ) -> Difference:
        """Find the first step whose batches differ from those of another run, and why.

        Args:
            other: Run to compare with.
            limit_rows: Maximum number of rows to compute before the first difference, and after it.
            progress: Function that is called with the number of rows that were computed.

        Returns:
            The first differing step, its cause, the changed keys, and the number of rows that differ.

        Raises:
            ConfigError: `other` is not a run.

        Examples:
            >>> import tokenmill as tm
            >>> run = tm.Run.from_toml("run.toml")
            >>> longer = tm.Run.build("stores/demo", seq_len=128, global_batch_size=8, steps=200)
            >>> run.diff(longer).first_step
            132
        """
        from tokenmill.run.compare import compare

        if not isinstance(other, Run):
            raise ConfigError(f"diff: expected a Run, got {other!r}; open its config with Run.from_toml first")
        limit_rows = whole("limit_rows", limit_rows, ConfigError, "leave it out")
        configs = (self.config, other.config)
        return compare(self.plan(), other.plan(), configs=configs, limit_rows=limit_rows, progress=progress)

    def record_batches(
        self,
        path: str | os.PathLike[str],
        first_step: int = 0,
        end_step: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> BatchRecord:
        """Write digests of the steps from `first_step` to `end_step`, exclusive; 1,000 steps by default."""
        from tokenmill.run.check import record_batches

        return record_batches(self, path, first_step, end_step, progress)

    def check_batches(
        self, path: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None
    ) -> BatchCheck:
        """Compute the batches of a record again, and return the first step that differs, with its cause."""
        from tokenmill.run.check import check_batches, read_record

        return check_batches(self, read_record(path), progress)

    def fork(
        self,
        *,
        at: int,
        to: str | os.PathLike[str],
        name: str | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> Fork:
        """Write the config of a new run that shares all batches before a step, and the state to resume from.

        Args:
            at: First step of the new run that may differ.
            to: Config to write. The state is written next to it. No file is overwritten.
            name: Name of the new stage, by default `fork`. If a stage begins at that step already, it is used.
            weights: Weights of the new stage; by default those of the stage that it continues.

        Returns:
            Paths of the config and the state, and fingerprints of both plans.

        Raises:
            ConfigError: A file exists, or batches before the step would differ. Nothing is written.
            PlanError: The run has no such step.

        Examples:
            >>> import tokenmill as tm
            >>> forked = tm.Run.from_toml("run.toml").fork(at=66, to="ablation.toml")
            >>> forked.config.name, forked.step
            ('ablation.toml', 66)
        """
        from tokenmill.run.fork import fork

        return fork(self, at=at, to=Path(path_of("to", to)), name=name, weights=weights)

    def loader(  # noqa: PLR0913 - the front door
        self,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        micro_batch: int = 1,
        layout: Layout | None = None,
        threads: int = 1,
        prefetch: int = 8,
        arrays: Sequence[str] | None = None,
        columns: Sequence[str] = (),
        pad_to: str | None = None,
        timeout: float = 30.0,
    ) -> Loader:
        """Return the loader of one rank. Environment variables of launchers are not read.

        For a run with a folder, the loader of rank 0 records a new plan in `.tokenmill` there.

        Args:
            rank: Data-parallel rank, 0 by default.
            world_size: Number of data-parallel ranks, 1 by default.
            micro_batch: Rows per micro-batch.
            layout: Place in all parallel groups, instead of rank and world size.
            threads: Threads that prefetch batches; 0 assembles each batch when it is asked for.
            prefetch: Micro-batches to prefetch. Like `threads`, it does not change what a batch holds.
            arrays: Arrays of a batch, by default those of the config.
            columns: Kept fields of pairs, groups or prompts to deliver with each batch.
            pad_to: "row" or "batch", by default that of the config.
            timeout: Seconds without progress after which a thread that reads live text is given up.

        Returns:
            The loader, at step 0.

        Raises:
            ConfigError: The batch does not divide by the ranks, or an argument is wrong.
            StoreError: A store cannot be opened.

        Examples:
            >>> import tokenmill as tm
            >>> loader = tm.Run.from_toml("run.toml").loader(rank=1, world_size=2, micro_batch=4)
            >>> loader[131]["labels"].shape
            (4, 128)
        """
        from tokenmill.loader import LoaderOptions
        from tokenmill.loader.layout import find_layout
        from tokenmill.run.loading import default_arrays, open_loader, warn_of_launcher

        if layout is None and rank is None and world_size is None:
            warn_of_launcher()
        run = self.config.run
        return open_loader(
            self,
            find_layout(layout, rank or 0, 1 if world_size is None else world_size),
            micro_batch,
            LoaderOptions(
                arrays=names_of("arrays", default_arrays(run, self.plan()) if arrays is None else arrays),
                threads=threads,
                prefetch=prefetch,
                positions=run.positions,
                horizon=run.horizon,
                columns=names_of("columns", columns),
                pad_to=pad_to or run.pad_to,
                timeout=timeout,
            ),
        )


def is_config(path: Path | str) -> bool:
    """Return whether a path is the config of a run, and not a store; an address is none."""
    return isinstance(path, Path) and path.suffix == ".toml" and not path.is_dir()
