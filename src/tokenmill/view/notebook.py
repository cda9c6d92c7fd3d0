"""Runs and stores in a notebook: their summary as HTML, and the viewer without the command line."""

from __future__ import annotations

import socket
import sys
import threading
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenmill.errors import ConfigError, MissingExtraError, TokenmillError
from tokenmill.inspect.examples import examples
from tokenmill.inspect.stores import inspect_store, kept_tokenizer
from tokenmill.plan import Plan
from tokenmill.plan.report import report
from tokenmill.run.report import RunReport
from tokenmill.run.run import Run
from tokenmill.store import Store
from tokenmill.view.pages import plan_html, standalone, stores_html, table
from tokenmill.view.picture import text_of, timeline
from tokenmill.view.tables import stage_table
from tokenmill.view.views import AUDITED_ITEMS, Opened

if TYPE_CHECKING:
    import uvicorn

HEIGHT = "34em"


def run_html(run: Run) -> str | None:
    """Draw what `tokenmill plan --html` shows; None if the run cannot be compiled, so that its repr is shown."""

    def body() -> str:
        facts = run.report()
        picture = timeline(run.plan(), facts, run.name, facts.quarantined, facts.evals)
        return f"<figure>{picture}</figure>{plan_html(facts)}"

    return _framed(f"Run {run.name}", body)


def compiled_plan_html(plan: Plan) -> str | None:
    """Draw the shares over the run, and one line per stage."""

    def body() -> str:
        facts = report(plan)
        return f"<figure>{timeline(plan, facts, 'plan')}</figure>{table(stage_table(facts))}"

    return _framed(f"Plan {plan.fingerprint[:8]}", body)


def report_html(facts: RunReport) -> str | None:
    """Draw the tables of a report."""
    return _framed("Plan", lambda: plan_html(facts))


def store_html(store: Store) -> str | None:
    """Draw what `tokenmill inspect --html` shows, for a part of the documents; None for a remote store."""

    def body() -> str:
        tokenizer = kept_tokenizer(store)
        contents = inspect_store(store, tokenizer, max_items=AUDITED_ITEMS)
        return stores_html([(store.path.name, contents, examples(store, tokenizer))], None)

    return None if store._remotes else _framed(f"Store {store.where}", body)


def _framed(title: str, body: Callable[[], str]) -> str | None:
    """Return a page inside a frame: its styles stay within it, and no script can run."""
    try:
        page = standalone(title, body())
    except (TokenmillError, OSError):
        return None
    style = f"width:100%;height:{HEIGHT};border:1px solid #8888;resize:vertical"
    return f'<iframe sandbox title="{text_of(title)}" style="{style}" srcdoc="{text_of(page)}"></iframe>'


@dataclass(frozen=True, eq=False, repr=False)
class Viewer:
    """A viewer that serves one run or store from this process, until it is closed or the process ends."""

    address: str
    _server: uvicorn.Server
    _thread: threading.Thread

    def __str__(self) -> str:
        """Return the address."""
        return self.address

    def __repr__(self) -> str:
        """Describe the viewer in one line."""
        return f"<Viewer at {self.address}>"

    def _repr_html_(self) -> str:
        return f'<a href="{text_of(self.address)}" target="_blank" rel="noopener">{text_of(self.address)}</a>'

    def close(self) -> None:
        """Stop serving."""
        self._server.should_exit = True
        self._thread.join()


def open_viewer(target: Run | Store, *, port: int = 0, browser: bool | None = None) -> Viewer:
    """Serve the viewer of a run or store on this machine, and open it in a browser unless in a notebook."""
    try:
        import uvicorn

        from tokenmill.view.server import LOOPBACK, make_app, new_word
    except ImportError as error:
        raise MissingExtraError(
            f"view: the viewer needs starlette and uvicorn: {error}; pip install 'tokenmill[view]'"
        ) from None
    opened = Opened.of(target)
    _ = opened.stores if opened.run is None else opened.run.plan()  # raise errors here, not on the page
    try:
        listening = socket.create_server((LOOPBACK[0], port))
    except (OSError, OverflowError) as error:
        raise ConfigError(f"port: not available: {port} ({error}); leave it out, and a free one is taken") from None
    port, word = listening.getsockname()[1], new_word()
    app = make_app(opened, word, tuple(f"{name}:{port}" for name in LOOPBACK))
    config = uvicorn.Config(app, log_level="warning", access_log=False, server_header=False, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [listening]}, name="tokenmill-viewer", daemon=True
    )
    thread.start()
    viewer = Viewer(f"http://{LOOPBACK[0]}:{port}/{word}/", server, thread)
    if browser if browser is not None else "ipykernel" not in sys.modules:
        webbrowser.open(viewer.address)
    return viewer
