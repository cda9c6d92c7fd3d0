"""README and docs are run: code blocks, commands and their output, figures, links, doctests.

Every page runs from an empty folder, top to bottom, in one Python namespace. Blocks are marked so:

- `python` blocks run. A `text` block after `<!-- prints -->` must equal what the Python block before it printed.
- `console` blocks hold commands after `$ `; lines below a command must equal what it printed, at 80 columns.
  A command without lines below it only runs. After `<!-- fails -->`, every command of the block must fail.
- `bash` blocks hold commands without output.
- `<!-- file: run.toml -->` before a block writes it to that file.
- `<!-- not run: reason -->` before a block leaves it out.
- In shown output, `...` stands for any text within a line; a line `...` stands for any number of lines.

`python tests/test_docs.py PAGE...` runs pages alone; with `--write` it puts real output where shown output differs.
"""

from __future__ import annotations

import doctest
import importlib
import io
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PARTS = ("start", "migrate", "how-to", "reference", "explanation")
PAGES = [ROOT / "README.md", *(page for part in PARTS for page in sorted((DOCS / part).glob("*.md")))]
LINKED = [
    *PAGES,
    ROOT / "SECURITY.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "README.md",
    *sorted(DOCS.glob("*.md")),
    *sorted((DOCS / "decisions").glob("*.md")),
]
AT_HOME = re.compile(
    r"^https://(?:github\.com/tokenmill/tokenmill/blob|raw\.githubusercontent\.com/tokenmill/tokenmill)/main/"
)
"""Start of addresses of our own files; README has them, because it is shown outside of the repository too."""
SHELLS = {"bash", "sh", "console"}
SHOWN = {"", "text", "json", "toml", "yaml", "diff", "mermaid"}
"""Languages of blocks that show something and have nothing to run."""
COMMANDS = {"tokenmill", "make", "python", "torchrun", "cat", "ls"}
"""Commands that are run; of `make`, only the target is checked."""
NOTICES = re.compile(r"^.*compiling kernels for this CPU.*\n", re.MULTILINE)
"""Lines on stderr that only the first start on a machine prints; they are no part of shown output."""


Corrections = dict[tuple[int, int], str]
"""Real output by the lines of a page that it replaces, first and after the last."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of a page."""

    language: str
    text: str
    line: int
    """Line of its first line of code, from 1."""
    note: str = ""
    """The HTML comment right before it."""


