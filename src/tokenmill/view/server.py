"""The server of the viewer: on loopback by default, with a random word in every address, read-only."""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenmill.errors import ConfigError, TokenmillError, nearest
from tokenmill.view.pages import PAGES, problem, shell
from tokenmill.view.views import VIEWS, Opened

STATIC = Path(__file__).parent / "static"
FILES = {"app.js": "text/javascript; charset=utf-8", "style.css": "text/css; charset=utf-8"}
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every response: nothing is loaded from other sites, and only the viewer's own script runs."""


def new_word() -> str:
    """Return the random word with which every address of one server starts."""
    return secrets.token_urlsafe(24)


def make_app(opened: Opened, word: str, hosts: tuple[str, ...]) -> Starlette:
    """Return the application. `hosts` are the accepted host names, with their port."""

    async def page(request: Request) -> Response:
        name, shown = request.path_params["view"], opened
        if name not in VIEWS:
            message = f"unknown view: {name[:40]!r}; choose one above"
            return _page(opened, name, problem(message), 404)
        try:
            shown = _chosen(opened, request)
            body = await run_in_threadpool(_draw, shown, name, dict(request.query_params))
        except (TokenmillError, OSError) as error:
            step = request.query_params.get("step", "0") if name == "step" else ""
            return _page(
                shown, name, problem(str(error), int(step) if re.fullmatch(r"\d{1,18}", step, re.A) else None), 400
            )
        return _page(shown, name, body)

    async def api(request: Request) -> Response:
        name = request.path_params["view"]
        try:
            if name not in VIEWS:
                raise ConfigError(f"view: must be one that there is, got {name[:40]!r}; {nearest(name, VIEWS)}")
            record = await run_in_threadpool(_ask, _chosen(opened, request), name, dict(request.query_params))
        except (TokenmillError, OSError) as error:
            return _json({"error": str(error)}, 400)
        return _json(record)

    def first(request: Request) -> Response:  # noqa: ARG001 - as starlette calls it
        return RedirectResponse(f"/{word}/{opened.first_view}")

    def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in FILES:
            return PlainTextResponse("there is no such file\n", 404)
        return Response((STATIC / name).read_bytes(), media_type=FILES[name])

    routes = [Route(f"/{word}/", first)]
    for place in (f"/{word}", f"/{word}/with/{{other}}"):
        routes += [
            Route(f"{place}/static/{{name}}", static),
            Route(f"{place}/api/{{view}}", api),
            Route(f"{place}/{{view}}", page),
        ]
    return Starlette(routes=routes, middleware=[Middleware(_Guard, hosts=hosts)])


def _chosen(opened: Opened, request: Request) -> Opened:
    """Return the target of an address: `with/OTHER.toml/...` is a run that this one is compared with."""
    other = request.path_params.get("other")
    return opened if other is None else opened.beside(other)


def _ask(opened: Opened, name: str, parameters: dict[str, str]) -> Any:  # noqa: ANN401 - the record of any view
    with opened.lock:
        return VIEWS[name](opened, parameters)


def _draw(opened: Opened, name: str, parameters: dict[str, str]) -> str:
    return PAGES[name](_ask(opened, name, parameters))


def _page(opened: Opened, name: str, body: str, status: int = 200) -> Response:
    try:
        views = opened.views
    except (TokenmillError, OSError):  # the body reports what is wrong with it
        views = ()
    text = shell(opened.name, views, name, body)
    return Response(text, status, media_type="text/html; charset=utf-8")


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value, enc_hook=str), status, media_type="application/json")


class _Guard:
    """Rejects requests for another host, from pages of other origins, and with methods that write."""

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...]) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *extra]}
            await send(message)

        asked = self._refused(Request(scope)) if scope["type"] == "http" else None
        await (asked or self._app)(scope, receive, send_with_headers)

    def _refused(self, request: Request) -> Response | None:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        if host not in self._hosts:
            return PlainTextResponse(
                "this server is not known by that name; use the address that it printed\n", 403
            )
        if origin is not None and origin not in {f"http://{name}" for name in self._hosts}:
            return PlainTextResponse("pages of others may not ask this server\n", 403)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("nothing can be written here\n", 405)
        return None
