"""Whether the parts of a recipe go together, and give every record something to train on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenmill.encode.recipe.recipe import DTYPES, Recipe, Section, Source, Variant
from tokenmill.errors import ConfigError, nearest
from tokenmill.types import AXES, TOKEN_KEYS

MASK_KEYS: Mapping[str, str | None] = {
    "sequence": "loss_mask",
    "chosen": "chosen_mask",
    "rejected": "rejected_mask",
    "prompts": None,
    "responses": "masks",
    "rewards": None,
}
"""Array -> the array of its mask, in the order of the training types."""
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
        key for key in AXES[recipe.kind] if key != "position_ids" or recipe.output.position_ids_mode != "none"
    )


def _dtype_names(key: str) -> tuple[str, ...]:
    if key in TOKEN_KEYS:
        return tuple(name for name, dtype in DTYPES.items() if "u" in dtype)
    return {"rewards": ("float32",), "position_ids": ("uint32",)}.get(key, ("uint8",))
