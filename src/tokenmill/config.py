"""What a run is: frozen dataclasses, and the TOML reader that fills them."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from tokenmill.errors import ConfigError, nearest
from tokenmill.types import ARRAYS, CROPS, ON_CHANGE, PACKINGS, POSITIONS, SPLITS

MAX_SEQ_LEN = 1 << 24
MAX_NUMBER = 1 << 40
"""Steps and rows of a batch, so that positions of a run fit 64 bits many times over."""
DEFAULT_ARRAYS = ("input_ids", "labels", "position_ids", "doc_ids")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceConfig:
    """A named set of rows."""

    name: str
    store: str
    """Folder of the store, or files of another project; a relative path counts from the folder of the config."""
    max_epochs: float | None = None
    """How often the source may be read in the whole run; checked before the first step."""
    dtype: str | None = None
    """What files of another project do not say of themselves, as all below; must not contradict what they say."""
    vocab_size: int | None = None
    eos_id: int | None = None
    bos_id: int | None = None
    format: str | None = None

    def __post_init__(self) -> None:
        if not self.name or not self.name.replace("-", "").replace("_", "").replace(".", "").isalnum():
            raise ConfigError(f"sources.name: must be letters, digits, - _ . only, got {self.name!r}; rename it")
        if self.max_epochs is not None and not 0 < self.max_epochs < float("inf"):
            raise ConfigError(
                f"source {self.name!r}: max_epochs must be positive, got {self.max_epochs}; omit it for no limit"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class StageConfig:
    """A run of steps; what it does not say (None), it takes from [run]."""

    name: str
    start_step: int
    weights: Mapping[str, float] | None = None
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
    weights: Mapping[str, float] | None = None
    """Share of rows of each source, for stages that do not say; need not sum to 1."""
    arrays: tuple[str, ...] = DEFAULT_ARRAYS
    """What a batch delivers, where stores hold sequences."""
    positions: str = "document"
    """Where position_ids start from 0: at every `document`, or only at the start of the `row`."""

    def __post_init__(self) -> None:
        for name in ("steps", "global_batch_size", "seq_len"):
            _check_positive("run", name, getattr(self, name))
        if self.seq_len > MAX_SEQ_LEN:
            raise ConfigError(f"run: seq_len must be at most {MAX_SEQ_LEN}, got {self.seq_len}; shorten it")
        _check_seed("run", self.seed)
        _check_packing("run", self.packing, self.split, self.crop)
        _check_choice("run", "positions", self.positions, POSITIONS)
        for name in self.arrays:
            _check_choice("run", "arrays", name, ARRAYS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A whole config file."""

    run: RunConfig
    sources: tuple[SourceConfig, ...]
    stages: tuple[StageConfig, ...] = field(default=())

    def __post_init__(self) -> None:
        if not self.sources:
            raise ConfigError(
                "sources: a run must have at least one, got none; add [[sources]] with name and store"
            )
        for kind, names in (("sources", self.source_names), ("stages", [stage.name for stage in self.stages])):
            twice = sorted({name for name in names if list(names).count(name) > 1})
            if twice:
                raise ConfigError(f"{kind}: names must differ, got {twice[0]!r} twice; rename one")

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of all sources, in the order of the file."""
        return tuple(source.name for source in self.sources)

    def resolved_stages(self) -> tuple[StageConfig, ...]:
        """Return the stages with everything said: own values, else those of [run]."""
        stages = self.stages or (StageConfig(name="main", start_step=0),)
        return tuple(self._resolve(stage) for stage in stages)

    def _resolve(self, stage: StageConfig) -> StageConfig:
        where = f"stage {stage.name!r}"
        for name in ("global_batch_size", "seq_len"):
            if getattr(stage, name) is not None:
                _check_positive(where, name, getattr(stage, name))
        if stage.seq_len is not None and stage.seq_len > MAX_SEQ_LEN:
            raise ConfigError(f"{where}: seq_len must be at most {MAX_SEQ_LEN}, got {stage.seq_len}; shorten it")
        if stage.seed is not None:
            _check_seed(where, stage.seed)
        if stage.start_step < 0:
            raise ConfigError(f"{where}: start_step must not be negative, got {stage.start_step}; count from 0")
        weights = stage.weights if stage.weights is not None else self.run.weights
        if weights is None:
            if len(self.sources) > 1:
                raise ConfigError(
                    f"{where}: weights must say the share of each of {len(self.sources)} sources, got none; "
                    f"add weights = {{ {', '.join(f'{name} = 1' for name in self.source_names)} }}"
                )
            weights = {self.sources[0].name: 1.0}
        self._check_weights(where, weights)
        packing = stage.packing or self.run.packing
        split = stage.split or (self.run.split if packing in ("best_fit", "padded") else "allow")
        crop = stage.crop or (self.run.crop if packing == "bos_best_fit" else "return")
        _check_packing(where, packing, split, crop)
        if self.run.cross_document_labels and packing != "concat":
            raise ConfigError(
                f"{where}: cross_document_labels is for packing concat, got it with {packing!r}; "
                "leave it out, or use packing = concat"
            )
        _check_choice(where, "on_change", stage.on_change, ON_CHANGE)
        return StageConfig(
            name=stage.name,
            start_step=stage.start_step,
            weights=weights,
            seed=self.run.seed if stage.seed is None else stage.seed,
            global_batch_size=stage.global_batch_size or self.run.global_batch_size,
            seq_len=stage.seq_len or self.run.seq_len,
            packing=packing,
            split=split,
            crop=crop,
            shuffle=stage.shuffle or self.run.shuffle,
            on_change=stage.on_change,
        )

    def _check_weights(self, where: str, weights: Mapping[str, float]) -> None:
        for name in weights:
            if name not in self.source_names:
                raise ConfigError(
                    f"{where}: weights must name sources, got {name!r}; {nearest(name, self.source_names)}"
                )
        bad = {name: weight for name, weight in weights.items() if not 0 < weight < float("inf")}
        if bad or not weights:
            raise ConfigError(
                f"{where}: weights must be positive, got {bad or dict(weights)}; "
                "leave a source out to give it no share"
            )


def read_config(path: str | os.PathLike[str]) -> Config:
    """Read a config file in TOML; every key must be known and every value of its type."""
    file = Path(path)
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{file}: a run must be described in a TOML file, got nothing there; fix the path"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: must be TOML, got {error}; fix that line") from None
    return parse_config(tables, where=str(file))


def parse_config(tables: Mapping[str, Any], *, where: str = "config") -> Config:
    """Make a config of nested tables, as a TOML reader gives them."""
    _check_keys(where, tables, ("run", "sources", "stages"))
    if "run" not in tables:
        raise ConfigError(
            f"{where}: table [run] must be there, got none; add it with steps, global_batch_size, seq_len"
        )
    return Config(
        run=_read(RunConfig, tables["run"], "run"),
        sources=tuple(
            _read(SourceConfig, item, f"sources[{i}]") for i, item in enumerate(_list(tables, "sources"))
        ),
        stages=tuple(_read(StageConfig, item, f"stages[{i}]") for i, item in enumerate(_list(tables, "stages"))),
    )


def _list(tables: Mapping[str, Any], key: str) -> list[Any]:
    value = tables.get(key, [])
    if not isinstance(value, list):
        raise ConfigError(f"{key}: must be a list of tables, got {type(value).__name__}; write [[{key}]]")
    return value


def _read(kind: type[T], table: Any, where: str) -> T:  # noqa: ANN401 - what TOML gives
    """Fill a dataclass from a table; names, presence and types are checked."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where}: must be a table, got {table!r}; write [{where}]")
    known = {item.name: item for item in fields(kind)}  # type: ignore[arg-type]
    _check_keys(where, table, tuple(known))
    for name, item in known.items():
        if name not in table and item.default is MISSING and item.default_factory is MISSING:
            raise ConfigError(f"{where}: {name} must be given, got nothing; add {name} = ...")
    hints = get_type_hints(kind)
    values = {name: _convert(f"{where}.{name}", value, hints[name]) for name, value in table.items()}
    return kind(**values)


