"""Addresses in object storage, and the objects below one: read, listed and written; every failure gets a name.

An address such as `s3://bucket/path?endpoint=...` says where, and may not say more: no secret is in it.

A failure is named by its kind alone. The message of a server or library may have a signed address or a token in it.

Requests go to the endpoint alone. obstore follows redirects and has no option against it. So a redirect is looked
for when an address is opened, and an endpoint on this machine cannot lead to another one (`_LOCAL_ONLY`).
"""

from __future__ import annotations

import logging
import os
import random
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from http.client import HTTPException
from pathlib import Path
from threading import Event
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.error import HTTPError
from urllib.parse import parse_qsl, quote, urljoin, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from tokenmill.errors import (
    ConfigError,
    MissingExtraError,
    StoreCorruptError,
    StoreError,
    StoreExistsError,
    StoreMissingError,
    StoreUnreachableError,
    nearest,
)
from tokenmill.types import RemoteOptions

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")
logger = logging.getLogger("tokenmill")
SCHEMES = ("s3", "gs", "az", "file")
_LOOPBACK = re.compile(r"localhost|127(\.\d{1,3}){3}|::1")
CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "file": "its file permissions",
}
"""Scheme -> what identifies the user; clouds know other ways, too."""
CHUNK_BYTES = 8 << 20
"""Of a whole object, that is read or written in parts."""
_STATUS = re.compile(r"\b(?:status(?: code)?:? ?|error \()([1-5]\d\d)\b", re.IGNORECASE)
_NOWHERE = "127.0.0.1:0"
"""The proxy for requests that must not be sent: nothing can listen at port 0."""
_LOCAL_ONLY = (
    *("localhost", "127.0.0.0/8", "::1"),
    # Hosts that give credentials.
    *("169.254.0.0/16", "amazonaws.com", "amazonaws.com.cn"),
    *("metadata.google.internal", "googleapis.com", "microsoftonline.com", "windows.net"),
)
"""Hosts that may be reached while the endpoint is on this machine."""
REDIRECT, NO_LOCATION = "a redirect to another server", "a redirect to nowhere"
_KINDS = (
    (_NOWHERE, REDIRECT),
    ("redirect without LOCATION", NO_LOCATION),
    ("timed out", "a time-out"),
    ("TimedOut", "a time-out"),
    ("ConnectionRefused", "a refused connection"),
    ("dns error", "an unknown host"),
    ("Body", "a body that was cut short"),
    ("Decode", "a body that was cut short"),
    ("IncompleteMessage", "a connection that was cut"),
    ("ConnectionReset", "a connection that was cut"),
    ("kind: Connect", "no connection"),
)
_PASSING = frozenset(
    (
        *("a time-out", "a refused connection", "an unknown host", "no connection"),
        *("a body that was cut short", "a connection that was cut", "status 408", "status 429"),
    )
)
"""Kinds of failures after which a request is retried. So it is after a status of 500 and above, except of what a
server does not support."""
_REFUSALS = ("PermissionDeniedError", "UnauthenticatedError", "status 401", "status 403")
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound")
LINE_SECONDS = 30.0
"""Minimum time between two log lines about a server that does not answer."""
_next_lines: dict[str, float] = {}
"""Server -> the time from which it may be logged again."""
PROBE_SECONDS = 5.0
"""Time limit of the request that looks for a redirect."""


# Addresses.


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """A place in object storage: an object, or a prefix of objects."""

    scheme: str
    bucket: str
    """Bucket or container; empty for files."""
    key: str
    """Names of folders and object, without slashes at either end."""
    endpoint: str | None = None
    """Where the server is, if it is not that of the cloud which the scheme stands for."""

    def __str__(self) -> str:
        return f"{self.scheme}://{'/'.join(part for part in (self.bucket, self.key) if part or not self.bucket)}"

    def __truediv__(self, name: str) -> Address:
        """Return the address of what is below it.

        >>> str(parse_address("s3://bucket/stores/web") / "manifest.json")
        's3://bucket/stores/web/manifest.json'
        """
        return replace(self, key="/".join(part for part in (self.key, name.strip("/")) if part))

    @property
    def name(self) -> str:
        """The last part of it."""
        return self.key.rpartition("/")[2] or self.bucket


