"""Functions of higher rooms that methods of lower ones call: a lower room knows the name, `tokenmill` the home.

A store can show its text, and a run its viewer, although neither may import what decodes or draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

_HOMES: dict[str, str] = {}


def attach(homes: Mapping[str, str]) -> None:
    """Say in which module each function is; it is imported when it is first called."""
    _HOMES.update(homes)


def attached(name: str) -> Callable[..., Any]:
    """Return a function of a higher room."""
    function: Callable[..., Any] = getattr(import_module(_HOMES[name]), name)
    return function
