"""`tokenmill diff`: the first step at which two runs differ, why, and how many rows do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from tokenmill.cli.console import WorldSize, console, errors, print_json, tell

if TYPE_CHECKING:
    from tokenmill.run.compare import Difference

_DEFAULT_ROWS = 1 << 22


def diff(
    old: Annotated[Path, typer.Argument(metavar="RUN1.toml", help="Config of a run.")],
    new: Annotated[Path, typer.Argument(metavar="RUN2.toml", help="Config of another.")],
    rows: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Rows that are computed at most, before the first difference and after."
        ),
    ] = _DEFAULT_ROWS,
    world_size: WorldSize = None,
    json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """At which step two runs first differ, by which change of the config, and in how many rows.

    The exit code is 0 if all batches are the same, 1 if not, and 2 if that cannot be told. Reads no token.
    """
    from tokenmill.run.compare import compare
    from tokenmill.run.run import Run

    runs = [Run.from_toml(path, world_size=world_size) for path in (old, new)]
    for run in runs:
        if run.translation:
            tell(run.translation)
    left, right = (run.plan() for run in runs)
    with errors.status("comparing") as status:
        found = compare(
            left,
            right,
            configs=(runs[0].config, runs[1].config),
            limit_rows=rows,
            progress=lambda done: status.update(f"compared {done:,} rows"),
        )
    if json:
        print_json(found.to_json())
    else:
        for line in told(found, max(left.steps, right.steps)):
            console.print(Text(line), soft_wrap=True, highlight=False)
    raise typer.Exit(0 if found.same else 1)


def told(found: Difference, steps: int) -> Iterator[str]:
    """Yield what was found, a sentence a line."""
    deciding = [str(change) for change in found.changes if change.step is not None]
    idle = [str(change) for change in found.changes if change.step is None]
    if found.first_step is not None:
        yield f"first difference at step {found.first_step:,} of {steps:,} (stage {found.stage!r})"
        yield f"because {deciding[0]}"
        if deciding[1:]:
            yield from ("other changes:", *(f"  {change}" for change in deciding[1:]))
    elif found.same:
        yield f"the same batches at all {steps:,} steps"
    else:
        assert found.begins is not None  # or all would be the same
        yield (
            f"no difference within the first {found.end_step - found.begins:,} steps after step {found.begins:,}, "
            f"where the configs begin to differ in {', '.join(deciding)}"
        )
        yield "raise --rows to compare more"
    if idle:
        yield from ("changes that change no batch:", *(f"  {change}" for change in idle))
    if found.first_step is not None:
        share = f"{found.differing / found.compared:.1%}"
        if found.complete:
            yield f"{found.differing:,} of {found.compared:,} rows differ after it ({share})"
        else:
            yield (
                f"{found.differing:,} of the first {found.compared:,} rows after it differ ({share}); the other "
                f"{found.total - found.compared:,} were not compared, raise --rows to compare more"
            )
