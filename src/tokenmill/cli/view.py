"""`tokenmill view`: look at a run or a store in a browser."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated

import typer

from tokenmill.cli import console as ui
from tokenmill.errors import ConfigError, MissingExtraError


def view(
    path: Annotated[
        str, typer.Argument(metavar="RUN.toml|STORE", help="Config of a run, or folder or address of a store.")
    ],
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.")] = 0,
    diff: Annotated[Path | None, typer.Option(metavar="OTHER.toml", help="Run to compare with.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    expose: Annotated[
        bool, typer.Option("--i-know", help="Listen beyond this machine: who has the address reads all documents.")
    ] = False,
) -> None:
    """Show batches, mixture, packing, documents and differences in a browser. Nothing is written or loaded."""
    try:
        import uvicorn

        from tokenmill.view.server import LOOPBACK, make_app, new_word
    except ImportError as error:
        raise MissingExtraError(
            f"tokenmill view: needs starlette and uvicorn, got {error}; pip install 'tokenmill[view]'"
        ) from None
    from tokenmill.view.views import Opened

    if host not in LOOPBACK and not expose:
        raise ConfigError(
            f"--host: must be an address of this machine alone, got {host!r}, by which others could read every "
            "document; add --i-know if that is meant"
        )
    opened = Opened(path=ui.place(path), other=diff)
    with ui.busy("opening"):
        _ = opened.stores if opened.run is None else opened.run.plan()
    with socket.create_server((host.strip("[]"), port)) as listening:
        port = listening.getsockname()[1]
        word, names = new_word(), (host, *(LOOPBACK if host in LOOPBACK else ()))
        app = make_app(opened, word, tuple(f"{name}:{port}" for name in dict.fromkeys(names)))
        if host not in LOOPBACK:
            ui.print_line(f"warning: {path} and all documents of its stores can be read by who has this address")
        ui.print_line(f"http://{host}:{port}/{word}/  (Ctrl-C ends it)")
        config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, lifespan="off")
        uvicorn.Server(config).run(sockets=[listening])
