"""Options of `prepare`: type, default, group and help text of each, for Python and the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenmill.documents.units import MAX_EXPANSION, MAX_RECORD_BYTES, ReadOptions
from tokenmill.errors import ConfigError
from tokenmill.tables import check_fields, check_option
from tokenmill.types import ON_ERROR

GROUPS = ("Input", "Tokenizer", "Chat", "Filters", "Output", "Parallel", "Advanced")
"""Groups of options, in the order of `prepare --help`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionHelp:
    """Description of an option for a command line."""

    group: str
    help: str
    metavar: str | None
    shown: str | None
    """Default to print if None means another value."""


def _option(default: Any, group: str, help: str, *, metavar: str | None = None, shown: str | None = None) -> Any:  # noqa: ANN401
    """Return a field of `PrepareOptions` that is an option of the command as well."""
    described = OptionHelp(group=group, help=help, metavar=metavar, shown=shown)
    return field(default=default, metadata={"option": described})


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareOptions:
    """Options of `prepare` that are seldom changed. None leaves a choice to the recipe or the tokenizer.

    The arguments are the options of `tokenmill prepare --help`, with underscores in their names.

    Raises:
        ConfigError: A value has the wrong type or is out of range.

    Examples:
        >>> PrepareOptions(text_field="content", keep=("url",), min_chars=100).on_error
        'stop'
    """

    text_field: str | None = _option(
        None, "Input", "Field of the text; a dot enters a nested one", metavar="NAME", shown="text"
    )
    """Field of the text in a record, for the recipe `text`. `a.b` is the field of that name, else field b of the
    object in field a."""
    control_strings: str | None = _option(
        None,
        "Tokenizer",
        "Special tokens such as <|endoftext|> in texts: text, encode, drop",
        metavar="HOW",
        shown="text",
    )
    """Treatment of strings such as `<|endoftext|>` in raw text: ordinary `text`, `encode`, or `drop`."""
    system: str | None = _option(None, "Chat", "System message of conversations that have none", metavar="TEXT")
    """System message of every conversation that has none."""
    train_turns: str | None = _option(
        None, "Chat", "Messages of trained roles to train on: all, last", metavar="WHICH", shown="as the recipe"
    )
    """Messages of trained roles to train on: `all`, or the `last`."""
    mask: Mapping[str, str] | None = _option(
        None,
        "Chat",
        "Roles to train on or mask, such as tool=train,user=mask",
        metavar="ROLES",
        shown="as the recipe",
    )
    """Role -> `train` or `mask`, over what the recipe says."""
    chat_template: str | None = _option(
        None,
        "Chat",
        "Template of messages: tokenizer, chatml or a .jinja file",
        metavar="TEMPLATE",
        shown="as the recipe",
    )
    """`tokenizer`, the path of a template, or `chatml`: what messages, and the texts of a preset, go through."""
    format: str | None = _option(
        None,
        "Input",
        "Format of all files, such as text, jsonl, parquet, csv",
        metavar="KIND",
        shown="by file ending",
    )
    """Format of all files, whatever their endings: `text`, `jsonl`, `json`, `parquet`, `arrow`, `csv`, ..."""
    delimiter: str | None = _option(
        None, "Input", "Separator between the cells of CSV and TSV", metavar="CHAR", shown="comma, tab"
    )
    """Separator between the cells of CSV and TSV files; None: a comma, a tab."""
    text_unit: str = _option("file", "Input", "Unit of a document in text files: file, line", metavar="UNIT")
    """Document of a plain text file: the `file`, or each `line` that is not blank."""
    keep: tuple[str, ...] = _option(
        (), "Input", "Fields to keep with each document, such as id,url", metavar="NAMES"
    )
    """Fields of a record that are kept with its document, such as `id` and `url`, named like `text_field`. Long
    values are cut. Which file and line a document came from is noted always."""
    on_error: str = _option(
        "stop", "Input", "Action for bad records and broken files: stop, skip", metavar="ACTION"
    )
    """Action for a bad record or a broken file: `stop` the build, or `skip` it, counted by reason and
    listed in the manifest; of a broken file, what cannot be read any more."""
    keep_empty: bool = _option(False, "Filters", "Keep texts without a character")
    """Make a text without a character a document, of BOS and EOS alone. By default it is left out, counted as
    `empty`."""
    min_chars: int | None = _option(None, "Filters", "Drop records with fewer characters", metavar="N")
    """Records with fewer characters are left out, and counted."""
    max_chars: int | None = _option(None, "Filters", "Drop records with more characters", metavar="N")
    max_items: int | None = _option(None, "Filters", "Maximum number of records, in input order", metavar="N")
    """Only so many records are taken, the first in input order that the filters leave."""
    max_seq_len: int | None = _option(None, "Filters", "Maximum number of tokens per record", metavar="N")
    """Records with more tokens are cut, or what `on_long` says."""
    on_long: str | None = _option(
        None, "Filters", "Action for longer records: cut, drop, stop", metavar="ACTION", shown="cut"
    )
    """Action for them: `cut` (the default), `drop`, counted as `too_long`, or `stop` the build."""
    domain_key: str | None = _option(
        None, "Output", "Field that names a domain; one store per domain", metavar="NAME"
    )
    """Field that names the domain of a record; every domain becomes a store of its own below `out`."""
    deduplicate: bool | None = _option(None, "Filters", "Keep only the first of records with equal content")
    """Take only the first of records with equal content."""
    val_fraction: float | None = _option(
        None, "Output", "Share of records for OUT/val; the rest: OUT/train", metavar="SHARE"
    )
    """Share of records, by a hash of their content, that go to the store `val` below `out`, the rest to `train`."""
    max_tokens_per_shard: int | None = _option(None, "Output", "Maximum number of tokens per shard", metavar="N")
    storage_format: str | None = _option(
        None, "Output", "Format of the arrays: bin, or h5 for HDF5", metavar="KIND", shown="bin"
    )
    """`bin`, or `h5` for HDF5."""
    add_bos: bool | None = _option(None, "Tokenizer", "Start each document with BOS", shown="as the tokenizer")
    """Start documents with BOS; None: as the tokenizer has it."""
    add_eos: bool | None = _option(None, "Tokenizer", "End each document with EOS", shown="as the tokenizer")
    bos_token: str | None = _option(
        None, "Tokenizer", "String of the BOS token", metavar="TOKEN", shown="as the tokenizer"
    )
    """String of the tokenizer that is BOS, if the tokenizer does not specify it."""
    eos_token: str | None = _option(
        None,
        "Tokenizer",
        "String of the EOS token, not of an end-of-turn token",
        metavar="TOKEN",
        shown="as the tokenizer",
    )
    engine: str = _option(
        "auto", "Tokenizer", "Tokenizer engine; auto: the fast one, where verified", metavar="ENGINE"
    )
    """Engine of the tokenizer. `auto`: the fast one if it agrees with the reference on a sample."""
    chunk_bytes: int | None = None
    """Size of a unit of input, which becomes a shard; None: 4 to 256 MiB, by the size of the input."""
    same_names: bool = _option(False, "Input", "Add files whose names are in the store already")
    """Take a file with the name of one in the store, and other content, as another file. By default it is
    refused, as one that has changed."""
    max_record_bytes: int = _option(
        MAX_RECORD_BYTES, "Advanced", "Size limit of a record", metavar="BYTES", shown="64 MiB"
    )
    """A larger record is a bad one; it bounds what a worker holds in memory."""
    max_expansion: int = _option(
        MAX_EXPANSION, "Advanced", "Limit of text per file, relative to its size", metavar="N"
    )
    """Limit of the text of a file, compressed or encoded, relative to its size; 4 GiB are always allowed."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_option("on_error", self.on_error, ON_ERROR)
        if self.chunk_bytes is not None and self.chunk_bytes < 1:
            raise ConfigError(f"chunk_bytes: must be at least 1, got {self.chunk_bytes}; leave it out")
        names = list(self.keep)
        are_paths = all(all(name.split(".")) for name in names)
        if isinstance(self.keep, str) or len(set(names)) < len(names) or not are_paths:
            raise ConfigError(
                f"keep: expected a list of fields, each once, got {self.keep!r}; for example id and url"
            )
        ReadOptions(
            text_field="text" if self.text_field is None else self.text_field,
            text_unit=self.text_unit,
            max_record_bytes=self.max_record_bytes,
            max_expansion=self.max_expansion,
            delimiter=self.delimiter,
        )

    def framing(self) -> dict[str, Any]:
        """Return what the options say of BOS and EOS, as arguments of `open_tokenizer`."""
        return {
            "add_bos": self.add_bos,
            "add_eos": self.add_eos,
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
        }