def parse_address(text: str, options: RemoteOptions | None = None) -> Address:
    """Read an address; what it leaves out is taken from the options. Secrets in it are refused, not repeated."""
    options = options or RemoteOptions()
    scheme = text.partition("://")[0]
    if scheme not in SCHEMES:
        raise ConfigError(
            f"address: must begin with {', '.join(f'{known}://' for known in SCHEMES)}, got {scheme}://; "
            f"{nearest(scheme, SCHEMES)}"
        )
    parts = urlsplit(text)
    shown = f"{scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    if "@" in parts.netloc or parts.fragment:
        raise ConfigError(
            f"{shown}: an address must have no user, password or #, got one; leave it out, credentials are taken "
            "from the environment"
        )
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    for name in query:
        if name != "endpoint":
            raise ConfigError(
                f"{shown}: after the ? of an address must stand endpoint= alone, got another key; leave it out, "
                "credentials are taken from the environment"
            )
    bucket, key = parts.netloc, parts.path.strip("/")
    if scheme == "file" and (bucket or not key):
        raise ConfigError(f"{shown}: must be file:// and a whole path, got no such; write file:///folder/store")
    if scheme != "file" and not bucket:
        raise ConfigError(f"{shown}: must name a bucket, got none; write {scheme}://bucket/path")
    if any(part in ("", ".", "..") for part in key.split("/")) and key:
        raise ConfigError(f"{shown}: must have plain names between its slashes, got others; write them out")
    endpoint = query.get("endpoint", options.endpoint) if scheme != "file" else None
    if endpoint is not None:
        _check_endpoint(shown, endpoint, options)
    return Address(scheme=scheme, bucket=bucket, key=key, endpoint=endpoint and endpoint.rstrip("/"))


def is_plain_http(endpoint: str | None) -> bool:
    """Say whether requests to an endpoint are not encrypted."""
    return endpoint is not None and endpoint.lower().startswith("http://")


def _check_endpoint(shown: str, endpoint: str, options: RemoteOptions) -> None:
    parts = urlsplit(endpoint)
    plain = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc or parts.query:
        raise ConfigError(
            f"{shown}: endpoint must be https://host, got {plain!r} or more; leave out users, passwords and ?"
        )
    if is_plain_http(endpoint) and not _LOOPBACK.fullmatch(parts.hostname) and not options.allow_http:
        raise ConfigError(
            f"{shown}: endpoint must be https but on this machine, got {plain!r}; use https, or say "
            "allow_http = true under [remote] if nobody else can read that network"
        )


# Objects.


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectInfo:
    """One object, as the server tells it."""

    name: str
    """Below the place."""
    bytes: int
    etag: str | None
    """Another one means other content."""


def _info(meta: Any, name: str) -> ObjectInfo:  # noqa: ANN401 - what obstore tells of an object
    etag = meta["e_tag"]
    if etag and not etag.endswith('"'):  # Azure lists versions without the quotes that it has elsewhere
        etag = f'"{etag}"'
    return ObjectInfo(name=name, bytes=int(meta["size"]), etag=etag)


