"""A new run that shares all batches of another before a step: its config, and the state to go on from."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from tokenmill.config.run import IN_TOKENS, Translation, parse_config, to_toml
from tokenmill.config.schedule import MAIN_STAGE, ResolvedStage
from tokenmill.config.spelling import respell
from tokenmill.errors import ConfigError, PlanError, TokenmillError, whole, writing
from tokenmill.loader import Loader, RankSlice
from tokenmill.run.history import PLAN_DIGITS, ForkPoint, PlanRecord, begins, record, table_of, tables_of
from tokenmill.run.run import Run
from tokenmill.store.files import sync_folder
from tokenmill.tables import check_types, is_address
from tokenmill.types import RECORD_TYPES

DEFAULT_NAME = "fork"
_RAMP = ("ramp", "ramp_steps", "ramp_from")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """Files that a fork has written."""

    config: Path
    state: Path
    stage: str
    """Name of the stage that begins where the runs part."""
    step: int
    plan: str
    """Fingerprint of the new run's plan."""
    shared: str
    """Fingerprint of all batches before the step, which both runs have."""
    edited: bool
    """Whether any batch differs from the old run. Without weights none does until you edit the config."""


def fork(
    run: Run, *, at: int, to: Path, name: str | None = None, weights: Mapping[str, float] | None = None
) -> Fork:
    """Write the config and the state of a run that parts from another at a step; see `Run.fork`."""
    plan, at = run.plan(), whole("at", at, PlanError, "pass a step of the run")
    check_types(name=(name, str | None), weights=(weights, Mapping[str, int | float] | None))
    if not 0 <= at < plan.steps:
        raise PlanError(f"fork: step must lie within 0:{plan.steps}, got {at}; choose one that the run has")
    file = _new_config(to)
    state = file.with_suffix(".state.json")
    if state.exists():
        raise _exists(state)
    _check_live(run, at)
    new, stage = _forked(run, file, at, name, weights)
    loader = Loader(new.plan(), RankSlice())
    loader.seek(at)
    _write_new(state, msgspec.json.encode(loader.state_dict()))
    try:
        _write_new(file, to_toml(_tables(new)).encode())
    except BaseException:
        state.unlink()
        raise
    config = f"{_prefix(run.folder, file.parent)}{run.name}.toml"
    origin = ForkPoint(config=config, plan=plan.fingerprint[:PLAN_DIGITS], step=at)
    record(new.folder, new.name, new.plan(), new.config, origin=(origin, PlanRecord.of(plan, run.config)))
    return Fork(
        config=file,
        state=state,
        stage=stage,
        step=at,
        plan=new.plan().fingerprint[:PLAN_DIGITS],
        shared=new.plan().fingerprint_at(at),
        edited=new.plan().fingerprint != plan.fingerprint,
    )


def native_tables(run: Run, translation: Translation) -> dict[str, Any]:
    """Return the native tables of a run in the new spelling.

    Stores are opened only for an old value whose meaning depends on their kind. It stays if they cannot be opened.
    """
    if respell(translation.tables)[1]:
        with suppress(TokenmillError):
            records = any(store.manifest.kind in RECORD_TYPES for store in run.stores.values())
            return respell(translation.tables, records=records)[0]
    return translation.tables


def write_config(run: Run, to: Path) -> Path:
    """Write the config of a run as native TOML to a new file; see `Run.to_toml`."""
    file = _new_config(to)
    written = native_tables(run, run.translation) if run.translation else _tables(run)
    _write_new(file, to_toml(_moved(written, run.folder, file.parent)).encode())
    return file


def _new_config(to: Path) -> Path:
    """Return where a new config goes; it must not exist, but its folder must."""
    if to.suffix != ".toml":
        raise ConfigError(f"{to}: a config must end in .toml, got {to.suffix!r}; rename it, such as {to.stem}.toml")
    file = to.resolve()
    if file.exists():
        raise _exists(file)
    if not file.parent.is_dir():
        raise ConfigError(f"folder not found: {file.parent}; create it first")
    return file


def _check_live(run: Run, step: int) -> None:
    """Reject a fork after live text, because only a state records the positions of its lanes."""
    drawn = {name for part in run.plan().stages if part.spec.start_step < step for name in part.names}
    for name in run.live:
        if name in drawn:
            raise ConfigError(
                f"fork: the sources of all batches before step {step} must be stores, got live text in {name!r}, "
                "whose lanes only a state knows; copy the config and a state of that step, and change what follows"
            )


def _forked(
    run: Run, file: Path, step: int, name: str | None, weights: Mapping[str, float] | None
) -> tuple[Run, str]:
    """Return the new run, checked to share all earlier batches, and the name of the stage that begins there."""
    plan = run.plan()
    tables = _moved(_tables(run), run.folder, file.parent)
    # Where documents are quarantined at the very step, a stage that begins there must not start their source again.
    for kept in (True, False):
        forked = copy.deepcopy(tables)
        stage = _cut(forked, run, step, name, keep_on_change=kept)
        new = _run(forked, file)
        if new.plan().fingerprint == plan.fingerprint:
            break
    else:
        raise ConfigError(
            f"fork: a stage that begins at step {step} would change batches from step {_parts_at(run, new)} on; "
            "choose another step"
        )
    if weights is not None:
        begun = next(stage for stage in forked["stages"] if stage["start_step"] == step)
        begun["weights"] = dict(weights)
        new = _run(forked, file)
    if new.plan().fingerprint_at(step) != plan.fingerprint_at(step):
        raise ConfigError(
            f"fork: batches before step {step} would differ from those of {run.name!r}, from step "
            f"{_parts_at(run, new)} on; choose another step"
        )
    return new, stage


