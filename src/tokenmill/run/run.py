"""A run: a config with its stores, from which plan and loaders are made."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from tokenmill.config.run import (
    DEFAULT_ARRAYS,
    TABLES,
    Config,
    SourceConfig,
    Translation,
    parse_config,
    read_tables,
)
from tokenmill.config.schedule import check_alone, limits, long_documents, read_tokens, schedule
from tokenmill.config.spelling import respell
from tokenmill.errors import ConfigError, whole
from tokenmill.fingerprint import key64
from tokenmill.hooks import attached
from tokenmill.tables import check_instance, check_types, is_address, names_of, path_of, read_table
from tokenmill.types import MASK_KEYS, NO_DOCUMENTS, RECORD_TYPES, STORED_ARRAYS, WHOLE_PACKINGS, Int64Array

if TYPE_CHECKING:
    from tokenmill.config.evals import EvalSource
    from tokenmill.config.schedule import ResolvedStage, Sizes, Tokens
    from tokenmill.live.lanes import LiveRows
    from tokenmill.loader import Layout, Loader
    from tokenmill.packing import ConcatRows, PackedRows, Policy, RecordRows
    from tokenmill.plan import Plan, Rows
    from tokenmill.plan.lr import TokenSchedule
    from tokenmill.run.check import BatchCheck, BatchRecord
    from tokenmill.run.compare import Difference
    from tokenmill.run.evals import Evals
    from tokenmill.run.fork import Fork
    from tokenmill.run.reading import Link, Prices, ReadingReport
    from tokenmill.run.report import RunReport
    from tokenmill.run.starter import Stores
    from tokenmill.run.uses import BatchRow
    from tokenmill.store import Store
    from tokenmill.store.records import Viewer
    from tokenmill.store.remote.fetch import Network

logger = logging.getLogger("tokenmill")
LIMIT_ROWS = 1 << 22
"""Rows that `diff` computes at most by default, before the first difference and after."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochCount:
    """What the epochs of a run come to in rows and steps."""

    epochs: float
    rows: int
    """Of one epoch, over all sources."""
    filled: int
    """Rows of the last step that are beyond these epochs: the first of the epoch that would be next."""

    def sentence(self, steps: int) -> str:
        """Return a sentence on what the epochs come to."""

        def several(number: float, name: str) -> str:
            return name if number == 1 else f"{name}s"

        filled = f"the last is filled with {self.filled:,} {several(self.filled, 'row')} of the next epoch"
        rows = f"{self.epochs:g} {several(self.epochs, 'epoch')} of {self.rows:,} {several(self.rows, 'row')}"
        verb = "is" if self.epochs == 1 else "are"
        return f"{rows} {verb} {steps:,} {several(steps, 'step')}: {filled if self.filled else 'all are full'}"


