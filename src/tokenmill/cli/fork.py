"""`tokenmill fork`: a new run that shares all batches of another before a step."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import console as ui
from tokenmill.errors import ConfigError


def fork(
    run: ui.RunFile,
    at: Annotated[int, typer.Option(metavar="STEP", help="First step that is to differ.")],
    to: Annotated[Path, typer.Option(metavar="NEW.toml", help="Config to write; its state is written beside it.")],
    name: Annotated[
        str | None, typer.Option(help="Of the stage that begins there; default: fork.", show_default=False)
    ] = None,
    weights: Annotated[
        str | None, typer.Option(metavar="web=0.5,books=0.5", help="Of that stage; default: as before.")
    ] = None,
    world_size: ui.WorldSize = None,
    json: ui.AsJson = False,
) -> None:
    """Write the config and the state of a run that parts from another at a step.

    All batches before it are the same, which is proven before anything is written.
    """
    opened = ui.open_run(run, world_size)
    fork = opened.fork(at=at, to=to, name=name, weights=None if weights is None else _weights(weights))
    if json:
        ui.print_json(asdict(fork))
        return
    state = to.with_name(fork.state.name)
    ui.print_line(f"wrote {to} and {state}: stage {fork.stage!r} begins at step {fork.step:,}")
    ui.print_line(f"all batches before are those of {run} (fingerprint {fork.shared[:12]})")
    if not fork.edited:
        ui.print_line(f"so are all after it, until you edit stage {fork.stage!r}")


def _weights(text: str) -> dict[str, float]:
    """Read the weights of sources."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = (piece.strip() for piece in part.partition("="))
        try:
            weight = float(number)
        except ValueError:
            raise ConfigError(
                f"--weights: must be a list of name=number, got {part.strip()!r}; for example web=0.5,books=0.5"
            ) from None
        if name in weights:
            raise ConfigError(f"--weights: must name each source once, got {name!r} twice; leave one out")
        weights[name] = weight
    return weights
