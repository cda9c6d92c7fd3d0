"""Addresses of object storage: what `s3://bucket/path?endpoint=...` says, and what it may not say."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from urllib.parse import parse_qsl, urlsplit

from tokenmill.errors import ConfigError, nearest
from tokenmill.types import RemoteOptions

SCHEMES = ("s3", "gs", "az", "file")
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_LOOPBACK = re.compile(r"localhost|127(\.\d{1,3}){3}|::1")


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


def is_address(path: object) -> bool:
    """Say whether a path is meant for object storage: it has a scheme.

    >>> is_address("s3://bucket/web"), is_address("stores/web"), is_address("hf:org/data")
    (True, False, False)
    """
    return isinstance(path, str) and _ADDRESS.match(path) is not None


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
                f"{shown}: behind the ? of an address must stand endpoint= alone, got another key; leave it out, "
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
