"""Tokenizers of the Hugging Face hub, by name: `hf:NAME[@REVISION]` as a folder of the hub's own cache.

Only the files of a tokenizer are downloaded, and none of them is code that runs.
"""

from __future__ import annotations

import re
from pathlib import Path

from tokenmill.errors import TokenizerError

PREFIX = "hf:"
FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "*.tiktoken",
)
"""Patterns of the files to download."""
_SPEC = re.compile(r"hf:([\w.-]+(?:/[\w.-]+)?)(?:@([\w.-]+(?:/[\w.-]+)*))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NOT_A_NAME = (".json", ".model", ".tiktoken", ".jinja", ".jsonl", ".parquet", ".txt", ".bin")

_snapshots: dict[tuple[str, str | None], Path] = {}
"""Folders by name and revision: a process resolves a revision once, so all its parts use the same commit."""


def is_hub_name(spec: str) -> bool:
    """Tell whether a spec names a tokenizer of the hub."""
    return spec.startswith(PREFIX)


def parse(spec: str) -> tuple[str, str | None]:
    """Return the repository and the revision that a spec names.

    >>> parse("hf:openai-community/gpt2@main")
    ('openai-community/gpt2', 'main')
    """
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise TokenizerError(
            f"tokenizer {spec!r}: expected hf:NAME or hf:NAME@REVISION, such as hf:gpt2, but it is neither; "
            "pass a folder without hf:"
        )
    return match[1], match[2]


def pinned(spec: str) -> str:
    """Return a spec with the commit of its revision, downloaded if necessary; other specs are returned as they are.

    Other processes that open the pinned spec read the same files.
    """
    if not is_hub_name(spec):
        return spec
    name, revision = parse(spec)
    return f"{PREFIX}{name}@{_snapshot(name, revision, spec).name}"


def local_spec(spec: str, *, download: bool = True) -> str:
    """Return the path of the files that a hub spec names; other specs are returned as they are."""
    if not is_hub_name(spec):
        return spec
    name, revision = parse(spec)
    folder = _snapshot(name, revision, spec) if download else _cached(name, revision, spec)
    ranks = sorted(folder.glob("*.tiktoken"))
    if ranks and not _has_tokenizer(folder):
        return f"tiktoken:{ranks[0]}"
    return str(folder)


def suggestion(path: str) -> str:
    """Return a question for the user who may have written a hub name as a path; empty if it cannot be one.

    >>> suggestion("openai-community/gpt2"), suggestion("tokenizer.json")
    ("; did you mean 'hf:openai-community/gpt2'?", '')
    """
    rest = Path(path)
    if rest.is_absolute():  # in a config, where paths are relative to its folder
        folder = next(parent for parent in rest.parents if parent.is_dir())
        rest = rest.relative_to(folder)
    name = rest.as_posix()
    if _SPEC.fullmatch(PREFIX + name) is None or "@" in name or name.startswith(".") or name.endswith(_NOT_A_NAME):
        return ""
    return f"; did you mean {PREFIX + name!r}?"


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))


def _snapshot(name: str, revision: str | None, spec: str) -> Path:
    """Return the folder of a revision in the hub's cache; without a network, the one that is there."""
    if (name, revision) not in _snapshots:
        folder = _download(name, revision, spec, only_cached=False)
        if not _COMMIT.fullmatch(folder.name):
            raise TokenizerError(
                f"tokenizer {spec!r}: expected a commit hash from the hub, got {folder.name!r}; retry"
            )
        _snapshots[name, revision] = _snapshots[name, folder.name] = folder
    return _snapshots[name, revision]


def _cached(name: str, revision: str | None, spec: str) -> Path:
    return _snapshots.get((name, revision)) or _download(name, revision, spec, only_cached=True)


def _download(name: str, revision: str | None, spec: str, *, only_cached: bool) -> Path:
    try:
        import huggingface_hub
    except ImportError as error:
        raise TokenizerError(
            f"tokenizer {spec!r}: huggingface_hub must be installed, got {error}; pip install 'tokenmill[hub]', or "
            "save the tokenizer to a folder and pass that folder"
        ) from error
    try:
        folder = Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, allow_patterns=list(FILES), local_files_only=only_cached
            )
        )
    except Exception as error:  # the library lets errors of its HTTP client through, which differs by version
        raise TokenizerError(
            f"tokenizer {spec!r}: {_reason(error, revision)}; on a machine with access, save it with "
            f"AutoTokenizer.from_pretrained({name!r}).save_pretrained('FOLDER') and pass FOLDER as the tokenizer"
        ) from error
    if not _has_tokenizer(folder) and not any(folder.glob("*.tiktoken")):
        names = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "no file"
        raise TokenizerError(
            f"tokenizer {spec!r}: no tokenizer.json, tokenizer.model or .tiktoken file, got {names} in {folder}; "
            f"save it with AutoTokenizer.from_pretrained({name!r}).save_pretrained('FOLDER') and pass FOLDER"
        )
    return folder


def _reason(error: Exception, revision: str | None) -> str:
    """Return in a clause why a download failed; messages of the library hold addresses and advice of many lines."""
    kinds = [kind.__name__ for kind in type(error).__mro__]
    if "GatedRepoError" in kinds:
        return "the hub wants you to accept its conditions, and HF_TOKEN to be set"
    if "RepositoryNotFoundError" in kinds:
        return "the hub has no such repository, or it is private and HF_TOKEN must be set"
    if "RevisionNotFoundError" in kinds:
        return f"the repository has no revision {revision!r}"
    if isinstance(error, ValueError) and "HFValidationError" in kinds:
        return "not a valid name of a repository"
    return f"not in the hub's cache, and the hub cannot be reached ({type(error.__cause__ or error).__name__})"