def blocks_of(page: str) -> Iterator[Block]:
    """Find the fenced blocks of a page, in order."""
    lines = page.splitlines()
    number = 0
    before = ""
    while number < len(lines):
        fence = re.fullmatch(r"(`{3,})(\w*)\s*", lines[number])
        if fence:
            end = next(i for i in range(number + 1, len(lines)) if lines[i].rstrip() == fence[1])
            note = re.fullmatch(r"<!--\s*(.*?)\s*-->", before)
            yield Block(
                language=fence[2],
                text="".join(f"{line}\n" for line in lines[number + 1 : end]),
                line=number + 2,
                note=note[1] if note else "",
            )
            number, before = end, ""
        elif lines[number].strip():
            before = lines[number].strip()
        number += 1


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command of a block."""

    text: str
    output: str = ""
    """Output shown below the command."""
    start: int = 0
    """First line of the shown output within the block."""
    end: int = 0
    """Line after the shown output."""


def commands_of(block: Block) -> list[Command]:
    """Return the commands of a block with the output shown below each; without prompts and comments."""
    lines = block.text.splitlines()
    with_prompts = any(line.startswith("$ ") for line in lines)
    found = []
    number = 0
    while number < len(lines):
        command = lines[number]
        number += 1
        if with_prompts and not command.startswith("$ "):
            continue
        command = command.removeprefix("$ ")
        while command.endswith("\\"):
            command = command[:-1] + " " + lines[number]
            number += 1
        end = number
        if with_prompts:
            while end < len(lines) and not lines[end].startswith("$ "):
                end += 1
        output = "".join(f"{line}\n" for line in lines[number:end])
        if shlex.split(command, comments=True):
            found.append(Command(text=command.strip(), output=output, start=number, end=end))
        number = end
    return found


def is_shown(shown: str, printed: str) -> bool:
    """Compare shown output with the real one, in which `...` matches any text and a line of `...` any lines."""
    pattern = ""
    for line in map(str.rstrip, shown.rstrip().splitlines()):
        pattern += "(?:.*\n)*?" if line.strip() == "..." else re.escape(line).replace(re.escape("..."), ".*") + "\n"
    real = "".join(f"{line.rstrip()}\n" for line in printed.strip("\n").rstrip().splitlines())
    return re.fullmatch(pattern, real) is not None


def make_targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def run_command(command: str, folder: Path, *, fails: bool = False) -> str:
    """Run one command as a reader would and return what it printed; check that one of make exists."""
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        missing = [word for word in words[1:] if "=" not in word and word not in make_targets()]
        assert not missing, f"Makefile has no target {missing[0]}"
        return ""
    assert words[0] in COMMANDS, f"{command!r} cannot be run here: put <!-- not run: reason --> before the block"
    if words[0] == "tokenmill" and not re.search(r"[|<>&;$`*?]", command):
        code, printed = run_here(words, folder)
    else:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env={**os.environ, "PATH": path, "COLUMNS": "80"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        code, printed = done.returncode, done.stdout
    assert bool(code) == fails, f"{command}\n{printed}\nended with exit code {code}"
    return NOTICES.sub("", printed)


def run_here(words: list[str], folder: Path) -> tuple[int, str]:
    """Run a command that needs no shell by its entry point: a process of its own for each takes a second."""
    from tokenmill.cli.app import main

    before = sys.argv, Path.cwd()
    sys.argv = words
    os.chdir(folder)
    output = io.StringIO()
    try:
        with redirect_stdout(output), redirect_stderr(output):
            main()
        code: object = 0
    except SystemExit as error:
        code = error.code
    finally:
        sys.argv = before[0]
        os.chdir(before[1])
    return (code if isinstance(code, int) else int(bool(code))), output.getvalue()


def run_page(page: str, name: str, folder: Path, *, corrections: Corrections | None = None) -> dict[str, Any]:
    """Run the blocks of a page in order, in the working directory `folder`; return what its Python has defined.

    Shown output that differs is an error, or goes into `corrections` by its lines, first and after the last.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = ""

    def compare(shown: str, real: str, first: int, last: int) -> None:
        if corrections is not None and not is_shown(shown, real):
            lines = real.strip("\n").replace(str(folder), "...").splitlines()
            corrections[first, last] = "".join(f"{line.rstrip()}\n" for line in lines)
        elif corrections is None:
            assert is_shown(shown, real), f"{name}:{first}: shown is\n{shown}\nprinted was\n{real}"

    for block in blocks_of(page):
        if block.note.startswith("not run:"):
            assert block.note.removeprefix("not run:").strip(), f"{name}:{block.line}: say why it is not run"
        elif block.note.startswith("file:"):
            file = (folder / block.note.removeprefix("file:").strip()).resolve()
            assert file.is_relative_to(folder.resolve()), f"{name}:{block.line}: files belong into the folder"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            # So that an error names the line of the page.
            code = compile("\n" * (block.line - 1) + block.text, name, "exec")
            with redirect_stdout(io.StringIO()) as output:
                exec(code, namespace)
            printed = output.getvalue()
        elif block.note == "prints":
            compare(block.text, printed, block.line, block.line + block.text.count("\n"))
        elif block.language in SHELLS:
            for command in commands_of(block):
                real = run_command(command.text, folder, fails=block.note == "fails")
                if command.output.strip():
                    compare(command.output, real, block.line + command.start, block.line + command.end)
        else:
            assert block.language in SHOWN, f"{name}:{block.line}: nobody runs blocks of {block.language!r}"
    return namespace


