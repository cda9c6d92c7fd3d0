"""What a run is: one record for each table of its config, and the stages with everything filled in.

`parse_config` reads the tables into records as they are written; `Config.resolved_stages` are the stages with what
they leave out taken from [run]. A rule that a single record can know stands in its `__post_init__`.
"""

from __future__ import annotations

import logging
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd, inf
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import tomli_w

from tokenmill.errors import ConfigError, nearest
from tokenmill.tables import (
    MAX_NUMBER,
    Number,
    check_choice,
    check_keys,
    check_positive,
    check_seed,
    read_list,
    read_table,
)
from tokenmill.types import (
    ARRAYS,
    CROPS,
    ON_CHANGE,
    ON_ERROR,
    ON_EXHAUSTED,
    PACKINGS,
    POSITIONS,
    RAMPS,
    SPLITS,
    WEIGHINGS,
    Int64Array,
)

MAX_SEQ_LEN = 1 << 24
MAX_RAMP_BATCH = 1 << 22
MAX_RAMP_STEPS = 1 << 24
"""Compiling a ramp takes a third of a microsecond a step, and a source."""
DEFAULT_ARRAYS = ("input_ids", "labels", "position_ids", "doc_ids")
logger = logging.getLogger("tokenmill.config")
Sizes: TypeAlias = Literal["tokens", "rows", "documents"]
"""What stands for weights: how much of that each source has."""
NATIVE = "native"
TABLES = ("run", "sources", "stages", "skip", "quarantine")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The table [run]."""

    steps: int
    global_batch_size: int
    """Rows of one optimizer step, over all ranks."""
    seq_len: int
    seed: int = 0
    packing: str = "best_fit"
    """How documents become rows: `best_fit`, `bos_best_fit`, `padded` or `concat`."""
    split: str = "allow"
    """What happens to a document longer than a row (best_fit, padded): it is cut into rows (`allow`), refused
    (`forbid`), or loses its beginning (`truncate_start`) or its end (`truncate_end`)."""
    crop: str = "return"
    """What bos_best_fit does with the rest of a cropped document: `return` it to the pool, or `discard` it."""
    cross_document_labels: bool = False
    """Whether the last token of a document is trained to predict the first token of the next."""
    shuffle: str = "full"
    block_rows: int = 1024
    """Neighbouring rows that stay together under shuffle = "block"."""
    window_blocks: int = 64
    """Blocks that are shuffled together under shuffle = "block"."""
    weights: Mapping[str, Number] | Sizes | None = None
    """Share of each source, for stages that do not say; need not sum to 1. In place of numbers: what of each source
    is counted, `tokens`, `rows` or `documents`, so that sources are drawn in proportion to their size."""
    temperature: Number = 1.0
    """Weights are raised to the power 1 / temperature: above 1 they become more alike."""
    weigh_by: str = "rows"
    """What the weights are shares of: `rows`, or `tokens`, of which the rows of some sources hold fewer."""
    arrays: tuple[str, ...] = DEFAULT_ARRAYS
    """What a batch delivers, where stores hold sequences."""
    positions: str = "document"
    """Where position_ids start from 0: at every `document`, or only at the start of the `row`."""

    def __post_init__(self) -> None:
        check_positive("run", "steps", self.steps)
        _check_sizes("run", self.global_batch_size, self.seq_len)
        check_seed("run", self.seed)
        _check_packing("run", self.packing, self.split, self.crop)
        _check_weighing("run", self.temperature, self.weigh_by)
        check_choice("run", "positions", self.positions, POSITIONS)
        for name in self.arrays:
            check_choice("run", "arrays", name, ARRAYS)


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    """A named set of rows."""

    name: str
    store: str | tuple[str, ...] | None = None
    """Folder of the store, or files of another project; a relative path counts from the folder of the config. A
    list, or a glob of stores, is read as one store, in that order."""
    documents: tuple[str, ...] = ()
    """In place of a store: files, folders, globs or `hf:` names of text, prepared into a store when first used."""
    tokenizer: str | None = None
    """Of `documents`, as `prepare` takes it; of token files the one that made them, whose EOS ends documents where
    `eos_id` is not given."""
    text_field: str = "text"
    keep_empty: bool = False
    """Whether texts of `documents` without a character are kept; else they are left out, counted as `empty`."""
    live: bool = False
    """Whether `documents` are tokenized while the model trains, and never prepared."""
    lanes: int | None = None
    """How many streams live text is read in; None: the largest number that divides the batch of every stage."""
    window_bytes: int | None = None
    """How much of a file is shuffled and packed together where text is live."""
    on_error: str | None = None
    """What a record of live text that cannot be read does: `stop` the run (the default), or be `skip`ped."""
    max_epochs: Number | None = None
    """How often the source may be read in the whole run; checked before the first step."""
    on_exhausted: str | None = None
    """What happens when it has been read so often (once, where max_epochs does not say): an `error` before step 0
    (the default with max_epochs), `stop` drawing from it, or `repeat` for ever (the default without)."""
    dtype: str | None = None
    """What files of another project do not say of themselves, as all below; must not contradict what they say."""
    vocab_size: int | None = None
    eos_id: int | None = None
    bos_id: int | None = None
    format: str | None = None

    def __post_init__(self) -> None:
        for key in ("store", "documents", "tokenizer"):
            object.__setattr__(self, key, _plain_paths(getattr(self, key)))
        if not self.name or not self.name.replace("-", "").replace("_", "").replace(".", "").isalnum():
            raise ConfigError(f"sources.name: must be letters, digits, - _ . only, got {self.name!r}; rename it")
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
            got = "both" if self.documents else "neither"
            raise ConfigError(
                f"{where}: must have a store, or documents and a tokenizer, got {got}; "
                'for example store = "stores/web"'
            )
        if self.live:
            self._check_live(where)
        for key in () if self.live else ("lanes", "window_bytes", "on_error"):
            if getattr(self, key) is not None:
                raise ConfigError(f"{where}: {key} is for live text, got no live; add live = true, or leave it out")
        if self.keep_empty and not self.documents:
            raise ConfigError(f"{where}: keep_empty is for documents, got a store; leave it out")
        if self.documents and self.tokenizer is None:
            raise ConfigError(
                f"{where}: documents must have a tokenizer, got none; "
                'for example tokenizer = "path/to/tokenizer.json", or "bytes"'
            )

    def _check_live(self, where: str) -> None:
        """Refuse what does not go with live text."""
        if not self.documents:
            raise ConfigError(
                f"{where}: live text must have documents and a tokenizer, got a store; leave out live"
            )
        for key in ("max_epochs", "on_exhausted"):
            if getattr(self, key) is not None:
                raise ConfigError(
                    f"{where}: {key} needs the rows of an epoch counted, got it with live = true; leave out live, "
                    "and the documents are prepared once"
                )
        for key in ("lanes", "window_bytes"):
            if getattr(self, key) is not None:
                check_positive(where, key, getattr(self, key))
        if self.on_error is not None:
            check_choice(where, "on_error", self.on_error, ON_ERROR)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageConfig:
    """A run of steps as it is written; what it does not say (None), it takes from [run]."""

    name: str
    start_step: int
    weights: Mapping[str, Number] | Sizes | None = None
    seed: int | None = None
    global_batch_size: int | None = None
    seq_len: int | None = None
    packing: str | None = None
    split: str | None = None
    crop: str | None = None
    shuffle: str | None = None
    on_change: str = "unseen"
    """Where seq_len or packing differ from the stage before: go on with what that one has not used (`unseen`), or
    `restart` the sources."""
    lr_scale: Number = 1.0
    """What the learning rate is to be multiplied by: handed on to the trainer, batches do not depend on it."""
    ramp: str | None = None
    """Over the first `ramp_steps` steps the weights go from those of the stage before to these: `linear` or
    `cosine`."""
    ramp_steps: int | None = None
    ramp_from: Mapping[str, Number] | None = None
    """Weights that the ramp starts from, if not those of the stage before."""
    temperature: Number | None = None
    weigh_by: str | None = None

    def __post_init__(self) -> None:
        where = f"stage {self.name!r}"
        if not self.name.isprintable() or not self.name.strip():
            raise ConfigError(f"stages.name: must be letters that can be printed, got {self.name!r}; rename it")
        if self.start_step < 0:
            raise ConfigError(f"{where}: start_step must not be negative, got {self.start_step}; count from 0")
        if not 0 < self.lr_scale < inf:
            raise ConfigError(f"{where}: lr_scale must be positive, got {self.lr_scale}; leave it out for 1")
        if self.ramp is not None:
            check_choice(where, "ramp", self.ramp, RAMPS)
            if self.ramp_steps is None or self.ramp_steps < 1:
                got = "none" if self.ramp_steps is None else self.ramp_steps
                raise ConfigError(f"{where}: a ramp must have ramp_steps of at least 1, got {got}; say how many")
        elif self.ramp_steps is not None or self.ramp_from is not None:
            key = "ramp_steps" if self.ramp_steps is not None else "ramp_from"
            raise ConfigError(f'{where}: {key} is for a ramp, got no ramp; add ramp = "linear" or "cosine"')
        _check_weighing(where, self.temperature, self.weigh_by)
        _check_sizes(where, self.global_batch_size, self.seq_len)
        if self.seed is not None:
            check_seed(where, self.seed)
        check_choice(where, "on_change", self.on_change, ON_CHANGE)


@dataclass(frozen=True, kw_only=True, slots=True)
class SkipConfig:
    """Steps that are not trained on; those after them keep their numbers and batches."""

    steps: str
    """`a:b`, b exclusive."""
    reason: str = ""

    def __post_init__(self) -> None:
        self.range()

    def range(self) -> tuple[int, int]:
        """Return the first step and the one after the last."""
        first, _, last = (part.strip() for part in self.steps.partition(":"))
        if not all(part.isascii() and part.isdecimal() for part in (first, last)) or int(first) >= int(last):
            raise ConfigError(
                f"skip: steps must be a:b with a below b, got {self.steps!r}; for example steps = '1200:1240'"
            )
        return int(first), int(last)


@dataclass(frozen=True, kw_only=True, slots=True)
class QuarantineConfig:
    """Documents of a source, or the whole of it, that are not trained on from a step on."""

    source: str
    from_step: int
    documents: tuple[int, ...] | None = None
    """Their numbers in the store; the whole source, where neither these nor a file are given."""
    file: str | None = None
    """File with such numbers, one a line; a relative path counts from the folder of the config."""
    reason: str = ""

    def __post_init__(self) -> None:
        where = f"quarantine of {self.source!r}"
        if self.from_step < 0:
            raise ConfigError(f"{where}: from_step must not be negative, got {self.from_step}; count from 0")
        if self.documents is not None and self.file is not None:
            raise ConfigError(f"{where}: must have documents or a file of them, got both; leave one of the two out")
        if self.documents is not None and not self.documents:
            raise ConfigError(
                f"{where}: documents must name some, got an empty list; leave the quarantine out, "
                "or documents to quarantine the whole source"
            )
        bad = [number for number in self.documents or () if not 0 <= number < MAX_NUMBER]
        if bad:
            raise ConfigError(f"{where}: documents must be numbers from 0 on, got {bad[0]}; count from 0")

    @property
    def whole(self) -> bool:
        """Whether all of the source is meant."""
        return self.documents is None and self.file is None

    def numbers(self, folder: Path) -> Int64Array:
        """Return the documents, sorted, each once; reads the file, if there is one."""
        if self.file is None:
            return np.unique(np.array(self.documents or (), np.int64))
        file = folder / self.file
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"quarantine of {self.source!r}: file must be a text with numbers of documents, got {error}; fix it"
            ) from None
        documents = []
        for number, line in enumerate(lines, 1):
            text = line.partition("#")[0].strip()
            if text and not (text.isascii() and text.isdecimal() and int(text) < MAX_NUMBER):
                raise ConfigError(
                    f"{file}, line {number}: must be the number of a document, got {line.strip()!r}; "
                    "write one a line, what follows # is not read"
                )
            documents += [int(text)] if text else []
        return np.unique(np.array(documents, np.int64))


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedStage:
    """A run of steps with everything filled in: what the stage says itself, else what [run] says."""

    name: str
    start_step: int
    end_step: int
    """First step that is no longer of the stage."""
    weights: Mapping[str, Number]
    sizes: Sizes | None
    """What of each source is counted and multiplied by its weight, which is 1 then; None: weights are as given."""
    seed: int
    global_batch_size: int
    seq_len: int
    packing: str
    split: str
    crop: str
    shuffle: str
    temperature: Number
    weigh_by: str
    on_change: str
    lr_scale: Number
    ramp: str | None
    ramp_steps: int
    """0 without a ramp."""
    ramp_from: Mapping[str, Number] | None
    """None: the weights of the stage before."""

    def __post_init__(self) -> None:
        where = f"stage {self.name!r}"
        _check_packing(where, self.packing, self.split, self.crop)
        if self.ramp_steps > MAX_RAMP_STEPS:
            raise ConfigError(
                f"{where}: ramp_steps must be at most {MAX_RAMP_STEPS}, got {self.ramp_steps}; "
                "shorten it, or put several stages after each other"
            )
        if self.ramp_steps > self.end_step - self.start_step:
            raise ConfigError(
                f"{where}: ramp_steps must be at most the {self.end_step - self.start_step} steps of the stage, "
                f"got {self.ramp_steps}; shorten it"
            )
        if self.ramp and self.start_step == 0 and self.ramp_from is None:
            raise ConfigError(
                f"{where}: a ramp of the first stage must say where it starts, got none; add ramp_from = {{ ... }}"
            )
        if self.ramp and self.global_batch_size > MAX_RAMP_BATCH:
            raise ConfigError(
                f"{where}: global_batch_size must be at most {MAX_RAMP_BATCH} in a ramp, "
                f"got {self.global_batch_size}; lower it"
            )

    @property
    def sources(self) -> set[str]:
        """Names of the sources that some step of it draws from."""
        return {*self.weights, *(self.ramp_from or ())}


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole config file."""

    run: RunConfig
    sources: tuple[SourceConfig, ...]
    stages: tuple[StageConfig, ...] = ()
    skip: tuple[SkipConfig, ...] = ()
    quarantine: tuple[QuarantineConfig, ...] = ()

    def __post_init__(self) -> None:
        for key in TABLES[1:]:
            object.__setattr__(self, key, tuple(getattr(self, key)))
        if not self.sources:
            raise ConfigError(
                "sources: a run must have at least one, got none; add [[sources]] with name and store"
            )
        for kind, names in (("sources", self.source_names), ("stages", [stage.name for stage in self.stages])):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ConfigError(f"{kind}: names must differ, got {twice[0]!r} twice; rename one")
        _check_edits(self)

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of all sources, in the order of the file."""
        return tuple(source.name for source in self.sources)

    @cached_property
    def resolved_stages(self) -> tuple[ResolvedStage, ...]:
        """The stages with everything filled in; where none is written, one over the whole run."""
        from tokenmill.plan.plan import check_order

        stages = self.stages or (StageConfig(name="main", start_step=0),)
        check_order([(stage.name, stage.start_step) for stage in stages], self.run.steps)
        ends = [*(stage.start_step for stage in stages[1:]), self.run.steps]
        resolved = tuple(self._resolve(stage, end) for stage, end in zip(stages, ends, strict=True))
        _check_live(self, resolved)
        return resolved

    def _resolve(self, stage: StageConfig, end_step: int) -> ResolvedStage:
        run, where = self.run, f"stage {stage.name!r}"
        weights = stage.weights if stage.weights is not None else run.weights
        if weights is None:
            if len(self.sources) > 1:
                raise ConfigError(
                    f"{where}: weights must say the share of each of {len(self.sources)} sources, got none; "
                    f"add weights = {{ {', '.join(f'{name} = 1' for name in self.source_names)} }}, or "
                    'weights = "tokens" for the size of each'
                )
            weights = {self.sources[0].name: 1.0}
        sizes = weights if isinstance(weights, str) else None
        if isinstance(weights, str):
            weights = dict.fromkeys(self.source_names, 1)
        _check_weights(where, weights, self.source_names)
        if stage.ramp_from is not None:
            _check_weights(f"{where}, ramp_from", stage.ramp_from, self.source_names)
        inherited = {
            name: getattr(run if getattr(stage, name) is None else stage, name)
            for name in ("seed", "global_batch_size", "seq_len", "packing", "shuffle", "temperature", "weigh_by")
        }
        packing = inherited["packing"]
        resolved = ResolvedStage(
            name=stage.name,
            start_step=stage.start_step,
            end_step=end_step,
            weights=weights,
            sizes=sizes,
            split=stage.split or (run.split if packing in ("best_fit", "padded") else "allow"),
            crop=stage.crop or (run.crop if packing == "bos_best_fit" else "return"),
            on_change=stage.on_change,
            lr_scale=stage.lr_scale,
            ramp=stage.ramp,
            ramp_steps=stage.ramp_steps or 0,
            ramp_from=stage.ramp_from,
            **inherited,
        )
        if run.cross_document_labels and packing != "concat":
            raise ConfigError(
                f"{where}: cross_document_labels is for packing concat, got it with {packing!r}; "
                "leave it out, or use packing = concat"
            )
        return resolved

    def num_lanes(self, source: SourceConfig) -> int:
        """Return how many streams a source of live text has: as it says, or as many as divide every batch."""
        batches = [stage.global_batch_size for stage in self.resolved_stages if source.name in stage.sources]
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
    """What `parse_config` reads."""
    notes: tuple[str, ...] = ()
    """What was taken how, or ignored; a sentence each. A native config has none."""
    warnings: tuple[str, ...] = ()
    """Those of the notes that decide what is trained on, and should not be overlooked."""

    def log(self, where: str) -> None:
        """Log what should not be overlooked."""
        for warning in self.warnings:
            logger.warning("%s: %s", where, warning)


def parse_config(tables: Mapping[str, Any], *, where: str = "config") -> Config:
    """Make a config of nested tables, as a TOML reader gives them; every key must be known."""
    check_keys(where, tables, TABLES)
    if "run" not in tables:
        raise ConfigError(
            f"{where}: table [run] must be there, got none; add it with steps, global_batch_size, seq_len"
        )
    return Config(
        run=read_table(RunConfig, tables["run"], "run"),
        sources=read_list(SourceConfig, tables, "sources"),
        stages=read_list(StageConfig, tables, "stages"),
        skip=read_list(SkipConfig, tables, "skip"),
        quarantine=read_list(QuarantineConfig, tables, "quarantine"),
    )


def read_tables(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a TOML file."""
    file = Path(path)
    if file.is_dir():
        configs = sorted(file.glob("*.toml"))
        way_out = f"did you mean {configs[0]}?" if configs else f"`tokenmill inspect {file}` shows a store"
        raise ConfigError(f"{file}: must be the .toml of a run, got a folder; {way_out}")
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{file}: a run must be described in a TOML file, got nothing there; fix the path"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: must be TOML, got {error}; fix that line") from None


