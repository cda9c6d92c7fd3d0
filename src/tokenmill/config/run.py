"""Config of a run: one record for each table, and how configs are read and written.

`parse_config` reads the tables into records as they are written; `Config.resolved_stages` are the stages with what
they leave out taken from [run]. A rule that a single record can check is in its `__post_init__`. Stages and
edits are in `schedule.py`, evals in `evals.py`.
"""

from __future__ import annotations

import logging
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd, inf
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tomli_w

from tokenmill.config.evals import EvalConfig
from tokenmill.config.schedule import (
    MAIN_STAGE,
    SHUFFLES,
    BatchSize,
    QuarantineConfig,
    ResolvedStage,
    Sizes,
    SkipConfig,
    StageConfig,
    TokenClock,
    Tokens,
    agreed,
    check_multiple,
    check_packing,
    check_sizes,
    check_weighing,
    limits,
    long_documents,
    read_tokens,
    wind_clock,
)
from tokenmill.config.spelling import read_old, takes_old_keys
from tokenmill.errors import ConfigError, nearest
from tokenmill.tables import (
    MAX_CONFIG_BYTES,
    Number,
    check_choice,
    check_fields,
    check_keys,
    check_name,
    check_positive,
    check_seed,
    plain_numbers,
    read_list,
    read_table,
    read_text,
)
from tokenmill.types import (
    ARRAYS,
    ON_ERROR,
    POSITIONS,
    WHOLE_PACKINGS,
    Int64Array,
    RemoteOptions,
)

WHOLE_BATCH_ARRAYS = ("cu_seqlens", "cu_seqlens_unpadded", "max_seqlen", "num_loss_tokens")
"""Arrays that describe the whole batch and have no line for each row."""
PAD_TO = ("row", "batch")
"""How far rows can be padded."""
ON_EXHAUSTED = ("repeat", "stop", "error")
"""What can happen when a source has no more rows."""

MAX_HORIZON = 64
DEFAULT_ARRAYS = ("input_ids", "labels", "position_ids", "doc_ids")
logger = logging.getLogger("tokenmill.config")
NATIVE = "native"
LISTS = ("sources", "stages", "skip", "quarantine", "evals")
"""Tables of which a config may have several."""
TABLES = ("run", *LISTS, "remote")
IN_TOKENS = {"stages": ("start_tokens", "ramp_tokens"), "skip": ("tokens",), "quarantine": ("from_tokens",)}
"""Keys that give a length in tokens instead of steps, by table; [run] has `tokens`."""


