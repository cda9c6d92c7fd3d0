"""Recipes: how a record becomes tokens and masks, as data that a file can hold.

`load_recipe` reads one in four steps: the preset that the tables are based on, the tables, the defaults that depend
on one another, and the rules that concern several tables.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from tokenmill.encode.chat.conversation import ROLES
from tokenmill.encode.fim import Fim
from tokenmill.encode.tokenizer import ControlPolicy, Framing
from tokenmill.errors import ConfigError, nearest
from tokenmill.fields import top_fields
from tokenmill.tables import (
    MAX_CONFIG_BYTES,
    MAX_NUMBER,
    Count,
    Positive,
    as_json,
    check_keys,
    read_bytes,
    read_table,
)
from tokenmill.types import STORED_ARRAYS, TRAINING_TYPES

Action: TypeAlias = Literal["train", "mask", "$role", "value"]
"""Treatment of a section: its tokens are trained or masked, its role decides which, or it is a number."""
Kind: TypeAlias = Literal["seq", "sft", "dpo", "grpo"]
"""The training types."""
PositionIds: TypeAlias = Literal["none", "doc_reset", "continuous"]
Trained: TypeAlias = Literal["train", "mask"]
Turns: TypeAlias = Literal["all", "last"]
FieldPath: TypeAlias = Annotated[
    str, Meta(pattern=r"^[^.]+(\.[^.]+)*$", description="the name of a field, such as name or outer.inner")
]
"""`a.b` is the field of that name, else field b of the object in field a."""
Table: TypeAlias = Mapping[str, Any]

SYSTEM, HISTORY, OPTIONS = "system", "history", "chat_template_kwargs"
"""Fields that are read whether or not a recipe names them: beside messages the text of the system, and arguments of
the chat template for one record, as TRL has it; beside the text of a user the turns before it, as LLaMA-Factory."""
SYSTEM_PROMPT = "system_prompt"
"""Name of other projects for `SYSTEM`. A record that has it is counted if the recipe does not read it."""
DTYPES: Mapping[str, str] = {"uint8": "|u1", "uint16": "<u2", "uint32": "<u4", "float32": "<f4"}
"""Names of dtypes, and how a store writes them."""
SOURCE_MASKS: Mapping[str, str | None] = {
    name: array.mask for name, array in STORED_ARRAYS.items() if array.holds in ("ids", "rewards")
}
"""Array that is made of a source -> the array of its mask, in the order of the training types."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A field of the record, and how it is used."""

    field: FieldPath
    action: Action
    template: bool = False
    """Whether it goes through the chat template: a list of messages, or the text of one, whose `role` is given."""
    add_special_tokens: bool | None = None
    """Whether BOS comes before the section, and EOS after the section before it, if there is one. None: only before
    the first section of plain texts, unless it is a response."""
    role: str | None = None
    """Whose text it is, for `$role` and for the chat template."""
    prefix: str = ""
    """Written before the text, with the same action."""
    suffix: str = ""


