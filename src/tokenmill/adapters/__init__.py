"""The engine under the interfaces that people already use.

1. In: a run, a store or a loader of ours; what a framework passes to its datasets, samplers and loaders.
2. Does: speaks the language of one framework a file: its names, its parameters, its state; nothing is decided here.
3. Out: the batches of the loader as that framework wants them, with exact resume wired in.
"""

from __future__ import annotations

import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from tokenmill.errors import ConfigError, MissingExtraError
from tokenmill.plan.plan import TokenSchedule

ENDLESS = 1 << 40
"""Steps of live text that ends when nobody draws from it any more."""


def need(module: str, *, extra: str, adapter: str, at_least: str | None = None) -> None:
    """Import a framework, or say in one line what to install; `at_least` is a version such as "5.10"."""
    if not _is_there(module):
        raise MissingExtraError(f"{adapter}: needs {module}, got none; pip install 'tokenmill[{extra}]'")
    installed = _version_of(module) if at_least is not None else None
    if at_least is not None and installed is not None and _numbers(installed) < _numbers(at_least):
        raise MissingExtraError(
            f"{adapter}: needs {module} {at_least} or later, got {installed}; pip install '{module}>={at_least}'"
        )
    import_module(module)


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # something blocks the import, or the package that the module is in is missing
        return False


def _version_of(module: str) -> str | None:
    """Return the version that is installed; None for a module that is only on the path."""
    try:
        return version(module)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def check_schedule(schedule: object) -> None:
    """Reject what is not a schedule of a run."""
    if not isinstance(schedule, TokenSchedule):
        raise ConfigError(f"lr_schedule: expected a schedule of a run, got {schedule!r}; pass run.lr_schedule(...)")