@takes_old_keys
@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The table [run] of a config: length, batch size, sequence length, order and packing.

    The arguments are the keys of [run] in docs/reference/config.md. `global_batch_size` and `seq_len` are required.

    Raises:
        ConfigError: A value has the wrong type, is out of range, or contradicts another one.

    Examples:
        >>> RunConfig(steps=1000, global_batch_size=64, seq_len=2048).packing
        'best_fit'
    """

    global_batch_size: BatchSize
    """Rows of one optimizer step, over all ranks; or a table of `from`, `to`, `step`, and `over_tokens` or
    `over_steps`: it then grows from the first step of the run on."""
    seq_len: int
    steps: int | None = None
    """Optimizer steps. Set this, `tokens` or `epochs`, unless a trainer sets the length."""
    tokens: Tokens | None = None
    """Input slots of the whole run, such as "2T", instead of steps. The number of steps is rounded up."""
    epochs: Number | None = None
    """Number of passes over all rows of all sources, instead of steps. The last step is filled with the first rows
    of the next epoch."""
    seed: int = 0
    packing: str = "best_fit"
    """Packing of documents into rows: `best_fit`, `bos_best_fit`, `padded` or `concat`."""
    on_long: str | None = None
    """Fate of a document longer than a row (best_fit, padded): `split` it over rows, cut its end
    (`truncate_end`) or its beginning (`truncate_start`), `drop` it, counted as too_long, or `stop` before the first
    step. None: `split` under best_fit, `stop` under padded and for pairs and groups."""
    crop: str = "return"
    """Fate of the rest of a document that bos_best_fit crops: `return` it to the pool, or `discard` it."""
    cross_document_labels: bool = False
    """Whether the last token of a document is trained to predict the first token of the next."""
    shuffle: str = "full"
    block_rows: int = 1024
    """Neighbouring rows that stay together under shuffle = "window" where nothing is packed."""
    window_blocks: int = 64
    """Packing windows, or blocks of `block_rows`, that are shuffled together under shuffle = "window"."""
    weights: Mapping[str, Number] | Sizes | None = None
    """Share of each source, for stages without weights. Shares need not sum to 1. `tokens`, `rows` or `documents`
    reads sources in proportion to their size."""
    temperature: Number = 1.0
    """Weights are raised to the power 1 / temperature: above 1 they become more alike."""
    weigh_by: str = "rows"
    """Unit of the weights: `rows` or `tokens`. They differ because rows of some sources hold fewer tokens."""
    pad_to: str = "row"
    """Length to which rows of padded, pairs and groups are padded: the `row`, or the longest row of a
    micro-`batch`."""
    arrays: tuple[str, ...] = DEFAULT_ARRAYS
    """Arrays of a batch, for stores of sequences."""
    positions: str = "document"
    """Point at which position_ids restart from 0: each `document`, or only the start of the `row`."""
    horizon: int = 1
    """Number of next tokens that are labels of an input. Above 1, labels have the shape rows × seq_len ×
    horizon."""
    segment_multiple: int = 1
    """Number of columns to a multiple of which best_fit and padded fill each segment, for kernels of context
    parallelism."""
    balance: Mapping[str, Number] | Literal["attention"] | None = None
    """Assignment of the rows of a step to ranks by cost: `attention`, or `linear` and `quadratic` costs per token
    and per squared token of a segment. By default ranks take rows in order."""

    def __post_init__(self) -> None:
        check_fields(self, "run.")
        if not 1 <= self.horizon <= MAX_HORIZON:
            raise ConfigError(
                f"run: horizon must be from 1 to {MAX_HORIZON}, got {self.horizon}; leave it out for the next token"
            )
        _check_balance(self.balance)
        check_positive("run", "segment_multiple", self.segment_multiple)
        if self.steps is not None:
            check_positive("run", "steps", self.steps)
        if self.tokens is not None:
            read_tokens("run", "tokens", self.tokens)
        if self.epochs is not None:
            self._check_epochs(self.epochs)
        check_sizes("run", self.global_batch_size, self.seq_len)
        check_seed("run", self.seed)
        check_packing("run", self.packing, self.crop)
        long_documents("run", self.on_long, self.packing)
        check_choice("run", "shuffle", self.shuffle, SHUFFLES)
        check_weighing("run", self.temperature, self.weigh_by)
        check_choice("run", "positions", self.positions, POSITIONS)
        check_choice("run", "pad_to", self.pad_to, PAD_TO)
        if not self.arrays:
            raise ConfigError(
                f"run: arrays must name one at least, got []; leave it out for {', '.join(DEFAULT_ARRAYS)}"
            )
        for name in self.arrays:
            check_choice("run", "arrays", name, ARRAYS)
        twice = next((name for name in self.arrays if self.arrays.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"run: arrays must name each array once, got {twice!r} twice; leave one out")
        if set(self.arrays) <= set(WHOLE_BATCH_ARRAYS):
            raise ConfigError(
                f"run: arrays must name one that has a line for every row, got {list(self.arrays)}; name input_ids "
                "and labels at least"
            )

    def _check_epochs(self, epochs: Number) -> None:
        """Reject epochs with another key that decides how often sources are read."""
        if not 0 < epochs < inf:
            raise ConfigError(f"run: epochs must be positive, got {epochs}; say how often every row is read")
        if self.steps is not None or self.tokens is not None:
            got = self.steps if self.steps is not None else self.tokens
            raise ConfigError(
                f"run: must have steps, tokens or epochs, got {got} and {epochs:g}; leave one of them out"
            )
        if not isinstance(self.global_batch_size, int):
            raise ConfigError(
                "run: epochs are counted in batches of one size, got a global_batch_size that grows; say tokens"
            )
        if self.weights not in (None, "rows") or self.temperature != 1 or self.weigh_by != "rows":
            raise ConfigError(
                "run: epochs draws from every source as many rows as it has, got weights, temperature or weigh_by "
                "that say otherwise; leave them out, or say steps"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    """A table of [[sources]]: a store, token files, or text, under a name.

    The arguments are the keys of [[sources]] in docs/reference/config.md. `name` is required, and `store`
    or `documents`.

    Raises:
        ConfigError: A value has the wrong type, is out of range, or contradicts another one.

    Examples:
        >>> SourceConfig(name="web", store="stores/web").store
        'stores/web'
    """

    name: str
    store: str | tuple[str, ...] | None = None
    """Folder of the store, or files of another project; a relative path counts from the folder of the config. A
    list, or a glob of stores, is read as one store, in that order."""
    documents: tuple[str, ...] = ()
    """Files, folders, globs or `hf:` names of text, instead of a store. They are prepared into a store on first
    use."""
    tokenizer: str | None = None
    """Tokenizer of `documents`, as for `prepare`. For token files it is the one that made them; its EOS ends
    documents unless `eos_id` is set."""
    text_field: str = "text"
    keep_empty: bool = False
    """Whether empty texts of `documents` are kept. Otherwise they are dropped and counted as `empty`."""
    fim: Mapping[str, Any] | None = None
    """Fill-in-the-middle for `documents`: `rate`, `spm_rate` and further keys."""
    live: bool = False
    """Whether `documents` are tokenized during training instead of prepared."""
    lanes: int | None = None
    """Number of streams that live text is read in. None: the largest number that divides the batch of every
    stage."""
    window_bytes: int | None = None
    """Bytes of live text that are shuffled and packed together."""
    on_error: str | None = None
    """Action on a live record that cannot be read: `stop` the run (default) or `skip` the record."""
    max_epochs: Number | None = None
    """Maximum number of passes over the source in the whole run, checked before the first step."""
    on_exhausted: str | None = None
    """Action when the source has been read `max_epochs` times, by default once: an `error` before step 0 (default
    with max_epochs), `stop` reading it, or `repeat` (default without)."""
    dtype: str | None = None
    """Facts that token files of other projects may lack: this field and the next four. They must not contradict the
    files."""
    vocab_size: int | None = None
    eos_id: int | None = None
    bos_id: int | None = None
    format: str | None = None
    verify_pages: bool = False
    """Whether every page of a store on disk is verified by its checksum when it is read."""

    def __post_init__(self) -> None:
        for key in ("store", "documents", "tokenizer"):
            object.__setattr__(self, key, _plain_paths(getattr(self, key)))
        check_fields(self, "sources.")
        check_name("sources.name", self.name)
        where = f"source {self.name!r}"
        if self.max_epochs is not None and not 0 < self.max_epochs < inf:
            raise ConfigError(f"{where}: max_epochs must be positive, got {self.max_epochs}; omit it for no limit")
        if self.on_exhausted is not None:
            check_choice(where, "on_exhausted", self.on_exhausted, ON_EXHAUSTED)
        if self.on_exhausted == "repeat" and self.max_epochs is not None:
            raise ConfigError(
                f"{where}: on_exhausted = repeat is for sources without a limit, got max_epochs "
                f"{self.max_epochs:g}; leave one of the two out"
            )
        if (not self.store) == (not self.documents):
            got = "both are" if self.documents else "neither is"
            raise ConfigError(
                f"{where}: expected a store, or documents with a tokenizer, but {got} set; "
                'for example store = "stores/web"'
            )
        if self.live:
            self._check_live(where)
        for key in () if self.live else ("lanes", "window_bytes", "on_error"):
            if getattr(self, key) is not None:
                raise ConfigError(f"{where}: {key} is for live text, got no live; add live = true, or leave it out")
        for key in ("keep_empty", "fim"):
            if getattr(self, key) and not self.documents:
                raise ConfigError(f"{where}: {key} is for documents, got a store; leave it out")
        if self.documents and self.tokenizer is None:
            raise ConfigError(
                f"{where}: `documents` without a tokenizer; "
                'for example tokenizer = "path/to/tokenizer.json", or "bytes"'
            )

    def _check_live(self, where: str) -> None:
        """Reject keys that cannot be combined with live text."""
        if not self.documents:
            raise ConfigError(
                f"{where}: live text must have documents and a tokenizer, got a store; leave out live"
            )
        for key in ("max_epochs", "on_exhausted"):
            if getattr(self, key) is not None:
                raise ConfigError(
                    f"{where}: {key} cannot be combined with live = true: rows are not counted; leave out live, "
                    "and the documents are prepared once"
                )
        for key in ("lanes", "window_bytes"):
            if getattr(self, key) is not None:
                check_positive(where, key, getattr(self, key))
        if self.on_error is not None:
            check_choice(where, "on_error", self.on_error, ON_ERROR)


_LISTED: tuple[type, ...] = (SourceConfig, StageConfig, SkipConfig, QuarantineConfig, EvalConfig)
"""Records of `LISTS`, in the same order."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole config: the tables of a run.toml as records. `Run(config)` makes the run.

    `Run.build` and `Run.from_tables` are shorter ways to a run.

    The arguments are the tables of docs/reference/config.md. `run` and at least one of `sources` are required.

    Raises:
        ConfigError: Two tables contradict each other, or a stage or edit is outside the run.

    Examples:
        >>> run = RunConfig(steps=100, global_batch_size=8, seq_len=128)
        >>> config = Config(run=run, sources=(SourceConfig(name="demo", store="stores/demo"),))
        >>> config.steps, config.source_names
        (100, ('demo',))
    """

    run: RunConfig
    sources: tuple[SourceConfig, ...]
    stages: tuple[StageConfig, ...] = ()
    skip: tuple[SkipConfig, ...] = ()
    quarantine: tuple[QuarantineConfig, ...] = ()
    evals: tuple[EvalConfig, ...] = ()
    remote: RemoteOptions = RemoteOptions()  # noqa: RUF009 - it is frozen
    clock: TokenClock = field(init=False, repr=False, compare=False)
    """Number of tokens before each step."""

    def __post_init__(self) -> None:
        if not isinstance(self.run, RunConfig):
            raise ConfigError(f"run: expected a RunConfig, got {self.run!r}; Run.from_tables takes plain tables")
        for key, record in zip(LISTS, _LISTED, strict=True):
            items = getattr(self, key)
            if not isinstance(items, list | tuple):
                raise ConfigError(
                    f"{key}: expected a list of {record.__name__}, got one {type(items).__name__}; "
                    f"write {key}=[...]"
                )
            for item in items:
                if not isinstance(item, record):
                    raise ConfigError(
                        f"{key}: expected a list of {record.__name__}, got {item!r} in it; "
                        "Run.from_tables takes plain tables"
                    )
            object.__setattr__(self, key, tuple(items))
        if not self.sources:
            raise ConfigError("sources: no sources; add [[sources]] with name and store")
        for kind in ("sources", "stages", "evals"):
            names = [item.name for item in getattr(self, kind)]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ConfigError(f"{kind}: names must differ, got {twice[0]!r} twice; rename one")
        if self.run.epochs is not None:
            _check_with_epochs(self)
        self._settle_tokens()
        _check_edits(self)
        for item in self.evals:
            item.check(self.source_names, [source.name for source in self.sources if source.live])
            seq_len = item.seq_len or self.run.seq_len
            check_multiple(f"eval {item.name!r}", seq_len, self.run.segment_multiple)

    @property
    def steps(self) -> int:
        """Optimizer steps of the run."""
        if self.run.steps is None:
            raise ConfigError("run: no length; set steps or epochs, for example steps = 1000, or epochs = 3")
        return self.run.steps

    def _settle_tokens(self) -> None:
        """Fill in the steps of all that is given in tokens."""
        clock, starts = wind_clock(self.run, self._written_stages)
        object.__setattr__(self, "clock", clock)
        run = self.run
        if run.tokens is not None:
            steps = clock.step_at(read_tokens("run", "tokens", run.tokens))
            object.__setattr__(self, "run", replace(run, steps=agreed("run", "steps", run.steps, steps)))
        settled = []
        for stage, start in zip(self.stages, starts, strict=False):
            ramp_steps = stage.ramp_steps
            if stage.ramp_tokens is not None:
                where = f"stage {stage.name!r}"
                tokens = read_tokens(where, "ramp_tokens", stage.ramp_tokens)
                counted = clock.step_at(clock.tokens_at(start) + tokens) - start
                ramp_steps = agreed(where, "ramp_steps", ramp_steps, counted)
            settled.append(replace(stage, start_step=start, ramp_steps=ramp_steps))
        object.__setattr__(self, "stages", tuple(settled))
        object.__setattr__(self, "skip", tuple(skip.resolved(clock) for skip in self.skip))
        object.__setattr__(self, "quarantine", tuple(edit.resolved(clock) for edit in self.quarantine))

    @property
    def _written_stages(self) -> tuple[StageConfig, ...]:
        """The stages; where none is written, one over the whole run."""
        return self.stages or (StageConfig(**MAIN_STAGE),)

    @property
    def says_tokens(self) -> bool:
        """Whether any length is given in tokens instead of steps."""
        batches = [self.run.global_batch_size, *(stage.global_batch_size for stage in self.stages)]
        given = [
            getattr(item, key) for name, keys in IN_TOKENS.items() for item in getattr(self, name) for key in keys
        ]
        given += [self.run.tokens, *(item.every_tokens for item in self.evals)]
        return any(tokens is not None for tokens in given) or any(
            isinstance(batch, Mapping) and "over_tokens" in batch for batch in batches
        )

    @property
    def trained_names(self) -> tuple[str, ...]:
        """Names of the sources that no eval holds out as a whole."""
        return tuple(name for name in self.source_names if name not in self.held_whole)

    @property
    def held_whole(self) -> set[str]:
        """Names of the sources of which nothing is trained on, as evals take all of them."""
        return {name for item in self.evals for name in item.held_whole}

    def held_out(self, folder: Path) -> dict[str, Int64Array]:
        """Return the documents that evals keep out of training, ascending, of each source that gives some."""
        held_out: dict[str, Int64Array] = {}
        for item in self.evals:
            for name, documents in item.held_out(folder):
                held_out[name] = np.union1d(held_out.get(name, documents), documents)
        return held_out

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of all sources, in the order of the file."""
        return tuple(source.name for source in self.sources)

    @cached_property
    def resolved_stages(self) -> tuple[ResolvedStage, ...]:
        """The stages with everything filled in; where none is written, one over the whole run."""
        from tokenmill.plan.compile import check_order

        stages = self._written_stages
        check_order([(stage.name, stage.start_step) for stage in stages], self.steps)
        ends = [*(stage.start_step for stage in stages[1:]), self.steps]
        return tuple(self._resolve(stage, end) for stage, end in zip(stages, ends, strict=True))

    def _weights(self, stage: StageConfig) -> tuple[Mapping[str, Number], Sizes | None]:
        """Return the weights of a stage, and what of each source they are multiplied by, if anything."""
        where = f"stage {stage.name!r}"
        weights = stage.weights if stage.weights is not None else self.run.weights
        trained = self.trained_names
        if not trained:
            raise ConfigError(
                f"{where}: a source must be left to train on, got all held out by evals; say which documents"
            )
        if weights is None:
            if len(trained) > 1:
                raise ConfigError(
                    f"{where}: no weights for {len(trained)} sources; "
                    f"add weights = {{ {', '.join(f'{name} = 1' for name in trained)} }} under [run]"
                    f"{' or to the stage' if self.stages else ''}, or "
                    'weights = "tokens" for the size of each'
                )
            weights = {trained[0]: 1.0}
        sizes = weights if isinstance(weights, str) else None
        if isinstance(weights, str):
            weights = dict.fromkeys(trained, 1)
        for key, names in (("weights", weights), ("ramp_from", stage.ramp_from or {})):
            for name in names:
                if name in self.held_whole:
                    raise ConfigError(
                        f"{where}: {key} must name sources that are trained on, got {name!r}, which an eval holds "
                        "out as a whole; leave it out, or say which documents the eval takes"
                    )
        _check_weights(where, weights, self.source_names)
        if stage.ramp_from is not None:
            _check_weights(f"{where}, ramp_from", stage.ramp_from, self.source_names)
        return weights, sizes

    def _resolve(self, stage: StageConfig, end_step: int) -> ResolvedStage:
        run = self.run
        weights, sizes = self._weights(stage)
        inherited = {
            name: getattr(run if getattr(stage, name) is None else stage, name)
            for name in ("seed", "seq_len", "packing", "shuffle", "temperature", "weigh_by")
        }
        packing, on_long = inherited["packing"], stage.on_long
        if on_long is None or (on_long == "cut" and run.on_long in ("truncate_start", "truncate_end")):
            on_long = run.on_long if packing in WHOLE_PACKINGS else None
        return ResolvedStage(
            name=stage.name,
            start_step=stage.start_step,
            end_step=end_step,
            batches=self.clock.batches(stage.start_step, end_step),
            weights=weights,
            sizes=sizes,
            on_long=on_long,
            crop=stage.crop or (run.crop if packing == "bos_best_fit" else "return"),
            on_change=stage.on_change,
            lr_scale=stage.lr_scale,
            ramp=stage.ramp,
            ramp_steps=stage.ramp_steps or 0,
            ramp_from=stage.ramp_from,
            **inherited,
        )

    def num_lanes(self, source: SourceConfig) -> int:
        """Return how many streams a source of live text has: its `lanes`, or the most that divide every batch."""
        batches = [
            size for stage in self.resolved_stages if source.name in stage.sources for _, size in stage.batches
        ]
        if source.lanes is None:
            return gcd(*batches) if batches else 1
        for batch in batches:
            if batch % source.lanes:
                raise ConfigError(
                    f"source {source.name!r}: lanes must divide the global_batch_size of every stage that draws "
                    f"from it, got {source.lanes} and {batch}; use {gcd(*batches)}, or leave it out"
                )
        return source.lanes