class Client:
    """The objects below one address, by their names; safe for any number of threads.

    Failures that may pass are tried again, with growing pauses, until the deadline of the options.

    With `checksums`, a SHA-256 is sent with each part of an upload, and the server rejects other bytes.
    """

    def __init__(self, address: Address, options: RemoteOptions | None = None, *, checksums: bool = False) -> None:
        self.address = address
        self.options = options or RemoteOptions()
        self.checksums = checksums
        # obstore retries as well: a failed part of a large upload must not start the whole file again.
        self.store = connect(address, self.options, retries=3, checksums=checksums)
        self._stopped = Event()

    def get(self, name: str) -> bytes:
        """Return a whole object."""
        return self._call(name, "read", lambda obs: bytes(obs.get(self.store, name).bytes()))

    def stream(self, name: str, etag: str | None = None) -> Iterator[bytes]:
        """Yield an object in parts, of the version that `etag` names if it is given; each is a request."""
        info = self.head(name)
        if info is None:
            raise explained(FileNotFoundError(), self.address / name, "read", self.options)
        etag = etag or info.etag

        def part(begin: int) -> bytes:
            options = {"range": (begin, min(begin + CHUNK_BYTES, info.bytes)), "if_match": etag}
            return self._call(name, "read", lambda obs: bytes(obs.get(self.store, name, options=options).bytes()))

        yield from map(part, range(0, info.bytes, CHUNK_BYTES))

    def head(self, name: str) -> ObjectInfo | None:
        """Return what the server knows of an object; None where there is none."""
        try:
            meta = self._call(name, "read", lambda obs: obs.head(self.store, name))
        except StoreMissingError:
            return None
        return _info(meta, name)

    def list(self, folder: str = "") -> list[ObjectInfo]:
        """Return all objects below a folder, at any depth, in the order of their names."""

        def look(obs: Any) -> list[ObjectInfo]:  # noqa: ANN401 - the module obstore
            chunks = obs.list(self.store, folder or None, chunk_size=1000)
            return [_info(meta, meta["path"]) for chunk in chunks for meta in chunk]

        return sorted(self._call(folder, "list", look), key=lambda item: item.name)

    def put(self, name: str, data: bytes | Path) -> str | None:
        """Write an object, or overwrite it; a file is sent in parts. Return its ETag."""

        def send(obs: Any) -> str | None:  # noqa: ANN401 - the module obstore
            etag: str | None = obs.put(self.store, name, data, chunk_size=CHUNK_BYTES)["e_tag"]
            return etag

        return self._call(name, "write", send)

    def create(self, name: str, data: bytes) -> str | None:
        """Write an object where there is none, in one request, of which one of many wins; return its ETag."""

        def send(obs: Any) -> str | None:  # noqa: ANN401 - the module obstore
            etag: str | None = obs.put(self.store, name, data, mode="create", use_multipart=False)["e_tag"]
            return etag

        return self._call(name, "write", send)

    def check_redirect(self, name: str) -> None:
        """Raise StoreError if reading an object leads to another server."""
        server = redirect_of(self.address / name, self.options)
        if server is not None:
            raise redirected(self.address / name, server)

    def delete(self, name: str) -> None:
        """Remove an object; one that is not there does not matter."""
        with suppress(StoreMissingError):
            self._call(name, "remove", lambda obs: obs.delete(self.store, name))

    def _call(self, name: str, verb: str, ask: Callable[[Any], T]) -> T:
        import obstore

        address = self.address / name if name else self.address
        return named(lambda: ask(obstore), address, verb, self.options, self._stopped)

    def stop(self) -> None:
        """Retry no more requests: their threads are waited for when a command is interrupted."""
        self._stopped.set()


_users: list[int] = []
"""The process in which obstore was first used; its threads are in no process that is forked from it."""


def check_process(where: object) -> None:
    """Refuse to use object storage in a process that was forked from one that did: it would wait for ever."""
    if not _users:
        _users.append(os.getpid())
    if _users[0] != os.getpid():
        raise StoreError(
            f"{where}: a process must not be forked after object storage was used in it, got one that was; start "
            "it with spawn, or read in threads instead of workers"
        )


