"""`tokenmill fork`: a new run that shares all batches of another before a step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from tokenmill.cli.console import WorldSize, console, print_json, tell
from tokenmill.errors import ConfigError


def fork(
    run: Annotated[Path, typer.Argument(metavar="RUN.toml", help="Config of a run.")],
    at: Annotated[int, typer.Option(metavar="STEP", help="First step that is to differ.")],
    to: Annotated[Path, typer.Option(metavar="NEW.toml", help="Config to write; its state is written beside it.")],
    name: Annotated[
        str | None, typer.Option(help="Of the stage that begins there; default: fork.", show_default=False)
    ] = None,
    weights: Annotated[
        str | None, typer.Option(metavar="web=0.5,books=0.5", help="Of that stage; default: as before.")
    ] = None,
    world_size: WorldSize = None,
    json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Write the config and the state of a run that parts from another at a step.

    All batches before it are the same, which is proven before anything is written.
    """
    from tokenmill.run.fork import fork as fork_run
    from tokenmill.run.run import Run

    opened = Run.from_toml(run, world_size=world_size)
    if opened.translation:
        tell(opened.translation)
    made = fork_run(opened, step=at, to=to, name=name, weights=None if weights is None else _weights(weights))
    if json:
        print_json(
            {
                "config": str(made.config),
                "state": str(made.state),
                "stage": made.stage,
                "step": made.step,
                "plan": made.plan,
                "shared": made.shared,
                "edited": made.edited,
            }
        )
        return
    lines = [
        f"wrote {to} and {to.with_name(made.state.name)}: stage {made.stage!r} begins at step {made.step:,}",
        f"all batches before are those of {run} (fingerprint {made.shared[:12]})",
    ]
    if not made.edited:
        lines.append(f"so are all after it, until you edit stage {made.stage!r}")
    for line in lines:
        console.print(Text(line), soft_wrap=True, highlight=False)


def _weights(text: str) -> dict[str, float]:
    """Read the weights of sources."""
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = (piece.strip() for piece in part.partition("="))
        try:
            weight = float(number)
        except ValueError:
            raise ConfigError(
                f"--weights: must be a list of name=number, got {part.strip()!r}; for example web=0.5,books=0.5"
            ) from None
        if name in found:
            raise ConfigError(f"--weights: must name each source once, got {name!r} twice; leave one out")
        found[name] = weight
    return found
