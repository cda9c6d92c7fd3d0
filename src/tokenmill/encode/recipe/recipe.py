"""What a recipe is: how a record becomes tokens and masks, in words that a file can hold."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TypeVar, cast, overload

import orjson

from tokenmill.encode.recipe.presets import PRESETS
from tokenmill.encode.tokenizer import POLICIES
from tokenmill.errors import ConfigError, nearest
from tokenmill.types import STORED_ARRAYS, TRAINING_TYPES

ACTIONS = ("train", "mask", "$role", "value")
"""What a section does: its tokens are trained or masked, its role decides, or it is a number."""
KINDS = tuple(TRAINING_TYPES)
"""The training types."""
TRAIN_TURNS = ("all", "last")
POSITION_IDS_MODES = ("none", "doc_reset", "continuous")
STORAGE_FORMATS = ("bin", "h5")
TRUNCATION_MODES = ("keep_start", "keep_end")
DTYPES: Mapping[str, str] = {"uint8": "|u1", "uint16": "<u2", "uint32": "<u4", "float32": "<f4"}
"""Names of dtypes, and how a store writes them."""
JOINED = "\n\n"
"""What stands between fields that make one message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A field of the record, and what becomes of it."""

    field: str
    """Dots go down: `a.b` is field b of the object in field a."""
    action: str
    """One of `ACTIONS`."""
    template: bool = False
    """Whether it goes through the chat template: a list of messages, or the text of one, whose `role` is given."""
    add_special_tokens: bool = False
    """Whether the section begins anew: BOS before it, and EOS behind the section before it, if there is one."""
    role: str | None = None
    """Whose text it is, for `$role` and for the chat template."""
    prefix: str = ""
    """Written before the text, with the same action."""
    suffix: str = ""

    @property
    def path(self) -> tuple[str, ...]:
        """Names of the fields to go down by."""
        return tuple(self.field.split("."))

    def to_json(self) -> dict[str, object]:
        """Return it as a JSON object."""
        return {
            "field": self.field,
            "action": self.action,
            "template": self.template,
            "add_special_tokens": self.add_special_tokens,
            "role": self.role,
            "prefix": self.prefix,
            "suffix": self.suffix,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The sections that make one array of tokens."""

    sections: tuple[Section, ...]
    list_field: bool = False
    """Whether the field holds a list, of which every element becomes an item of its own."""
    mask_key: str | None = None
    """Array of its mask; None: it has none."""

    @property
    def template(self) -> bool:
        """Whether it goes through the chat template."""
        return self.sections[0].template

    def to_json(self) -> dict[str, object]:
        """Return it as a JSON object."""
        return {
            "sections": [section.to_json() for section in self.sections],
            "list_field": self.list_field,
            "mask_key": self.mask_key,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way to read a record: sources by the name of their array."""

    sources: Mapping[str, Source]

    @property
    def template(self) -> bool:
        """Whether its records go through the chat template."""
        return any(source.template for source in self.sources.values())

    def sections(self) -> Iterator[tuple[Section, bool]]:
        """Yield every section, and whether its field holds a list of items; the same field may come twice."""
        for source in self.sources.values():
            for section in source.sections:
                yield section, source.list_field

    def to_json(self) -> dict[str, object]:
        """Return it as a JSON object."""
        if list(self.sources) == ["sequence"]:
            return {"sections": [section.to_json() for section in self.sources["sequence"].sections]}
        return {"sources": {name: source.to_json() for name, source in self.sources.items()}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Preprocessing:
    """Which records are taken, and how much of them; by default all, whole."""

    min_chars: int = 0
    max_chars: int | None = None
    max_items: int | None = None
    """Stop after so many records."""
    max_seq_len: int | None = None
    """Cut a record that has more tokens."""
    truncation_mode: str = "keep_start"
    """Which end of it is kept."""
    domain_key: str | None = None
    """Field whose text names the domain of a record."""
    deduplicate: bool = False
    """Take of records with the same content the first only."""
    val_fraction: float = 0.0
    """Share of records set apart for validation."""

    def to_json(self) -> dict[str, object]:
        """Return it as a JSON object."""
        return {name: getattr(self, name) for name in PREPROCESSING_KEYS}


PREPROCESSING_KEYS = (
    "min_chars",
    "max_chars",
    "max_items",
    "max_seq_len",
    "truncation_mode",
    "domain_key",
    "deduplicate",
    "val_fraction",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """How the arrays are kept."""

    storage_format: str = "bin"
    max_tokens_per_shard: int | None = None
    """None: what prepare has as its default."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """Array -> name of a dtype that it shall have instead of the smallest that holds it."""
    position_ids_mode: str = "none"

    def to_json(self) -> dict[str, object]:
        """Return it as a JSON object."""
        return {
            "storage_format": self.storage_format,
            "max_tokens_per_shard": self.max_tokens_per_shard,
            "dtypes": dict(sorted(self.dtypes.items())),
            "position_ids_mode": self.position_ids_mode,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How records become the arrays of one training type."""

    name: str
    """For people."""
    kind: str
    """One of `KINDS`."""
    variants: tuple[Variant, ...]
    """In order of priority: the first that fits a record is taken."""
    tools_field: str | None
    """Field with the definitions of tools for the chat template, where a record has it."""
    mask: Mapping[str, str]
    """Role -> `train` or `mask`."""
    mask_default: str
    """For roles that are not in it."""
    control_strings: str
    """What becomes of control strings in the texts of a record: `text`, `encode` or `drop`."""
    train_turns: str
    """Whether `all` messages of the trained roles are trained, or the `last` only."""
    chat_template: str | None
    """`tokenizer`, a path or a built-in name; None: no section goes through one."""
    chat_template_kwargs: Mapping[str, object]
    preprocessing: Preprocessing
    output: Output

    @property
    def fields(self) -> tuple[str, ...] | None:
        """Top-level fields of a record that it may need, in order of first mention."""
        paths = [section.field for variant in self.variants for section, _ in variant.sections()]
        paths += [name for name in (self.tools_field, self.preprocessing.domain_key) if name is not None]
        return tuple(dict.fromkeys(path.split(".")[0] for path in paths))

    @property
    def text_field(self) -> str | None:
        """The field, if a record is the plain text of one field and nothing else is asked for, else None."""
        section, *more = (section for variant in self.variants for section, _ in variant.sections())
        bare = Section(field=section.field, action="train", add_special_tokens=True, role=section.role)
        if self.kind != "seq" or more or section != bare:
            return None
        limits = self.preprocessing
        bare_text = limits.max_seq_len is None and limits.domain_key is None and not self.output.dtypes
        return section.field if bare_text else None

    def trains(self, role: str | None) -> bool:
        """Say whether `$role` means train for this role."""
        return self.mask.get(role or "", self.mask_default) == "train"

    def to_json(self) -> dict[str, object]:
        """Return it as a JSON object with every default filled in, which `load_recipe` takes as well."""
        alone = len(self.variants) == 1
        ways = [variant.to_json() for variant in self.variants]
        return {
            "version": 1,
            "name": self.name,
            "kind": self.kind,
            "input": {**(ways[0] if alone else {"variants": ways}), "tools_field": self.tools_field},
            "mask": dict(sorted(self.mask.items())),
            "mask_default": self.mask_default,
            "control_strings": self.control_strings,
            "train_turns": self.train_turns,
            "chat_template": self.chat_template,
            "chat_template_kwargs": dict(self.chat_template_kwargs),
            "preprocessing": self.preprocessing.to_json(),
            "output": self.output.to_json(),
        }


# Whether the parts of a recipe go together, and give every record something to train on.

MASK_KEYS: Mapping[str, str | None] = {
    name: array.mask for name, array in STORED_ARRAYS.items() if array.holds in ("ids", "rewards")
}
"""Array that a source can become -> the array of its mask, in the order of the training types."""
ROLES = (
    *("system", "developer", "user", "assistant", "tool", "function"),
    *("ipython", "observation", "model", "chatbot"),
)
"""Roles that `mask_default` speaks for: all that chat templates know."""


def kind_of(variants: Sequence[Variant], where: str) -> str:
    """Return the training type that the sources of all variants make."""
    names = [frozenset(variant.sources) for variant in variants]
    for kind, wanted in (("dpo", {"chosen", "rejected"}), ("grpo", {"prompts", "responses", "rewards"})):
        if all(name == wanted for name in names):
            return kind
    if any(name != {"sequence"} for name in names):
        got = "; ".join(", ".join(variant.sources) or "none" for variant in variants)
        raise ConfigError(
            f"{where}: sources must be chosen and rejected, or prompts, responses and rewards, got {got}; "
            "for one sequence write sections"
        )
    sections = [section for variant in variants for section, _ in variant.sections()]
    plain = all(section.action == "train" and not section.template for section in sections)
    return "seq" if plain else "sft"


def trained_roles(recipe: Recipe) -> tuple[str, ...]:
    """Return the roles that `$role` trains."""
    return tuple(role for role in dict.fromkeys((*recipe.mask, *ROLES)) if recipe.trains(role))


def check_recipe(recipe: Recipe, where: str) -> None:
    """Raise `ConfigError` for what cannot be right."""
    for variant in recipe.variants:
        for name, source in variant.sources.items():
            spot = f"{where}: input" if name == "sequence" else f"{where}: input: sources: {name}"
            for section in source.sections:
                _check_section(section, f"{spot}: section {section.field!r}")
            _check_source(recipe, name, source, spot)
    _check_template(recipe, where)
    if recipe.control_strings != "text" and any(variant.template for variant in recipe.variants):
        raise ConfigError(
            f"{where}: control_strings must be text where messages go through a chat template, "
            f"got {recipe.control_strings!r}; leave it out: else a message could end its own turn"
        )
    _check_output(recipe, f"{where}: output")


def _check_section(section: Section, where: str) -> None:
    if section.action == "$role" and not section.template and section.role is None:
        raise ConfigError(
            f"{where}: action $role must have a role to go by, got template = false and no role; "
            "add template = true if it holds messages, or role = ... if it holds text"
        )
    if section.template:
        for name, value in (
            ("prefix", section.prefix),
            ("suffix", section.suffix),
            ("add_special_tokens", section.add_special_tokens),
        ):
            if value:
                raise ConfigError(
                    f"{where}: {name} must be left out with template = true, got {value!r}; "
                    "the chat template writes what stands around a message"
                )


def _check_source(recipe: Recipe, name: str, source: Source, where: str) -> None:
    actions = [section.action for section in source.sections]
    if (name == "rewards") != ("value" in actions):
        rule = "must be value: it holds numbers" if name == "rewards" else "value is for rewards only"
        raise ConfigError(f"{where}: action {rule}, got {', '.join(actions)}; change it")
    if name in ("rewards", "responses") and len(actions) != 1:
        raise ConfigError(f"{where}: must have one section, got {len(actions)}; leave out the others")
    if name == "responses" and source.sections[0].add_special_tokens:
        raise ConfigError(
            f"{where}: add_special_tokens must be false, got true; "
            "leave it out: a response goes on behind its prompt"
        )
    if len({section.template for section in source.sections}) > 1:
        raise ConfigError(
            f"{where}: all sections must go through the chat template or none, got both; "
            "give the text a role and template = true, so that it is a message"
        )
    if source.template and len(set(actions)) > 1:
        raise ConfigError(
            f"{where}: sections of one conversation must have one action, got {', '.join(actions)}; "
            "write $role, and say in mask which roles are trained"
        )
    if name == "prompts":
        if set(actions) != {"mask"}:
            raise ConfigError(
                f"{where}: action must be mask: a prompt is given, got {', '.join(actions)}; change it"
            )
    elif name != "rewards" and not any(_trains(recipe, section) for section in source.sections):
        raise ConfigError(
            f"{where}: something must be trained, got {', '.join(actions)} with mask {dict(recipe.mask)} and "
            f'mask_default {recipe.mask_default!r}; write action = "train", or mask = {{ assistant = "train" }}'
        )


def _trains(recipe: Recipe, section: Section) -> bool:
    if section.action != "$role":
        return section.action == "train"
    return recipe.trains(section.role) if not section.template else bool(trained_roles(recipe))


def _check_template(recipe: Recipe, where: str) -> None:
    sections = [
        section
        for variant in recipe.variants
        for name, source in variant.sources.items()
        for section in source.sections
        if section.template and name not in ("prompts", "responses")
    ]
    if len({section.action for section in sections}) > 1:
        raise ConfigError(
            f"{where}: conversations of all variants must have one action, got $role and train; choose one"
        )
    for variant in recipe.variants:
        prompts, responses = variant.sources.get("prompts"), variant.sources.get("responses")
        if prompts is not None and responses is not None and prompts.template != responses.template:
            raise ConfigError(
                f"{where}: responses with template = true must answer messages, got prompts without it; "
                "write template = true there as well"
            )
    if any(variant.template for variant in recipe.variants):
        return
    for name, value in (
        ("chat_template", recipe.chat_template),
        ("chat_template_kwargs", recipe.chat_template_kwargs),
        ("tools_field", recipe.tools_field),
    ):
        if value:
            raise ConfigError(
                f"{where}: {name} must be left out where no section has template = true, got {value!r}; "
                "add template = true to the sections that are messages"
            )


def _check_output(recipe: Recipe, where: str) -> None:
    if recipe.output.position_ids_mode != "none" and recipe.kind != "sft":
        raise ConfigError(
            f"{where}: position_ids_mode must be none for {recipe.kind!r}, got "
            f"{recipe.output.position_ids_mode!r}; leave it out: positions are counted when a batch is made"
        )
    arrays = recipe_arrays(recipe)
    for key, name in recipe.output.dtypes.items():
        if key not in arrays:
            raise ConfigError(f"{where}: dtypes must name arrays, got {key!r}; {nearest(key, arrays)}")
        known = _dtype_names(key)
        if name not in known:
            raise ConfigError(
                f"{where}: dtypes.{key} must be one of {', '.join(known)}, got {name!r}; {nearest(name, known)}"
            )


def recipe_arrays(recipe: Recipe) -> tuple[str, ...]:
    """Return the arrays that records become, in the order of the training type."""
    return tuple(
        key
        for key in TRAINING_TYPES[recipe.kind]
        if key != "position_ids" or recipe.output.position_ids_mode != "none"
    )


def _dtype_names(key: str) -> tuple[str, ...]:
    stored = STORED_ARRAYS[key].dtype
    return tuple(name for name, dtype in DTYPES.items() if (dtype == stored if stored else "u" in dtype))


# A table of a recipe, read key by key: names, presence and types are checked, and errors say where.

MAX_NUMBER = 1 << 40
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Table:
    """A table that may hold the known keys only; a key that is null counts as left out."""

    value: Mapping[str, object]
    where: str
    known: tuple[str, ...]

    def __post_init__(self) -> None:
        for key in self.value:
            if key not in self.known:
                raise ConfigError(f"{self.where}: keys must be known, got {key!r}; {nearest(str(key), self.known)}")

    def narrowed(self, known: tuple[str, ...]) -> Table:
        """Return the same table with its keys checked."""
        return Table(self.value, self.where, known)

    @overload
    def text(self, key: str, default: str) -> str: ...
    @overload
    def text(self, key: str, default: str | None) -> str | None: ...
    def text(self, key: str, default: str | None) -> str | None:
        """Return a string."""
        value = self.value.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._wrong(key, "a string", value)
        return value

    @overload
    def path(self, key: str) -> str: ...
    @overload
    def path(self, key: str, default: None) -> str | None: ...
    def path(self, key: str, default: str | None = "") -> str | None:
        """Return the name of a field, dots going down; without a default it must be given."""
        value = self.text(key, default)
        if value == "" and key not in self.value:
            raise ConfigError(f"{self.where}: {key} must be given, got nothing; name a field of the records")
        if value is not None and not all(value.split(".")):
            raise ConfigError(f"{self.where}: {key} must name a field, got {value!r}; write name or outer.inner")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self.value.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    @overload
    def whole(self, key: str, default: int, least: int = 0) -> int: ...
    @overload
    def whole(self, key: str, default: None, least: int = 0) -> int | None: ...
    def whole(self, key: str, default: int | None, least: int = 0) -> int | None:
        """Return a whole number, at least `least`."""
        value = self.value.get(key)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(key, "a whole number", value)
        if not least <= value <= MAX_NUMBER:
            raise ConfigError(
                f"{self.where}: {key} must be from {least} to {MAX_NUMBER}, got {value}; leave it out"
            )
        return value

    def share(self, key: str) -> float:
        """Return a share: from 0, which it is by default, to below 1."""
        value = self.value.get(key, 0.0)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(key, "a number", value)
        if not 0 <= value < 1:
            raise ConfigError(
                f"{self.where}: {key} must be at least 0 and below 1, got {value}; leave it out for 0"
            )
        return float(value)

    def choice(self, key: str, choices: Sequence[str], default: str | None = "*first") -> str:
        """Return one of the choices: by default the first; with None it must be given."""
        value = self.text(key, choices[0] if default == "*first" else default)
        if value is None:
            raise ConfigError(f"{self.where}: {key} must be given, got nothing; write one of {', '.join(choices)}")
        if value not in choices and value != default:
            raise ConfigError(
                f"{self.where}: {key} must be one of {', '.join(choices)}, got {value!r}; {nearest(value, choices)}"
            )
        return value

    def anything(self, key: str) -> dict[str, object]:
        """Return a table of any values."""
        value = self.value.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise self._wrong(key, "a table", value)
        return dict(value)

    def strings(self, key: str) -> dict[str, str]:
        """Return a table of strings."""
        inner = self.anything(key)
        return {name: Table(inner, f"{self.where}: {key}", tuple(inner)).text(name, "") for name in inner}

    def choices(self, key: str, choices: Sequence[str]) -> dict[str, str]:
        """Return a table whose values are of the choices."""
        inner = self.anything(key)
        return {name: Table(inner, f"{self.where}: {key}", tuple(inner)).choice(name, choices) for name in inner}

    def table(self, key: str, known: tuple[str, ...]) -> Table:
        """Return a table within it, empty where it is left out."""
        return Table(self.anything(key), f"{self.where}: {key}", known)

    def tables(self, key: str) -> list[Table]:
        """Return a list of tables, at least one; their keys are not yet checked."""
        value = self.value.get(key)
        if not isinstance(value, Sequence) or isinstance(value, str) or not value:
            raise self._wrong(key, "a list of at least one table", value)
        for index, item in enumerate(value):
            if not isinstance(item, Mapping):
                raise self._wrong(f"{key}[{index}]", "a table", item)
        return [Table(item, f"{self.where}: {key}[{index}]", tuple(item)) for index, item in enumerate(value)]

    def _wrong(self, key: str, wanted: str, value: object) -> ConfigError:
        return ConfigError(f"{self.where}: {key} must be {wanted}, got {value!r}; change it")


# From what names a recipe to the recipe: a preset, a JSON or TOML file, or the table itself.

__all__ = ["Recipe", "load_recipe"]

_KEYS = (
    *("version", "name", "kind", "preset", "input", "mask", "mask_default", "control_strings"),
    *("train_turns", "chat_template", "chat_template_kwargs", "preprocessing", "output"),
)
_SECTION_KEYS = tuple(item.name for item in fields(Section))
_PACKING = "rows are packed when a run is planned, not here: say packing and seq_len in the table [run] of the run"


def load_recipe(spec: str | Mapping[str, object]) -> Recipe:
    """Return the recipe that a preset's name, the path of a `.json` or `.toml` file, or a table stands for.

    An unknown key, a value of the wrong type or a recipe that could train on nothing raises `ConfigError`. A chat
    template that a file names by a relative path is looked for from the folder of that file.
    """
    if not isinstance(spec, str):
        return _recipe(spec, "recipe")
    if spec in PRESETS:
        return _recipe({"preset": spec}, f"recipe {spec!r}")
    path = Path(spec)
    if path.suffix not in (".json", ".toml"):
        raise ConfigError(
            f"recipe: must be one of {', '.join(PRESETS)} or the path of a .json or .toml file, got {spec!r}; "
            f"{nearest(spec, PRESETS)}"
        )
    recipe = _recipe(_read(path), str(path))
    template = recipe.chat_template
    if template is not None and (path.parent / template).is_file():
        return replace(recipe, chat_template=str(path.parent / template))
    return recipe


def _read(path: Path) -> Mapping[str, object]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: a recipe must be a readable file, got {error.strerror}; fix the path") from None
    try:
        value: object = orjson.loads(data) if path.suffix == ".json" else tomllib.loads(data.decode())
    except (orjson.JSONDecodeError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: must be {path.suffix[1:].upper()}, got {error}; fix that line") from None
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path}: a recipe must be a table, got {type(value).__name__}; write {{...}}")
    return value


def _recipe(value: Mapping[str, object], where: str) -> Recipe:
    table = Table(value, where, _KEYS)
    version = table.whole("version", 1)
    if version != 1:
        raise ConfigError(f"{where}: version must be 1, got {version}; use a newer tokenmill")
    preset = table.text("preset", None)
    if preset is not None:
        table = _overlaid(table, preset)
    variants, tools_field = _input(table.table("input", ("sections", "sources", "variants", "tools_field")))
    if preset is not None and value.get("chat_template") is not None:
        variants = _through_template(variants)
    output, domain_key = _output(table.table("output", _OUTPUT_KEYS))
    kind = _kind(table, variants)
    if kind == "sft" and not output.position_ids_mode:
        output = replace(output, position_ids_mode="doc_reset")
    recipe = Recipe(
        name=table.text("name", preset or kind),
        kind=kind,
        variants=variants,
        tools_field=tools_field,
        mask=table.choices("mask", ("train", "mask")),
        mask_default=table.choice("mask_default", ("mask", "train")),
        control_strings=table.choice("control_strings", POLICIES),
        train_turns=table.choice("train_turns", TRAIN_TURNS),
        chat_template=table.text("chat_template", _default_template(variants)),
        chat_template_kwargs=table.anything("chat_template_kwargs"),
        preprocessing=_preprocessing(table, domain_key),
        output=replace(output, position_ids_mode=output.position_ids_mode or "none"),
    )
    check_recipe(recipe, where)
    return recipe


def _overlaid(table: Table, preset: str) -> Table:
    """Return the table of a preset with what this one says on top."""
    if preset not in PRESETS:
        raise ConfigError(
            f"{table.where}: preset must be one of {', '.join(PRESETS)}, got {preset!r}; {nearest(preset, PRESETS)}"
        )
    if "input" in table.value:
        raise ConfigError(
            f"{table.where}: input must be left to the preset {preset!r}, got both; leave out one of them"
        )
    below = PRESETS[preset]
    mask = {**cast("Mapping[str, object]", below.get("mask", {})), **table.anything("mask")}
    return Table({**below, **table.value, "mask": mask}, table.where, _KEYS)


def _default_template(variants: Sequence[Variant]) -> str | None:
    return "tokenizer" if any(variant.template for variant in variants) else None


def _kind(table: Table, variants: tuple[Variant, ...]) -> str:
    kind = kind_of(variants, table.where)
    said = table.choice("kind", KINDS, kind)
    # Text of which all is trained may be asked for with a mask, so that it mixes with what has one.
    if said != kind and (said, kind) != ("sft", "seq"):
        raise ConfigError(
            f"{table.where}: kind must be {kind!r} for these sections and sources, got {said!r}; leave it out"
        )
    return said


def _input(table: Table) -> tuple[tuple[Variant, ...], str | None]:
    given = [key for key in ("sections", "sources", "variants") if table.value.get(key) is not None]
    if len(given) != 1:
        raise ConfigError(
            f"{table.where}: must have one of sections, sources, variants, got {' and '.join(given) or 'none'}; "
            "sections make one sequence, sources the arrays of dpo and grpo, variants are a list of either"
        )
    if given == ["variants"]:
        inner = [item.narrowed(("sections", "sources")) for item in table.tables("variants")]
    else:
        inner = [table]
    return _once([_variant(item) for item in inner]), table.path("tools_field", None)


def _once(variants: Sequence[Variant]) -> tuple[Variant, ...]:
    """Leave out variants that are there already: they would never be taken."""
    return tuple(variant for index, variant in enumerate(variants) if variant not in variants[:index])


def _variant(table: Table) -> Variant:
    if table.value.get("sources") is None:
        return Variant(sources={"sequence": Source(sections=_sections(table), mask_key=MASK_KEYS["sequence"])})
    if table.value.get("sections") is not None:
        raise ConfigError(f"{table.where}: must have sections or sources, got both; leave out one of them")
    known = ("sections", "list_field", "mask_key")
    inner = table.table("sources", tuple(MASK_KEYS))
    sources = {name: _source(name, inner.table(name, known)) for name in inner.value}
    # In the order of the training type, so that equal recipes are equal whatever order they are written in.
    sources = {name: sources[name] for name in MASK_KEYS if name in sources}
    prompts, responses = sources.get("prompts"), sources.get("responses")
    if prompts is not None and responses is not None and prompts.template and not responses.template:
        # An answer to messages is a message: the template closes it as it does at inference.
        answers = tuple(
            replace(section, template=True, role=section.role or "assistant", add_special_tokens=False)
            for section in responses.sections
        )
        sources["responses"] = replace(responses, sections=answers)
    return Variant(sources=sources)


def _source(name: str, table: Table) -> Source:
    wanted = MASK_KEYS[name]
    mask_key = table.text("mask_key", wanted)
    if mask_key != wanted:
        way_out = f"write {wanted!r}, or leave it out" if wanted else "leave it out: it has no mask"
        raise ConfigError(f"{table.where}: mask_key must be {wanted!r}, got {mask_key!r}; {way_out}")
    listed = name == "responses"
    if table.flag("list_field", listed) != listed:
        rule = "must be true: a record has several" if listed else "is for responses only"
        raise ConfigError(f"{table.where}: list_field {rule}, got {not listed}; leave it out")
    # A response goes on behind its prompt, so it does not begin anew.
    return Source(sections=_sections(table, anew=not listed), list_field=listed, mask_key=wanted)


def _sections(table: Table, *, anew: bool = True) -> tuple[Section, ...]:
    items = table.tables("sections")
    return tuple(_section(item.narrowed(_SECTION_KEYS), anew and index == 0) for index, item in enumerate(items))


def _section(table: Table, first: bool) -> Section:
    template = table.flag("template", False)
    action = table.choice("action", ACTIONS, None)
    plain = not template and action != "value"
    return Section(
        field=table.path("field"),
        action=action,
        template=template,
        add_special_tokens=table.flag("add_special_tokens", first and plain),
        role=table.text("role", None),
        prefix=table.text("prefix", ""),
        suffix=table.text("suffix", ""),
    )


def _through_template(variants: tuple[Variant, ...]) -> tuple[Variant, ...]:
    """Send plain fields that have a role through the chat template as well."""

    def sent(source: Source) -> Source:
        return replace(
            source,
            sections=tuple(
                Section(field=section.field, action=section.action, template=True, role=section.role)
                if section.role is not None
                else section
                for section in source.sections
            ),
        )

    return _once(
        [Variant(sources={name: sent(source) for name, source in each.sources.items()}) for each in variants]
    )


def _preprocessing(table: Table, domain_key: str | None) -> Preprocessing:
    inner = table.table("preprocessing", (*PREPROCESSING_KEYS, "packing_strategy", "max_packed_len"))
    packing = inner.text("packing_strategy", "simple")
    if packing != "simple" or inner.value.get("max_packed_len") is not None:
        name = "packing_strategy" if packing != "simple" else "max_packed_len"
        raise ConfigError(f"{inner.where}: {name} must be left out, got {inner.value[name]!r}; {_PACKING}")
    said = inner.path("domain_key", None)
    if said is not None and domain_key not in (None, said):
        raise ConfigError(
            f"{inner.where}: domain_key must be said once, got {said!r} and {domain_key!r} in output; leave out one"
        )
    return Preprocessing(
        min_chars=inner.whole("min_chars", 0),
        max_chars=inner.whole("max_chars", None),
        max_items=inner.whole("max_items", None, least=1),
        max_seq_len=inner.whole("max_seq_len", None, least=2),
        truncation_mode=inner.choice("truncation_mode", TRUNCATION_MODES),
        domain_key=said if said is not None else domain_key,
        deduplicate=inner.flag("deduplicate", False),
        val_fraction=inner.share("val_fraction"),
    )


_OUTPUT_KEYS = ("storage_format", "max_tokens_per_shard", "dtypes", "dtype", "position_ids_mode", "domain_key")
_SAME_BYTES = {"bool": "uint8", "int32": "uint32"}
"""Names for what has the same bytes in a store: ids and positions are never negative, a mask is 0 or 1."""


def _output(table: Table) -> tuple[Output, str | None]:
    """Return the output, and the domain key, which older recipes keep here; an empty mode was not said."""
    if "dtypes" in table.value and "dtype" in table.value:
        raise ConfigError(f"{table.where}: must have dtypes or dtype, which are one, got both; leave out dtype")
    names = table.strings("dtypes" if "dtypes" in table.value else "dtype")
    output = Output(
        storage_format=table.choice("storage_format", STORAGE_FORMATS),
        max_tokens_per_shard=table.whole("max_tokens_per_shard", None, least=1),
        dtypes={key: _SAME_BYTES.get(name, name) for key, name in names.items()},
        position_ids_mode=table.choice("position_ids_mode", POSITION_IDS_MODES, ""),
    )
    return output, table.path("domain_key", None)