def correct(page: Path, folder: Path) -> int:
    """Put real output where shown output differs; return the number of places."""
    text = page.read_text(encoding="utf-8")
    corrections: Corrections = {}
    run_page(text, str(page), folder, corrections=corrections)
    lines = text.splitlines(keepends=True)
    for (first, last), real in sorted(corrections.items(), reverse=True):
        lines[first - 1 : last - 1] = [real]
    page.write_text("".join(lines), encoding="utf-8")
    return len(corrections)


def figures_of(page: str) -> list[str]:
    """Return the rows with numbers of tables under a heading that says Figures or Measured."""
    rows, wanted, header = [], False, True
    for line in page.splitlines():
        if line.startswith("#"):
            wanted = re.search(r"figures|measured", line, re.IGNORECASE) is not None
        if not line.startswith("|"):
            header = True
        elif re.fullmatch(r"[|\s:-]+", line):
            header = False
        elif wanted and not header and re.search(r"\d", line):
            rows.append(line)
    return rows


def script_of(row: str) -> str:
    """Return the script that a row of figures names; it must exist."""
    found = re.search(r"benchmarks/[\w/]+\.py", row)
    assert found, f"a row of figures must name its script under benchmarks/: {row}"
    assert (ROOT / found[0]).is_file(), f"{found[0]} does not exist"
    return found[0]


def make_workplace(folder: Path) -> Path:
    """Make the empty working directory of a reader."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(make_workplace(tmp_path))
    return tmp_path


ALONE = {"README.md", "quick-start.md", "jax.md"}
"""Pages that a reader begins with, each in a fresh interpreter; and one whose threads would outlive it."""
FRAMEWORKS = r"^\s*(?:import|from) (?:transformers|trl|lightning)\b"
TORCH = r"^\s*(?:import|from) (?:torch|tokenmill\.torch|tokenmill\.adapters)\b"


def group_of(page: Path) -> str:
    """Say with which other pages a page is run: importing a framework takes longer than running a page."""
    if page.name in ALONE:
        return page.name
    text = page.read_text(encoding="utf-8")
    for name, imports in (("frameworks", FRAMEWORKS), ("torch", TORCH)):
        if re.search(imports, text, re.MULTILINE):
            return name
    return f"plain {PAGES.index(page) % 2}"


GROUPS = {group: [page for page in PAGES if group_of(page) == group] for group in sorted({*map(group_of, PAGES)})}


@pytest.mark.slow
@pytest.mark.parametrize("pages", GROUPS.values(), ids=lambda pages: ", ".join(page.name for page in pages))
def test_every_code_block_runs(pages, tmp_path):
    """[A1.c]"""
    # In an interpreter of its own, as a reader has it: nothing but what other pages took is imported yet.
    done = subprocess.run(
        [sys.executable, "-P", "-W", "error", __file__, *map(str, pages)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_figure_names_the_script_behind_it(page):
    for row in figures_of(page.read_text(encoding="utf-8")):
        script_of(row)


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_within_the_project_leads_somewhere(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = [target.split("#")[0] for target in re.findall(r"(?:\]\(|src(?:set)?=\")([^)\s\"]+)[)\"]", text)]
    targets = [AT_HOME.sub(os.path.relpath(ROOT, page.parent) + "/", target) for target in targets]
    local = [target for target in targets if target and "://" not in target and not target.startswith("mailto:")]
    assert [target for target in local if not (page.parent / target).exists()] == []


def test_links_of_the_readme_work_outside_of_the_repository():
    text = re.sub(r"```.*?```", "", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    targets = re.findall(r"(?:\]\(|src(?:set)?=\")([^)\s\"]+)[)\"]", text)
    assert len(targets) > 20
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_of_ours_that_a_page_names_is_there(page):
    """Such as `packing/packers.py`, from the package, the tests or the project."""
    named = re.findall(r"`((?:[\w-]+/)+\w+\.(?:py|toml|md))`", page.read_text(encoding="utf-8"))
    places = (ROOT, ROOT / "src" / "tokenmill", ROOT / "tests")
    assert [name for name in named if not any((place / name).exists() for place in places)] == []


SOURCE = ROOT / "src"
MODULES = [
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((SOURCE / "tokenmill").rglob("*.py"))
    if path.name != "__main__.py"
]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if "adapters" in name or name == "tokenmill.torch" else name
        for name in MODULES
    ],
)
def test_the_examples_in_docstrings_hold(name, demo_folder, tmp_path, monkeypatch):
    """Examples run in the folder that `tokenmill init --demo` writes."""
    shutil.copytree(demo_folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    failed, _ = doctest.testmod(importlib.import_module(name), raise_on_error=False)
    assert failed == 0


# The runner itself.

SAMPLE = """\
# A page

