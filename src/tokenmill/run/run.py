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
    """The data of a training job: sources, stages, edits and evals. Only loaders read tokens."""

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
        """Read a config file of tokenmill, KempnerForge or torchtitan.

        Stores are opened when the plan is made, or at once with `epochs`, whose steps are counted in rows. Pass
        `world_size` with a config of KempnerForge or torchtitan, because it sets the batch of one rank.
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
        """Make a run from the tables of a config as plain Python values, by the rules of a config file.

        Args:
            tables: Tables of the config by name.
            folder: Folder that relative paths start from. If you pass one, loaders record plans in it under `name`;
                otherwise paths start from the current folder and nothing is recorded.
            name: Name of the run in records.
            where: Beginning of error messages.
            world_size: Number of ranks, for tables of KempnerForge or torchtitan.

        Raises:
            ConfigError: A key is unknown, or a value is invalid.
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
        """Write the config as native TOML, and return its path; relative paths lead to the same files from there.

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
        """Compile and check the plan, once; no token is read."""
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
        """Return the rows of the global batch of a step; their spans have `text`, `origin` and `fields`."""
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
        """Report what the run will do, before its first step: all that `tokenmill plan` shows. No token is read."""
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
        """Compare with another run: the first step whose batches differ, why, and how many rows do from there on.

        At most `limit_rows` rows are computed to find it, and as many after it; `progress` is called with how many
        were.
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
        """Write the config `to` of a run that shares all batches before step `at`, and the state to go on from.

        A stage begins there, named `name`: a copy of the one that is running, with the given weights, if any. Where
        one begins there already, it is taken as it is. Nothing is written unless all batches before are proven to
        be the same, and no file is overwritten.
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
        """Return the loader of one rank. `threads` and `prefetch` never change the content of a batch.

        For a run with a folder, the loader of the first rank records a new plan in `.tokenmill` there.

        Args:
            rank: Data-parallel rank, 0 by default. It is not read from the environment.
            world_size: Number of data-parallel ranks, 1 by default.
            micro_batch: Rows per batch.
            layout: Place among data-, context-, tensor- and pipeline-parallel ranks, instead of `rank`.
            threads: Threads that assemble batches, or read and tokenize live text; 0 for none.
            prefetch: Micro-batches that are kept ready.
            arrays: Arrays of a batch; those of the config by default.
            columns: Kept fields of records (`prepare --keep`) to deliver with the arrays.
            pad_to: "row" or "batch"; that of the config by default.
            timeout: Seconds without progress after which a thread that reads live text is given up.

        Raises:
            ConfigError: A value is invalid, or does not fit the run.
            StoreError: A store cannot be opened.
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