def _convert(where: str, value: Any, hint: Any) -> Any:  # noqa: ANN401 - what TOML gives, what a hint is
    """Return a TOML value as the type of its field, or refuse it."""
    text = str(hint)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if "Mapping" in text:
        ok = isinstance(value, Mapping) and all(
            isinstance(weight, int | float) and not isinstance(weight, bool) for weight in value.values()
        )
        wanted, result = "a table of numbers", value
    elif "tuple" in text:
        ok = isinstance(value, list) and all(isinstance(item, str) for item in value)
        wanted, result = "a list of strings", tuple(value) if ok else value
    elif "bool" in text:
        ok, wanted, result = isinstance(value, bool), "true or false", value
    elif "float" in text:
        ok, wanted, result = number, "a number", value
    elif "int" in text:
        ok, wanted, result = number and isinstance(value, int), "a whole number", value
    else:
        ok, wanted, result = isinstance(value, str), "a string", value
    if not ok:
        raise ConfigError(f"{where}: must be {wanted}, got {value!r}; change its type")
    return result


def _check_keys(where: str, table: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for key in table:
        if key not in known:
            raise ConfigError(f"{where}: keys must be known, got {key!r}; {nearest(key, known)}")


def _check_positive(where: str, name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{where}: {name} must be at least 1, got {value}; raise it")
    if value > MAX_NUMBER:
        raise ConfigError(f"{where}: {name} must be at most {MAX_NUMBER}, got {value}; lower it")


def _check_seed(where: str, seed: int) -> None:
    if not 0 <= seed < 1 << 63:
        raise ConfigError(f"{where}: seed must lie within 0 and 2^63, got {seed}; choose a smaller one")


def _check_packing(where: str, packing: str, split: str, crop: str) -> None:
    _check_choice(where, "packing", packing, PACKINGS)
    _check_choice(where, "split", split, SPLITS)
    _check_choice(where, "crop", crop, CROPS)
    if split != "allow" and packing not in ("best_fit", "padded"):
        raise ConfigError(
            f"{where}: split is for packing best_fit and padded, got {split!r} with {packing!r}; leave it out"
        )
    if crop != "return" and packing != "bos_best_fit":
        raise ConfigError(f"{where}: crop is for packing bos_best_fit, got {crop!r} with {packing!r}; leave it out")


def _check_choice(where: str, name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(
            f"{where}: {name} must be one of {', '.join(choices)}, got {value!r}; {nearest(value, choices)}"
        )
