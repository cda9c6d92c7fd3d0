"""The stock templates that trl carries, read without importing it."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from tokenmill.encode.chat.template import ChatTemplate

_FOUND = importlib.util.find_spec("trl")
assert _FOUND is not None, "trl is not installed: run `make test`, which installs it with --no-deps"
assert _FOUND.submodule_search_locations
STOCK = {
    path.stem: path
    for path in sorted((Path(_FOUND.submodule_search_locations[0]) / "chat_templates").glob("*.jinja"))
}


def stock_source(name: str) -> str:
    return STOCK[name].read_bytes().decode()  # some have line ends of their own


def stock_template(name: str) -> ChatTemplate:
    return ChatTemplate(
        source=stock_source(name), where=name, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}
    )


ALIKE = re.compile(
    r"gemma4_v[234]|nemotron_3_(?:5_lightning|super|ultra)|qwen3_(?:5_nothink|6|vl)|qwen2_5_vl|phi3_5|smolvlm"
)


def swept(names: Iterable[str]) -> list[object]:
    """Return names to sweep over; templates that are hardly unlike another one are left to the long run."""
    return [pytest.param(name, marks=pytest.mark.deep) if ALIKE.match(name) else name for name in names]