Sections: TypeAlias = Annotated[tuple[Section, ...], Meta(min_length=1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """The sections that make one array of tokens."""

    sections: Sections
    list_field: bool | None = None
    """Whether the field holds a list whose elements become items. None: only for responses."""
    mask_key: str | None = None
    """Array of its mask; None where the array has none."""

    @property
    def template(self) -> bool:
        """Whether it goes through the chat template."""
        return self.sections[0].template


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way to read a record: sources by the name of their array."""

    sections: Sections | None = None
    """Written instead of `sources` if the record makes one sequence. None once the recipe is loaded."""
    sources: Mapping[str, Source] = field(default_factory=dict)

    @property
    def template(self) -> bool:
        """Whether its records go through the chat template."""
        return any(source.template for source in self.sources.values())

    def all_sections(self) -> Iterator[tuple[Section, bool]]:
        """Yield every section, and whether its field holds a list of items; the same field may come twice."""
        for source in self.sources.values():
            for section in source.sections:
                yield section, bool(source.list_field)

    def to_json(self) -> dict[str, object]:
        """Return it as a JSON object."""
        if list(self.sources) == ["sequence"]:
            return {"sections": as_json(self.sources["sequence"].sections)}
        return {"sources": as_json(self.sources)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Input(Variant):
    """The fields of a record: several variants, or a single one."""

    variants: Annotated[tuple[Variant, ...], Meta(min_length=1)] | None = None
    """In order of priority: the first that fits a record is used. A loaded recipe has all its variants here."""
    tools_field: FieldPath | None = None
    """Field with the definitions of tools for the chat template, where a record has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preprocessing:
    """Which records are taken, and how much of them; by default all, whole."""

    min_chars: Count = 0
    max_chars: Count | None = None
    max_items: Positive | None = None
    """Number of records after which to stop."""
    max_seq_len: Annotated[int, Meta(ge=2, le=MAX_NUMBER)] | None = None
    """Cut a record that has more tokens."""
    truncation_mode: Literal["keep_start", "keep_end"] = "keep_start"
    """Which end of it is kept."""
    on_long: Literal["cut", "drop", "stop"] = "cut"
    """Treatment of such a record: it is cut, dropped as a whole, or stops the build."""
    domain_key: FieldPath | None = None
    """Field whose text names the domain of a record."""
    deduplicate: bool = False
    """Take of records with the same content the first only."""
    val_fraction: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Share of records set apart for validation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """Names that records use instead of those of the recipe."""

    fields: Mapping[str, str] = field(default_factory=dict)
    """Field of the recipe -> field of the record at its top, such as `messages` -> `dialog`."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """`role` and `content` of a message -> the keys in the record, such as `speaker` and `text`."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Speaker in a message -> the role, such as `doctor` -> `assistant`."""

    def renamed(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a record whose fields have the names of the recipe."""
        if not self.fields:
            return record
        renamed = {name: record[theirs] for name, theirs in self.fields.items() if theirs in record}
        return {**{name: value for name, value in record.items() if name not in self.fields}, **renamed}


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """How the arrays are kept."""

    storage_format: Literal["bin", "h5"] = "bin"
    max_tokens_per_shard: Positive | None = None
    """None: what prepare has as its default."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """Array -> name of a dtype that it shall have instead of the smallest that holds it."""
    position_ids_mode: PositionIds = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How records become the arrays of one training type.

    The fields are the keys of a recipe file. `load_recipe` fills in the defaults that depend on one another.
    """

    version: int = 1
    name: str = ""
    """For people."""
    kind: Kind = "seq"
    preset: str | None = None
    """Preset that a recipe file is based on. None once the recipe is loaded."""
    input: Input = field(default_factory=Input)
    mask: Mapping[str, Trained] = field(default_factory=dict)
    """Role -> `train` or `mask`, for sections with the action `$role`."""
    mask_default: Trained = "mask"
    """Treatment of roles that `mask` does not name."""
    control_strings: ControlPolicy = "text"
    """Treatment of special tokens in the texts of a record."""
    train_turns: Turns = "all"
    """Whether all messages of the trained roles are trained, or only the last."""
    chat_template: str | None = None
    """`tokenizer`, a path or a built-in name; None: no section goes through one."""
    chat_template_kwargs: Table = field(default_factory=dict)
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    output: Output = field(default_factory=Output)
    names: Names = field(default_factory=Names)
    system: str | None = None
    """System prompt of every conversation that has none."""
    fim: Fim | None = None
    """Share of plain texts that are cut in three, to learn to fill in the middle."""
    framing: Framing = field(default_factory=Framing)
    """BOS and EOS around its records, where the options of a build do not specify them."""

    @property
    def variants(self) -> tuple[Variant, ...]:
        """The variants, in order of priority."""
        return self.input.variants or ()

    @property
    def tools_field(self) -> str | None:
        """Field with the definitions of tools."""
        return self.input.tools_field

    @property
    def template(self) -> bool:
        """Whether some of its records go through the chat template."""
        return any(variant.template for variant in self.variants)

    @property
    def sections(self) -> list[Section]:
        """All sections of all variants; the same field may come twice."""
        return [section for variant in self.variants for section, _ in variant.all_sections()]

    @property
    def fields(self) -> tuple[str, ...]:
        """Top-level fields of a record that it may need, in order of first mention."""
        paths = [section.field for section in self.sections]
        has_user = any(section.role == "user" for section in self.sections)
        system, history = SYSTEM if self.template or has_user else None, HISTORY if has_user else None
        options = OPTIONS if self.template else None
        beside = (self.tools_field, system, history, options, self.preprocessing.domain_key)
        paths += [name for name in beside if name is not None]
        return tuple(dict.fromkeys(self.names.fields.get(name, name) for name in top_fields(paths)))

    @property
    def text_field(self) -> str | None:
        """The field, if a record is the plain text of one field and nothing else is asked for, else None."""
        section, *more = self.sections
        if self.names.fields:
            return None
        bare = Section(field=section.field, action="train", add_special_tokens=True, role=section.role)
        if self.kind != "seq" or more or section != bare:
            return None
        limits = self.preprocessing
        bare_text = limits.max_seq_len is None and limits.domain_key is None and not self.output.dtypes
        return section.field if bare_text else None

    @property
    def arrays(self) -> tuple[str, ...]:
        """The arrays that records become, in the order of the training type."""
        positions = self.output.position_ids_mode != "none"
        return tuple(key for key in TRAINING_TYPES[self.kind] if key != "position_ids" or positions)

    @property
    def trained_roles(self) -> tuple[str, ...]:
        """The roles that `$role` trains, of all that chat templates know."""
        return tuple(role for role in dict.fromkeys((*self.mask, *ROLES)) if self.trains(role))

    def trains(self, role: str | None) -> bool:
        """Return whether `$role` means train for this role."""
        return self.mask.get(role or "", self.mask_default) == "train"

    def trains_section(self, section: Section) -> bool:
        """Return whether a section is trained; for messages, whether any role is."""
        if section.action != "$role":
            return section.action == "train"
        return bool(self.trained_roles) if section.template else self.trains(section.role)

    def to_json(self) -> dict[str, object]:
        """Return the recipe as a JSON object with every default filled in, which `load_recipe` takes as well."""
        table = as_json(self)
        variants = [variant.to_json() for variant in self.variants]
        variant = variants[0] if len(variants) == 1 else {"variants": variants}
        for name in ("version", "name", "kind", "preset", "input"):
            del table[name]
        # Keys that are newer than the first stores are left out where they are unused: recipes stay what they were.
        if self.preprocessing.on_long == "cut":
            del table["preprocessing"]["on_long"]
        for name, unused in (("names", Names()), ("system", None), ("fim", None), ("framing", Framing())):
            if getattr(self, name) == unused:
                del table[name]
        return {
            "version": 1,
            "name": self.name,
            "kind": self.kind,
            "input": {**variant, "tools_field": self.tools_field},
            **table,
        }


# Reading a recipe.


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
            f"recipe: expected one of {', '.join(PRESETS)} or the path of a .json or .toml file, got {spec!r}; "
            f"{nearest(spec, PRESETS)}"
        )
    recipe = _recipe(_read_file(path), str(path))
    template = recipe.chat_template
    if template is not None and (path.parent / template).is_file():
        return replace(recipe, chat_template=str(path.parent / template))
    return recipe


def _read_file(path: Path) -> object:
    try:
        data = read_bytes(path, MAX_CONFIG_BYTES)
    except OSError as error:
        raise ConfigError(f"{path}: a recipe must be a readable file, got {error.strerror}; fix the path") from None
    try:
        return msgspec.json.decode(data) if path.suffix == ".json" else tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:  # of either library
        raise ConfigError(f"{path}: must be {path.suffix[1:].upper()}, got {error}; fix that line") from None


def _without_nulls(value: object) -> object:
    """Return a table without the keys that are null, as not written; in tables whose keys are free, null stays."""
    if isinstance(value, Mapping):
        kept = {name: item for name, item in value.items() if item is not None}
        return {name: item if name in _FREE_TABLES else _without_nulls(item) for name, item in kept.items()}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


_FREE_TABLES = ("chat_template_kwargs", "mask", "names")


def _recipe(value: object, where: str) -> Recipe:
    table = _without_nulls(value)
    preset = table.get("preset") if isinstance(table, Mapping) else None
    if isinstance(table, Mapping):
        table = _present_keys(_over_preset(table, where) if isinstance(preset, str) else table, where)
    written = read_table(Recipe, table, f"{where}:")
    assert isinstance(table, Mapping)
    if written.version != 1:
        raise ConfigError(f"{where}: version must be 1, got {written.version}; use a newer tokenmill")
    variants = _variants(written.input, f"{where}: input")
    if preset is not None and isinstance(value, Mapping) and value.get("chat_template") is not None:
        variants = tuple(map(_through_template, variants))
    kind = _kind(table.get("kind"), variants, where)
    output = written.output
    # Positions of other types are counted when a batch is made, and not stored.
    if "position_ids_mode" not in table.get("output", {}) or output.position_ids_mode == "doc_reset":
        output = replace(output, position_ids_mode="doc_reset" if kind == "sft" else "none")
    dtypes = {key: _SAME_BYTES.get(name, name) for key, name in sorted(output.dtypes.items())}
    template = "tokenizer" if any(variant.template for variant in variants) else None
    recipe = replace(
        written,
        name=written.name if "name" in table else written.preset or kind,
        kind=kind,
        preset=None,
        # A second equal variant would never be used.
        input=Input(
            variants=tuple(variant for index, variant in enumerate(variants) if variant not in variants[:index]),
            tools_field=written.input.tools_field,
        ),
        mask=dict(sorted(written.mask.items())),
        chat_template=written.chat_template or template,
        output=replace(output, dtypes=dtypes),
    )
    check_recipe(recipe, where)
    return recipe


def _over_preset(table: Table, where: str) -> Table:
    """Return the table of a preset, overridden by the keys of this one."""
    preset = table["preset"]
    if preset not in PRESETS:
        raise ConfigError(
            f"{where}: preset must be one of {', '.join(PRESETS)}, got {preset!r}; {nearest(preset, PRESETS)}"
        )
    if "input" in table:
        raise ConfigError(f"{where}: input must be left to the preset {preset!r}, got both; leave out one of them")
    below, mask = PRESETS[preset], table.get("mask", {})
    return {**below, **table, "mask": {**below.get("mask", {}), **mask} if isinstance(mask, Mapping) else mask}


_PACKING = "rows are packed when a run is planned, not here: say packing and seq_len in the table [run] of the run"
_SAME_BYTES = {"bool": "uint8", "int32": "uint32"}
"""Names for what has the same bytes in a store: ids and positions are never negative, a mask is 0 or 1."""


def _present_keys(table: Table, where: str) -> Table:
    """Return a table with keys of older recipes, and of AstrAI's, under their present names."""
    parts = (table.get("preprocessing", {}), table.get("output", {}))
    if not all(isinstance(part, Mapping) for part in parts):
        return table  # reading it says what is wrong
    preprocessing, output = map(dict, parts)
    preprocessing.pop("batch_size", None)  # how many records AstrAI tokenizes together
    packing, packed_len = (preprocessing.pop(name, None) for name in ("packing_strategy", "max_packed_len"))
    if packing not in (None, "simple"):
        raise ConfigError(f"{where}: preprocessing: packing_strategy must be left out, got {packing!r}; {_PACKING}")
    if packed_len is not None:
        # AstrAI writes its default; it cuts nothing where records are cut to fewer tokens before.
        longest = preprocessing.get("max_seq_len")
        if not (isinstance(packed_len, int) and isinstance(longest, int) and longest <= packed_len):
            raise ConfigError(
                f"{where}: preprocessing: max_packed_len must be left out, got {packed_len!r}; {_PACKING}"
            )
        preprocessing.pop("truncation_mode", None)  # of what is longer than that
    older = output.pop("domain_key", None)
    domain_key = preprocessing.get("domain_key")
    if None not in (older, domain_key) and older != domain_key:
        raise ConfigError(
            f"{where}: preprocessing: domain_key must be said once, got {domain_key!r} and {older!r} in output; "
            "leave out one"
        )
    if older is not None:
        preprocessing["domain_key"] = older
    if "dtypes" in output and "dtype" in output:
        raise ConfigError(f"{where}: output: must have dtypes or dtype, which are one, got both; leave out dtype")
    if "dtype" in output:
        output["dtypes"] = output.pop("dtype")
    return {**table, "preprocessing": preprocessing, "output": output}


def _variants(written: Input, where: str) -> tuple[Variant, ...]:
    if _only_key(written, ("sections", "sources", "variants"), where) != "variants":
        return (_variant(written, where),)
    variants = []
    for index, variant in enumerate(written.variants or ()):
        place = f"{where}.variants[{index}]"
        _only_key(variant, ("sections", "sources"), place)
        variants.append(_variant(variant, place))
    return tuple(variants)


def _only_key(written: Variant, names: Sequence[str], where: str) -> str:
    """Return which of these keys is written; reject none, and several."""
    present = [name for name in names if getattr(written, name)]
    if len(present) != 1:
        raise ConfigError(
            f"{where}: must have one of {', '.join(names)}, got {' and '.join(present) or 'none'}; "
            "sections make one sequence, sources the arrays of dpo and grpo, variants are a list of either"
        )
    return present[0]


def _variant(written: Variant, where: str) -> Variant:
    """Return a variant with its defaults filled in."""
    if written.sections:
        sections = _with_bos(written.sections)
        return Variant(sources={"sequence": Source(sections=sections, mask_key=SOURCE_MASKS["sequence"])})
    check_keys(f"{where}.sources", written.sources, list(SOURCE_MASKS))
    # In the order of the training type, so that equal recipes are equal whatever order they are written in.
    names = [name for name in SOURCE_MASKS if name in written.sources]
    sources = {name: _source(name, written.sources[name], f"{where}.sources.{name}") for name in names}
    prompts, responses = sources.get("prompts"), sources.get("responses")
    if prompts is not None and responses is not None and prompts.template and not responses.template:
        # An answer to messages is a message: the template closes it as it does at inference.
        answers = tuple(
            replace(section, template=True, role=section.role or "assistant", add_special_tokens=False)
            for section in responses.sections
        )
        sources["responses"] = replace(responses, sections=answers)
    return Variant(sources=sources)


def _source(name: str, written: Source, where: str) -> Source:
    """Return a source with its defaults filled in."""
    mask_key, is_response = SOURCE_MASKS[name], name == "responses"
    if written.mask_key not in (None, mask_key):
        way_out = f"write {mask_key!r}, or leave it out" if mask_key else "leave it out: it has no mask"
        raise ConfigError(f"{where}: mask_key must be {mask_key!r}, got {written.mask_key!r}; {way_out}")
    if written.list_field and not is_response:
        raise ConfigError(f"{where}: list_field is for responses only, got True; leave it out")
    sections = _with_bos(written.sections, first=not is_response)  # a response continues its prompt
    return Source(sections=sections, list_field=is_response and written.list_field is not False, mask_key=mask_key)


def _with_bos(sections: Sequence[Section], *, first: bool = True) -> tuple[Section, ...]:
    """Return sections that say whether BOS comes before them; by default before the `first` one of plain texts."""
    is_plain = not sections[0].template and sections[0].action != "value"
    return tuple(
        replace(section, add_special_tokens=first and is_plain and index == 0)
        if section.add_special_tokens is None
        else section
        for index, section in enumerate(sections)
    )


def _through_template(variant: Variant) -> Variant:
    """Send plain fields that have a role through the chat template as well."""

    def sent(section: Section) -> Section:
        if section.role is None:
            return section
        return Section(
            field=section.field, action=section.action, template=True, add_special_tokens=False, role=section.role
        )

    return Variant(
        sources={
            name: replace(source, sections=tuple(map(sent, source.sections)))
            for name, source in variant.sources.items()
        }
    )


def _kind(written: str | None, variants: Sequence[Variant], where: str) -> Kind:
    """Return the training type that the sources of all variants make."""
    names = [frozenset(variant.sources) for variant in variants]
    sections = [section for variant in variants for section, _ in variant.all_sections()]
    kind: Kind
    if all(name == {"chosen", "rejected"} for name in names):
        kind = "dpo"
    elif all(name in ({"prompts", "responses", "rewards"}, {"prompts"}) for name in names):
        kind = "grpo"  # a prompt alone is a group that has no responses yet
    elif any(name != {"sequence"} for name in names):
        got = "; ".join(", ".join(variant.sources) or "none" for variant in variants)
        raise ConfigError(
            f"{where}: sources must be chosen and rejected, or prompts alone or with responses and rewards, got "
            f"{got}; for one sequence write sections"
        )
    elif all(section.action == "train" and not section.template for section in sections):
        # Text of which all is trained may be asked for with a mask, so that it mixes with what has one.
        kind = "sft" if written == "sft" else "seq"
    else:
        kind = "sft"
    if written not in (None, kind):
        raise ConfigError(
            f"{where}: kind must be {kind!r} for these sections and sources, got {written!r}; leave it out"
        )
    return kind


# Whether the parts of a recipe go together, and give every record something to train on.


def check_recipe(recipe: Recipe, where: str) -> None:
    """Raise `ConfigError` where the parts of a recipe contradict one another."""
    for role in recipe.mask:
        # A role of one's own is welcome; one that is nearly a known role is taken for a typing error.
        meant = get_close_matches(role.lower(), ROLES, n=1, cutoff=0.8)
        if meant and role not in ROLES:
            raise ConfigError(f"{where}: mask must name roles, got {role!r}; did you mean {meant[0]!r}?")
    for variant in recipe.variants:
        for name, source in variant.sources.items():
            spot = f"{where}: input" if name == "sequence" else f"{where}: input.sources.{name}"
            for section in source.sections:
                _check_section(section, f"{spot}: section {section.field!r}")
            _check_source(recipe, name, source, spot)
    _check_template(recipe, where)
    if recipe.control_strings != "text" and recipe.template:
        raise ConfigError(
            f"{where}: control_strings must be text where messages go through a chat template, "
            f"got {recipe.control_strings!r}; leave it out: else a message could end its own turn"
        )
    if recipe.fim is not None and (recipe.text_field is None or recipe.control_strings == "encode"):
        raise ConfigError(
            f"{where}: fim is for plain texts of one field, whose control strings are no control tokens, got "
            f'{recipe.name!r}; leave it out, or say preset = "text" alone'
        )
    _check_output(recipe, f"{where}: output")
    _check_names(recipe, f"{where}: names")
    if recipe.preprocessing.on_long != "cut" and recipe.preprocessing.max_seq_len is None:
        raise ConfigError(
            f"{where}: on_long is for records with more than max_seq_len tokens, got "
            f"{recipe.preprocessing.on_long!r} and no max_seq_len; add it, or say on_long in the run"
        )


def _check_section(section: Section, where: str) -> None:
    if section.action == "$role" and not section.template and section.role is None:
        raise ConfigError(
            f"{where}: action $role must have a role to go by, got template = false and no role; "
            "add template = true if it holds messages, or role = ... if it holds text"
        )
    for name in ("prefix", "suffix", "add_special_tokens") if section.template else ():
        if getattr(section, name):
            raise ConfigError(
                f"{where}: {name} must be left out with template = true, got {getattr(section, name)!r}; "
                "the chat template writes what stands around a message"
            )


def _check_source(recipe: Recipe, name: str, source: Source, where: str) -> None:
    actions = [section.action for section in source.sections]
    listed = ", ".join(actions)
    if (name == "rewards") != ("value" in actions):
        rule = "must be value: it holds numbers" if name == "rewards" else "value is for rewards only"
        raise ConfigError(f"{where}: action {rule}, got {listed}; change it")
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
    if source.template and len({action for action in actions if action != "mask"}) > 1:
        raise ConfigError(
            f"{where}: sections of one conversation must have one action beside mask, got {listed}; "
            "write $role, and say in mask which roles are trained"
        )
    if source.template and {"train", "mask"} <= set(actions):
        raise ConfigError(
            f"{where}: a section beside masked ones of a conversation must be $role, got {listed}; write that, and "
            "say in mask which roles are trained"
        )
    if name == "prompts":
        if set(actions) != {"mask"}:
            raise ConfigError(f"{where}: action must be mask: a prompt is given, got {listed}; change it")
    elif name != "rewards" and not any(map(recipe.trains_section, source.sections)):
        raise ConfigError(
            f"{where}: something must be trained, got {listed} with mask {dict(recipe.mask)} and "
            f'mask_default {recipe.mask_default!r}; write action = "train", or mask = {{ assistant = "train" }}'
        )


def _check_template(recipe: Recipe, where: str) -> None:
    actions = {
        section.action
        for variant in recipe.variants
        for name, source in variant.sources.items()
        for section in source.sections
        if section.template and name not in ("prompts", "responses") and section.action != "mask"
    }
    if len(actions) > 1:
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
    for name in ("chat_template", "chat_template_kwargs", "tools_field", "system") if not recipe.template else ():
        if getattr(recipe, name):
            raise ConfigError(
                f"{where}: {name} must be left out where no section has template = true, "
                f"got {getattr(recipe, name)!r}; add template = true to the sections that are messages"
            )


def _check_names(recipe: Recipe, where: str) -> None:
    fields = {*top_fields([section.field for section in recipe.sections])}
    if recipe.tools_field:
        fields.update(top_fields([recipe.tools_field]))
    if recipe.template:
        fields.add(SYSTEM)
    for name in recipe.names.fields:
        if name not in fields:
            raise ConfigError(
                f"{where}: fields must be of the recipe, got {name!r}; {nearest(name, sorted(fields))}"
            )
    for key in recipe.names.keys:
        if key not in ("role", "content"):
            raise ConfigError(f"{where}: keys must be role or content, got {key!r}; name the record's on the right")
    for role in recipe.names.roles.values():
        if role not in ROLES and role not in recipe.mask:
            raise ConfigError(f"{where}: roles must lead to a role, got {role!r}; {nearest(role, ROLES)}")


def _check_output(recipe: Recipe, where: str) -> None:
    if recipe.output.position_ids_mode != "none" and recipe.kind != "sft":
        raise ConfigError(
            f"{where}: position_ids_mode must be none for {recipe.kind!r}, got "
            f"{recipe.output.position_ids_mode!r}; leave it out: positions are counted when a batch is made"
        )
    for key, name in recipe.output.dtypes.items():
        if key not in recipe.arrays:
            raise ConfigError(f"{where}: dtypes must name arrays, got {key!r}; {nearest(key, recipe.arrays)}")
        stored = STORED_ARRAYS[key].dtype
        allowed = [known for known, dtype in DTYPES.items() if (dtype == stored if stored else "u" in dtype)]
        if name not in allowed:
            raise ConfigError(
                f"{where}: dtypes.{key} must be one of {', '.join(allowed)}, got {name!r}; {nearest(name, allowed)}"
            )


PRESETS: Mapping[str, Table] = tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))
"""Name -> recipe, in the order of the file."""