<!-- file: conf/run.toml -->
```toml
[run]
steps = 3
```

```python
from pathlib import Path

steps = Path("conf/run.toml").read_text().split()[-1]
```

Some words.

```console
$ tokenmill \\
    --version
tokenmill 0.1.0
$ make test JOBS=1   # a target of the Makefile
```

<!-- not run: needs a GPU -->
```python
raise SystemExit
```

```text
nothing to run
```

```python
steps = int(steps) + 1
```
"""


def test_the_runner_finds_blocks_with_their_notes_and_lines():
    assert [(block.language, block.note, block.line) for block in blocks_of(SAMPLE)] == [
        ("toml", "file: conf/run.toml", 5),
        ("python", "", 10),
        ("console", "", 18),
        ("python", "not run: needs a GPU", 26),
        ("text", "", 30),
        ("python", "", 34),
    ]


def test_the_runner_runs_a_page_in_order_in_one_namespace(workplace):
    assert run_page(SAMPLE, "sample", workplace)["steps"] == 4
    assert not (workplace / "corpus").exists()


@pytest.mark.parametrize("page", ["", "# Title\n\nwords only\n", "| a |\n|---|\n| 1 |\n"])
def test_the_runner_does_without_blocks(tmp_path, page):
    assert list(run_page(page, "empty", tmp_path)) == ["__name__"]
    assert figures_of(page) == []


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("```python\nassert 1 == 2, 'so it is'\n```\n", "so it is"),
        ("```bash\ntokenmill verify nowhere\n```\n", "no store at this path: nowhere"),
        ("```bash\nmake nonsense\n```\n", "no target nonsense"),
        ("```bash\nrm -rf build\n```\n", "not run: reason"),
        ("```console\n$ tokenmill --version\ntokenmill 9\n```\n", r"printed was\s+tokenmill 0\.1\.0"),
        ("<!-- fails -->\n```console\n$ tokenmill --version\n```\n", "ended with exit code 0"),
        ("```python\nprint(1)\n```\n\n<!-- prints -->\n```text\n2\n```\n", "wrong:7: shown is"),
        ("<!-- not run: -->\n```bash\nrm -rf build\n```\n", "say why"),
        ("```ruby\nputs 1\n```\n", "nobody runs blocks of 'ruby'"),
        ("<!-- file: ../x -->\n```toml\n```\n", "files belong into the folder"),
    ],
)
def test_the_runner_fails_where_a_page_is_wrong(tmp_path, page, message):
    with pytest.raises(AssertionError, match=message):
        run_page(page, "wrong", tmp_path)


def test_the_commands_of_a_block_are_those_after_a_prompt_or_all_lines():
    with_prompt = Block(language="console", text="$ tokenmill a\nout # put\n$ tokenmill b\n", line=1)
    without = Block(language="bash", text="# first\ntokenmill a   # why\n\ntokenmill b \\\n  --c\n", line=1)
    assert [(command.text, command.output) for command in commands_of(with_prompt)] == [
        ("tokenmill a", "out # put\n"),
        ("tokenmill b", ""),
    ]
    assert [shlex.split(command.text, comments=True) for command in commands_of(without)] == [
        ["tokenmill", "a"],
        ["tokenmill", "b", "--c"],
    ]


def test_the_figures_are_rows_with_numbers_under_their_heading():
    page = """