def connect(address: Address, options: RemoteOptions, *, retries: int, checksums: bool = False) -> ObjectStore:
    """Return obstore's own object for an address; no request is made."""
    check_process(address)
    try:
        import obstore.store as stores
    except ImportError:
        raise MissingExtraError(f"{address}: obstore is not installed; pip install 'tokenmill[remote]'") from None
    deadline = timedelta(seconds=options.deadline)
    client: Any = {
        "timeout": deadline,
        "connect_timeout": timedelta(seconds=min(5.0, options.deadline)),
        "pool_max_idle_per_host": str(options.concurrency),
    }
    if is_plain_http(address.endpoint) or options.allow_http:
        client["allow_http"] = True
    if is_plain_http(address.endpoint) and not options.allow_http:
        # The endpoint is on this machine. A redirect to another one ends at a proxy that does not exist.
        client |= {"proxy_url": f"http://{_NOWHERE}", "proxy_excludes": ",".join(_LOCAL_ONLY)}
    retry: Any = {"max_retries": retries, "retry_timeout": deadline}
    common: Any = {"prefix": address.key or None, "client_options": client, "retry_config": retry}
    if address.endpoint:
        common["base_url" if address.scheme == "gs" else "endpoint"] = address.endpoint
    if options.region and address.scheme == "s3":
        common["region"] = options.region
    if checksums:
        common["checksum_algorithm"] = "SHA256"
    if address.scheme == "file":
        os.makedirs(f"/{address.key}", exist_ok=True)
    try:
        if address.scheme == "s3":
            return stores.S3Store(address.bucket, **common)
        if address.scheme == "gs":
            return stores.GCSStore(address.bucket, **common)
        if address.scheme == "az":
            return stores.AzureStore(address.bucket, **common)
        return stores.LocalStore(f"/{address.key}", mkdir=False)
    except Exception as error:
        raise ConfigError(
            f"{address}: must be complete with what the environment says, got {kind_of(error)}; check "
            f"{CREDENTIALS[address.scheme]}, region and endpoint"
        ) from None


def named(ask: Callable[[], T], address: Address, verb: str, options: RemoteOptions, stopped: Event) -> T:
    """Return the result of a request, retried until the deadline; a failure is raised as an error of ours."""
    check_process(address)
    attempts = Attempts(options.deadline)
    while True:
        try:
            return ask()
        except Exception as error:
            kind = kind_of(error)
            pause = attempts.next_pause() if may_pass(kind) and not stopped.is_set() else None
            if pause is None:
                raise explained(error, address, verb, options) from None
        _log_waiting(address, kind, options)
        stopped.wait(pause)


class Attempts:
    """The attempts of one request: how many there were, and how long to wait before the next one."""

    def __init__(self, deadline: float) -> None:
        self.count = 1
        """Number of attempts, with the one that is under way."""
        self.end = monotonic() + deadline
        """Time at which the last attempt must have ended."""
        self._pause = 0.05

    def next_pause(self) -> float | None:
        """Return the seconds to wait before the next attempt; None if there is no time for one."""
        if monotonic() + self._pause > self.end:
            return None
        pause, self._pause = self._pause * random.uniform(0.5, 1.5), min(2.0, 2 * self._pause)
        self.count += 1
        return pause


def may_pass(kind: str) -> bool:
    """Whether a request that failed in this way may succeed later."""
    return kind in _PASSING or (kind.startswith("status 5") and kind not in ("status 501", "status 505"))


def _log_waiting(address: Address, kind: str, options: RemoteOptions) -> None:
    server, now = address.endpoint or f"{address.scheme}://{address.bucket}", monotonic()
    if now >= _next_lines.get(server, 0.0):
        _next_lines[server] = now + LINE_SECONDS
        logger.warning(
            "%s: object storage does not answer (%s); requests are retried for up to %g s",
            address,
            kind,
            options.deadline,
        )


def explained(error: Exception, address: Address, verb: str, options: RemoteOptions) -> StoreError:
    """Return the error of ours that a failed request stands for."""
    kind = kind_of(error)
    if isinstance(error, FileNotFoundError) or (kind, verb) == ("status 404", "list"):
        return _missing(error, address, verb)
    if kind == "AlreadyExistsError":
        return StoreExistsError(f"{address}: nothing may be there yet, got an object; choose another address")
    if kind in ("PreconditionError", "NotModifiedError"):
        return overwritten(address)
    if kind in (REDIRECT, *_REFUSALS):
        return _refused(kind, address, verb, options)
    if kind == NO_LOCATION or "No space left" in str(error):
        region = options.region or "the one of the environment"
        elsewhere = f"bucket is in another region than {region}; set region under [remote], or AWS_REGION"
        full = "the disk is full; free some space, then run the same command again"
        return StoreError(f"{address}: {elsewhere if kind == NO_LOCATION else full}")
    rule, way_out = f"cannot be {_done(verb)}: {kind}", "check endpoint, region and network"
    if may_pass(kind):
        rule = f"must be {_done(verb)} within {options.deadline:g} s, got {kind}"
        way_out += ", or raise deadline under [remote]"
    return StoreUnreachableError(f"{address}: {rule}; {way_out}")


