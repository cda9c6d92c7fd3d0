"""The history of a run: which plan followed which, from which step on, and why.

A line of JSON for each plan that a run was loaded with, in `.tokenmill/history/<name of the config>.jsonl`, beside
the descriptions of the plans in `.tokenmill/plans/`. It is for people: nothing else depends on it, and a folder
that cannot be written to costs only the history.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from tokenmill.fingerprint import first_difference

if TYPE_CHECKING:
    from tokenmill.config.run import Config, QuarantineConfig
    from tokenmill.plan import Plan


# What differs between two configs, by the path of each key, and from which step on it matters.

Value: TypeAlias = bool | int | float | str | list[int] | list[str]
Tables: TypeAlias = Mapping[str, Any]
"""A config as nested tables; what it leaves at its default is not in them."""
Description: TypeAlias = Mapping[str, Any]
"""What `Plan.describe` gives."""

_TOLD = frozenset(("name", "lr_scale", "reason", "arrays"))
"""Keys that decide no batch."""
_INHERITED = frozenset(
    (
        *("seed", "global_batch_size", "seq_len", "packing", "split", "crop", "shuffle"),
        *("weights", "temperature", "weigh_by"),
    )
)
"""Keys of [run] that a stage may say for itself."""
_SHOWN_ITEMS = 8
"""Longer lists are shown by their first items."""


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
        """Return it as one that has turned out to change no batch."""
        return replace(self, step=None)

    def to_json(self) -> dict[str, Value | None]:
        """Return it as JSON."""
        return {"path": self.path, "old": self.old, "new": self.new, "step": self.step}


def shown(value: Value | None) -> str:
    """Show a value of a config.

    >>> shown(None), shown("full"), shown(0.5), shown([1, 2])
    ('(absent)', "'full'", '0.5', '[1, 2]')
    """
    if value is None:
        return "(absent)"
    if isinstance(value, list) and len(value) > _SHOWN_ITEMS:
        return f"[{', '.join(map(repr, value[:_SHOWN_ITEMS]))}, and {len(value) - _SHOWN_ITEMS:,} more]"
    return repr(value)


def tables_of(config: Config) -> dict[str, Any]:
    """Return a config as tables of JSON values; what is at its default is left out."""
    found: dict[str, Any] = {"run": _table(config.run)}
    for name in ("sources", "stages", "skip", "quarantine"):
        items = [_table(item) for item in getattr(config, name)]
        if items:
            found[name] = items
    return found


def _table(item: Any) -> dict[str, Any]:  # noqa: ANN401 - any dataclass of the config
    found = {}
    for key in fields(item):
        value = getattr(item, key.name)
        default = key.default_factory() if key.default_factory is not MISSING else key.default
        if value != default:
            found[key.name] = (
                list(value) if isinstance(value, tuple) else dict(value) if isinstance(value, Mapping) else value
            )
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """A run, as far as it can be compared."""

    tables: Tables
    """None are known of plans that were recorded long ago: empty."""
    description: Description

    @property
    def steps(self) -> int | None:
        """Number of its steps, if known."""
        steps = self.tables.get("run", {}).get("steps")
        return steps if isinstance(steps, int) else None


def begins(old: Side, new: Side) -> int | None:
    """Return the first step at which batches may differ, going by descriptions; None where all are the same."""
    found = _edge(old.description, new.description)
    ends = {side.steps for side in (old, new)}
    if len(ends) == 1 or None in ends:
        return found
    last = min(end for end in ends if end is not None)
    return last if found is None else min(found, last)


def _edge(old: Description, new: Description) -> int | None:
    if any(old.get(key) != new.get(key) for key in ("version", "contract")):
        return 0
    left, right = old["stages"], new["stages"]
    for number in range(max(len(left), len(right))):
        stages = [side[number] for side in (left, right) if number < len(side)]
        if len(stages) < 2 or stages[0] != stages[1]:
            return min(int(stage["start_step"]) for stage in stages)
    return None


def changes(old: Side, new: Side, first_step: int | None = None) -> list[Change]:
    """Return what differs: first what makes the first difference, then the rest, last what changes no batch.

    `first_step` is the first step at which batches are known to differ; where it is not given, that at which the
    descriptions do.
    """
    first = begins(old, new) if first_step is None else first_step
    found = _listed(old, new) if old.tables and new.tables else []
    found += _hidden(old, new, found)
    if first is None:
        return [change.inert() for change in found]

    def rank(change: Change) -> tuple[bool, bool, int, bool]:
        # The nearest cause before the first difference; what begins later cannot have made it. That a stage begins
        # says less than what it changes.
        if change.step is None:
            return True, True, 0, False
        whole = change.path.endswith(".start_step") and None in (change.old, change.new)
        return False, change.step > first, abs(first - change.step), whole

    return sorted(found, key=rank)


def _listed(old: Side, new: Side) -> list[Change]:
    """Return the keys that differ, in the order of the config."""
    left, right = _filled(old.tables), _filled(new.tables)
    found = _leaves("run", left["run"], right["run"], lambda key: _run_step(key, left, right))
    for name, keys in _KEYS.items():
        for number, before, after in _pairs(left.get(name, []), right.get(name, []), keys):
            sides = [side for side in (before, after) if side]

            def step(key: str, name: str = name, sides: Sequence[Tables] = sides) -> int | None:
                return _step(name, key, sides, (old, new))

            found += _leaves(f"{name}[{number}]", before, after, step)
    return found


def _filled(tables: Tables) -> dict[str, Any]:
    """Return tables with the one stage that a run without any has."""
    return {**tables, "stages": tables.get("stages") or [{"name": "main", "start_step": 0}]}


def _leaves(path: str, old: Tables, new: Tables, step: Callable[[str], int | None]) -> list[Change]:
    found = []
    for key in dict.fromkeys((*new, *old)):
        before, after = old.get(key), new.get(key)
        if before == after:
            continue
        if isinstance(before, Mapping) or isinstance(after, Mapping):
            for name in dict.fromkeys((*(after or {}), *(before or {}))):
                sides = (before or {}).get(name), (after or {}).get(name)
                if sides[0] != sides[1]:
                    found.append(Change(path=f"{path}.{key}.{name}", old=sides[0], new=sides[1], step=step(key)))
        else:
            found.append(Change(path=f"{path}.{key}", old=before, new=after, step=step(key)))
    return found


_KEYS: Mapping[str, Sequence[tuple[str, ...]]] = {
    "sources": (("name",), ("store", "documents")),
    "stages": (("name", "start_step"), ("name",), ("start_step",)),
    "skip": (("steps", "reason"), ("steps",), ()),
    "quarantine": (("source", "from_step", "documents", "file"), ("source", "from_step"), ("source",), ()),
}
"""Lists of tables -> by which keys the tables of two configs are taken for the same one, the surest first."""


def _pairs(
    old: Sequence[Tables], new: Sequence[Tables], keys: Sequence[tuple[str, ...]]
) -> list[tuple[int, Tables, Tables]]:
    """Say which tables of two lists belong together: (number in the new list or the old one, old, new)."""
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
    if key in _TOLD:
        return None
    if key == "steps":
        return min(int(side["run"]["steps"]) for side in (old, new))
    stages = [stage for side in (old, new) for stage in side["stages"]]
    if key in _INHERITED:
        return min((int(stage["start_step"]) for stage in stages if key not in stage), default=None)
    if key in ("block_rows", "window_blocks"):
        return min(
            (
                int(stage["start_step"])
                for side in (old, new)
                for stage in side["stages"]
                if stage.get("shuffle", side["run"].get("shuffle")) == "block"
            ),
            default=None,
        )
    return 0


def _step(name: str, key: str, sides: Sequence[Tables], runs: tuple[Side, Side]) -> int | None:
    """Return the first step that a key of a table in a list can change."""
    if name == "sources":
        return _source_step(key, sides, runs)
    if key in _TOLD:
        return None
    if name == "stages":
        return _stage_step(key, sides, runs)
    if name == "quarantine":
        return min(int(side["from_step"]) for side in sides)
    ranges = [[int(edge) for edge in side["steps"].split(":")] for side in sides]
    firsts, lasts = {edges[0] for edges in ranges}, {edges[1] for edges in ranges}
    # Where only the end is moved, the steps until the nearer end stay as they were.
    return min(firsts) if len(sides) < 2 or len(firsts) > 1 else min(lasts)


def _stage_step(key: str, sides: Sequence[Tables], runs: tuple[Side, Side]) -> int | None:
    """Return the first step that a key of a stage can change.

    A stage that is new, or gone, changes what it does not share with the one that runs there in the other config.
    """
    step = min(int(side["start_step"]) for side in sides)
    if len(sides) > 1:
        return step
    here, there = sorted((_running(run.tables, step) for run in runs), key=lambda one: one[0] != step)
    if there[0] == step:
        return step
    if key == "start_step":
        return None if here[1] == there[1] else step
    return None if here[1].get(key) == there[1].get(key) else step


def _running(tables: Tables, step: int) -> tuple[int, dict[str, Any]]:
    """Return the stage that runs at a step: where it begins, and what it says or takes from [run]."""
    tables = _filled(tables)
    stage = max(
        (stage for stage in tables["stages"] if stage["start_step"] <= step),
        key=lambda stage: int(stage["start_step"]),
        default=tables["stages"][0],
    )
    begin = int(stage["start_step"])
    said = {key: value for key, value in tables["run"].items() if key in _INHERITED}
    said |= {key: value for key, value in stage.items() if key not in _TOLD and key != "start_step"}
    if begin < step:
        # It began with these; a ramp that goes on would be cut.
        said.pop("on_change", None)
        if step >= begin + int(stage.get("ramp_steps", 0)):
            said = {key: value for key, value in said.items() if not key.startswith("ramp")}
    return begin, said


def _source_step(key: str, sides: Sequence[Tables], runs: tuple[Side, Side]) -> int | None:
    """Return the first step that a key of a source can change; None if its tokens are the same in spite of it."""
    if key in ("max_epochs", "on_exhausted"):
        stops = any(side.get("on_exhausted") == "stop" for side in sides)
        return begins(*runs) if stops else None
    names = {str(side["name"]) for side in sides}
    contents = [{_content(stage["sources"][name]) for name, stage in _uses(run, names)} for run in runs]
    if key != "name" and contents[0] == contents[1]:
        return None
    return min((int(stage["start_step"]) for run in runs for _, stage in _uses(run, names)), default=None)


def _content(rows: Mapping[str, Any]) -> str:
    """Return what stands for the tokens of a source: those of a store, or of live text with what deals it out."""
    return str(rows.get("store", rows.get("live")))


def _uses(run: Side, names: set[str]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the described stages that draw from a source of one of these names."""
    return [
        (name, stage) for stage in run.description["stages"] for name in sorted(names) if name in stage["sources"]
    ]


