"""The history of a run: which plan followed which, from which step on, by which keys of the config, and why.

`changes` says how two configs differ and from which step on that matters. A line of JSON is kept for each plan that
a run was loaded with, in `.tokenmill/history/<name of the config>.jsonl`, beside the plans in `.tokenmill/plans/`.
It is for people: nothing else depends on it, and a folder that cannot be written to costs only the history.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from tokenmill.config.run import LISTS, Config, RunConfig
from tokenmill.config.schedule import MAIN_STAGE, QuarantineConfig, StageConfig
from tokenmill.config.spelling import respell
from tokenmill.errors import ConfigError
from tokenmill.fingerprint import first_difference
from tokenmill.plan.plan import Plan
from tokenmill.tables import as_json, read_json

Value: TypeAlias = bool | int | float | str | tuple[int | str, ...]
Tables: TypeAlias = Mapping[str, Any]
"""A config as nested tables; what it leaves at its default is not in them."""

PLAN_DIGITS = 16
"""Of a plan's fingerprint, as states name it."""
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
            raise ConfigError("plan: a stage must have start_step and sources, got one without; remove the record")
        # A plan that an older release recorded has old keys, which must show no difference.
        records = any(
            rows.get("packing") == "records" for stage in self.stages for rows in stage["sources"].values()
        )
        object.__setattr__(self, "config", respell(self.config, records=records)[0])

    @classmethod
    def of(cls, plan: Plan, config: Config) -> PlanRecord:
        """Return what is kept of a plan that was compiled from a config."""
        described = plan.describe()
        return cls(**described | {"stages": tuple(described["stages"])}, config=tables_of(config))

    @property
    def description(self) -> dict[str, Any]:
        """What decides its batches, as `Plan.describe` gives it."""
        return {"version": self.version, "contract": dict(self.contract), "stages": list(self.stages)}

    @property
    def steps(self) -> int | None:
        """Number of its steps, if known."""
        steps = self.config.get("run", {}).get("steps")
        return steps if isinstance(steps, int) else None

    def before(self, step: int) -> PlanRecord:
        """Return it without the stages that begin at a step or after it."""
        return replace(self, stages=tuple(stage for stage in self.stages if stage["start_step"] < step))


def tables_of(config: Config) -> dict[str, Any]:
    """Return a config as tables of JSON values; what is at its default is left out."""
    tables: dict[str, Any] = {"run": table_of(config.run)}
    for name in LISTS:
        items = [table_of(item) for item in getattr(config, name)]
        if items:
            tables[name] = items
    return tables


