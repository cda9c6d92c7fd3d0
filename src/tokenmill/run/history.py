"""History of a run: its plans in order, the first step of each change, the changed keys, and the reasons.

A line of JSON is kept for each plan that a run was loaded with, in `.tokenmill/history/<name of the config>.jsonl`,
next to the plans in `.tokenmill/plans/`. It is for people: nothing else depends on it. If the folder is not
writable, only the history is missing.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from tokenmill.config.run import LISTS, Config
from tokenmill.config.schedule import MAIN_STAGE, QuarantineConfig
from tokenmill.config.spelling import respell
from tokenmill.errors import ConfigError
from tokenmill.fingerprint import canonical, first_difference
from tokenmill.plan.plan import Plan
from tokenmill.tables import as_json, read_json

Value: TypeAlias = bool | int | float | str | tuple[int | str, ...]
Tables: TypeAlias = Mapping[str, Any]
"""A config as nested tables; what it leaves at its default is not in them."""

PLAN_DIGITS = 16
"""Digits of a plan's fingerprint in states."""
_SHOWN_ITEMS = 8
"""Longer lists are shown by their first items."""
_SHOWN_CHANGES = 3
"""More are counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRecord:
    """A plan as it is kept: what decides its batches, and the config that it was made from."""

    version: int = 0
    contract: Mapping[str, str] = field(default_factory=dict)
    stages: tuple[Mapping[str, Any], ...]
    config: Tables = field(default_factory=dict)
    """Empty, where a plan was recorded before configs were kept."""

    def __post_init__(self) -> None:
        if not all({"start_step", "sources"} <= stage.keys() for stage in self.stages):
            raise ConfigError("plan: a stage of the record has no start_step or sources; remove the record")
        # A plan that an older release recorded has old keys, which must show no difference.
        records = any(
            rows.get("packing") == "records" for stage in self.stages for rows in stage["sources"].values()
        )
        object.__setattr__(self, "config", respell(self.config, records=records)[0])

    @classmethod
    def of(cls, plan: Plan, config: Config) -> PlanRecord:
        """Return the record of a plan that was compiled from a config."""
        described = plan.describe()
        return cls(**described | {"stages": tuple(described["stages"])}, config=tables_of(config))

    @property
    def steps(self) -> int | None:
        """Number of its steps, if known."""
        steps = self.config.get("run", {}).get("steps")
        return steps if isinstance(steps, int) else None

    def stage_at(self, step: int) -> tuple[int, dict[str, Any]]:
        """Return the description of the stage that runs at a step, and its index."""
        number = bisect_right(self.stages, step, key=lambda stage: int(stage["start_step"])) - 1
        return number, dict(self.stages[number])

    def before(self, step: int) -> PlanRecord:
        """Return it without the stages that begin at a step or after it."""
        return replace(self, stages=tuple(stage for stage in self.stages if stage["start_step"] < step))


def tables_of(config: Config) -> dict[str, Any]:
    """Return a config as tables of JSON values, without values that are the default."""
    tables: dict[str, Any] = {"run": table_of(config.run)}
    for name in LISTS:
        items = [table_of(item) for item in getattr(config, name)]
        if items:
            tables[name] = items
    return tables


def table_of(item: Any) -> dict[str, Any]:  # noqa: ANN401 - any dataclass of the config
    """Return one record of a config as a table, without values that are the default."""
    defaults = {
        key.name: key.default if key.default_factory is MISSING else key.default_factory() for key in fields(item)
    }
    values = {name: getattr(item, name) for name in defaults if getattr(item, name) != defaults[name]}
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:  # noqa: ANN401 - a value of a config
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return table_of(value) if is_dataclass(value) else as_json(value)


# Differences of two plans, and of the configs that they were compiled from

_INERT = frozenset(("name", "lr_scale", "reason", "arrays"))
"""Keys that decide no batch; they are listed last."""
_NO_START = {"start_step": None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A key with another value, in a config or in the description of a plan."""

    path: str
    """Path such as `stages[1].weights.web`. Indices count in the new config, or in the old one for a removed
    table."""
    old: Value | None
    """Old value; None if the key was absent."""
    new: Value | None

    def __str__(self) -> str:
        return f"{self.path} {shown(self.old)} -> {shown(self.new)}"