def _hidden(old: Side, new: Side, found: Sequence[Change]) -> list[Change]:
    """Return what differs though no key says so: other tokens in a store, other numbers in a file.

    Where nothing else is known, the first difference of the descriptions.
    """
    hidden = []
    for number, source in enumerate(new.tables.get("sources", [])):
        uses = [_uses(run, {source["name"]}) for run in (old, new)]
        made_of = [side[0][1]["sources"][source["name"]] if side else {} for side in uses]
        stores = [str(one.get("store", one.get("files", ""))) for one in made_of]
        told = any(change.path.startswith(f"sources[{number}].") and change.step is not None for change in found)
        if all(stores) and stores[0] != stores[1] and not told:
            step = min(int(side[0][1]["start_step"]) for side in uses)
            before, after = (f"content {store[:12]}" for store in stores)
            key = "documents" if "documents" in source else "store"
            hidden.append(Change(path=f"sources[{number}].{key}", old=before, new=after, step=step))
    edge = _edge(old.description, new.description)
    deciding = [change for change in (*found, *hidden) if change.step is not None]
    if edge is None or any(change.step is not None and change.step <= edge for change in deciding):
        return hidden
    place = first_difference(dict(old.description), dict(new.description))
    assert place is not None  # there is an edge
    path, before, after = place
    for number, edit in enumerate(new.tables.get("quarantine", [])):
        if path.endswith(f".{edit['source']}.quarantined") and "file" in edit:
            path = f"quarantine[{number}].file"
    return [*hidden, Change(path=path, old=_plain(before), new=_plain(after), step=edge)]


