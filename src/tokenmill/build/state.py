"""State of a build, read from its folder, and what a request does in each state.

    state       file that decides     meaning
    publishing  publish.json          finished units are being moved into the store
    running     build.json            a build was begun; with `rebuild`, it replaces the store at its end
    finished    inputs.json           there is a store, which later builds add files to
    empty       none of them          there is no store

`ACTIONS` is the whole decision. A publication is finished before any request is looked at. Whether a process is at
work does not belong to the state: its lease tells that, and ends with the process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from tokenmill.build.inputs import entry_digest, new_files_of, stamp_of, versions_of
from tokenmill.build.journal import BUILD, FINISHED, PUBLISH, Journal, Ledger, RunningBuild
from tokenmill.build.publish import Publication, read_publication
from tokenmill.documents import InputFile, chunk_size, file_digest
from tokenmill.encode.hub import is_hub_name
from tokenmill.errors import StoreExistsError
from tokenmill.fingerprint import first_difference
from tokenmill.store import layout, writer

StateName: TypeAlias = Literal["empty", "running", "publishing", "finished"]
_DECIDING: tuple[tuple[StateName, str], ...] = (
    ("publishing", PUBLISH),
    ("running", BUILD),
    ("finished", FINISHED),
)
"""State -> file that decides it; the first that exists counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Empty:
    """There is no store and no build."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """A build was begun. It may be at work, or interrupted."""

    build: RunningBuild
    has_units: bool
    """True if a unit is finished, which a new build would lose."""
    base: Ledger | None
    """Ledger of the store that is added to or replaced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Publishing:
    """Finished units are being moved into the store."""

    publication: Publication


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """There is a store that prepare made."""

    ledger: Ledger


State: TypeAlias = Empty | Running | Publishing | Finished


def state_name(journal: Journal) -> StateName:
    """Return the name of the state, without reading a file."""
    return next((name for name, file in _DECIDING if journal.time_of(file)), "empty")


def read_state(out: Path) -> State:
    """Return the state of the build in a folder."""
    journal = Journal(out)
    publication = read_publication(journal)
    if publication is not None:
        return Publishing(publication=publication)
    build, ledger = journal.running(), journal.ledger()
    if build is not None:
        return Running(build=build, has_units=journal.has_finished_units(), base=ledger)
    return Empty() if ledger is None else Finished(ledger=ledger)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A call of `prepare`, as far as it decides what happens to the folder."""

    identity: Mapping[str, Any]
    """Tokenizer, recipe and options: what all builds of a store must share."""
    rebuild: bool


Action: TypeAlias = Literal["begin", "resume", "add", "replace", "reject"]
ACTIONS: Mapping[str, Mapping[str, Action]] = {
    # state          request: same identity, another one, and both with `rebuild`
    "empty": {"same": "begin", "other": "begin", "rebuild same": "replace", "rebuild other": "replace"},
    "running": {"same": "resume", "other": "reject", "rebuild same": "replace", "rebuild other": "replace"},
    "replacing": {"same": "resume", "other": "reject", "rebuild same": "resume", "rebuild other": "replace"},
    "finished": {"same": "add", "other": "reject", "rebuild same": "replace", "rebuild other": "replace"},
}
"""Action for each state and request. `replacing` is a running build with `rebuild`.