def to_toml(tables: Mapping[str, Any]) -> str:
    """Write the tables of a config as TOML; a list of tables as [[name]], to which a user can add one."""
    parts = []
    # An empty list has no header of its own, and must stand before the first.
    for name in sorted(tables, key=lambda name: (tables[name] != [], TABLES.index(name))):
        if not isinstance(tables[name], list) or not tables[name]:
            parts.append(tomli_w.dumps({name: tables[name]}))
            continue
        for item in tables[name]:
            plain = {key: inner for key, inner in item.items() if not isinstance(inner, Mapping)}
            nested = {key: inner for key, inner in item.items() if isinstance(inner, Mapping)}
            parts.append(f"[[{name}]]\n{tomli_w.dumps(plain)}")
            parts += [tomli_w.dumps({name: {key: inner}}) for key, inner in nested.items()]
    return "\n".join(parts)


# Rules that several records have, or that need more than one


def _plain_paths(value: Any) -> Any:  # noqa: ANN401 - a path, several, or nothing
    """Return paths as strings, as a file of TOML has them, and a list as a tuple."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return tuple(map(_plain_paths, value)) if isinstance(value, list | tuple) else value


def _check_sizes(where: str, global_batch_size: int | None, seq_len: int | None) -> None:
    for name, size in (("global_batch_size", global_batch_size), ("seq_len", seq_len)):
        if size is not None:
            check_positive(where, name, size)
    if seq_len is not None and seq_len > MAX_SEQ_LEN:
        raise ConfigError(f"{where}: seq_len must be at most {MAX_SEQ_LEN}, got {seq_len}; shorten it")


def _check_packing(where: str, packing: str, split: str, crop: str) -> None:
    """Refuse choices of packing that do not go together."""
    check_choice(where, "packing", packing, PACKINGS)
    check_choice(where, "split", split, SPLITS)
    check_choice(where, "crop", crop, CROPS)
    if split != "allow" and packing not in ("best_fit", "padded"):
        raise ConfigError(
            f"{where}: split is for packing best_fit and padded, got {split!r} with {packing!r}; leave it out"
        )
    if crop != "return" and packing != "bos_best_fit":
        raise ConfigError(f"{where}: crop is for packing bos_best_fit, got {crop!r} with {packing!r}; leave it out")


def _check_weighing(where: str, temperature: float | None, weigh_by: str | None) -> None:
    if temperature is not None and not 0 < temperature < inf:
        raise ConfigError(f"{where}: temperature must be positive, got {temperature}; leave it out for 1")
    if weigh_by is not None:
        check_choice(where, "weigh_by", weigh_by, WEIGHINGS)


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
    """Refuse skips and quarantines that do not fit the run."""
    steps, end = config.run.steps, 0
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
    for edit in config.quarantine:
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


def _check_live(config: Config, stages: Sequence[ResolvedStage]) -> None:
    """Refuse what needs the rows of a source to be known beforehand, where a stage draws from live text."""
    live = [source.name for source in config.sources if source.live]
    for edit in config.quarantine:
        if edit.source in live and not edit.whole:
            raise ConfigError(
                f"quarantine of {edit.source!r}: documents must have numbers, got some of live text, which has "
                "none; quarantine the whole source, or leave out live = true"
            )
    for stage in stages:
        where = f"stage {stage.name!r}"
        drawn = [name for name in live if name in stage.sources]
        if not drawn:
            continue
        if stage.sizes:
            raise ConfigError(
                f'{where}: weights = "{stage.sizes}" needs the size of all sources, got live text in {drawn[0]!r}; '
                "give numbers, or leave out live = true"
            )
        if stage.weigh_by == "tokens":
            raise ConfigError(
                f'{where}: weigh_by = "tokens" needs the tokens of a row counted, got live text in {drawn[0]!r}; '
                "weigh by rows, or leave out live = true"
            )
        for key in ("seed", "shuffle"):
            if getattr(stage, key) != getattr(config.run, key):
                raise ConfigError(
                    f"{where}: {key} must be that of [run] where live text is drawn, as its lanes go through an "
                    f"epoch at their own pace, got {getattr(stage, key)!r}; leave it out"
                )