def _plain(value: Any) -> Value | None:  # noqa: ANN401 - any JSON value
    """Return a value of a description as one that can be shown."""
    if value == "(absent)":
        return None
    return value if isinstance(value, bool | int | float | str) else str(value)


PLAN_DIGITS = 16
"""Of a plan's fingerprint, as states name it."""
_SHOWN_CHANGES = 3
"""More are counted."""


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
    """A plan that a run was trained with, and what it changed."""

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

    def to_json(self) -> dict[str, Any]:
        """Return it as a line of the history has it."""
        origin = self.forked_from
        told = {"config": origin.config, "plan": origin.plan, "step": origin.step} if origin else None
        return {
            "time": self.time,
            "plan": self.plan,
            "before": self.before,
            "first_step": self.first_step,
            "changes": [change.to_json() for change in self.changes],
            "reasons": list(self.reasons),
            **({"forked_from": told} if told else {}),
        }


def read_history(folder: Path, name: str) -> list[Edit]:
    """Return the plans of a run, oldest first; lines that cannot be read are left out."""
    try:
        data = _history_file(folder, name).read_bytes()
    except OSError:
        return []
    found: list[Edit] = []
    for edit in map(_parse, data.split(b"\n")):
        # Two processes that loaded the run at the same time have both noted it.
        if edit is not None and not (found and found[-1].plan == edit.plan and edit.forked_from is None):
            found.append(edit)
    return found