def shown(value: Value | None) -> str:
    """Show a value of a config.

    >>> shown(None), shown("full"), shown(0.5), shown((1, 2))
    ('(absent)', "'full'", '0.5', '[1, 2]')
    """
    if value is None:
        return "(absent)"
    if not isinstance(value, tuple):
        return repr(value)
    more = f", and {len(value) - _SHOWN_ITEMS:,} more" if len(value) > _SHOWN_ITEMS else ""
    return f"[{', '.join(map(repr, value[:_SHOWN_ITEMS]))}{more}]"


def begins(old: PlanRecord, new: PlanRecord) -> int | None:
    """Return the first step at which the descriptions of two plans differ; None if all batches are the same."""
    steps = {record.steps for record in (old, new)} - {None}
    end = min(step for step in steps if step is not None) if len(steps) > 1 else None
    return min((step for step in (_first_other_stage(old, new), end) if step is not None), default=None)


def _first_other_stage(old: PlanRecord, new: PlanRecord) -> int | None:
    """Return the first step of the first stage in which two plans differ."""
    if (old.version, old.contract) != (new.version, new.contract):
        return 0
    for stages in zip_longest(old.stages, new.stages):
        if stages[0] != stages[1]:
            return min(int(stage["start_step"]) for stage in stages if stage is not None)
    return None


def cause(old: PlanRecord, new: PlanRecord) -> Change | None:
    """Return the first difference of the stages that run at the first step at which two plans differ."""
    step = begins(old, new)
    if step is None:
        return None
    if (old.version, old.contract) != (new.version, new.contract):
        before, after = ({"version": side.version, "contract": dict(side.contract)} for side in (old, new))
        place = first_difference(before, after)
    elif step != _first_other_stage(old, new):
        return Change(path="run.steps", old=old.steps, new=new.steps)
    else:
        (_, before), (number, after) = (side.stage_at(step) for side in (old, new))
        path = f"stages[{number}]"
        place = first_difference(before | _NO_START, after | _NO_START, path) or first_difference(
            before, after, path
        )
    assert place is not None  # or `begins` would be None
    old_value, new_value = (None if side == "(absent)" else _tupled(side) for side in place[1:])
    return Change(path=place[0], old=old_value, new=new_value)


def changes(old: PlanRecord, new: PlanRecord) -> list[Change]:
    """Return the keys that differ between two configs, in the order of the config."""
    if not (old.config and new.config):
        return []
    left, right = ({**side.config, "stages": side.config.get("stages") or [MAIN_STAGE]} for side in (old, new))
    changed = _leaves("run", left["run"], right["run"])
    for name in LISTS:
        for number, before, after in _pairs(left.get(name, []), right.get(name, [])):
            changed += _leaves(f"{name}[{number}]", before, after)
    return sorted(changed, key=lambda change: change.path.rpartition(".")[2] in _INERT)


def _leaves(path: str, old: Tables, new: Tables) -> list[Change]:
    """Return the keys of a table, and of the tables in it, that differ."""
    changed: list[Change] = []
    for key in dict.fromkeys((*new, *old)):
        before, after = old.get(key), new.get(key)
        if before == after:
            continue
        if all(value is None or isinstance(value, Mapping) for value in (before, after)):
            changed += _leaves(f"{path}.{key}", before or {}, after or {})
        else:
            changed.append(Change(path=f"{path}.{key}", old=_tupled(before), new=_tupled(after)))
    return changed


def _tupled(value: Any) -> Value | None:  # noqa: ANN401 - a JSON value
    if isinstance(value, list):
        return tuple(item if isinstance(item, str | int) else str(item) for item in value)
    return "(present)" if isinstance(value, Mapping) else value


def _pairs(old: Sequence[Tables], new: Sequence[Tables]) -> list[tuple[int, Tables, Tables]]:
    """Pair tables of two lists: (index in the new list, or in the old one for a removed table; old; new).

    Tables pair by name, those without a name by content, and the rest in order.
    """

    def identity(table: Tables) -> bytes:
        return canonical(table.get("name", table))

    left = {identity(table): (number, table) for number, table in enumerate(old)}
    pairs: list[tuple[int, Tables, Tables]] = []
    rest: list[tuple[int, Tables]] = []
    for number, table in enumerate(new):
        _, same = left.pop(identity(table), (0, None))
        if same is None:
            rest.append((number, table))
        else:
            pairs.append((number, same, table))
    for before, after in zip_longest(left.values(), rest):
        number = (after or before)[0]
        pairs.append((number, before[1] if before else {}, after[1] if after else {}))
    return sorted(pairs, key=lambda pair: pair[0])


