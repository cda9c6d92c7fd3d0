"""Every promise has tests that name it, and every name in a test is a promise."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "promises.md"
LINE = re.compile(r"^- \*\*(?P<id>[A-Z]\d?\.[a-z])\*\* (?P<text>.+?) \((?P<files>`.+`)\)$", re.MULTILINE)
TAGS = re.compile(r"\[((?:[A-Z]\d?\.[a-z])(?:, ?[A-Z]\d?\.[a-z])*)\]")


def proving() -> dict[str, list[str]]:
    """Return the test files that name each promise."""
    files: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for tags in TAGS.findall(path.read_text(encoding="utf-8")):
            for tag in tags.replace(" ", "").split(","):
                files.setdefault(tag, set()).add(path.relative_to(ROOT / "tests").as_posix())
    return {tag: sorted(names) for tag, names in sorted(files.items())}


def test_the_page_of_promises_names_the_tests_that_prove_them():
    lines = LINE.findall(PAGE.read_text(encoding="utf-8"))
    assert {tag: re.findall(r"`([^`]+)`", files) for tag, _, files in lines} == proving()
    assert len(lines) == PAGE.read_text(encoding="utf-8").count("\n- ")


def main() -> None:
    """Update the lists of test files on the page."""
    files = proving()

    def line(match: re.Match[str]) -> str:
        names = ", ".join(f"`{name}`" for name in files[match["id"]])
        return f"- **{match['id']}** {match['text']} ({names})"

    PAGE.write_text(LINE.sub(line, PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
