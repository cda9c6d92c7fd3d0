"""What an adapter needs beside tokenmill itself, and what to say where it is missing."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from tokenmill.errors import MissingExtraError


def need(module: str, *, extra: str, adapter: str) -> None:
    """Import a framework, or say in one line what to install."""
    if find_spec(module) is None:
        raise MissingExtraError(f"{adapter}: needs {module}, got none; pip install 'tokenmill[{extra}]'")
    import_module(module)