def _last_plan(folder: Path, name: str) -> str | None:
    """Return the plan of the last line that can be read; None if there is none."""
    try:
        data = _history_file(folder, name).read_bytes()
    except OSError:
        return None
    found = (_parse(line) for line in reversed(data.split(b"\n")))
    return next((edit.plan for edit in found if edit is not None), None)


def _parse(line: bytes) -> Edit | None:
    try:
        fields = msgspec.json.decode(line)
        origin, first_step = fields.get("forked_from"), fields["first_step"]
        return Edit(
            time=str(fields["time"]),
            plan=str(fields["plan"]),
            before=fields["before"],
            first_step=None if first_step is None else int(first_step),
            changes=tuple(Change(**change) for change in fields["changes"]),
            reasons=tuple(fields["reasons"]),
            forked_from=Origin(**origin) if origin else None,
        )
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return None


def lines(edits: Sequence[Edit]) -> list[str]:
    """Return a history for people, a line an edit.

    >>> made = Edit(time="2026-11-16T08:00:00Z", plan="1a2b3c4d5e6f7081", before="77", first_step=1200,
    ...             reasons=("skip 1200:1240 (loss spike)",))
    >>> lines([made])
    ['2026-11-16 plan 1a2b3c4d… from step 1,200: skip 1200:1240 (loss spike)']
    """
    return [_line(edit) for edit in edits]


def _line(edit: Edit) -> str:
    head = f"{edit.time[:10]} plan {edit.plan[:8]}…"
    if edit.forked_from is not None:
        origin = edit.forked_from
        head += f" forked from {origin.config} (plan {origin.plan[:8]}…) at step {origin.step:,}"
    elif edit.before is None:
        return f"{head} is the first on record"
    if edit.first_step is not None:
        head += (
            f" from step {edit.first_step:,}"
            if edit.forked_from is None
            else f", differs from step {edit.first_step:,}"
        )
    # What a reason tells is not told again, key by key.
    added = ("skip[", "quarantine[")
    rest = [change for change in edit.changes if not (change.old is None and change.path.startswith(added))]
    told = [*edit.reasons, *(str(change) for change in rest[:_SHOWN_CHANGES])]
    if len(rest) > _SHOWN_CHANGES:
        told.append(f"and {len(rest) - _SHOWN_CHANGES} more")
    if not told:
        return head if edit.forked_from else f"{head}: what changed is not on record"
    return f"{head}: {', '.join(told)}"


def record(
    folder: Path, name: str, plan: Plan, config: Config, *, origin: tuple[Origin, Side] | None = None
) -> None:
    """Keep the description of a plan beside its config; note it in the history, if it is not the last one there.

    `origin` is for a fork: where it comes from, and that run. Nothing is raised where nothing can be written.
    """
    new = Side(tables=tables_of(config), description=plan.describe())
    number = plan.fingerprint[:PLAN_DIGITS]
    with suppress(OSError):
        _keep(folder, number, new)
    last = _last_plan(folder, name)
    if last == number and origin is None:
        return
    before = origin[0].plan if origin else last
    old = origin[1] if origin else read_plan(folder, before) if before else None
    edit = Edit(
        time=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        plan=number,
        before=before,
        first_step=begins(old, new) if old else None,
        changes=tuple(changes(old, new)) if old else (),
        reasons=tuple(_reasons(old, config)) if old and old.tables else (),
        forked_from=origin[0] if origin else None,
    )
    with suppress(OSError):
        _append(_history_file(folder, name), edit)


