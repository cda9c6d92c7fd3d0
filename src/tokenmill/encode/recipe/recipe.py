"""What a recipe is: how a record becomes tokens and masks, as data that a file can hold.

`load_recipe` reads one in four steps: the tables as they are written, the preset that they are based on, the
defaults that depend on one another, and the rules that concern several tables.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

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
"""What becomes of a section: its tokens are trained or masked, its role decides which, or it is a number."""
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
Tables: TypeAlias = Annotated[tuple[Table, ...], Meta(min_length=1)]
T = TypeVar("T")

SYSTEM, HISTORY, OPTIONS = "system", "history", "chat_template_kwargs"
"""Fields that are read whether or not a recipe names them: beside messages the text of the system, and arguments of
the chat template for one record, as TRL has it; beside the text of a user the turns before it, as LLaMA-Factory."""
SYSTEM_PROMPT = "system_prompt"
"""A name of other projects for `SYSTEM`. It is noted where nothing reads it."""
DTYPES: Mapping[str, str] = {"uint8": "|u1", "uint16": "<u2", "uint32": "<u4", "float32": "<f4"}
"""Names of dtypes, and how a store writes them."""
SOURCE_MASKS: Mapping[str, str | None] = {
    name: array.mask for name, array in STORED_ARRAYS.items() if array.holds in ("ids", "rewards")
}
"""Array that is made of a source -> the array of its mask, in the order of the training types."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A field of the record, and what becomes of it."""

    field: FieldPath
    action: Action
    template: bool = False
    """Whether it goes through the chat template: a list of messages, or the text of one, whose `role` is given."""
    add_special_tokens: bool = False
    """Whether the section begins anew: BOS before it, and EOS behind the section before it, if there is one."""
    role: str | None = None
    """Whose text it is, for `$role` and for the chat template."""
    prefix: str = ""
    """Written before the text, with the same action."""
    suffix: str = ""


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
            return {"sections": as_json(self.sources["sequence"].sections)}
        return {"sources": as_json(self.sources)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Preprocessing:
    """Which records are taken, and how much of them; by default all, whole."""

    min_chars: Count = 0
    max_chars: Count | None = None
    max_items: Positive | None = None
    """Stop after so many records."""
    max_seq_len: Annotated[int, Meta(ge=2, le=MAX_NUMBER)] | None = None
    """Cut a record that has more tokens."""
    truncation_mode: Literal["keep_start", "keep_end"] = "keep_start"
    """Which end of it is kept."""
    on_long: Literal["cut", "drop", "stop"] = "cut"
    """What becomes of such a record: it is cut, dropped as a whole, or stops the build."""
    domain_key: FieldPath | None = None
    """Field whose text names the domain of a record."""
    deduplicate: bool = False
    """Take of records with the same content the first only."""
    val_fraction: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Share of records set apart for validation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """Names that records have in place of those of the recipe."""

    fields: Mapping[str, str] = field(default_factory=dict)
    """Field of the recipe -> field of the record at its top, such as `messages` -> `dialog`."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """`role` and `content` of a message -> what its keys are, such as `speaker` and `text`."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """What a message says of its speaker -> the role, such as `doctor` -> `assistant`."""

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
    """How records become the arrays of one training type."""

    name: str
    """For people."""
    kind: Kind
    variants: tuple[Variant, ...]
    """In order of priority: the first that fits a record is taken."""
    tools_field: str | None
    """Field with the definitions of tools for the chat template, where a record has it."""
    mask: Mapping[str, Trained]
    """Role -> `train` or `mask`."""
    mask_default: Trained
    """For roles that are not in it."""
    control_strings: ControlPolicy
    """What becomes of control strings in the texts of a record."""
    train_turns: Turns
    """Whether all messages of the trained roles are trained, or the last only."""
    chat_template: str | None
    """`tokenizer`, a path or a built-in name; None: no section goes through one."""
    chat_template_kwargs: Mapping[str, Any]
    preprocessing: Preprocessing
    output: Output
    names: Names = field(default_factory=Names)
    system: str | None = None
    """What the system says in every conversation that does not say it itself."""
    fim: Fim | None = None
    """Whether some documents of plain text are cut in three, to learn to fill in the middle."""
    framing: Framing = field(default_factory=Framing)
    """BOS and EOS around its records, where the options of a build do not specify them."""

    @property
    def template(self) -> bool:
        """Whether some of its records go through the chat template."""
        return any(variant.template for variant in self.variants)

    @property
    def sections(self) -> list[Section]:
        """All sections of all variants; the same field may come twice."""
        return [section for variant in self.variants for section, _ in variant.sections()]

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
        """Tell whether `$role` means train for this role."""
        return self.mask.get(role or "", self.mask_default) == "train"

    def trains_section(self, section: Section) -> bool:
        """Tell whether a section is trained on; one of messages, whether some role is."""
        if section.action != "$role":
            return section.action == "train"
        return bool(self.trained_roles) if section.template else self.trains(section.role)

    def to_json(self) -> dict[str, object]:
        """Return the recipe as a JSON object with every default filled in, which `load_recipe` takes as well."""
        table = as_json(self)
        variants = [variant.to_json() for variant in self.variants]
        variant = variants[0] if len(variants) == 1 else {"variants": variants}
        for name in ("name", "kind", "variants", "tools_field"):
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


# Reading: the tables as they are written.


@dataclass(frozen=True, kw_only=True, slots=True)
class _RecipeTable:
    """A recipe as it is written; its larger parts are read on their own."""

    version: int = 1
    name: str | None = None
    kind: Kind | None = None
    preset: str | None = None
    input: Table = field(default_factory=dict)
    mask: Mapping[str, Trained] = field(default_factory=dict)
    mask_default: Literal["mask", "train"] = "mask"
    control_strings: ControlPolicy = "text"
    train_turns: Turns = "all"
    chat_template: str | None = None
    chat_template_kwargs: Table = field(default_factory=dict)
    preprocessing: Table = field(default_factory=dict)
    output: Table = field(default_factory=dict)
    names: Names = field(default_factory=Names)
    system: str | None = None
    fim: Fim | None = None
    framing: Framing = field(default_factory=Framing)


@dataclass(frozen=True, kw_only=True, slots=True)
class _VariantTable:
    sections: Tables | None = None
    sources: Mapping[str, Table] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _InputTable(_VariantTable):
    variants: Tables | None = None
    tools_field: FieldPath | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _SourceTable:
    sections: Tables
    list_field: bool | None = None
    mask_key: str | None = None


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


def _read(kind: type[T], table: object, where: str) -> T:
    return read_table(kind, _without_nulls(table), where)


def _without_nulls(table: object) -> object:
    """Leave out the keys of a table that are null: they count as not written."""
    if not isinstance(table, Mapping):
        return table
    return {name: value for name, value in table.items() if value is not None}


def _recipe(table: object, where: str) -> Recipe:
    table = _without_nulls(table)
    written = read_table(_RecipeTable, table, f"{where}:")
    if written.version != 1:
        raise ConfigError(f"{where}: version must be 1, got {written.version}; use a newer tokenmill")
    through_template = written.preset is not None and written.chat_template is not None
    if written.preset is not None:
        assert isinstance(table, Mapping)
        written = read_table(_RecipeTable, _over_preset(table, written, where), f"{where}:")
    inputs = _read(_InputTable, written.input, f"{where}: input")
    variants = _variants(inputs, f"{where}: input")
    if through_template:
        variants = tuple(map(_through_template, variants))
    kind = _kind(written.kind, variants, where)
    preprocessing, output_table = _present_keys(written, where)
    # Those of other types are counted so when a batch is made, and not stored.
    if output_table.get("position_ids_mode") in (None, "doc_reset"):
        output_table["position_ids_mode"] = "doc_reset" if kind == "sft" else "none"
    output = _read(Output, output_table, f"{where}: output")
    dtypes = sorted(output.dtypes.items())
    template = "tokenizer" if any(variant.template for variant in variants) else None
    recipe = Recipe(
        name=(written.preset or kind) if written.name is None else written.name,
        kind=kind,
        # A variant that is there already would never be taken.
        variants=tuple(variant for index, variant in enumerate(variants) if variant not in variants[:index]),
        tools_field=inputs.tools_field,
        mask=dict(sorted(written.mask.items())),
        mask_default=written.mask_default,
        control_strings=written.control_strings,
        train_turns=written.train_turns,
        chat_template=template if written.chat_template is None else written.chat_template,
        chat_template_kwargs=written.chat_template_kwargs,
        preprocessing=_read(Preprocessing, preprocessing, f"{where}: preprocessing"),
        output=replace(output, dtypes={key: _SAME_BYTES.get(name, name) for key, name in dtypes}),
        names=written.names,
        system=written.system,
        fim=written.fim,
        framing=written.framing,
    )
    check_recipe(recipe, where)
    return recipe


def _over_preset(table: Table, written: _RecipeTable, where: str) -> Table:
    """Return the table of a preset with what this one says on top."""
    preset = written.preset or ""
    if preset not in PRESETS:
        raise ConfigError(
            f"{where}: preset must be one of {', '.join(PRESETS)}, got {preset!r}; {nearest(preset, PRESETS)}"
        )
    if "input" in table:
        raise ConfigError(f"{where}: input must be left to the preset {preset!r}, got both; leave out one of them")
    below = PRESETS[preset]
    return {**below, **table, "mask": {**below.get("mask", {}), **written.mask}}


_PACKING = "rows are packed when a run is planned, not here: say packing and seq_len in the table [run] of the run"
_SAME_BYTES = {"bool": "uint8", "int32": "uint32"}
"""Names for what has the same bytes in a store: ids and positions are never negative, a mask is 0 or 1."""


def _present_keys(written: _RecipeTable, where: str) -> tuple[Table, dict[str, Any]]:
    """Return preprocessing and output with keys of older recipes, and of AstrAI's, under their present names."""
    preprocessing, output = dict(written.preprocessing), dict(written.output)
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
    preprocessing["domain_key"] = older if domain_key is None else domain_key
    if "dtypes" in output and "dtype" in output:
        raise ConfigError(f"{where}: output: must have dtypes or dtype, which are one, got both; leave out dtype")
    if "dtype" in output:
        output["dtypes"] = output.pop("dtype")
    return preprocessing, output


def _variants(table: _InputTable, where: str) -> tuple[Variant, ...]:
    if _only_one(table, ("sections", "sources", "variants"), where) != "variants":
        return (_variant(table, where),)
    variants = []
    for index, item in enumerate(table.variants or ()):
        spot = f"{where}.variants[{index}]"
        variant = _read(_VariantTable, item, spot)
        _only_one(variant, ("sections", "sources"), spot)
        variants.append(_variant(variant, spot))
    return tuple(variants)


def _only_one(table: _VariantTable, names: Sequence[str], where: str) -> str:
    """Return which of these keys a table has; refuse none, or several."""
    present = [name for name in names if getattr(table, name) is not None]
    if len(present) != 1:
        raise ConfigError(
            f"{where}: must have one of {', '.join(names)}, got {' and '.join(present) or 'none'}; "
            "sections make one sequence, sources the arrays of dpo and grpo, variants are a list of either"
        )
    return present[0]


def _variant(table: _VariantTable, where: str) -> Variant:
    if table.sources is None:
        sections = _sections(table.sections or (), where, anew=True)
        return Variant(sources={"sequence": Source(sections=sections, mask_key=SOURCE_MASKS["sequence"])})
    check_keys(f"{where}.sources", table.sources, list(SOURCE_MASKS))
    # In the order of the training type, so that equal recipes are equal whatever order they are written in.
    names = [name for name in SOURCE_MASKS if name in table.sources]
    sources = {name: _source(name, table.sources[name], f"{where}.sources.{name}") for name in names}
    prompts, responses = sources.get("prompts"), sources.get("responses")
    if prompts is not None and responses is not None and prompts.template and not responses.template:
        # An answer to messages is a message: the template closes it as it does at inference.
        answers = tuple(
            replace(section, template=True, role=section.role or "assistant", add_special_tokens=False)
            for section in responses.sections
        )
        sources["responses"] = replace(responses, sections=answers)
    return Variant(sources=sources)


def _source(name: str, table: Table, where: str) -> Source:
    written = _read(_SourceTable, table, where)
    mask_key, responses = SOURCE_MASKS[name], name == "responses"
    if written.mask_key not in (None, mask_key):
        way_out = f"write {mask_key!r}, or leave it out" if mask_key else "leave it out: it has no mask"
        raise ConfigError(f"{where}: mask_key must be {mask_key!r}, got {written.mask_key!r}; {way_out}")
    if written.list_field and not responses:
        raise ConfigError(f"{where}: list_field is for responses only, got True; leave it out")
    # A response goes on behind its prompt, so it does not begin anew.
    sections = _sections(written.sections, where, anew=not responses)
    listed = responses and written.list_field is not False
    return Source(sections=sections, list_field=listed, mask_key=mask_key)


def _sections(tables: Sequence[Table], where: str, *, anew: bool) -> tuple[Section, ...]:
    """Read sections; with `anew`, the first one of plain texts begins anew unless it says otherwise."""
    sections = []
    for index, table in enumerate(tables):
        section = _read(Section, table, f"{where}.sections[{index}]")
        plain = not section.template and section.action != "value"
        if table.get("add_special_tokens") is None and anew and index == 0 and plain:
            section = replace(section, add_special_tokens=True)
        sections.append(section)
    return tuple(sections)


def _through_template(variant: Variant) -> Variant:
    """Send plain fields that have a role through the chat template as well."""

    def sent(section: Section) -> Section:
        if section.role is None:
            return section
        return Section(field=section.field, action=section.action, template=True, role=section.role)

    return Variant(
        sources={
            name: replace(source, sections=tuple(map(sent, source.sections)))
            for name, source in variant.sources.items()
        }
    )


def _kind(written: Kind | None, variants: Sequence[Variant], where: str) -> Kind:
    """Return the training type that the sources of all variants make."""
    names = [frozenset(variant.sources) for variant in variants]
    sections = [section for variant in variants for section, _ in variant.sections()]
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


# The recipes that have a name: plain data, in the words of any other recipe.

# Alpaca's headings, so that a prompt ends where an answer begins, in every tokenizer.
_INSTRUCTION = "### Instruction:\n"
_INPUT = "\n\n### Input:\n"
_RESPONSE = "\n\n### Response:\n"


def _preset_section(field: str, role: str, **more: object) -> dict[str, object]:
    return {"field": field, "action": "$role", "role": role, **more}


def _prompt(field: str, **more: object) -> dict[str, object]:
    return {"field": field, "action": "mask", "role": "user", **more}


def _instruction(instruction: str, response: str, context: str | None = None) -> dict[str, object]:
    """Return a variant: an instruction, perhaps with an input of its own, and the response."""
    if context is None:
        prompt = [_preset_section(instruction, "user", prefix=_INSTRUCTION, suffix=_RESPONSE)]
    else:
        prompt = [
            _preset_section(instruction, "user", prefix=_INSTRUCTION),
            _preset_section(context, "user", prefix=_INPUT, suffix=_RESPONSE),
        ]
    return {"sections": [*prompt, _preset_section(response, "assistant")]}


def _completion(*, template: bool) -> dict[str, object]:
    """Return a variant as TRL has it: a masked prompt and a trained completion, without headings."""
    completion = _preset_section("completion", "assistant", template=template)
    return {"sections": [_prompt("prompt", template=template), completion]}


def _messages(field: str) -> dict[str, object]:
    """Return a section of messages with roles of their own."""
    return {"field": field, "action": "$role", "template": True}


def _pair(prompt: Sequence[dict[str, object]], *, template: bool) -> dict[str, object]:
    """Return a variant of pairs: two answers to one prompt."""
    return {
        "sources": {
            answer: {"sections": [*prompt, _preset_section(answer, "assistant", template=template)]}
            for answer in ("chosen", "rejected")
        }
    }


def _group(
    *,
    template: bool,
    prompt: Sequence[str] = ("prompt",),
    responses: str = "responses",
    rewards: str = "rewards",
    listed: bool = True,
) -> dict[str, object]:
    """Return a variant of groups: a prompt of some fields, its responses and their rewards."""
    asked = [_prompt(prompt[0], template=template)]
    asked += [_prompt(field, template=template, prefix="\n") for field in prompt[1:]]
    answer = {"field": responses, "action": "train", "role": "assistant", "template": template}
    return {
        "sources": {
            "prompts": {"sections": asked},
            "responses": {"sections": [answer], "list_field": listed, "mask_key": "masks"},
            "rewards": {"sections": [{"field": rewards, "action": "value"}]},
        }
    }


def _labelled(prompt: Sequence[str], response: str, label: str, *, template: bool) -> dict[str, object]:
    """Return a variant of groups of one response each, with a label for its reward."""
    return _group(template=template, prompt=prompt, responses=response, rewards=label, listed=False)


_ROLES = {"system": "mask", "user": "mask", "assistant": "train"}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "text": {"input": {"sections": [{"field": "text", "action": "train"}]}},
    "chat": {
        "input": {
            "tools_field": "tools",
            "variants": [
                {"sections": [_messages("messages")]},
                {
                    "sections": [
                        _preset_section("system", "system", template=True),
                        _messages("conversations"),
                    ]
                },
                {"sections": [_messages("conversations")]},
            ],
        },
        "mask": _ROLES,
    },
    "instruction": {
        "input": {
            "variants": [
                _instruction("prompt", "response"),
                _instruction("prompt", "completion"),
                _instruction("instruction", "output", "input"),
                _instruction("instruction", "output"),
                _instruction("instruction", "response", "context"),
                _instruction("instruction", "response"),
                _instruction("question", "answer"),
            ]
        },
        "mask": _ROLES,
    },
    "completion": {
        "input": {"tools_field": "tools", "variants": [_completion(template=False), _completion(template=True)]},
        "mask": _ROLES,
    },
    "dpo": {
        "input": {
            "tools_field": "tools",
            "variants": [
                _pair([_preset_section("prompt", "user", template=False)], template=False),
                _pair([_preset_section("prompt", "user", template=True)], template=True),
                {"sources": {answer: {"sections": [_messages(answer)]} for answer in ("chosen", "rejected")}},
            ],
        },
        "mask": _ROLES,
        "train_turns": "last",
    },
    "pairs": {
        "input": {
            "tools_field": "tools",
            "variants": [
                _pair([_messages("conversations")], template=True),
                _pair(
                    [_preset_section("instruction", "user"), _preset_section("input", "user", prefix="\n")],
                    template=False,
                ),
                _pair([_preset_section("instruction", "user")], template=False),
            ],
        },
        "mask": _ROLES,
        "train_turns": "last",
    },
    "prompts": {
        "input": {
            "tools_field": "tools",
            "variants": [
                {"sources": {"prompts": {"sections": [_prompt("prompt", template=template)]}}}
                for template in (False, True)
            ],
        },
        "mask": _ROLES,
    },
    "kto": {
        "input": {
            "tools_field": "tools",
            "variants": [
                _labelled(["prompt"], "completion", "label", template=False),
                _labelled(["prompt"], "completion", "label", template=True),
                _labelled(["conversations"], "conversations", "kto_tag", template=True),
                _labelled(["messages"], "messages", "kto_tag", template=True),
                _labelled(["instruction", "input"], "output", "kto_tag", template=False),
                _labelled(["instruction"], "output", "kto_tag", template=False),
            ],
        },
        "mask": _ROLES,
    },
    "grpo": {
        "input": {"tools_field": "tools", "variants": [_group(template=False), _group(template=True)]},
        "mask": _ROLES,
    },
}
"""Name -> recipe. The order of variants is the priority by which fields are detected, record by record."""