`begin` starts a store. `resume` continues the units of the running build. `add` starts a build of the new files, or
does nothing if there are none. `replace` starts a build whose store replaces the old one at its end.
"""


def action_of(state: State, request: Request) -> Action:
    """Return what a request does; a publication must have been finished before."""
    assert not isinstance(state, Publishing)
    name, identity = "empty", None
    if isinstance(state, Running):
        name, identity = ("replacing" if state.build.rebuild else "running"), state.build.identity
    elif isinstance(state, Finished):
        name, identity = "finished", state.ledger.identity
    is_same = identity is not None and first_difference(dict(identity), dict(request.identity)) is None
    if isinstance(state, Running) and not (is_same or request.rebuild or state.has_units):
        # A build without a finished unit has nothing to lose: another request takes its place.
        return action_of(Empty() if state.base is None else Finished(ledger=state.base), request)
    return ACTIONS[name][f"{'rebuild ' if request.rebuild else ''}{'same' if is_same else 'other'}"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Build:
    """Work of a build that was begun or resumed."""

    journal: Journal
    identity: Mapping[str, Any]
    files: Sequence[InputFile]
    """Files that are not in the store yet."""
    digests: Mapping[str, str]
    """Path -> its `entry_digest`."""
    stamps: Mapping[str, tuple[int, int] | None]
    """Path -> size and mtime, to find out at the end that no process wrote to it."""
    versions: Mapping[str, str]
    """Path -> digest that stands for its content, by which a resumed build finds its units."""
    chunk_bytes: int
    base: Ledger | None
    """Ledger of the store that is added to; None for a new store or one that is replaced."""
    cleared: Sequence[str] | None
    """Routes of the store that is replaced; None if there is none."""


def open_build(
    journal: Journal,
    request: Request,
    files: Sequence[InputFile],
    *,
    chunk_bytes: int | None,
    same_names: bool = False,
    tokenizer: str = "",
) -> Build:
    """Begin or resume a build as `ACTIONS` has it; raise if the request does not fit the folder."""
    state = read_state(journal.out)
    action = action_of(state, request)
    ledger = journal.ledger()
    running = state.build if isinstance(state, Running) and action == "resume" else None
    replaces = action == "replace" or (running is not None and running.rebuild)
    _check_folder(journal.out, state, action, request, ledger, replaces=replaces)
    routes = ledger.routes if ledger is not None else ()
    base = None if replaces else ledger
    digests = {file.path: file_digest(file) for file in files}
    new_files = new_files_of(journal, files, digests, base, same_names=same_names)
    if running is not None and chunk_bytes in (None, running.chunk_bytes):
        chunk_bytes = running.chunk_bytes
    else:
        chunk_bytes = chunk_bytes or chunk_size(new_files)
        if new_files:
            build = RunningBuild(
                identity=request.identity,
                chunk_bytes=chunk_bytes,
                rebuild=replaces,
                tokenizer=tokenizer if is_hub_name(tokenizer) else "",
            )
            journal.begin(build)
    entries = {file.path: entry_digest(file.name, digests[file.path]) for file in new_files}
    return Build(
        journal=journal,
        identity=request.identity,
        files=new_files,
        digests=entries,
        stamps={file.path: stamp_of(file) for file in new_files},
        versions=versions_of(journal, new_files, entries),
        chunk_bytes=chunk_bytes,
        base=base,
        # `out` itself comes last, after the stores below it.
        cleared=[*filter(None, routes), ""] if replaces else None,
    )


def _check_folder(
    out: Path, state: State, action: Action, request: Request, ledger: Ledger | None, *, replaces: bool
) -> None:
    """Raise if the request is rejected, or `out` contains files that a build would mix up with its own."""
    routes = ledger.routes if ledger is not None else ()
    _check_no_unknown_files(out, routes)
    if action == "begin" and (out / layout.MANIFEST).exists():
        raise StoreExistsError(
            f"{out}: must not hold a store that prepare cannot add to, got one without its journal; "
            "choose another path, or replace it with rebuild=True"
        )
    if action == "reject":
        running = state.build if isinstance(state, Running) and state.has_units else None
        old = running.identity if running is not None else ledger.identity if ledger is not None else {}
        _check_identity(out, old, request.identity, finished=running is None)
    if not replaces:
        _check_no_unlisted_shards(out, routes)
        return
    for route in {"", *routes}:
        writer.check_no_foreign_shards(out / route)


def _check_identity(out: Path, old: Mapping[str, Any], new: Mapping[str, Any], *, finished: bool) -> None:
    """Raise if a request differs from the build in the folder; the error names the first difference."""
    difference = first_difference(dict(old), dict(new))
    if difference is None:
        return
    path, before, after = difference
    what = "a store must be added to as it was made" if finished else "an unfinished build must go on as it began"
    raise StoreExistsError(
        f"{out}: {what}, got {path} {before!r} -> {after!r}; "
        "give what was given before, choose another path, or start over with rebuild=True"
    )


def _check_no_unknown_files(out: Path, routes: Sequence[str]) -> None:
    """Raise if `out`, or the folder of a route, contains files that no build wrote."""
    folders = {out: {layout.JOURNAL_FOLDER}} | {out / route: set() for route in routes if route}
    for route in routes:
        parts = route.split("/") if route else []
        for depth, part in enumerate(parts):
            folders.setdefault(out.joinpath(*parts[:depth]), set()).add(part)
    for folder, known in folders.items():
        if folder.is_dir():
            writer.check_no_unknown_files(folder, known)


def _check_no_unlisted_shards(out: Path, routes: Sequence[str]) -> None:
    """Raise if there are shards that no manifest lists, because new ones would get their names."""
    for route in {"", *routes}:
        listed = {shard.name for shard in layout.read_manifest(out / route).shards} if route in routes else set()
        shards = {child.name for child in (out / route).iterdir() if layout.is_shard_name(child.name)}
        if unlisted := sorted(shards - listed):
            raise StoreExistsError(
                f"{out / route}: must hold no shards but those of its manifest, got {unlisted[0]!r}; "
                "choose another path, or say rebuild=True if it may be deleted"
            )
