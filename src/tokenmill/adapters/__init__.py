"""tokenmill behind the interfaces of other frameworks.

1. In: a run, a store or a loader; the arguments that a framework passes to its datasets, samplers and loaders.
2. Does: translates names, parameters and state, one framework per file. It has no logic of batches.
3. Out: the batches of the loader in the form of the framework, with exact resume.
"""

from __future__ import annotations

import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from tokenmill.errors import ConfigError, MissingExtraError
from tokenmill.plan.lr import TokenSchedule

ENDLESS = 1 << 40
"""Steps of live text that has no end of its own."""


def need(module: str, *, extra: str, adapter: str, at_least: str | None = None) -> None:
    """Import a framework, or raise an error that names the extra; `at_least` is a version such as "5.10"."""
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
    except ImportError:  # another package blocks the import, or the package of the module is missing
        return False


def _version_of(module: str) -> str | None:
    """Return the installed version; None for a module that is only on the path."""
    try:
        return version(module)
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def check_schedule(schedule: object) -> None:
    """Reject anything but a schedule of a run."""
    if not isinstance(schedule, TokenSchedule):
        raise ConfigError(f"lr_schedule: expected a schedule of a run, got {schedule!r}; pass run.lr_schedule(...)")
