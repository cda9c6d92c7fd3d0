"""Build the documentation site: pages of docs/ with their generated parts, and notebooks as pages.

python tools/site_pages.py              # writes build/pages
python tools/site_pages.py --build      # and build/site, by zensical; fails at the first warning
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import notebooks
import reference

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
HOME = "https://github.com/tokenmill/tokenmill/blob/main/"
NOTEBOOKS = {"docs/start/tutorial.ipynb": "start/tutorial.md", "examples/look_inside.ipynb": "start/look-inside.md"}
"""Notebook -> its page."""
_LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=[#)])")
_CODE = re.compile(r"^(`{3,}).*?^\1|`[^`\n]+`", re.DOTALL | re.MULTILINE)
_MARK = re.compile(r"^<!-- (?:file|not run|prints|fails)\b.*?-->\n", re.MULTILINE)
"""Marks of code blocks, for the tests of the pages."""


def pages() -> Iterator[tuple[str, str]]:
    """Yield path within the site and text of each page."""
    for file in sorted(DOCS.rglob("*.md")):
        text = reference.fill(_MARK.sub("", file.read_text(encoding="utf-8")))
        yield _place(file), _linked(text, file)
    for notebook in NOTEBOOKS:
        yield _place(ROOT / notebook), _linked(notebooks.markdown(notebooks.read(ROOT / notebook)), ROOT / notebook)


def _place(file: Path) -> str:
    """Return where the page of a file is within the site."""
    path = file.relative_to(ROOT).as_posix()
    return NOTEBOOKS.get(path) or path.removeprefix("docs/")


def _linked(text: str, file: Path) -> str:
    """Lead links of a page to other pages, and those to files outside of the site to the repository."""
    code = [match.span() for match in _CODE.finditer(text)]

    def lead(match: re.Match[str]) -> str:
        if any(begin <= match.start() < end for begin, end in code):
            return match[0]
        target = Path(os.path.normpath(file.parent / match[0]))
        path = target.relative_to(ROOT).as_posix()
        if path not in NOTEBOOKS and not target.is_relative_to(DOCS):
            return HOME + path
        return os.path.relpath(_place(target), Path(_place(file)).parent)

    return _LINK.sub(lead, text)


def stage(folder: Path) -> None:
    """Write all pages and pictures into a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(DOCS, folder, ignore=shutil.ignore_patterns("*.md", "*.ipynb", "*.json"))
    for path, text in pages():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")


def main() -> int:
    """Stage the pages, and build the site if asked for."""
    stage(ROOT / "build" / "pages")
    if "--build" not in sys.argv:
        return 0
    shutil.rmtree(ROOT / "build" / "site", ignore_errors=True)
    zensical = Path(sys.executable).with_name("zensical")
    return subprocess.run([zensical, "build", "--strict", "--clean"], cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