def read_plan(folder: Path, number: str) -> Side | None:
    """Return what is on record of a plan; None if there is nothing."""
    try:
        found = msgspec.json.decode(_plan_file(folder, number).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    stages = found.get("stages") if isinstance(found, dict) else None
    known = {"start_step", "sources"}
    if not isinstance(stages, list) or not all(isinstance(one, dict) and known <= one.keys() for one in stages):
        return None
    # Records of earlier versions have no config.
    return Side(tables=found.pop("config", None) or {}, description=found)


def explain(old: Side, new: Side, step: int) -> str | None:
    """Say what makes the first difference before a step: in the description, and by which key of the config."""
    stages = [stage for stage in old.description["stages"] if stage["start_step"] < step]
    then = [stage for stage in new.description["stages"] if stage["start_step"] < step]
    before = Side(tables=old.tables, description={**old.description, "stages": stages})
    after = Side(tables=new.tables, description={**new.description, "stages": then})
    found = first_difference(dict(before.description), dict(after.description))
    if found is None:
        return None
    text = f"{found[0]} {found[1]!r} -> {found[2]!r}"
    if not (old.tables and new.tables):
        return text
    told = [change for change in changes(before, after) if change.step is not None and change.step < step]
    return f"{text} ({told[0]})" if told and str(told[0]) != text else text


def _reasons(old: Side, config: Config) -> list[str]:
    """Return the skips and quarantines of a config that an old one did not have."""
    skips = [skip.get("steps") for skip in old.tables.get("skip", [])]
    parts = ("source", "from_step", "documents", "file")
    known = [tuple(_listed_edits(edit.get(key)) for key in parts) for edit in old.tables.get("quarantine", [])]
    found = [_told(f"skip {skip.steps}", skip.reason) for skip in config.skip if skip.steps not in skips]
    found += [
        _told(_quarantine(edit), edit.reason)
        for edit in config.quarantine
        if tuple(_listed_edits(getattr(edit, key)) for key in parts) not in known
    ]
    return found


def _listed_edits(value: object) -> object:
    """Return a value as JSON gives it back; an empty list is one that is not said."""
    return list(value) or None if isinstance(value, tuple) else value


def _quarantine(edit: QuarantineConfig) -> str:
    if edit.whole:
        what = "all"
    elif edit.file is not None:
        what = f"documents in {edit.file}"
    else:
        numbers = edit.documents or ()
        shown = ", ".join(map(str, numbers[:4])) + (", …" if len(numbers) > 4 else "")
        what = f"document{'s' * (len(numbers) > 1)} {shown}"
    return f"quarantine {what} of {edit.source} from step {edit.from_step}"


def _told(edit: str, reason: str) -> str:
    return f"{edit} ({reason})" if reason else edit


def _history_file(folder: Path, name: str) -> Path:
    return folder / ".tokenmill" / "history" / f"{name}.jsonl"


def _plan_file(folder: Path, number: str) -> Path:
    safe = "".join(character for character in number if character.isalnum())
    return folder / ".tokenmill" / "plans" / f"{safe}.json"


def _keep(folder: Path, number: str, side: Side) -> None:
    """Write the record of a plan, unless it is there; one without a config is replaced."""
    from tokenmill.store.durable import write_atomically

    known = read_plan(folder, number)
    if known is not None and known.tables:
        return
    file = _plan_file(folder, number)
    file.parent.mkdir(parents=True, exist_ok=True)
    described: Mapping[str, Any] = {**side.description, "config": side.tables}
    write_atomically(file, msgspec.json.format(msgspec.json.encode(described), indent=2))


def _append(file: Path, edit: Edit) -> None:
    """Add a line in one write, so that those of several processes never mix."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        line = msgspec.json.encode(edit.to_json()) + b"\n"
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line  # a line that a full disk cut short stays alone
        os.write(descriptor, line)
    finally:
        os.close(descriptor)
