"""tokenmill behind the interfaces of other frameworks.

1. In: a run, a store or a loader; the arguments that a framework passes to its datasets, samplers and loaders.
2. Does: translates names, parameters and state, one framework per file. It has no logic of batches.
3. Out: the batches of the loader in the form of the framework, with exact resume.
"""

from __future__ import annotations

import logging
import re
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from tokenmill.errors import ConfigError, MissingExtraError
from tokenmill.plan.lr import TokenSchedule

logger = logging.getLogger("tokenmill.adapters")
TESTED_BELOW = {"lightning": "3", "torchtitan": "0.4", "transformers": "6", "trl": "2"}
"""Frameworks whose internals an adapter uses -> first version that the adapter has not been tested with."""
ENDLESS = 1 << 40
"""Steps of live text that has no end of its own."""


def need(module: str, *, extra: str, adapter: str, at_least: str | None = None) -> None:
    """Import a framework, or raise an error that names the extra; `at_least` is a version such as "5.10".

    A version that is too new to have been tested logs a warning.
    """
    if not _is_there(module):
        raise MissingExtraError(f"{adapter}: {module} is not installed; pip install 'tokenmill[{extra}]'")
    installed, below = _version_of(module), TESTED_BELOW.get(module)
    if at_least is not None and installed is not None and _numbers(installed) < _numbers(at_least):
        raise MissingExtraError(
            f"{adapter}: needs {module} {at_least} or later, got {installed}; pip install '{module}>={at_least}'"
        )
    if below is not None and installed is not None and _numbers(installed) >= _numbers(below):
        logger.warning(
            "%s: %s %s has not been tested, only versions below %s; if it fails, pip install '%s<%s'",
            *(adapter, module, installed, below, module, below),
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