def _missing(error: Exception, address: Address, verb: str) -> StoreError:
    """Return the error of an object that does not exist, or of a bucket: only that is missed by LIST and PUT."""
    if address.scheme != "file" and (verb in ("list", "write") or _NO_BUCKET.search(str(error))):
        kind = "container" if address.scheme == "az" else "bucket"
        return StoreError(
            f"{address}: {kind} not found: {address.bucket!r}; create it, or fix its name or the endpoint"
        )
    return StoreMissingError(
        f"{address}: an object must be there to be {_done(verb)}, got none; check the address, or upload it"
    )


def _refused(kind: str, address: Address, verb: str, options: RemoteOptions) -> StoreError:
    """Return the error of a request that was not allowed, perhaps as it was redirected without credentials."""
    server = redirect_of(address, options)
    if server is not None or kind == REDIRECT:
        return redirected(address, server or "another server")
    return StoreError(
        f"{address}: this user must be allowed to {verb} it, got a refusal; set {CREDENTIALS[address.scheme]}, or "
        "ask who owns the bucket"
    )


# Redirects.


class _Unfollowed(HTTPRedirectHandler):
    """Makes a redirect an HTTPError instead of following it."""

    def redirect_request(self, *_: object) -> None:
        """Return no request."""


def redirect_of(address: Address, options: RemoteOptions) -> str | None:
    """Return the other server that the endpoint sends readers of an object to.

    None if it sends them nowhere, or does not answer. A cloud that is used without an endpoint is not asked.
    """
    if address.endpoint is None:
        return None
    folder, _, name = address.key.rpartition("/")
    url = f"{address.endpoint}/{address.bucket}/{quote(address.key)}"
    if address.scheme == "s3":  # elsewhere signing may need requests of its own
        with suppress(Exception):
            import obstore

            store = connect(replace(address, key=folder), options, retries=0)
            url = obstore.sign(store, "GET", name, timedelta(minutes=1))
    try:
        request = Request(url, headers={"Range": "bytes=0-0"})
        with build_opener(_Unfollowed).open(request, timeout=min(PROBE_SECONDS, options.deadline)):
            return None
    except HTTPError as error:
        with error:
            location = error.headers.get("Location") if 300 <= error.code < 400 else None
    except (OSError, ValueError, HTTPException):
        return None
    there = location and _server(urljoin(url, location))
    return None if not there or there == _server(url) else there


def _server(url: str) -> str | None:
    """Return the scheme, host and port of a URL, without its user; None if it has no host."""
    parts = urlsplit(url)
    try:
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return None
    return f"{parts.scheme}://{parts.hostname}:{port}" if parts.hostname else None


def redirected(address: Address, server: str) -> StoreError:
    """Return the error of an endpoint that leads to another server."""
    return StoreError(
        f"{address}: redirected to {server}; redirects are not followed, so set endpoint to the server with "
        "the objects"
    )


def overwritten(address: Address) -> StoreCorruptError:
    """Return the error of an object that is not what it was."""
    return StoreCorruptError(
        f"{address}: an object must stay as it is while it is read, got another one in its place; put the first "
        "one back, or begin again without its mirror"
    )


def kind_of(error: BaseException) -> str:
    """Say in a few words of ours what went wrong; nothing that was received is repeated."""
    name, text = type(error).__name__, str(error)
    if name not in ("GenericError", "Exception", "OSError", "ValueError"):
        return name
    status = _STATUS.search(text)
    if status is not None:
        return f"status {status[1]}"
    return next((words for mark, words in _KINDS if mark in text), "a failed request")


def _done(verb: str) -> str:
    return {"read": "read", "list": "listed", "write": "written", "remove": "removed"}[verb]
