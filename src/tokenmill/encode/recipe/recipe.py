"""What a recipe is: how a record becomes tokens and masks, in words that a file can hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

ACTIONS = ("train", "mask", "$role", "value")
"""What a section does: its tokens are trained or masked, its role decides, or it is a number."""
KINDS = ("seq", "sft", "dpo", "grpo")
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
