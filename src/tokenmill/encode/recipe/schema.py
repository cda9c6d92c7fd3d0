"""From what names a recipe to the recipe: a preset, a JSON or TOML file, or the table itself."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import cast

import orjson

from tokenmill.encode.control import POLICIES
from tokenmill.encode.recipe.check import MASK_KEYS, check_recipe, kind_of
from tokenmill.encode.recipe.presets import PRESETS
from tokenmill.encode.recipe.recipe import (
    ACTIONS,
    KINDS,
    POSITION_IDS_MODES,
    PREPROCESSING_KEYS,
    STORAGE_FORMATS,
    TRAIN_TURNS,
    TRUNCATION_MODES,
    Output,
    Preprocessing,
    Recipe,
    Section,
    Source,
    Variant,
)
from tokenmill.encode.recipe.table import Table
from tokenmill.errors import ConfigError, nearest

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
