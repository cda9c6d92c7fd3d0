"""Stores of documents that a run names: prepared by the first process that needs them, and kept."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

from tokenmill.build.build import prepare
from tokenmill.build.inputs import TakenFiles, entry_digest
from tokenmill.build.job import PrepareOptions, settle_recipe
from tokenmill.build.journal import Journal
from tokenmill.documents import file_digest, find_files
from tokenmill.documents.hugging_face import PREFIX, parse
from tokenmill.encode.chat.template import load_template
from tokenmill.encode.engines import open_tokenizer
from tokenmill.encode.files import copy_of
from tokenmill.encode.hub import is_hub_name, local_spec
from tokenmill.errors import DocumentError, StoreBusyError, StoreExistsError, TokenizerError, TokenmillError
from tokenmill.fingerprint import digest, first_difference
from tokenmill.store.layout import MANIFEST, TOKENIZER_FOLDER, read_manifest
from tokenmill.store.lease import find_holder

MAX_WAIT_SECONDS = 3600.0
"""Seconds to wait for another process."""
_FIRST_SECONDS, _LONGEST_SECONDS = 0.05, 5.0
"""Between two looks at a build of another process, at first and after a while."""
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

    A finished one is not built again, and its tokenizer not opened; it is refused if its files, its tokenizer or
    its recipe have changed since. A name on the hub is looked up once, when it is prepared. Of several processes
    one builds, and the others wait for it.
    """
    named = sorted(set(documents))
    # What is added to the digest later must leave out its first value: the names of older stores stay.
    more = [*([] if keep_empty else ["no empty ones"]), *([] if recipe == "text" else [recipe])]
    store = folder / digest([named, tokenizer, text_field, *more])[:16]
    end = time.monotonic() + MAX_WAIT_SECONDS
    pause, announced = _FIRST_SECONDS, False
    while True:
        if _is_finished(store):
            _check_documents(named, store, where)
            _check_tokenizer(tokenizer, store, where)
            if recipe != "text":
                _check_recipe(recipe, tokenizer, store, where)
            return store
        if not find_holder(store)[1]:  # prepare opens the tokenizer before it looks
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
            except StoreBusyError:
                pass
        if time.monotonic() > end:
            raise StoreBusyError(
                f"{where}: another process has been preparing {store} for more than {MAX_WAIT_SECONDS:g} s; "
                "wait for it or stop it, and start again"
            )
        if not announced:
            _log.warning("%s: waiting for another process, which prepares %s", where, store)
        announced = True
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_SECONDS)


def _is_finished(store: Path) -> bool:
    return (store / MANIFEST).is_file() and Journal(store).ledger() is not None


def _check_documents(documents: Sequence[str], store: Path, where: str) -> None:
    """Refuse files that are not those that the store was made of."""
    change = _change(documents, store)
    if change is not None:
        raise StoreExistsError(
            f"{where}: documents must stay as they were when they were prepared, got {change}; put the files back, "
            f"or delete {store} to prepare them again"
        )


def _change(documents: Sequence[str], store: Path) -> str | None:
    """Return which file has changed, None if none has; names on the hub are not looked up again."""
    finished = Journal(store).ledger()
    assert finished is not None
    local = [item for item in documents if not _is_on_hub(item)]
    try:
        files = find_files(local).files if local else ()
        digests = {file.path: entry_digest(file.name, file_digest(file)) for file in files}
    except DocumentError as error:
        return f"none ({error})"
    taken = TakenFiles(Journal(store), finished)
    for file in files:
        if not taken.find(file, digests[file.path]):
            return f"{file.path}, which is new or has changed"
    if len(local) == len(documents):  # else it may be a file of the hub
        missing = next(chain.from_iterable(taken.left.values()), None)
        if missing is not None:
            return f"no {missing.name}, which was among them"
    taken.confirm()
    return None


def _is_on_hub(item: str) -> bool:
    return item.startswith(PREFIX) and not os.path.isdir(parse(item)[0])


def _check_tokenizer(tokenizer: str, store: Path, where: str) -> None:
    """Refuse a tokenizer whose files are not those that the store was made with; one that is gone does no harm.

    All its files count: BOS and EOS may be in another file than the vocabulary. A name on the hub is
    resolved once, when its store is prepared.
    """
    if is_hub_name(tokenizer):
        return
    try:
        files = copy_of(tokenizer)
    except TokenizerError:
        return
    folder = store / TOKENIZER_FOLDER
    kept = {path.name: path.read_bytes() for path in folder.iterdir()} if folder.is_dir() else {}
    changed = next((name for name in sorted({*files, *kept}) if files.get(name) != kept.get(name)), None)
    if changed is None:
        return
    # A build that was killed at its very end keeps no copy, but its manifest has the identity.
    if not kept and open_tokenizer(tokenizer).identity.to_json() == dict(read_manifest(store).tokenizer):
        return
    file = Path(tokenizer) / changed if Path(tokenizer).is_dir() else tokenizer
    raise StoreExistsError(
        f"{where}: the tokenizer must stay as it was when the documents were prepared, got {file} with "
        f"other content; put it back, or delete {store} to prepare them again"
    )


def _check_recipe(recipe: str | Mapping[str, object], tokenizer: str, store: Path, where: str) -> None:
    """Refuse a recipe whose files, or whose chat template, are not those that the store was made with."""
    finished = Journal(store).ledger()
    assert finished is not None
    settled = settle_recipe(recipe, PrepareOptions())
    now, then = dict(settled.to_json()), dict(finished.identity["recipe"])
    template = then.get("chat_template")
    now["chat_template"] = then["chat_template"] = None
    if isinstance(template, Mapping) and settled.chat_template is not None:
        try:
            if is_hub_name(tokenizer):  # as it was resolved, and only if it is in the hub's cache
                tokenizer = local_spec(str(read_manifest(store).recipe["tokenizer"]), download=False)
            now["chat_template"] = load_template(settled.chat_template, tokenizer=tokenizer).to_json()
        except TokenmillError:
            return  # it is gone, which does no harm
        then["chat_template"] = {name: value for name, value in template.items() if name != "bos"}
    difference = first_difference(then, now)
    if difference is not None:
        raise StoreExistsError(
            f"{where}: the recipe must stay as it was when the documents were prepared, got {difference[0]} "
            f"{difference[1]!r} -> {difference[2]!r}; put it back, or delete {store} to prepare them again"
        )
