"""AstrAI's pipeline: records and a recipe in, a store out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tokenmill.adapters.astrai.formats import refuse_unknown
from tokenmill.prepare import PrepareOptions, prepare

if TYPE_CHECKING:
    from tokenmill.prepare import PrepareReport


class Pipeline:
    """Prepares a store of ours with a recipe of AstrAI or of ours.

    A store of ours and not AstrAI's files: those keep no boundaries of records, so pairs and groups cannot be read
    back, and have no checksums. `DatasetFactory.load` reads either.
    """

    def __init__(
        self,
        config: str | os.PathLike[str] | Mapping[str, object],
        paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        output_dir: str | os.PathLike[str],
        tokenizer_path: str | os.PathLike[str],
        **unknown: object,
    ) -> None:
        """Check the recipe; `config` is its path, its table, or the name of a preset."""
        refuse_unknown("Pipeline", unknown, ("config", "paths", "output_dir", "tokenizer_path"))
        from tokenmill.encode.recipe import load_recipe

        self.config = os.fspath(config) if isinstance(config, os.PathLike) else config
        self.paths = paths
        self.output_dir = output_dir
        self.tokenizer_path = os.fspath(tokenizer_path)
        load_recipe(self.config)

    def run(
        self, *, workers: int | None = None, rebuild: bool = False, on_error: str = "stop", **unknown: object
    ) -> PrepareReport:
        """Prepare the store, or go on where that was interrupted; a record that cannot be encoded stops it.

        With `on_error="skip"` such records are left out, as in AstrAI; the report and the store count them.
        """
        refuse_unknown("Pipeline.run", unknown, ("workers", "rebuild", "on_error"))
        return prepare(
            self.paths,
            out=self.output_dir,
            tokenizer=self.tokenizer_path,
            recipe=self.config,
            workers=workers,
            rebuild=rebuild,
            options=PrepareOptions(on_error=on_error),
        )
