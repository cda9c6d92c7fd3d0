"""AstrAI's pipeline: records and a recipe become a store, with BOS and EOS where AstrAI puts them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, is_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tokenmill.adapters.astrai.layout import withheld
from tokenmill.adapters.astrai.store import refuse_unknown
from tokenmill.build import PrepareOptions, PrepareReport, prepare
from tokenmill.build.cached import cached_store
from tokenmill.encode.hub import local_spec
from tokenmill.encode.tokenizer import Framing
from tokenmill.errors import ConfigError
from tokenmill.tables import is_address, read_json
from tokenmill.types import TOKEN_KEYS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from tokenmill.encode.recipe import Recipe


class Pipeline:
    """Prepares a store with a recipe of AstrAI or of tokenmill.

    The folder is a tokenmill store with AstrAI's layout, so the readers of both use the same files. Tokens are
    those of AstrAI except for `differences`, which the notes of the report count.
    """

    def __init__(
        self,
        config: str | os.PathLike[str] | Mapping[str, object] | DataclassInstance,
        input_paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        output_dir: str | os.PathLike[str],
        tokenizer_path: str | os.PathLike[str],
        **unknown: object,
    ) -> None:
        """Check the recipe; `config` is AstrAI's object, a path, a table, or the name of a preset."""
        refuse_unknown(type(self), unknown)
        from tokenmill.encode.recipe import load_recipe

        if not isinstance(config, str | os.PathLike | Mapping):
            if not is_dataclass(config):
                raise ConfigError(
                    f"Pipeline: config must be a PipelineConfig, a path, a table or the name of a preset, got "
                    f"{type(config).__name__}; pass one of these"
                )
            config = asdict(config)
        recipe = load_recipe(os.fspath(config) if isinstance(config, os.PathLike) else config)
        if recipe.kind != "seq":
            # AstrAI writes both into every config, and requires them only for plain text.
            limits = replace(recipe.preprocessing, min_chars=0, max_chars=None)
            recipe = replace(recipe, preprocessing=limits)
        self.paths = input_paths
        self.output_dir = output_dir
        self.tokenizer_path = os.fspath(tokenizer_path)
        if recipe.framing == Framing():
            recipe = replace(recipe, framing=framing_of(recipe, Path(local_spec(self.tokenizer_path))))
        if recipe.fim is None:
            # AstrAI's dtype; otherwise, ids would have the smallest one that holds the vocabulary.
            dtypes = {key: "uint32" for key in recipe.arrays if key in TOKEN_KEYS} | dict(recipe.output.dtypes)
            recipe = replace(recipe, output=replace(recipe.output, dtypes=dtypes))
        self.config = recipe.to_json()
        self.recipe = recipe

    def run(
        self, *, workers: int | None = None, rebuild: bool = False, on_error: str = "stop", **unknown: object
    ) -> PrepareReport:
        """Prepare the store, or resume an interrupted build; a record that cannot be encoded is an error.

        With `on_error="skip"`, such records are left out, as in AstrAI; the report and the store count them.
        """
        refuse_unknown(self.run, unknown)
        remote = is_address(self.output_dir)
        storage = self.recipe.output.storage_format
        with nullcontext() if remote else withheld(Path(self.output_dir).expanduser(), storage):
            report = prepare(
                self.paths,
                out=self.output_dir,
                tokenizer=self.tokenizer_path,
                recipe=self.config,
                workers=workers,
                rebuild=rebuild,
                options=PrepareOptions(on_error=on_error),
            )
        differences = dict.fromkeys(self.differences, report.new_documents) if report.new_documents else {}
        return replace(report, notes={**report.notes, **differences})

    @property
    def differences(self) -> tuple[str, ...]:
        """Names of the intended differences of the records from AstrAI's pipeline, as in `DIFFERENCES`."""
        sources = [source for variant in self.recipe.variants for source in variant.sources.values()]
        chats = self.recipe.template
        plain = [source.sections for source in sources if not source.template]
        is_group = self.recipe.kind == "grpo"
        # AstrAI puts EOS after the section that has BOS before it.
        parts = [
            (one.add_special_tokens, other.add_special_tokens) for all in plain for one, other in pairwise(all)
        ]
        moved = bool(self.recipe.framing.add_eos) and ((True, False) in parts or (is_group and not chats))
        by_role = any(section.action == "$role" for section in self.recipe.sections)
        differing = {
            "header_not_trained": chats and by_role,
            "eos_at_end": moved,
            "response_is_message": chats and is_group,
        }
        return tuple(name for name, differs in differing.items() if differs)


DIFFERENCES: Mapping[str, str] = {
    "header_not_trained": "the header of an answer, and what follows its end of turn, is not trained",
    "eos_at_end": "EOS of the post-processor ends the record or the response, not the prompt",
    "response_is_message": "the prompt ends with the generation prompt, and a response with its end of turn",
}
"""Note of a report -> the intended difference from AstrAI's pipeline."""


# Records as a dataset.

_PRESETS = {"seq": "text", "sft": "chat", "dpo": "dpo", "grpo": "grpo"}
"""Training type -> the default recipe for its records."""
_MESSAGE = {"action": "$role", "template": True}
_PAIRS = {
    "name": "pairs of AstrAI",
    "input": {
        "variants": [
            {
                "sources": {
                    answer: {
                        "sections": [
                            {"field": prompt, "role": "user", **_MESSAGE},
                            {"field": answer, "role": "assistant", **_MESSAGE},
                        ]
                    }
                    for answer in ("chosen", "rejected")
                }
            }
            for prompt in ("prompt", "input")
        ]
    },
    "mask": {"system": "mask", "user": "mask", "assistant": "train"},
    "train_turns": "last",
}
"""AstrAI's reading of pairs: a prompt or an input, and both answers, go through the chat template."""