def table_of(item: Any) -> dict[str, Any]:  # noqa: ANN401 - any dataclass of the config
    """Return one record of a config as a table; what is at its default is left out."""
    defaults = {
        key.name: key.default if key.default_factory is MISSING else key.default_factory() for key in fields(item)
    }
    values = {name: getattr(item, name) for name in defaults if getattr(item, name) != defaults[name]}
    return {name: _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:  # noqa: ANN401 - a value of a config
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return table_of(value) if is_dataclass(value) else as_json(value)


# What differs between two configs, and from which step on it matters

_INERT = frozenset(("name", "lr_scale", "reason", "arrays"))
"""Keys that decide no batch."""
_INHERITED = {item.name for item in fields(RunConfig)} & {item.name for item in fields(StageConfig)}
"""Keys of [run] that a stage may set for itself."""
_SAME_TABLE: Mapping[str, Sequence[tuple[str, ...]]] = {
    "sources": (("name",), ("store", "documents")),
    "stages": (("name", "start_step"), ("name",), ("start_step",)),
    "skip": (("steps", "reason"), ("steps",), ()),
    "quarantine": (("source", "from_step", "documents", "file"), ("source", "from_step"), ("source",), ()),
    "evals": (("name",), ("store", "source", "documents")),
}
"""Lists of tables -> by which keys the tables of two configs are taken for the same one, the surest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A key of the config that has another value."""

    path: str
    """`stages[1].weights.web`; numbers are those of the new config, or of the old one for what is gone."""
    old: Value | None
    """None where it was not said."""
    new: Value | None
    step: int | None
    """First step whose batch it can change; None if it changes no batch."""

    def __str__(self) -> str:
        return f"{self.path} {shown(self.old)} -> {shown(self.new)}"

    def inert(self) -> Change:
        """Return it marked as one that changes no batch."""
        return replace(self, step=None)


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
    """Return the first step at which batches may differ, going by descriptions; None where all are the same."""
    steps = {record.steps for record in (old, new)} - {None}
    end = min(step for step in steps if step is not None) if len(steps) > 1 else None
    return min((step for step in (_first_other_stage(old, new), end) if step is not None), default=None)


def _first_other_stage(old: PlanRecord, new: PlanRecord) -> int | None:
    """Return the first step of the first stage in which two plans differ."""
    if (old.version, old.contract) != (new.version, new.contract):
        return 0
    for number in range(max(len(old.stages), len(new.stages))):
        stages = [record.stages[number] for record in (old, new) if number < len(record.stages)]
        if len(stages) < 2 or stages[0] != stages[1]:
            return min(int(stage["start_step"]) for stage in stages)
    return None


def changes(old: PlanRecord, new: PlanRecord, first_step: int | None = None) -> list[Change]:
    """Return what differs: first what makes the first difference, then the rest, last what changes no batch.

    `first_step` is the first step at which batches are known to differ; where it is not given, that at which the
    descriptions do.
    """
    first = begins(old, new) if first_step is None else first_step
    changed = _changed_keys(old, new) if old.config and new.config else []
    changed += _hidden_changes(old, new, changed)
    if first is None:
        return [change.inert() for change in changed]

    def rank(change: Change) -> tuple[bool, bool, int, bool]:
        # The nearest cause before the first difference; what begins later cannot have made it. What a stage changes
        # explains more than that it begins.
        if change.step is None:
            return True, True, 0, False
        new_stage = change.path.endswith(".start_step") and None in (change.old, change.new)
        return False, change.step > first, abs(first - change.step), new_stage

    return sorted(changed, key=rank)


def _changed_keys(old: PlanRecord, new: PlanRecord) -> list[Change]:
    """Return the keys that differ, in the order of the config."""
    left, right = _with_stages(old.config), _with_stages(new.config)
    changed = _leaves("run", left["run"], right["run"], lambda key: _run_step(key, left, right))
    for name, keys in _SAME_TABLE.items():
        for number, before, after in _pairs(left.get(name, []), right.get(name, []), keys):
            sides = [side for side in (before, after) if side]

            def step(key: str, name: str = name, sides: Sequence[Tables] = sides) -> int | None:
                return _step(name, key, sides, (old, new))

            changed += _leaves(f"{name}[{number}]", before, after, step)
    return changed


def _with_stages(tables: Tables) -> dict[str, Any]:
    """Return tables with the one stage that a run without any has."""
    return {**tables, "stages": tables.get("stages") or [MAIN_STAGE]}


def _leaves(path: str, old: Tables, new: Tables, step: Callable[[str], int | None]) -> list[Change]:
    """Return the keys of a table, and of the tables in it, that differ."""
    pairs = []
    for key in dict.fromkeys((*new, *old)):
        before, after = old.get(key), new.get(key)
        if all(value is None or isinstance(value, Mapping) for value in (before, after)) and (before or after):
            before, after = before or {}, after or {}
            names = dict.fromkeys((*after, *before))
            pairs += [(key, f"{path}.{key}.{name}", before.get(name), after.get(name)) for name in names]
        else:
            pairs.append((key, f"{path}.{key}", before, after))
    return [
        Change(path=place, old=_tupled(before), new=_tupled(after), step=step(key))
        for key, place, before, after in pairs
        if before != after
    ]


def _tupled(value: Any) -> Value | None:  # noqa: ANN401 - a value of a config
    return tuple(value) if isinstance(value, list) else value


def _pairs(
    old: Sequence[Tables], new: Sequence[Tables], keys: Sequence[tuple[str, ...]]
) -> list[tuple[int, Tables, Tables]]:
    """Pair the tables of two lists that are the same one: (number in the new list or the old one, old, new)."""
    left, right = dict(enumerate(old)), dict(enumerate(new))
    pairs: list[tuple[int, Tables, Tables]] = []
    for key in keys:
        for number, table in list(right.items()):
            same = [i for i, other in left.items() if all(other.get(name) == table.get(name) for name in key)]
            if same:
                pairs.append((number, left.pop(same[0]), right.pop(number)))
    pairs += [(number, {}, table) for number, table in right.items()]
    pairs += [(number, table, {}) for number, table in left.items()]
    return sorted(pairs, key=lambda pair: pair[0])


def _run_step(key: str, old: Tables, new: Tables) -> int | None:
    """Return the first step that a key of [run] can change."""
    if key in _INERT:
        return None
    if key == "steps":
        return min(int(side["run"]["steps"]) for side in (old, new))
    stages = [(stage, side["run"]) for side in (old, new) for stage in side["stages"]]
    if key in _INHERITED:
        stages = [(stage, run) for stage, run in stages if key not in stage]
    elif key in ("block_rows", "window_blocks"):
        blocks = ("block", "window")
        stages = [(stage, run) for stage, run in stages if stage.get("shuffle", run.get("shuffle")) in blocks]
    else:
        return 0
    return min((int(stage["start_step"]) for stage, _ in stages), default=None)


def _step(name: str, key: str, sides: Sequence[Tables], runs: tuple[PlanRecord, PlanRecord]) -> int | None:
    """Return the first step that a key of a table in a list can change."""
    if name == "sources":
        return _source_step(key, sides, runs)
    if key in _INERT:
        return None
    if name == "stages":
        return _stage_step(key, sides, runs)
    if name == "quarantine":
        return min(int(side["from_step"]) for side in sides)
    if name == "evals":  # what they hold out of a source no step has
        return 0 if key in ("source", "documents", "file", "sources") and any(map(_holds_out, sides)) else None
    ranges = [[int(edge) for edge in side["steps"].split(":")] for side in sides]
    firsts, lasts = {edges[0] for edges in ranges}, {edges[1] for edges in ranges}
    # Where only the end is moved, the steps until the nearer end stay as they were.
    return min(firsts) if len(sides) < 2 or len(firsts) > 1 else min(lasts)


def _holds_out(table: Tables) -> bool:
    return any("source" in part for part in (table, *table.get("sources", ())))


def _stage_step(key: str, sides: Sequence[Tables], runs: tuple[PlanRecord, PlanRecord]) -> int | None:
    """Return the first step that a key of a stage can change.

    A stage that is new, or gone, changes what it does not share with the one that runs there in the other config.
    """
    step = min(int(side["start_step"]) for side in sides)
    if len(sides) > 1:
        return step
    (_, own), (begin, other) = sorted((_running(run.config, step) for run in runs), key=lambda run: run[0] != step)
    if begin == step:
        return step
    same = own == other if key == "start_step" else own.get(key) == other.get(key)
    return None if same else step


def _running(tables: Tables, step: int) -> tuple[int, dict[str, Any]]:
    """Return the stage that runs at a step: where it begins, and its values, its own or those of [run]."""
    tables = _with_stages(tables)
    stage = max(
        (stage for stage in tables["stages"] if stage["start_step"] <= step),
        key=lambda stage: int(stage["start_step"]),
        default=tables["stages"][0],
    )
    begin = int(stage["start_step"])
    values = {key: value for key, value in tables["run"].items() if key in _INHERITED}
    values |= {key: value for key, value in stage.items() if key not in _INERT and key != "start_step"}
    if begin < step:
        # It began with these; a ramp that goes on would be cut.
        values.pop("on_change", None)
        if step >= begin + int(stage.get("ramp_steps", 0)):
            values = {key: value for key, value in values.items() if not key.startswith("ramp")}
    return begin, values


def _source_step(key: str, sides: Sequence[Tables], runs: tuple[PlanRecord, PlanRecord]) -> int | None:
    """Return the first step that a key of a source can change; None if its tokens are the same in spite of it."""
    if key in ("max_epochs", "on_exhausted"):
        stops = any(side.get("on_exhausted") == "stop" for side in sides)
        return begins(*runs) if stops else None
    uses = [_uses(run, {str(side["name"]) for side in sides}) for run in runs]
    # What stands for the tokens: the store, or live text with what deals it out.
    contents = [{str(rows.get("store", rows.get("live"))) for _, rows in side} for side in uses]
    if key != "name" and contents[0] == contents[1]:
        return None
    return min((step for side in uses for step, _ in side), default=None)


def _uses(run: PlanRecord, names: set[str]) -> list[tuple[int, Tables]]:
    """Return the first step of the described stages that draw from a source of one of these names, and its rows."""
    return [
        (int(stage["start_step"]), stage["sources"][name])
        for stage in run.stages
        for name in sorted(names)
        if name in stage["sources"]
    ]


def _hidden_changes(old: PlanRecord, new: PlanRecord, changed: Sequence[Change]) -> list[Change]:
    """Return what differs though no key does: other tokens in a store, other numbers in a file.

    Where nothing else is known, the first difference of the descriptions.
    """
    hidden = []
    for number, source in enumerate(new.config.get("sources", [])):
        uses = [_uses(run, {source["name"]}) for run in (old, new)]
        stores = [str(side[0][1].get("store", side[0][1].get("files", ""))) if side else "" for side in uses]
        known = any(change.path.startswith(f"sources[{number}].") and change.step is not None for change in changed)
        if all(stores) and stores[0] != stores[1] and not known:
            before, after = (f"content {store[:12]}" for store in stores)
            key = "documents" if "documents" in source else "store"
            step = min(side[0][0] for side in uses)
            hidden.append(Change(path=f"sources[{number}].{key}", old=before, new=after, step=step))
    edge = _first_other_stage(old, new)
    if edge is None or any(change.step is not None and change.step <= edge for change in (*changed, *hidden)):
        return hidden
    place = first_difference(old.description, new.description)
    assert place is not None  # there is an edge
    path, *sides = place
    for number, edit in enumerate(new.config.get("quarantine", [])):
        if path.endswith(f".{edit['source']}.quarantined") and "file" in edit:
            path = f"quarantine[{number}].file"
    old_value, new_value = (
        None if side == "(absent)" else side if isinstance(side, bool | int | float | str) else str(side)
        for side in sides
    )
    return [*hidden, Change(path=path, old=old_value, new=new_value, step=edge)]


def explain(old: PlanRecord, new: PlanRecord, step: int) -> str | None:
    """Say what makes the first difference before a step: in the description, and by which key of the config."""
    before, after = old.before(step), new.before(step)
    place = first_difference(before.description, after.description)
    if place is None:
        return None
    text = f"{place[0]} {place[1]!r} -> {place[2]!r}"
    if not (old.config and new.config):
        return text
    deciding = [change for change in changes(before, after) if change.step is not None and change.step < step]
    return f"{text} ({deciding[0]})" if deciding and str(deciding[0]) != text else text


# The history


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The run that another was forked from."""

    config: str
    """Its file, from the folder of the fork."""
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
    forked_from: Origin | None = None

    def __str__(self) -> str:
        head = f"{self.time[:10]} plan {self.plan[:8]}…"
        origin = self.forked_from
        if origin is not None:
            head += f" forked from {origin.config} (plan {origin.plan[:8]}…) at step {origin.step:,}"
        elif self.before is None:
            return f"{head} is the first on record"
        if self.first_step is not None:
            head += f"{', differs' if origin else ''} from step {self.first_step:,}"
        # A skip or quarantine that is new is named by its reason, not again by its keys.
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
    folder: Path, name: str, plan: Plan, config: Config, *, origin: tuple[Origin, PlanRecord] | None = None
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
    """Return what is on record of a plan; None if there is nothing."""
    with suppress(OSError, ConfigError):
        file = _plan_file(folder, number)
        return read_json(PlanRecord, file.read_bytes(), str(file))
    return None


def _keep(folder: Path, number: str, plan: PlanRecord) -> None:
    """Write the record of a plan, unless it is there; one without a config is replaced."""
    from tokenmill.store.files import write_atomically

    known = read_plan(folder, number)
    if known is not None and known.config:
        return
    file = _plan_file(folder, number)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, msgspec.json.format(msgspec.json.encode(plan), indent=2))


def _append(file: Path, edit: Edit) -> None:
    """Add a line in one write, so that those of several processes never mix."""
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
