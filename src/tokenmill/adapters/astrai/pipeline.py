"""AstrAI's pipeline: records and a recipe become a store, with BOS and EOS where AstrAI puts them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.adapters.astrai.layout import withheld
from tokenmill.adapters.astrai.store import refuse_unknown
from tokenmill.build import PrepareOptions, PrepareReport, prepare
from tokenmill.encode.tokenizer import Framing
from tokenmill.errors import ConfigError
from tokenmill.tables import is_address, read_json
from tokenmill.types import TOKEN_KEYS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from tokenmill.encode.recipe import Recipe


class Pipeline:
    """Prepares a store with a recipe of AstrAI or of ours."""

    def __init__(
        self,
        config: str | os.PathLike[str] | Mapping[str, object] | DataclassInstance,
        input_paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        output_dir: str | os.PathLike[str],
        tokenizer_path: str | os.PathLike[str],
        **unknown: object,
    ) -> None:
        """Check the recipe; `config` is AstrAI's own object, a path, a table, or the name of a preset."""
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
            # AstrAI writes both into every config, and asks for them of plain text alone.
            limits = replace(recipe.preprocessing, min_chars=0, max_chars=None)
            recipe = replace(recipe, preprocessing=limits)
        self.paths = input_paths
        self.output_dir = output_dir
        self.tokenizer_path = os.fspath(tokenizer_path)
        if recipe.framing == Framing():
            recipe = replace(recipe, framing=framing_of(recipe, Path(self.tokenizer_path)))
        if recipe.fim is None:
            # AstrAI's dtype; without it, ids would have the smallest that holds the vocabulary.
            dtypes = {key: "uint32" for key in recipe.arrays if key in TOKEN_KEYS} | dict(recipe.output.dtypes)
            recipe = replace(recipe, output=replace(recipe.output, dtypes=dtypes))
        self.config = recipe.to_json()
        self._recipe = recipe

    def run(
        self, *, workers: int | None = None, rebuild: bool = False, on_error: str = "stop", **unknown: object
    ) -> PrepareReport:
        """Prepare the store, or go on where that was interrupted; a record that cannot be encoded stops it.

        With `on_error="skip"` such records are left out, as in AstrAI; the report and the store count them.
        """
        refuse_unknown(self.run, unknown)
        remote = is_address(self.output_dir)
        with (
            nullcontext()
            if remote
            else withheld(Path(self.output_dir).expanduser(), self._recipe.output.storage_format)
        ):
            return prepare(
                self.paths,
                out=self.output_dir,
                tokenizer=self.tokenizer_path,
                recipe=self.config,
                workers=workers,
                rebuild=rebuild,
                options=PrepareOptions(on_error=on_error),
            )


# Where AstrAI puts BOS and EOS.


def framing_of(recipe: Recipe, folder: Path) -> Framing:
    """Return where AstrAI puts BOS and EOS with the tokenizer of a folder; any other tokenizer has its own rules.

    Texts get what the post-processor of `tokenizer.json` adds. Conversations get the `bos_token` that
    `special_tokens` of `tokenizer_config.json` names.
    """
    if not (folder / "tokenizer.json").is_file():
        return Framing()
    from tokenizers import Tokenizer  # late: it takes time to load

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
