"""Text, ranges and notes of all stock templates, as one golden file.

`golden/chat_masks.json` holds a digest for each of 72 templates and 28 conversations, or the reason of a rejection.
A changed digest changes what a model is trained on: review it, explain it in the commit, and write the file again
with `python tests/encode/chat/test_golden.py`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "tools")] if __name__ != "__main__" else [str(ROOT), str(ROOT / "tools")]

from chat_matrix import KINDS, record  # noqa: E402
from tests.encode.chat.stock import STOCK, stock_source, stock_template  # noqa: E402

from tokenmill.encode import Refusal  # noqa: E402
from tokenmill.encode.chat.render import render  # noqa: E402

GOLDEN = ROOT / "tests" / "golden" / "chat_masks.json"
TURNS = (1, 2, 3, 5)
CONVERSATIONS = {f"{kind}, {turns} turns": record(turns, kind) for kind in KINDS for turns in TURNS}
IN_PARTS = ("idefics3", "llava_next", "smolvlm")
"""Templates for images, which read contents as lists of parts only."""


def digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data, ensure_ascii=True).encode()).hexdigest()[:8]


def result(template: str, conversation: str) -> str:
    """Return a digest of everything that a render decides, or the reason of the rejection."""
    given = CONVERSATIONS[conversation]
    messages = given["messages"]
    if template.startswith(IN_PARTS):
        messages = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
    try:
        shown = render(stock_template(template), messages, tools=given.get("tools"), kwargs={"now": "2025-01-31"})
    except Refusal as error:
        return error.reason
    return digest([shown.text, shown.supervised, shown.authored, shown.notes])


def results(template: str) -> dict[str, object]:
    by_kind: dict[str, str] = {}
    for kind in KINDS:
        by_kind[kind] = " ".join(result(template, f"{kind}, {turns} turns") for turns in TURNS)
    return {"template": digest(stock_source(template)), **by_kind}


def changes(template: str, golden: dict[str, str]) -> Iterator[str]:
    for kind in KINDS:
        for turns, old in zip(TURNS, golden[kind].split(), strict=True):
            conversation = f"{kind}, {turns} turns"
            new = result(template, conversation)
            if new != old:
                yield f"{template}, {conversation}: {old} -> {new}"


def test_the_golden_file_has_every_template():
    """[T1.a]"""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert sorted(golden) == sorted(STOCK)
    assert len(golden) >= 72
    assert [name for name in STOCK if golden[name]["template"] != digest(stock_source(name))] == []


@pytest.mark.parametrize("name", STOCK)
def test_text_ranges_and_notes_stay_as_they_are(name):
    """[T1.a]"""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert list(changes(name, golden[name])) == []


if __name__ == "__main__":
    lines = json.dumps({name: results(name) for name in STOCK}, indent=0)
    GOLDEN.write_text(lines + "\n", encoding="utf-8")
