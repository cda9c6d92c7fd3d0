"""Files and a tokenizer, opened to be trained on as they are."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeGuard

from tokenmill.documents import InputFile, file_digest, find_files
from tokenmill.encode.agreement import trusted
from tokenmill.encode.load import ENGINES, kind_of
from tokenmill.encode.tokenizer import TokenizerIdentity
from tokenmill.errors import ConfigError, DocumentError, TokenizerError
from tokenmill.fingerprint import digest
from tokenmill.live.foreign import ForeignTokenizer, NanochatTokenizer
from tokenmill.live.options import TEXT_OPTIONS
from tokenmill.live.windows import Windows, cut_windows
from tokenmill.prepare.sample import sample_texts

if TYPE_CHECKING:
    from tokenmill.encode.tokenizer import Tokenizer
    from tokenmill.live.options import LiveOptions

MAX_GROUPS = 64
"""Digests of files that a state holds; where there are more files, each digest is of several."""
MANY_PARTS = 16
_log = logging.getLogger("tokenmill")


@dataclass(frozen=True, kw_only=True)
class LiveSource:
    """Text that can be trained on as it is."""

    files: tuple[InputFile, ...] = field(repr=False)
    digests: tuple[str, ...] = field(repr=False)
    """Of each file: its size and a sample of its content."""
    tokenizer: Tokenizer
    options: LiveOptions

    def windows(self, lanes: int) -> Windows:
        """Cut the files into windows for so many lanes."""
        options = self.options
        windows = cut_windows(
            self.files,
            window_bytes=options.window_size(lanes),
            lanes=lanes,
            seed=options.seed,
            shuffle=options.shuffle,
        )
        if windows.max_parts > MANY_PARTS:
            _log.warning(
                "%d windows are parts of one row group or compressed file, which is read that many times an epoch; "
                "write smaller row groups or files, raise window_bytes, or use fewer lanes",
                windows.max_parts,
            )
        return windows

    def made_of(self, lanes: int) -> dict[str, Any]:
        """Return what decides every row, as JSON of at most some 2 kB."""
        return {name: dict(facts) for name, facts in self._told(lanes, formats=True)[0].items()}

    def fingerprint(self, lanes: int, *, formats: bool = True) -> str:
        """Return 32 hex digits that stand for every row of every lane; or for their text, however rows are made."""
        return self._told(lanes, formats=formats)[1]

    def _told(self, lanes: int, *, formats: bool) -> tuple[dict[str, Any], str]:
        """Return both of the above; made once, as a state is saved often, and there may be thousands of files."""
        if (lanes, formats) not in self._known:
            options = self.options.describe(lanes)
            if not formats:
                options = {name: value for name, value in options.items() if name in TEXT_OPTIONS}
            groups = file_groups(len(self.files))
            names, tokenizer = [file.name for file in self.files], self.tokenizer.identity.to_json()
            files = {
                "count": len(names),
                "names": digest(names)[:16],
                "samples": [digest(self.digests[begin:end])[:8] for begin, end in groups],
            }
            made_of = {"files": files, "tokenizer": tokenizer, "options": options}
            self._known[lanes, formats] = made_of, digest([names, self.digests, tokenizer, options])
        return self._known[lanes, formats]

    @cached_property
    def _known(self) -> dict[tuple[int, bool], tuple[dict[str, Any], str]]:
        return {}


def file_groups(count: int) -> list[tuple[int, int]]:
    """Divide files into at most `MAX_GROUPS` runs.

    >>> file_groups(2), len(file_groups(1000)), file_groups(1000)[-1]
    ([(0, 1), (1, 2)], 64, (984, 1000))
    """
    groups = min(count, MAX_GROUPS)
    return [(group * count // groups, (group + 1) * count // groups) for group in range(groups)]


def open_live(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    tokenizer: str | Tokenizer | NanochatTokenizer,
    options: LiveOptions,
) -> LiveSource:
    """List files and open a tokenizer; of the files a sample is read, of each.

    `tokenizer` is what `prepare` takes, an open tokenizer, or an object with the methods of nanochat's.
    """
    files = find_files(inputs).files
    opened = _opened(tokenizer, files, options)
    if options.packing == "bos_best_fit" and not opened.identity.add_bos:
        raise ConfigError(
            "packing: bos_best_fit needs documents that start with BOS, got a tokenizer that adds none; "
            "say add_bos=True, or use packing='best_fit'"
        )
    return LiveSource(files=files, digests=tuple(map(file_digest, files)), tokenizer=opened, options=options)


def _opened(
    tokenizer: str | Tokenizer | NanochatTokenizer, files: Sequence[InputFile], options: LiveOptions
) -> Tokenizer:
    framing = {name: value for name, value in options.framing.items() if value is not None}
    if isinstance(tokenizer, str):
        sample = _sample(files, options) if len(ENGINES[kind_of(tokenizer)]) > 1 else []
        opened, note = trusted(
            tokenizer,
            sample,
            add_bos=options.add_bos,
            add_eos=options.add_eos,
            bos_token=options.bos_token,
            eos_token=options.eos_token,
        )
        if note is not None:
            _log.warning("%s", note)
        return opened
    if framing:
        raise ConfigError(
            f"{next(iter(framing))}: must be left to a tokenizer that is already open, "
            f"got {next(iter(framing.values()))!r}; open it so"
        )
    if _is_ours(tokenizer):
        return tokenizer
    if isinstance(tokenizer, NanochatTokenizer):
        return ForeignTokenizer(inner=tokenizer)
    raise TokenizerError(
        "tokenizer: must be a name, an open tokenizer, or have get_bos_token_id, get_vocab_size, encode and "
        f"decode, got {type(tokenizer).__name__}; wrap it in a class with these methods"
    )


def _is_ours(tokenizer: Tokenizer | NanochatTokenizer) -> TypeGuard[Tokenizer]:
    return isinstance(getattr(tokenizer, "identity", None), TokenizerIdentity)


def _sample(files: Sequence[InputFile], options: LiveOptions) -> list[str]:
    """Return some of the text, by which engines are compared."""
    try:
        return sample_texts(files, options.text_field)
    except DocumentError as error:
        if options.on_error == "stop":
            raise
        _log.warning("engines are compared on hard texts alone, as a sample cannot be read: %s", error)
        return []
