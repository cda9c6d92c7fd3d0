"""Print the lowest versions of the dependencies that pyproject.toml allows, one per line, for `pip install -r`."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

_BOUND = re.compile(r"([A-Za-z0-9_.-]+)>=([0-9.]+)")


def lowest(requirements: list[str]) -> list[str]:
    """Return requirements with the version of their lower bound.

    >>> lowest(["numpy>=1.26", "rich>=13.7"])
    ['numpy==1.26', 'rich==13.7']
    """
    matches = [(text, _BOUND.fullmatch(text)) for text in requirements]
    return [f"{match[1]}=={match[2]}" if match else text for text, match in matches]


if __name__ == "__main__":
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    sys.stdout.write("\n".join(lowest(project["dependencies"])) + "\n")
