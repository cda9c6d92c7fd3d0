"""The history of a run: which plan followed which, from which step on, and why.

A line of JSON for each plan that a run was loaded with, in `.tokenmill/history/<name of the config>.jsonl`, beside
the descriptions of the plans in `.tokenmill/plans/`. It is for people: nothing else depends on it, and a folder
that cannot be written to costs only the history.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from tokenmill.changes import Change, Side, begins, changes, tables_of
from tokenmill.fingerprint import first_difference

if TYPE_CHECKING:
    from tokenmill.config import Config
    from tokenmill.edits import QuarantineConfig
    from tokenmill.plan import Plan

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
        fields = orjson.loads(line)
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
    except (AttributeError, KeyError, TypeError, ValueError):
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
        found = orjson.loads(_plan_file(folder, number).read_bytes())
    except (OSError, orjson.JSONDecodeError):
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
    known = [tuple(_listed(edit.get(key)) for key in parts) for edit in old.tables.get("quarantine", [])]
    found = [_told(f"skip {skip.steps}", skip.reason) for skip in config.skip if skip.steps not in skips]
    found += [
        _told(_quarantine(edit), edit.reason)
        for edit in config.quarantine
        if tuple(_listed(getattr(edit, key)) for key in parts) not in known
    ]
    return found


def _listed(value: object) -> object:
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
    write_atomically(file, orjson.dumps(described, option=orjson.OPT_INDENT_2))


def _append(file: Path, edit: Edit) -> None:
    """Add a line in one write, so that those of several processes never mix."""
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        line = orjson.dumps(edit.to_json()) + b"\n"
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line  # a line that a full disk cut short stays alone
        os.write(descriptor, line)
    finally:
        os.close(descriptor)