## Words
| a | b |
|---|---|
| 1 | x |

## Measured in 2025
| what 1 | script |
|:--|--:|
| 3 ns | `benchmarks/order.py` |
| none | – |

## More
| 4 |
"""
    assert figures_of(page) == ["| 3 ns | `benchmarks/order.py` |"]
    with pytest.raises(AssertionError, match="must name its script"):
        script_of("| 3 ns | – |")
    with pytest.raises(AssertionError, match="does not exist"):
        script_of("| 3 ns | benchmarks/nonsense.py |")


@pytest.mark.parametrize(
    ("shown", "printed", "equal"),
    [
        ("a\nb\n", "a\nb\n", True),
        ("a\nb\n", "a  \nb\n\n", True),
        ("a\nb\n", "a\nb\n   \n", True),
        ("a\n", "a\nb\n", False),
        ("a\n...\n", "a\nb\nc\n", True),
        ("...\nc\n", "a\nb\nc\n", True),
        ("in ... s\n", "in 0.3 s\n", True),
        ("in ... s\n", "in 0.3 s\nmore\n", False),
        ("(a|b)\n", "a\n", False),
    ],
)
def test_shown_output_equals_what_was_printed_but_for_its_ellipses(shown, printed, equal):
    assert is_shown(shown, printed) is equal


def test_a_correction_names_no_folder_of_this_machine_and_has_no_trailing_spaces(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"```python\nprint('{tmp_path}/a: bad  ')\n```\n\n<!-- prints -->\n```text\n```\n")
    assert correct(page, tmp_path) == 1
    assert page.read_text().endswith("```text\n.../a: bad\n```\n")
    assert correct(page, tmp_path) == 0


def test_notices_of_the_first_start_are_no_part_of_shown_output(tmp_path):
    code = "print('compiling kernels for this CPU, once: later starts load them'); print('plan 1')"
    assert run_command(f'python -c "{code}"', tmp_path) == "plan 1\n"


def test_a_page_is_corrected_only_where_its_output_differs(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "```console\n$ tokenmill --version\ntokenmill 9\nold\n$ tokenmill --version\ntoken... 0.1.0\n```\n\n"
        "```python\nprint('new')\n```\n\n<!-- prints -->\n```text\n```\n"
    )
    assert correct(page, tmp_path) == 2
    assert page.read_text() == (
        "```console\n$ tokenmill --version\ntokenmill 0.1.0\n$ tokenmill --version\ntoken... 0.1.0\n```\n\n"
        "```python\nprint('new')\n```\n\n<!-- prints -->\n```text\nnew\n```\n"
    )


if __name__ == "__main__":
    os.environ["COLUMNS"] = "80"
    pages = [Path(word).resolve() for word in sys.argv[1:] if word != "--write"]
    with tempfile.TemporaryDirectory() as start:
        for page in pages:
            print(f"{page}:", flush=True)
            workplace = make_workplace(Path(start) / page.parent.name / page.stem)
            if page.parent == ROOT / "examples":  # its commands are for the root of a clone
                (workplace / "examples").symlink_to(ROOT / "examples")
            os.chdir(workplace)
            logging.getLogger("tokenmill").setLevel(logging.NOTSET)  # a page before may have turned it on
            if "--write" in sys.argv:
                print(f"  {correct(page, workplace)} places corrected")
            else:
                run_page(page.read_text(encoding="utf-8"), str(page), workplace)
        os.chdir(start)