@dataclass(frozen=True, repr=False)
class Run:
    """What is trained on, in which order; reads manifests, never tokens, until a loader is asked for batches."""

    config: Config
    folder: Path = Path()
    """Where relative paths count from, and where plans are recorded."""
    name: str = "run"
    """Of the config file, without its ending; names the history of edits."""
    translation: Translation | None = None
    """How the config file was read, if it was."""
    epochs: EpochCount | None = field(default=None, init=False)
    """What the epochs come to, where the config gives its length in epochs; it then has steps in their place."""

    def __post_init__(self) -> None:
        if not isinstance(self.config, Config):
            way_out = "from_tables" if isinstance(self.config, Mapping) else "from_toml"
            raise ConfigError(f"Run: expected a Config, got {self.config!r}; use Run.{way_out}(...)")
        if self.config.run.epochs is not None:
            epochs, config = self._counted_epochs(self.config.run.epochs)
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
        """Read a config file, our own, of KempnerForge or of torchtitan.

        Stores are opened when the plan is made; with `epochs` at once, because its steps are counted in rows.
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
        check_instance(where, tables, Mapping, "write {...}, or open a file with Run.from_toml")
        folder = Path(path_of("folder", folder)).resolve()
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
        return cls(config=config, folder=folder, name=name, translation=translation)

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
        folder: str | os.PathLike[str] = ".",
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
            folder: Folder that relative paths start from, and that plans are recorded in.
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

    def _counted_epochs(self, epochs: float) -> tuple[EpochCount, Config]:
        """Count the rows of an epoch; return the count, and the config with steps in place of epochs."""
        from tokenmill.plan.mixture import exact_weight

        one_step = replace(self.config.run, steps=1, epochs=None, weights="rows")
        first = replace(self.config, run=one_step, skip=())
        (spec,) = schedule(first, self.folder, self._stage_rows, self._size)
        counted = {name: rows.counted for name, rows in spec.rows.items()}
        rows = {name: index.num_rows for name, index in counted.items() if index is not None and index.num_rows}
        if not rows:
            raise ConfigError("run: epochs must have rows to read, got none in any source; add documents")
        wanted, batch = ceil(exact_weight(epochs) * sum(rows.values())), self.config.clock.stretches[0].batch
        steps = -(-wanted // batch)
        weights = rows if len(rows) > 1 else None
        config = replace(self.config, run=replace(one_step, steps=steps, weights=weights))
        return EpochCount(epochs=epochs, rows=sum(rows.values()), filled=steps * batch - wanted), config

    @cached_property
    def stores(self) -> dict[str, Store]:
        """The open store of each source; they share one bounded set of maps."""
        from tokenmill.store import open_store
        from tokenmill.store.maps import MapCache

        stored = [source for source in self.config.sources if not source.live]
        maps = MapCache() if stored else None

        def opened(source: SourceConfig) -> Store:
            store = open_store(
                self._store_places(source),
                maps=maps,
                dtype=source.dtype,
                vocab_size=source.vocab_size,
                eos_id=self._eos_id(source),
                bos_id=source.bos_id,
                format=source.format,
                remote=self.network,
                verify_pages=source.verify_pages,
            )
            for files in store._remotes:
                files.bring_small()
            return store

        # Those in object storage side by side: none waits for the round trips of those before it.
        remote = [source for source in stored if any(map(is_address, _places(source.store)))]
        with ThreadPoolExecutor(max(1, len(remote))) as pool:
            remote_stores = dict(zip((source.name for source in remote), pool.map(opened, remote), strict=True))
        stores = {
            source.name: remote_stores[source.name] if source.name in remote_stores else opened(source)
            for source in stored
        }
        live = {source.name: source.tokenizer for source in self.config.sources}
        _check_tokenizers(
            {name: _tokenizer_of(store) for name, store in stores.items()}
            | {name: (rows.source.tokenizer.identity.to_json(), live[name]) for name, rows in self.live.items()}
        )
        _check_kinds(stores, self.live)
        return stores

    @cached_property
    def evals(self) -> Evals:
        """What the run is evaluated on, by name; stores are opened when an eval is asked for something."""
        from tokenmill.run.evals import Eval, Evals

        return Evals({config.name: Eval(self, config) for config in self.config.evals})

    def eval_store(self, source: EvalSource) -> Store:
        """Return the store that an eval takes documents from, opened once; its ids must mean what the run's do."""
        if source.source is not None:
            return self.stores[source.source]
        places = _places(source.store)
        if places not in self._eval_stores:
            from tokenmill.store import open_store

            # Maps of its own: an eval takes none from the training loader beside it.
            store = open_store(self._places_of(places), remote=self.network)
            tokenizers = {name: _tokenizer_of(each) for name, each in self.stores.items()}
            _check_tokenizers({**tokenizers, str(store.path): _tokenizer_of(store)})
            self._eval_stores[places] = store
        return self._eval_stores[places]

    @cached_property
    def _eval_stores(self) -> dict[tuple[str, ...], Store]:
        return {}

    @cached_property
    def network(self) -> Network | None:
        """What the stores in object storage share: requests, memory, counters; None where none is there."""
        evals = [source.store for config in self.config.evals for source in config.sources]
        stored = [*(source.store for source in self.config.sources), *evals]
        paths = [path for each in stored for path in _places(each)]
        if not any(isinstance(self._place(path), str) for path in paths):
            return None
        from tokenmill.store.remote.fetch import Network

        options = self.config.remote
        if options.mirror is not None:
            options = replace(options, mirror=str(self.folder / Path(options.mirror).expanduser()))
        return Network(options)

    def _place(self, path: str) -> Path | str:
        """Return where a path of the config leads; an address stays as it is."""
        return path if is_address(path) else self.folder / path

    def _places_of(self, store: str | tuple[str, ...] | None) -> list[Path | str]:
        """Return where the stores of a source are."""
        return [place for path in _places(store) for place in _dataset_of(self.folder, path) or [self._place(path)]]

    @cached_property
    def live(self) -> dict[str, LiveRows]:
        """The sources of live text, with files listed and tokenizers open, as [run] makes rows of them."""
        return {source.name: self._open_live(source) for source in self.config.sources if source.live}

    def _open_live(self, source: SourceConfig) -> LiveRows:
        from tokenmill.encode.fim import Fim
        from tokenmill.live.lanes import LiveRows
        from tokenmill.live.source import LiveOptions, open_live

        run, lanes = self.config.run, self.config.num_lanes(source)
        options = LiveOptions(
            seq_len=run.seq_len,
            packing=run.packing,
            split=long_documents(run.on_long, run.packing),
            crop=run.crop,
            seed=key64(run.seed, "live", source.name) >> 1,  # or sources of one size would be walked in step
            shuffle=run.shuffle != "none",
            text_field=source.text_field,
            lanes=lanes,
            on_error=source.on_error or "stop",
            keep_empty=source.keep_empty,
            fim=None if source.fim is None else read_table(Fim, source.fim, f"source {source.name!r}: fim"),
            window_bytes=source.window_bytes,
        )
        return LiveRows(
            source=open_live(self._texts(source), tokenizer=self._tokenizer(source), options=options),
            lanes=lanes,
            format=options.format,
            cross_document_labels=run.cross_document_labels,
        )

    def _texts(self, source: SourceConfig) -> list[str]:
        """Return where the texts of a source are; those in object storage are copied below the run first."""
        texts = [
            text if text.startswith("hf:") or is_address(text) else str(self.folder / text)
            for text in source.documents
        ]
        if not any(map(is_address, texts)):
            return texts
        from tokenmill.build.downloads import copy_inputs
        from tokenmill.documents.inputs import suffix_of

        folder = (self.folder / ".tokenmill" / "inputs").absolute()
        copies = copy_inputs(
            texts, folder, is_known=lambda name: suffix_of(name) is not None, options=self.config.remote
        )
        return list(map(str, copies))

    def _tokenizer(self, source: SourceConfig) -> str:
        assert source.tokenizer is not None
        plain = source.tokenizer == "bytes" or ":" in source.tokenizer
        return source.tokenizer if plain else str(self.folder / source.tokenizer)

    def _eos_id(self, source: SourceConfig) -> int | None:
        """Return the id that ends the documents of token files: that of the source, else that of its tokenizer."""
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

    def _store_places(self, source: SourceConfig) -> list[Path | str]:
        """Return where the stores of a source are; text is prepared first, once."""
        if source.store is not None:
            return self._places_of(source.store)
        from tokenmill.build.cached import cached_store

        recipe: str | dict[str, object] = "text"
        if source.fim is not None:
            section = {"field": source.text_field, "action": "train", "add_special_tokens": True}
            recipe = {"name": "text", "kind": "seq", "input": {"sections": [section]}, "fim": dict(source.fim)}
        store = cached_store(
            self._texts(source),
            tokenizer=self._tokenizer(source),
            text_field=source.text_field if source.fim is None else None,
            folder=self.folder / ".tokenmill" / "stores",
            where=f"source {source.name!r}",
            keep_empty=source.keep_empty,
            recipe=recipe,
        )
        return [store]

    @cached_property
    def _rows(self) -> dict[tuple[str, int, Policy, bytes], ConcatRows | PackedRows | RecordRows]:
        return {}

    def rows(
        self, source: str, seq_len: int, policy: Policy, excluded: Int64Array = NO_DOCUMENTS
    ) -> ConcatRows | PackedRows | RecordRows:
        """Return the rows of a source at a sequence length under a policy, without the `excluded` documents.

        Pairs and groups are never packed.
        """
        from tokenmill.packing import ConcatRows, RecordRows, pack_rows

        key = (source, seq_len, policy, excluded.tobytes())
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
        from tokenmill.plan.compile import compile_plan

        for kind in self._record_kinds:
            self._check_for_records(kind)
        self._check_padding(self.config.run.pad_to)
        began = perf_counter()
        errors, stops = limits(self.config)
        plan = compile_plan(
            schedule(self.config, self.folder, self._stage_rows, self._size),
            sources=self.config.source_names,
            steps=self.config.steps,
            max_epochs=errors,
            stops=stops,
            contract=self._contract,
        )
        return plan, perf_counter() - began

    @property
    def _record_kinds(self) -> set[str]:
        """The training type of the stores, if it is one whose records are rows as they are."""
        return {store.manifest.kind for store in self.stores.values()} & RECORD_TYPES

    def _check_for_records(self, kind: str) -> None:
        """Refuse what only rows of sequences have, where the stores are of pairs or groups."""
        if self.config.says_tokens:
            raise ConfigError(
                f"run: tokens are counted in rows of seq_len, got stores of {kind}, whose rows have several "
                "arrays; say steps"
            )
        run = self.config.run
        for key, is_set in (
            ("horizon", run.horizon > 1),
            ("balance", run.balance is not None),
            ("segment_multiple", run.segment_multiple > 1),
        ):
            if is_set:
                raise ConfigError(f"run: {key} is for stores of sequences, got stores of {kind}; leave it out")

    @property
    def _contract(self) -> dict[str, str]:
        """Choices of delivery that change what a batch holds."""
        run = self.config.run
        return {"positions": run.positions} | (
            {"horizon": f"{run.horizon} within the row"} if run.horizon > 1 else {}
        )

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
        """Return the loader of one rank, by default of the only one, whatever launcher started the process.

        `threads` and `prefetch` never change what a batch holds.
        A `layout`, in place of rank and world size, is the place of the process among data-, context-, tensor- and
        pipeline-parallel ones. A thread that reads live text is given up if it gets nowhere for `timeout` seconds.
        `arrays` and `pad_to` are those of the config, if not given. `columns` are fields that stores of pairs,
        groups or prompts keep of each record.

        The loader of the first rank keeps the plan beside the config, and notes it in the history if it is a new
        one.
        """
        from tokenmill.loader import Loader, LoaderOptions, RankSlice
        from tokenmill.loader.layout import find_layout
        from tokenmill.run.history import record

        if layout is None and rank is None and world_size is None:
            _warn_of_launcher()
        layout = find_layout(layout, rank or 0, 1 if world_size is None else world_size)
        plan = self.plan()
        if pad_to is not None:
            self._check_padding(pad_to)
        arrays = names_of("arrays", self._arrays(plan) if arrays is None else arrays)
        columns = names_of("columns", columns)
        if columns:
            self.check_columns(columns, arrays, self.stores)
        if layout.leads:
            record(self.folder, self.name, plan, self.config)
            self._warn_of_long_records()
            if self.epochs is not None:
                logger.info("%s", self.epochs.sentence(plan.steps))
        return Loader(
            plan,
            RankSlice(layout=layout, micro_batch=micro_batch, balance=self.config.run.balance is not None),
            LoaderOptions(
                arrays=arrays,
                threads=threads,
                prefetch=prefetch,
                positions=self.config.run.positions,
                horizon=self.config.run.horizon,
                columns=columns,
                pad_to=pad_to or self.config.run.pad_to,
                timeout=timeout,
            ),
            explain=lambda made_by, step: self._explain(plan, made_by, step),
        )

    @staticmethod
    def check_columns(columns: Sequence[str], arrays: Sequence[str], stores: Mapping[str, Store]) -> None:
        """Refuse columns that a store does not keep, or whose rows are no records."""
        columns = names_of("columns", columns)
        for name, store in stores.items():
            if store.manifest.kind not in RECORD_TYPES:
                raise ConfigError(
                    "columns: rows must be records (pairs, groups, prompts) to have some, got "
                    f"{name!r} of {store.manifest.kind}; leave columns out"
                )
            kept = store.manifest.recipe.get("keep", [])
            for column in columns:
                if column in arrays:
                    raise ConfigError(
                        f"columns: must have other names than the arrays of a batch, got {column!r}; leave it out, "
                        "or choose the arrays"
                    )
                if column not in kept:
                    raise ConfigError(
                        f"columns: must be one of those that {store.path} keeps, got {column!r} and {kept}; "
                        f'prepare it with keep=["{column}"]'
                    )

    def _check_padding(self, pad_to: str) -> None:
        """Refuse to pad rows to the longest of a batch where they are full, or nobody knows how long they are."""
        multiple = self.config.run.segment_multiple
        for stage in self.config.resolved_stages if pad_to == "batch" else ():
            packing = self._packing(stage)
            if live := [name for name in stage.sources if name in self.live]:
                got = f"live text in {live[0]!r}"
            elif packing != "padded":
                got = f"{packing!r}, whose rows are full"
            elif multiple > 1:
                got = f"segment_multiple = {multiple}"
            else:
                continue
            raise ConfigError(
                f'stage {stage.name!r}: pad_to = "batch" is for stores packed as padded, for pairs and groups, got '
                f"{got}; leave it out"
            )

    def _warn_of_long_records(self) -> None:
        """Log what becomes of conversations, pairs and groups that do not fit a row."""
        if any(key in MASK_KEYS for store in self.stores.values() for key in store.keys):
            from tokenmill.run.report import long_records

            for sentence in long_records(self, count=False):
                logger.warning("%s", sentence)

    def _stage_rows(self, name: str, stage: ResolvedStage, excluded: Int64Array) -> Rows:
        """Return the rows of a source in a stage."""
        from tokenmill.packing import Policy

        _ = self.stores  # checks that all sources go together
        packing = self._packing(stage)
        multiple = self.config.run.segment_multiple
        split = long_documents(stage.on_long, packing)
        policy = Policy(name=packing, split=split, crop=stage.crop, multiple=multiple)
        if name in self.live:
            return self.live[name].in_format(stage.seq_len, policy)
        return self.rows(name, stage.seq_len, policy, excluded)

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
        """Return the packing of a stage; records of pairs and groups are rows as they are, and padded."""
        kinds = self._record_kinds
        if not kinds:
            return stage.packing
        if stage.packing not in WHOLE_PACKINGS:
            raise ConfigError(
                f"stage {stage.name!r}: packing is for stores of sequences, got {stage.packing!r} with stores of "
                f"{kinds.pop()}; leave it out, a record is a row"
            )
        check_alone(f"stage {stage.name!r}", stage.on_long, f"stores of {next(iter(kinds))}")
        return "padded"

    def _arrays(self, plan: Plan) -> tuple[str, ...]:
        """Return the arrays of a batch: those of the config for sequences, else those of the training type."""
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

    def _explain(self, plan: Plan, made_by: str, step: int) -> str | None:
        """Say what changed since the plan that a state was made by, if that one is on record."""
        from tokenmill.run.history import PlanRecord, explain, read_plan

        old = read_plan(self.folder, made_by)
        return explain(old, PlanRecord.of(plan, self.config), step) if old else None


