"""Functions of higher rooms that lower rooms call by name; `tokenmill/__init__.py` sets the module of each.

A store can show its text, and a run its viewer, although neither may import what decodes or draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

_HOMES: dict[str, str] = {}


def attach(homes: Mapping[str, str]) -> None:
    """Set the module of each function; the module is imported at the first call."""
    _HOMES.update(homes)


def attached(name: str) -> Callable[..., Any]:
    """Return the function that was attached under a name."""
    function: Callable[..., Any] = getattr(import_module(_HOMES[name]), name)
    return function
