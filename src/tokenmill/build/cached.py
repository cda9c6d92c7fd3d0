"""Stores of text that a run names as documents: prepared once, by whoever comes first."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenmill.build.build import prepare
from tokenmill.build.journal import Journal, entry_digest
from tokenmill.build.worker import PrepareOptions
from tokenmill.documents import file_digest, find_files
from tokenmill.documents.inputs import PREFIX, parse
from tokenmill.encode.files import copy_of
from tokenmill.encode.tokenizer import content_digest
from tokenmill.errors import DocumentError, StoreExistsError, TokenizerError
from tokenmill.fingerprint import digest
from tokenmill.store.layout import MANIFEST, read_manifest

MAX_WAIT_SECONDS = 3600.0
"""How long another process is waited for."""
_FIRST_SECONDS, _LONGEST_SECONDS = 0.05, 5.0
"""Between two looks at a build of another process, at first and after a while."""
_ONE_AT_A_TIME = "only one build may write to it at a time"
"""By which prepare refuses a store that another process builds, and nothing else."""
_log = logging.getLogger("tokenmill")


def cached_store(
    documents: Sequence[str],
    *,
    tokenizer: str,
    text_field: str | None = None,
    folder: Path,
    where: str,
    progress: bool = True,
    keep_empty: bool = False,
    recipe: str | Mapping[str, object] = "text",
) -> Path:
    """Return the store of some documents below `folder`, prepared now if it is not there yet.

    A finished one is not built again, and its tokenizer not opened; files or a tokenizer that are not those it was
    made of are refused. What a name on the hub stands for is looked up once, when it is prepared. Of several
    processes one builds, and the others wait for it.
    """
    named = sorted(set(documents))
    more = [*([] if keep_empty else ["no empty ones"]), *([] if recipe == "text" else [recipe])]
    store = folder / digest([named, tokenizer, text_field, *more])[:16]
    end = time.monotonic() + MAX_WAIT_SECONDS
    pause, announced = _FIRST_SECONDS, False
    while True:
        if _is_finished(store):
            _check_documents(named, store, where)
            _check_tokenizer(tokenizer, store, where)
            return store
        # Looked at before, as it costs a process much to find out by trying: it opens the tokenizer first.
        if not _is_locked(store):
            try:
                prepare(
                    named,
                    out=store,
                    tokenizer=tokenizer,
                    recipe=recipe,
                    progress=None if progress else False,
                    options=PrepareOptions(text_field=text_field, keep_empty=keep_empty),
                )
                return store
            except StoreExistsError as error:
                if _ONE_AT_A_TIME not in str(error):
                    raise
        if time.monotonic() > end:
            raise StoreExistsError(
                f"{where}: another process must finish {store} within {MAX_WAIT_SECONDS:g} s, got one still at "
                "work; wait for it or stop it, and start again"
            )
        if not announced:
            _log.warning("%s: waiting for another process, which prepares %s", where, store)
        announced = True
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_SECONDS)


def _is_finished(store: Path) -> bool:
    return (store / MANIFEST).is_file() and Journal(store).finished() is not None


def _is_locked(store: Path) -> bool:
    """Tell whether a build is under way in a folder; where there are no locks, none is seen."""
    try:
        import fcntl

        descriptor = os.open(store, os.O_RDONLY)
    except (ImportError, FileNotFoundError):
        return False
    try:
        # Shared, so that those who wait do not see each other.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _check_documents(documents: Sequence[str], store: Path, where: str) -> None:
    """Refuse files that are not those that the store was made of."""
    change = _change(documents, store)
    if change is not None:
        raise StoreExistsError(
            f"{where}: documents must stay as they were when they were prepared, got {change}; put the files back, "
            f"or delete {store} to prepare them anew"
        )


def _change(documents: Sequence[str], store: Path) -> str | None:
    """Say what is not as it was, None if nothing; names of the hub are not looked up again."""
    finished = Journal(store).finished()
    assert finished is not None
    local = [item for item in documents if not _is_on_hub(item)]
    try:
        files = find_files(local).files if local else ()
        digests = {file.path: entry_digest(file.name, file_digest(file)) for file in files}
    except DocumentError as error:
        return f"none ({error})"
    now, then = Counter(digests.values()), Counter(file.digest for file in finished.inputs)
    added, gone = now - then, then - now
    for path, content in digests.items():
        if content in added:
            return f"{path}, which is new or has changed"
    for file in finished.inputs if len(local) == len(documents) else ():  # else it may be a file of the hub
        if file.digest in gone:
            return f"no {file.name}, which was among them"
    return None


def _is_on_hub(item: str) -> bool:
    return item.startswith(PREFIX) and not os.path.isdir(parse(item)[0])


def _check_tokenizer(tokenizer: str, store: Path, where: str) -> None:
    """Refuse a tokenizer with other bytes than the store was made with; one that is gone does no harm."""
    try:
        files = copy_of(tokenizer)
    except TokenizerError:
        return
    content = read_manifest(store).tokenizer["content"]
    for name in {"tokenizer.json", "tokenizer.model"} & files.keys():
        if content_digest(files[name]) != content:
            file = Path(tokenizer) / name if Path(tokenizer).is_dir() else tokenizer
            raise StoreExistsError(
                f"{where}: the tokenizer must stay as it was when the documents were prepared, got {file} with "
                f"other content; put it back, or delete {store} to prepare them anew"
            )