def explain(old: PlanRecord, new: PlanRecord, step: int) -> str | None:
    """Return the first difference of two plans before a step, and the key of the config that changed, as text."""
    place = cause(old.before(step), new.before(step))
    if place is None:
        return None
    keys = [str(change) for change in changes(old, new) if change.path.rpartition(".")[2] not in _INERT]
    more = f", and {len(keys) - 1} more" if len(keys) > 1 else ""
    return f"{place} ({keys[0]}{more})" if keys and keys[0] != str(place) else str(place)


# The history


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkPoint:
    """Run and step that a fork starts from."""

    config: str
    """Config file of the run, relative to the folder of the fork."""
    plan: str
    step: int
    """Batches before it are shared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """A plan that a run was trained with, and what it changed: a line of the history.

    >>> print(Edit(time="2026-11-16T08:00:00Z", plan="1a2b3c4d5e6f7081", before="77", first_step=1200,
    ...            reasons=("skip 1200:1240 (loss spike)",)))
    2026-11-16 plan 1a2b3c4d… from step 1,200: skip 1200:1240 (loss spike)
    """

    time: str
    """When it was first loaded: UTC, ISO 8601."""
    plan: str
    before: str | None
    """The plan before it; None for the first."""
    first_step: int | None
    """First step at which it may differ from the one before; None for the first, or if that is not on record."""
    changes: tuple[Change, ...] = ()
    reasons: tuple[str, ...] = ()
    """Skips and quarantines that are new, with their reasons: `skip 1200:1240 (loss spike)`."""
    forked_from: ForkPoint | None = None

    def __str__(self) -> str:
        head = f"{self.time[:10]} plan {self.plan[:8]}…"
        origin = self.forked_from
        if origin is not None:
            head += f" forked from {origin.config} (plan {origin.plan[:8]}…) at step {origin.step:,}"
        elif self.before is None:
            return f"{head} is the first on record"
        if self.first_step is not None:
            head += f"{', differs' if origin else ''} from step {self.first_step:,}"
        # A new skip or quarantine is named by its reason, not again by its keys.
        added = ("skip[", "quarantine[")
        rest = [change for change in self.changes if not (change.old is None and change.path.startswith(added))]
        causes = [*self.reasons, *(str(change) for change in rest[:_SHOWN_CHANGES])]
        if len(rest) > _SHOWN_CHANGES:
            causes.append(f"and {len(rest) - _SHOWN_CHANGES} more")
        if not causes:
            return head if origin else f"{head}: what changed is not on record"
        return f"{head}: {', '.join(causes)}"


def read_history(folder: Path, name: str) -> list[Edit]:
    """Return the plans of a run, oldest first; lines that cannot be read are left out."""
    edits: list[Edit] = []
    for edit in _edits(folder, name):
        # Two processes that loaded the run at the same time have both noted it.
        if not (edits and edits[-1].plan == edit.plan and edit.forked_from is None):
            edits.append(edit)
    return edits


def _edits(folder: Path, name: str, *, newest_first: bool = False) -> Iterator[Edit]:
    try:
        written = _history_file(folder, name).read_bytes().split(b"\n")
    except OSError:
        return
    for line in reversed(written) if newest_first else written:
        with suppress(ConfigError):
            yield read_json(Edit, line, "history")


def record(
    folder: Path, name: str, plan: Plan, config: Config, *, origin: tuple[ForkPoint, PlanRecord] | None = None
) -> None:
    """Keep a plan beside its config; note it in the history, if it is not the last one there.

    `origin` is for a fork: where it comes from, and that run. Nothing is raised where nothing can be written.
    """
    new = PlanRecord.of(plan, config)
    number = plan.fingerprint[:PLAN_DIGITS]
    with suppress(OSError):
        _keep(folder, number, new)
    last = next(_edits(folder, name, newest_first=True), None)
    if last is not None and last.plan == number and origin is None:
        return
    before = origin[0].plan if origin else last.plan if last else None
    old = origin[1] if origin else read_plan(folder, before) if before else None
    edit = Edit(
        time=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        plan=number,
        before=before,
        first_step=begins(old, new) if old else None,
        changes=tuple(changes(old, new)) if old else (),
        reasons=tuple(_new_edits(old, config)) if old and old.config else (),
        forked_from=origin[0] if origin else None,
    )
    with suppress(OSError):
        _append(_history_file(folder, name), edit)


def _new_edits(old: PlanRecord, config: Config) -> list[str]:
    """Return the skips and quarantines of a config that an old one did not have, with their reasons."""
    tables = tables_of(config)
    skips = [skip["steps"] for skip in old.config.get("skip", [])]
    new = [(f"skip {skip.steps}", skip.reason) for skip in config.skip if skip.steps not in skips]
    quarantines = [{**edit, "reason": ""} for edit in old.config.get("quarantine", [])]
    for edit, table in zip(config.quarantine, tables.get("quarantine", []), strict=True):
        if {**table, "reason": ""} not in quarantines:
            new.append((_quarantine(edit), edit.reason))
    return [f"{edit} ({reason})" if reason else edit for edit, reason in new]


def _quarantine(edit: QuarantineConfig) -> str:
    numbers = edit.documents or ()
    if edit.whole:
        what = "all"
    elif edit.file is not None:
        what = f"documents in {edit.file}"
    else:
        more = ", …" if len(numbers) > 4 else ""
        what = f"document{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:4]))}{more}"
    return f"quarantine {what} of {edit.source} from step {edit.from_step}"


# The files


def _history_file(folder: Path, name: str) -> Path:
    return folder / ".tokenmill" / "history" / f"{name}.jsonl"


def _plan_file(folder: Path, number: str) -> Path:
    safe = "".join(character for character in number if character.isalnum())
    return folder / ".tokenmill" / "plans" / f"{safe}.json"


def read_plan(folder: Path, number: str) -> PlanRecord | None:
    """Return the record of a plan, or None."""
    with suppress(OSError, ConfigError):
        file = _plan_file(folder, number)
        return _unpacked(read_json(_PlanFile, file.read_bytes(), str(file)))
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class _PlanFile:
    """A `PlanRecord` as a file has it: rows that many stages share are described once."""

    version: int = 0
    contract: Mapping[str, str] = field(default_factory=dict)
    rows: tuple[Mapping[str, Any], ...] = ()
    """Descriptions of rows. `sources` of a stage map a name to an index in this list."""
    stages: tuple[Mapping[str, Any], ...]
    """Stages. Those of an older release have the descriptions themselves."""
    config: Tables = field(default_factory=dict)


def _packed(plan: PlanRecord) -> _PlanFile:
    rows: dict[bytes, int] = {}
    descriptions: list[Mapping[str, Any]] = []
    stages = []
    for stage in plan.stages:
        sources = {}
        for name, described in stage["sources"].items():
            number = rows.setdefault(canonical(described), len(rows))
            if number == len(descriptions):
                descriptions.append(described)
            sources[name] = number
        stages.append({**stage, "sources": sources})
    return _PlanFile(
        version=plan.version,
        contract=plan.contract,
        rows=tuple(descriptions),
        stages=tuple(stages),
        config=plan.config,
    )


def _unpacked(file: _PlanFile) -> PlanRecord:
    stages = []
    for stage in file.stages:
        sources = stage.get("sources", {})
        try:
            sources = {name: file.rows[rows] if isinstance(rows, int) else rows for name, rows in sources.items()}
        except IndexError:
            raise ConfigError("plan: a stage names rows that the record does not describe; remove it") from None
        stages.append({**stage, "sources": sources} if sources else stage)
    return PlanRecord(version=file.version, contract=file.contract, stages=tuple(stages), config=file.config)


def _keep(folder: Path, number: str, plan: PlanRecord) -> None:
    """Write the record of a plan, unless it is there; one without a config is replaced."""
    from tokenmill.store.files import write_atomically

    known = read_plan(folder, number)
    if known is not None and known.config:
        return
    file = _plan_file(folder, number)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, msgspec.json.encode(_packed(plan)))


def _append(file: Path, edit: Edit) -> None:
    """Append a line in one write, so that lines of several processes do not mix."""
    from tokenmill.store.layout import read_at

    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
    try:
        line = msgspec.json.encode(edit) + b"\n"
        size = os.fstat(descriptor).st_size
        if size and read_at(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line  # a line that a full disk cut short stays alone
        os.write(descriptor, line)
    finally:
        os.close(descriptor)
