"""The stock templates that trl carries, read without importing it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

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
