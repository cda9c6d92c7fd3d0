"""Check the language of pages: words that have a plainer one, and sentences that are too long.

python tools/prose.py README.md docs/how-to/mix.md
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

LONGEST = 35
"""Words of the longest sentence outside of tables and code."""
PLAINER = {
    r"anew": "again",
    r"amid": "during, within",
    r"beside": "next to, in addition to",
    r"go(?:es)? on|went on|going on": "continue, resume",
    r"is told|are told|be told": "is passed, receives",
    r"lets? go(?: of)?": "evict, release",
    r"(?:stands?|lies) (?:in|at|by|beside|behind)": "is in",
    r"in the mean": "on average",
    r"so many|as many as": "the number, n",
    r"strangers?": "unknown file",
    r"mends?|mended": "repair, fix",
    r"none but": "only",
    r"got (?:none|nothing|it|both|neither)": "(name the value)",
}
"""Patterns of words that the pages avoid, with what to write instead."""
_AVOIDED = {re.compile(rf"\b(?:{pattern})\b", re.IGNORECASE): instead for pattern, instead in PLAINER.items()}
_LEFT_OUT = (
    re.compile(r"^(`{3,}).*?^\1", re.DOTALL | re.MULTILINE),
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"`[^`\n]*`|\"[^\"\n]*\""),
    re.compile(r"\]\([^)\s]*\)"),
)


def prose_of(page: str) -> str:
    """Return a page with its code and addresses blanked out; lines keep their numbers."""
    for pattern in _LEFT_OUT:
        page = pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]).replace("  ", "x ", 1), page)
    return page


def findings(page: str) -> Iterator[tuple[int, str]]:
    """Find what is wrong with a page: line and message.

    >>> list(findings("It begins anew."))
    [(1, "'anew': write again")]
    """
    text = prose_of(page)
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, instead in _AVOIDED.items():
            for match in pattern.finditer(line):
                yield number, f"{match[0]!r}: write {instead}"
    for block in re.finditer(r"(?:^(?![ ]*[|#]).*\S.*\n?)+", text, re.MULTILINE):
        start = text.count("\n", 0, block.start()) + 1
        for item in re.split(r"^\s*(?:[-*]|\d+\.)\s", block[0], flags=re.MULTILINE):
            for sentence in re.split(r"(?<=[.!?:;])\s+", item):
                words = re.findall(r"[A-Za-z][\w'-]*", sentence)
                if len(words) > LONGEST:
                    yield start, f"a sentence of {len(words)} words: {' '.join(words[:6])} ..."


def main(paths: list[str]) -> int:
    """Print the findings of pages; return 1 if there are any."""
    found = [(path, *finding) for path in paths for finding in findings(Path(path).read_text(encoding="utf-8"))]
    for path, line, message in found:
        sys.stdout.write(f"{path}:{line}: {message}\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