def _warn_of_launcher() -> None:
    """Warn where a launcher started several processes: each reads all rows. Only the warning depends on it."""
    processes = os.environ.get("WORLD_SIZE", "")
    if "RANK" in os.environ and processes.isdecimal() and int(processes) > 1:
        logger.warning(
            "run.loader() got no rank and world_size, so each of the %s processes of this job reads all rows; use "
            "torch_loader, or pass rank= and world_size= (rank=0, world_size=1 if that is meant)",
            processes,
        )


def is_config(path: Path | str) -> bool:
    """Return whether a path is the config of a run, and not a store; an address is none."""
    return isinstance(path, Path) and path.suffix == ".toml" and not path.is_dir()


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


def _places(store: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the paths and addresses of the stores of a source."""
    return (store,) if isinstance(store, str) else store or ()


def _dataset_of(folder: Path, path: str) -> list[Path | str]:
    """Return the Arrow files of a dataset of ids; nothing where a path is files as they are.

    `hf:` names are opened by the `datasets` library, as are folders of Parquet files, of which it makes Arrow files
    in its cache.
    """
    local = folder / Path(path.removeprefix("hf:")).expanduser()
    if is_address(path) or not (path.startswith("hf:") or local.is_dir()):
        return []
    if local.is_dir():
        from tokenmill.store.layout import is_ours

        if is_ours(local) or not (path.startswith("hf:") or _has_parquet(local)):
            return [local]
        path = f"hf:{local}"
    from tokenmill.documents.inputs import dataset_files

    return list(map(Path, dataset_files(path)))


def _has_parquet(folder: Path) -> bool:
    """Whether a folder has Parquet files of ids."""
    first = next(folder.rglob("*.parquet"), None)
    if first is None:
        return False
    from tokenmill.store.foreign.titan import is_preprocessed

    return is_preprocessed(first)


def _tokenizer_of(store: Store) -> tuple[Mapping[str, Any], str | None]:
    """Return the identity of the tokenizer of a store, and the name or path that it was prepared with."""
    return store.manifest.tokenizer, store.manifest.recipe.get("tokenizer")


def _check_tokenizers(tokenizers: Mapping[str, tuple[Mapping[str, Any], str | None]]) -> None:
    """Refuse sources whose ids do not mean the same; each has the identity of its tokenizer and its name."""
    from tokenmill.store.layout import describe_tokenizer, tokenizer_difference

    first, *others = tokenizers
    for other in others:
        differing = tokenizer_difference(tokenizers[first][0], tokenizers[other][0])
        if differing:
            key, left, right, way_out = differing
            values = "" if key == "content" else f": {left!r} and {right!r}"
            one, another = (f"{name!r} with {describe_tokenizer(*tokenizers[name])}" for name in (first, other))
            raise ConfigError(
                f"sources: all must be prepared with one tokenizer, got {one} and {another} that differ in "
                f"{key}{values}; {way_out}"
            )
