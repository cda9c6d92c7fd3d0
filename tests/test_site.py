"""The documentation site, without building it: navigation, generated references, links, and notebooks."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

import tokenmill as tm

ROOT = Path(__file__).parents[1]


SPEC = importlib.util.spec_from_file_location("site_pages", ROOT / "tools" / "site_pages.py")
site = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(site)
reference, notebooks = site.reference, site.notebooks


@pytest.fixture(scope="module")
def pages():
    return dict(site.pages())


def test_the_navigation_has_every_page_once(pages):
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    assert sorted(re.findall(r"[\w/-]+\.md", nav)) == sorted(pages)


def test_every_key_of_the_config_has_an_entry_with_an_anchor(pages):
    anchors = re.findall(r"^### `\w+` \{ #([\w.]+) \}$", pages["reference/config.md"], re.MULTILINE)
    assert anchors == [f"{table}.{key.name}" for table in reference.TABLES for key in reference.keys_of(table)]
    for key in reference.keys_of("run"):
        assert f"[`{key.name}`](#run.{key.name})" in pages["reference/config.md"]


def test_an_entry_has_type_default_the_text_of_the_record_and_the_note_of_the_page():
    page = "<!-- generated: config run -->\n- `crop`: A note.\n<!-- end -->\n"
    key = next(key for key in reference.keys_of("run") if key.name == "crop")
    entry = reference._entry("run", key, "A note.")
    assert entry == f'### `crop` {{ #run.crop }}\n\n*string; default `"return"`*\n\n{key.text} A note.\n'
    with pytest.raises(ValueError, match="seq_len: nothing describes it"):
        reference.fill(page)
    with pytest.raises(ValueError, match="has no key 'corp'"):
        reference.fill(page.replace("crop", "corp"))


def test_every_command_and_option_is_listed(pages):
    page = pages["reference/command-line.md"]
    for name, command in reference.commands():
        assert f"(#{name})" in page.split("<!--")[0].split("\n## ")[0], name
        section = page.split(f"## tokenmill {name} {{ #{name} }}")[1].split("\n## ")[0]
        for param in command.params:
            for option in [*param.opts, *param.secondary_opts] if param.param_type_name == "option" else ():
                assert re.search(rf"`{re.escape(option)}[ `]", section) or getattr(param, "hidden", False), option


def test_every_error_is_listed(pages):
    names = re.findall(r"^### (\w+Error) \{ #\1 \}$", pages["reference/errors.md"], re.MULTILINE)
    assert names == [kind.__name__ for kind in reference.errors()]
    assert set(names) >= {name for name in tm.__all__ if name.endswith("Error")}


def test_every_public_name_is_in_the_api_and_every_member_exists(pages):
    names = re.findall(r"^::: tokenmill\.(\w+)$", pages["reference/python.md"], re.MULTILINE)
    assert sorted(names) == sorted(n for n in tm.__all__ if not n.endswith("Error") and n != "__version__")
    for owner, members in reference.MEMBERS.items():
        kind = getattr(tm, owner.removeprefix("tokenmill."))
        fields = getattr(kind, "__dataclass_fields__", ())
        assert [name for name in members if not hasattr(kind, name) and name not in fields] == [], owner


def test_every_variable_that_the_code_reads_is_listed(pages):
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    read = set(re.findall(r"environ(?:\.get\(|\[)\"(\w+)\"", source))
    read |= set(re.findall(r"^\w+_VARIABLE = \"(\w+)\"", source, re.MULTILINE))
    assert len(read) >= 4
    assert [name for name in sorted(read) if f"`{name}`" not in pages["reference/environment.md"]] == []


def anchors_of(page: str) -> set[str]:
    """Return the anchors of a page, as the site makes them."""
    found = set(re.findall(r"\{ #(\S+) \}|<span id=\"([^\"]+)\"", page)) | set()
    anchors = {name for pair in found for name in pair if name}
    anchors |= set(re.findall(r"^::: (\S+)$", page, re.MULTILINE))
    text = re.sub(r"^(`{3,}).*?^\1", "", page, flags=re.DOTALL | re.MULTILINE)
    for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"\{ #.*|`|\\|\]\([^)]*\)", "", title)
        anchors.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower()))
    return anchors


def test_every_link_within_the_site_leads_to_a_page_and_an_anchor(pages):
    anchors = {path: anchors_of(text) for path, text in pages.items()}
    broken = []
    for path, text in pages.items():
        bare = re.sub(r"^(`{3,}).*?^\1|`[^`\n]+`", "`x`", text, flags=re.DOTALL | re.MULTILINE)
        for target, anchor in re.findall(r"\]\(([^)\s#:]*)(?:#([^)\s]+))?\)", bare):
            if Path(target).suffix not in ("", ".md"):
                continue
            file = (ROOT / path).parent.joinpath(target).resolve().relative_to(ROOT).as_posix() if target else path
            if file not in pages or (anchor and anchor not in anchors[file]):
                broken.append(f"{path}: {target}#{anchor}")
    assert broken == []


@pytest.mark.slow
@pytest.mark.parametrize("path", ["docs/start/tutorial.ipynb", "examples/look_inside.ipynb"])
def test_a_notebook_shows_what_its_cells_give(path, tmp_path):
    """[A1.c]"""
    notebook = notebooks.read(ROOT / path)
    before = notebooks.shown(notebook)
    notebooks.run(notebook, tmp_path)
    assert notebooks.shown(notebook) == before
    assert len(before) > 8


def test_a_notebook_becomes_a_page(tmp_path):
    cells = ["x = 3\nprint(x)", "x + 1", "!echo told"]
    notebook = {"cells": [{"cell_type": "markdown", "source": ["# Title"]}]}
    notebook["cells"] += [{"cell_type": "code", "metadata": {}, "source": [cell]} for cell in cells]
    notebooks.run(notebook, tmp_path)
    outputs = ["3", "4", "told"]
    blocks = [f"```python\n{cell}\n```\n\n```text\n{out}\n```" for cell, out in zip(cells, outputs, strict=True)]
    assert notebooks.markdown(notebook) == "\n\n".join(["# Title", *blocks]) + "\n"