# Reading and writing


@dataclass(frozen=True, kw_only=True, slots=True)
class Translation:
    """A config in native tables."""

    dialect: str = NATIVE
    """`native`, `KempnerForge` or `torchtitan`."""
    tables: dict[str, Any]
    """Native tables, for `parse_config`."""
    notes: tuple[str, ...] = ()
    """Sentences about keys that were translated or ignored. A native config has none."""
    warnings: tuple[str, ...] = ()
    """Notes that decide what is trained on and are logged as warnings."""

    def log(self, where: str) -> None:
        """Log what should not be overlooked."""
        for warning in self.warnings:
            logger.warning("%s: %s", where, warning)


def parse_config(tables: Mapping[str, Any], *, where: str = "config") -> Config:
    """Make a config of nested tables, as a TOML reader gives them; every key must be known."""
    tables = read_old(plain_numbers(tables), where)
    own = next((key for key in tables if key in RunConfig.__dataclass_fields__ and key not in TABLES), None)
    if own is not None:
        raise ConfigError(f"{where}: {own} is outside of a table; write [run] above it")
    check_keys(where, tables, TABLES)
    if "run" not in tables:
        raise ConfigError(f"{where}: missing table: [run]; add it with steps, global_batch_size, seq_len")
    for key, kind, step, tokens in (
        ("stages", StageConfig, "start_step", "start_tokens"),
        ("quarantine", QuarantineConfig, "from_step", "from_tokens"),
    ):
        for number, table in enumerate(tables.get(key, ()) if isinstance(tables.get(key), list) else ()):
            if isinstance(table, Mapping) and not {step, tokens} & table.keys():
                check_keys(f"{key}[{number}]", table, list(kind.__dataclass_fields__))  # it may be misspelt
                raise ConfigError(f"{key}[{number}]: missing key: {step}; add {step} = ...")
    return Config(
        run=read_table(RunConfig, tables["run"], "run"),
        sources=read_list(SourceConfig, tables, "sources"),
        stages=read_list(StageConfig, tables, "stages"),
        skip=read_list(SkipConfig, tables, "skip"),
        quarantine=read_list(QuarantineConfig, tables, "quarantine"),
        evals=read_list(EvalConfig, tables, "evals"),
        remote=read_table(RemoteOptions, tables.get("remote", {}), "remote"),
    )


