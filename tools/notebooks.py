"""Run notebooks without Jupyter: one namespace, an empty folder, outputs written back.

python tools/notebooks.py docs/start/tutorial.ipynb           # run it and write its outputs
python tools/notebooks.py --check docs/start/tutorial.ipynb   # run it and compare its outputs
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

Notebook = dict[str, Any]
_SHELL = re.compile(r"^!(.*)$", re.MULTILINE)
NOTICES = re.compile(r"^.*compiling kernels for this CPU.*\n", re.MULTILINE)
"""Lines that only the first start on a machine prints."""


def read(file: Path) -> Notebook:
    """Read a notebook."""
    notebook: Notebook = json.loads(file.read_text(encoding="utf-8"))
    return notebook


def code_of(notebook: Notebook) -> Iterator[dict[str, Any]]:
    """Yield the cells that hold code."""
    yield from (cell for cell in notebook["cells"] if cell["cell_type"] == "code")


def run(notebook: Notebook, folder: Path) -> None:
    """Run all cells in a folder, and put what they print and show in place of their outputs."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    before = Path.cwd()
    os.chdir(folder)
    try:
        for count, cell in enumerate(code_of(notebook), 1):
            cell["execution_count"] = count
            cell["outputs"] = list(_outputs("".join(cell["source"]), namespace, count))
    finally:
        os.chdir(before)


def _shell(command: str) -> None:
    """Run a line of a notebook that starts with `!`."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "PATH": path, "COLUMNS": "80"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{command}: exit code {done.returncode}\n{done.stdout}")
    sys.stdout.write(NOTICES.sub("", done.stdout))


def _outputs(code: str, namespace: dict[str, Any], count: int) -> Iterator[dict[str, Any]]:
    """Run a cell and yield what it printed, then what its last expression shows."""
    code = _SHELL.sub(lambda line: f"_shell({line[1]!r})", code)
    namespace["_shell"] = _shell
    module = ast.parse(code)
    last = module.body.pop() if module.body and isinstance(module.body[-1], ast.Expr) else None
    value = None
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(module, f"cell {count}", "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"cell {count}", "eval"), namespace)
    if printed.getvalue():
        yield {"name": "stdout", "output_type": "stream", "text": printed.getvalue().splitlines(keepends=True)}
    if value is not None:
        data: dict[str, Any] = {"text/plain": repr(value).splitlines(keepends=True)}
        picture = getattr(value, "_repr_svg_", None)
        if picture is not None:
            data["image/svg+xml"] = picture().splitlines(keepends=True)
        yield {"data": data, "execution_count": count, "metadata": {}, "output_type": "execute_result"}


def markdown(notebook: Notebook) -> str:
    """Return a notebook as a page: text, code, and the outputs below each cell."""
    parts = []
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/svg+xml" in data:
                parts.append(
                    '<div class="notebook-output">\n' + "".join(data["image/svg+xml"]).strip() + "\n</div>"
                )
            else:
                shown = "".join(output.get("text", data.get("text/plain", ())))
                parts.append(f"```text\n{shown.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def shown(notebook: Notebook) -> list[str]:
    """Return the outputs of each cell as text, to compare; a cell with the tag `wording` only has to run."""
    return [
        "" if "wording" in cell["metadata"].get("tags", ()) else json.dumps(cell["outputs"], indent=1)
        for cell in code_of(notebook)
    ]


def main(words: list[str]) -> int:
    """Run notebooks; write their outputs, or print the cells whose outputs differ."""
    different = 0
    for path in (Path(word) for word in words if word != "--check"):
        notebook, before = read(path), shown(read(path))
        with tempfile.TemporaryDirectory() as folder:
            run(notebook, Path(folder))
        if "--check" not in words:
            path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            continue
        for count, (old, new) in enumerate(zip(before, shown(notebook), strict=True), 1):
            if old != new:
                different += 1
                sys.stdout.write(f"{path}: cell {count} shows\n{old}\nand gives\n{new}\n")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
