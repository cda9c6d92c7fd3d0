"""Each documented statement of the four projects that tokenmill replaces has a test, named in one table."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "explanation" / "compatibility.md"
ROW = re.compile(r"^\| (?P<statement>[^|]+) \| (?P<answer>[^|]+) \| (?P<tests>(?:`[^`|]+::[^`|]+`(?:, )?)+) \|$")


def rows_of(page: str) -> list[str]:
    """Return the rows of all tables of a page, without their headers."""
    lines = page.splitlines()
    rules = [number for number, line in enumerate(lines) if re.fullmatch(r"\|[\s:|-]+\|", line)]
    headers = {number - 1 for number in rules}
    return [
        line
        for number, line in enumerate(lines)
        if line.startswith("|") and number not in headers and number not in rules
    ]


@cache
def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name[:5] == "test_"}


ROWS = rows_of(PAGE.read_text(encoding="utf-8"))


def test_the_page_has_a_table_for_each_project():
    headings = re.findall(r"^## (.+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings == ["KempnerForge", "AstrAI", "The multi-stage fork of torchtitan", "nanochat"]
    assert len(ROWS) > 60


@pytest.mark.parametrize("row", ROWS)
def test_each_statement_names_a_test_that_exists(row):
    match = ROW.match(row)
    assert match, f"expected statement, answer and tests as `file.py::test_name`: {row}"
    for file, name in re.findall(r"`([^`]+)::([^`]+)`", match["tests"]):
        assert (ROOT / "tests" / file).is_file(), f"tests/{file} does not exist"
        assert name in names_in(ROOT / "tests" / file), f"tests/{file} has no {name}"