def read_tables(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a TOML file."""
    file = Path(path)
    if file.is_dir():
        configs = sorted(file.glob("*.toml"))
        way_out = f"did you mean {configs[0]}?" if configs else f"`tokenmill inspect {file}` shows a store"
        raise ConfigError(f"{file}: must be the .toml of a run, got a folder; {way_out}")
    try:
        return tomllib.loads(read_text(file, MAX_CONFIG_BYTES))
    except FileNotFoundError:
        raise ConfigError(f"config not found: {file}; fix the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: expected TOML, got {error}; fix that line") from None
    except RecursionError:
        raise ConfigError(f"{file}: expected TOML, got lists or tables too deep in one another; fix it") from None


def to_toml(tables: Mapping[str, Any]) -> str:
    """Write the tables of a config as TOML; a list of tables as [[name]], to which a user can add one."""
    parts = []
    # An empty list has no header of its own, and must stand before the first.
    for name in sorted(tables, key=lambda name: (tables[name] != [], TABLES.index(name))):
        if not isinstance(tables[name], list) or not tables[name]:
            parts.append(tomli_w.dumps({name: tables[name]}))
            continue
        for item in tables[name]:
            nested = {key: inner for key, inner in item.items() if isinstance(inner, Mapping) or _has_tables(inner)}
            plain = {key: inner for key, inner in item.items() if key not in nested}
            parts.append(f"[[{name}]]\n{tomli_w.dumps(plain)}")
            parts += [tomli_w.dumps({name: {key: inner}}) for key, inner in nested.items()]
    return "\n".join(parts)


def _has_tables(value: object) -> bool:
    return isinstance(value, list) and any(isinstance(item, Mapping) for item in value)


# Rules that several records have, or that need more than one


def _plain_paths(value: Any) -> Any:  # noqa: ANN401 - a path, several, or nothing
    """Return paths as strings, as a file of TOML has them, and a list as a tuple."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return tuple(map(_plain_paths, value)) if isinstance(value, list | tuple) else value


ATTENTION = {"linear": 1.0, "quadratic": 1.75e-5}
"""What a token and a squared token of a segment cost a model of 8B parameters (Llama 3's: 15 GFLOP a token in its
matrices, and 32 layers * 2 * 4096 a pair of tokens of which half are masked), where that of a token is 1."""


def _check_balance(balance: Mapping[str, Number] | str | None) -> None:
    """Reject invalid costs."""
    if isinstance(balance, Mapping):
        check_keys("run.balance", balance, tuple(ATTENTION))
        wrong = {name: balance.get(name) for name in ATTENTION if not 0 <= (balance.get(name) or 0) < inf}
        if wrong or not balance.get("quadratic"):
            raise ConfigError(
                f"run: balance must have costs of at least 0, and a quadratic one above, got {dict(balance)}; "
                f'for example balance = "attention", or {{ linear = 1, quadratic = {ATTENTION["quadratic"]:g} }}'
            )


def _check_weights(where: str, weights: Mapping[str, Number], sources: Sequence[str]) -> None:
    for name in weights:
        if name not in sources:
            raise ConfigError(f"{where}: weights must name sources, got {name!r}; {nearest(name, sources)}")
    bad = {name: weight for name, weight in weights.items() if not 0 < weight < inf}
    if bad or not weights:
        raise ConfigError(
            f"{where}: weights must be positive, got {bad or dict(weights)}; leave a source out to give it no share"
        )


def _check_edits(config: Config) -> None:
    """Reject skips and quarantines that do not fit the run."""
    steps, end = config.run.steps or inf, 0  # how many steps epochs take is not known yet
    ranges = sorted(skip.range() for skip in config.skip)
    for first, last in ranges:
        if last > steps:
            raise ConfigError(f"skip {first}:{last}: steps must lie within 0:{steps}, got {last}; shorten it")
        if first < end:
            raise ConfigError(
                f"skip {first}:{last}: steps must be skipped once, got those before {end} twice; join the two"
            )
        end = last
    if sum(last - first for first, last in ranges) >= steps:
        raise ConfigError(f"skip: a run must train on some step, got all {steps} skipped; shorten it")
    live = [source.name for source in config.sources if source.live]
    for edit in config.quarantine:
        if edit.source in live and not edit.whole:
            raise ConfigError(
                f"quarantine of {edit.source!r}: documents of live text have no numbers; quarantine the whole "
                "source, or remove live = true"
            )
        if edit.source not in config.source_names:
            raise ConfigError(
                f"quarantine: source must be one of the run's, got {edit.source!r}; "
                f"{nearest(edit.source, config.source_names)}"
            )
        if edit.from_step >= steps:
            raise ConfigError(
                f"quarantine of {edit.source!r}: from_step must be below run.steps {steps}, "
                f"got {edit.from_step}; leave it out"
            )


def _check_with_epochs(config: Config) -> None:
    """Reject keys that change the rows during epochs."""
    late = [f"quarantine of {edit.source!r}" for edit in config.quarantine if edit.from_step > 0]
    changing = ["stages"] if config.stages else late
    if changing:
        raise ConfigError(
            f"run: epochs reads the same rows from the first step to the last, got {changing[0]} as well; say the "
            "steps that `tokenmill plan` shows without it in place of epochs"
        )
    live = next((source.name for source in config.sources if source.live), None)
    if live is not None:
        raise ConfigError(f"run: epochs needs the rows of an epoch counted, got live text in {live!r}; say steps")
    epochs = config.run.epochs or 0
    errors, stops = limits(config)
    for name, limit in (errors | stops).items():
        if limit < epochs:
            raise ConfigError(
                f"run: epochs reads every source {epochs:g} times, got {name!r} that may be read {limit:g} "
                "times; leave out max_epochs and on_exhausted of it, or say steps"
            )