def prepared(
    train_type: str, records: Sequence[Path], tokenizer: str | os.PathLike[str] | None, max_len: int
) -> Path:
    """Return the store of records, prepared now or earlier, with their dataset_config.json or a preset."""
    folder = records[0].parent
    config = folder / "dataset_config.json"
    if config.is_file():
        recipe = read_json(dict[str, object], config.read_bytes(), str(config))
        named = recipe.pop("tokenizer_path", None) or (folder if (folder / "tokenizer.json").is_file() else None)
        tokenizer = str(named) if tokenizer is None and named is not None else tokenizer
    if tokenizer is None:
        raise ConfigError(
            f"{records[0]}: tokenizer_path must be given for records, got none; say it, or run Pipeline first"
        )
    if not config.is_file():
        recipe = {**_default_recipe(train_type, records, tokenizer), "preprocessing": {"max_seq_len": max_len}}
    pipeline = Pipeline(recipe, [], folder, tokenizer)
    settled = pipeline.recipe
    if recipe.get("name") == _PAIRS["name"]:
        # AstrAI encodes a pair as one text, which starts with BOS if texts do.
        settled = replace(settled, framing=replace(settled.framing, chat_bos=settled.framing.add_bos))
    return cached_store(
        [os.fspath(file) for file in records],
        tokenizer=os.fspath(tokenizer),
        folder=folder / ".tokenmill" / "stores",
        where=f"DatasetFactory.load: {folder}",
        recipe=settled.to_json(),
    )


def _default_recipe(
    train_type: str, records: Sequence[Path], tokenizer: str | os.PathLike[str]
) -> dict[str, object]:
    """Return AstrAI's reading of records without a config: messages and pairs go through the chat template."""
    from tokenmill.encode.chat.template import has_template  # imported here, because jinja2 takes time to load

    if train_type == "dpo" and os.path.isdir(tokenizer) and has_template(os.fspath(tokenizer)):
        return dict(_PAIRS)
    if train_type == "seq" and _first_fields(records) >= {"messages"}:
        return {"preset": "chat"}
    return {"preset": _PRESETS[train_type]}


def _first_fields(records: Sequence[Path]) -> set[str]:
    """Return the fields of the first readable record; the build names one that cannot be read."""
    for file in records:
        with file.open("rb") as lines:
            line = next(filter(bytes.strip, lines), b"{}")
        with suppress(ValueError):
            return set(msgspec.json.decode(line, type=dict[str, Any]))
    return set()


# BOS and EOS as in AstrAI.


def framing_of(recipe: Recipe, folder: Path) -> Framing:
    """Return AstrAI's BOS and EOS for the tokenizer of a folder; any other tokenizer has its own rules.

    Texts get what the post-processor of `tokenizer.json` adds. Conversations get the `bos_token` that
    `special_tokens` of `tokenizer_config.json` names.
    """
    if not (folder / "tokenizer.json").is_file():
        return Framing()
    from tokenizers import Tokenizer  # imported here, because it takes time to load

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    before, behind = _placed(tokenizer)
    if len(before) > 1 or len(behind) > 1:
        raise ConfigError(
            f"{folder}: the post-processor must add at most one token before and after a text, got "
            f"{[*before, *behind]}; use tm.prepare, whose options name BOS and EOS"
        )
    config = _tokenizer_config(folder)
    special = config.get("special_tokens")
    chat_bos = special.get("bos_token") if isinstance(special, Mapping) else None
    if not isinstance(chat_bos, str) or tokenizer.token_to_id(chat_bos) is None:
        chat_bos = None
    bos = chat_bos if recipe.template and chat_bos is not None else next(iter(before), None)
    eos = next(iter(behind), None)
    begins_anew = any(section.add_special_tokens for section in recipe.sections)
    return Framing(
        add_bos=bool(before),
        add_eos=bool(behind) and (begins_anew or recipe.template),
        bos_token=None if bos == _named("bos_token", config, bos) else bos,
        eos_token=None if eos == _named("eos_token", config, eos) else eos,
        chat_bos=chat_bos is not None,
    )


def _placed(tokenizer: Any) -> tuple[list[str], list[str]]:  # noqa: ANN401 - tokenizers ships no types
    """Return the tokens that the post-processor of a tokenizer puts before and after a text."""
    for text in ("a", *sorted(tokenizer.get_vocab())[:64]):
        encoding = tokenizer.encode(text)
        own = [place for place, sequence in enumerate(encoding.sequence_ids) if sequence is not None]
        if own:
            return encoding.tokens[: own[0]], encoding.tokens[own[-1] + 1 :]
    return [], []


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    config = folder / "tokenizer_config.json"
    return read_json(dict[str, Any], config.read_bytes(), str(config)) if config.is_file() else {}


def _named(role: str, config: Mapping[str, Any], otherwise: str | None) -> str | None:
    """Return the token that a `tokenizer_config.json` names for a role, as the engine reads it."""
    special = config.get("special_tokens")
    for table in (config, special):
        if isinstance(table, Mapping) and role in table:
            token = table[role]
            return token.get("content") if isinstance(token, Mapping) else token
    return otherwise