def _cut(tables: dict[str, Any], run: Run, step: int, name: str | None, *, keep_on_change: bool) -> str:
    """Begin a stage at a step of the tables, unless one begins there; return its name."""
    stages: list[dict[str, Any]] = tables.setdefault("stages", [])
    if not stages:
        stages.append(dict(MAIN_STAGE))
    number = max(index for index, stage in enumerate(stages) if stage["start_step"] <= step)
    taken = [str(stage["name"]) for stage in stages]
    running = stages[number]
    if running["start_step"] == step:
        if name is not None and name != running["name"]:
            _check_name(name, taken)
            running["name"] = name
        return str(running["name"])
    _check_ramp(run.config.resolved_stages[number], step)
    if name is None:
        names = (DEFAULT_NAME if number == 1 else f"{DEFAULT_NAME}-{number}" for number in count(1))
        name = next(name for name in names if name not in taken)
    _check_name(name, taken)
    dropped = {*_RAMP, *(() if keep_on_change else ("on_change",))}
    begun = {key: copy.deepcopy(value) for key, value in running.items() if key not in dropped}
    stages.insert(number + 1, begun | {"name": name, "start_step": step})
    return name


def _check_name(name: str, taken: Sequence[str]) -> None:
    if not name or name in taken:
        raise ConfigError(
            f"fork: name must be one that no stage has ({', '.join(taken)}), got {name!r}; choose another"
        )


def _check_ramp(stage: ResolvedStage, step: int) -> None:
    """Reject a step within a ramp. A ramp is counted from the start of its stage and cannot be cut."""
    end = stage.start_step + stage.ramp_steps
    if step < end:
        raise ConfigError(
            f"fork: step must not lie within the ramp of stage {stage.name!r} (steps {stage.start_step}:{end}), "
            f"got {step}; fork at {stage.start_step}, where it begins, or at {end}, where it ends"
        )


def _parts_at(run: Run, new: Run) -> int | None:
    old, other = (PlanRecord.of(side.plan(), side.config) for side in (run, new))
    return begins(old, other)


def _tables(run: Run) -> dict[str, Any]:
    """Return the native tables of a run, as they were written or translated; tokens and epochs become steps."""
    if run.translation and run.epochs is None:
        written = native_tables(run, run.translation)
        if not any(key in item for item, keys in _token_keys(written) for key in keys):
            return written
    tables = tables_of(run.config)
    for item, keys in _token_keys(tables):
        for key in keys:
            item.pop(key, None)
    remote = table_of(run.config.remote)
    return {**tables, "remote": remote} if remote else tables


def _token_keys(tables: Mapping[str, Any]) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
    """Return the tables in which something may be given in tokens, each with the keys for it."""
    items = [(item, keys) for name, keys in IN_TOKENS.items() for item in tables.get(name, [])]
    return [(tables["run"], ("tokens",)), *items]


def _run(tables: dict[str, Any], file: Path) -> Run:
    return Run(
        config=parse_config(tables, where=str(file)),
        folder=file.parent,
        name=file.stem,
        translation=Translation(tables=tables),
        records_plans=True,
    )


def _moved(tables: Mapping[str, Any], old: Path, new: Path) -> dict[str, Any]:
    """Return tables whose relative paths lead from another folder to the same files."""
    moved = copy.deepcopy(dict(tables))
    parts = [part for item in moved.get("evals", []) for part in (item, *item.get("sources", []))]
    for source in (*moved.get("sources", []), *parts):
        if "store" in source:
            store = source["store"]
            source["store"] = (
                _from(store, old, new) if isinstance(store, str) else [_from(path, old, new) for path in store]
            )
        if "documents" in source and source not in parts:
            source["documents"] = [_from(text, old, new) for text in source["documents"]]
        tokenizer = source.get("tokenizer")
        if tokenizer is not None and tokenizer != "bytes" and ":" not in tokenizer:
            source["tokenizer"] = _from(tokenizer, old, new)
    for edit in (*moved.get("quarantine", []), *parts):
        if "file" in edit:
            edit["file"] = _from(edit["file"], old, new)
    mirror = moved.get("remote", {}).get("mirror", "~")
    if not mirror.startswith("~"):
        moved["remote"]["mirror"] = _from(mirror, old, new)
    return moved


def _from(path: str, old: Path, new: Path) -> str:
    """Return how a path that counts from one folder is written from another; an address or `hf:` name stays."""
    if PurePosixPath(path).is_absolute() or is_address(path) or path.startswith("hf:") or old == new:
        return path
    # Only dots at the front are resolved: behind a name that is a link they would lead elsewhere.
    while path.startswith("../"):
        old, path = old.parent, path[3:].lstrip("/")
    return f"{_prefix(old, new)}{path.removeprefix('./')}"


def _prefix(old: Path, new: Path) -> str:
    path = os.path.relpath(old, new)
    return "" if path == "." else f"{path}/"


def _exists(path: Path) -> ConfigError:
    return ConfigError(f"file exists: {path}; choose another name or remove it")


def _write_new(path: Path, data: bytes) -> None:
    """Write a file that is not there yet, so that a reader sees nothing or the whole of it."""
    temporary = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    try:
        with writing(path), temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)  # unlike a rename, it refuses a name that is taken
    except FileExistsError:
        raise _exists(path) from None
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)
