"""Files around the code: workflows, forms, and settings that name one another."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tokenmill

ROOT = Path(__file__).parents[1]
GITHUB = ROOT / ".github"
FORMS = GITHUB / "ISSUE_TEMPLATE"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
SCHEMAS = {
    "vendor.github-workflows": WORKFLOWS,
    "custom.github-workflows-require-timeout": WORKFLOWS,
    "vendor.dependabot": [GITHUB / "dependabot.yml"],
    "vendor.github-issue-config": [FORMS / "config.yml"],
    "vendor.github-issue-forms": sorted(
        set((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")) - {GITHUB / "ISSUE_TEMPLATE" / "config.yml"}
    ),
    "vendor.citation-file-format": [ROOT / "CITATION.cff"],
}


SPEC = importlib.util.spec_from_file_location("prose", ROOT / "tools" / "prose.py")
prose = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(prose)
PAGES = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "examples" / "README.md",
    ROOT / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_use_plain_words_and_short_sentences(page):
    assert list(prose.findings(page.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_that_services_read_have_their_schema(schema):
    pytest.importorskip("check_jsonschema")
    assert SCHEMAS[schema]
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, "--force-filetype", "yaml"]
    done = subprocess.run([*command, *map(str, SCHEMAS[schema])], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_workflow_with_a_mistake_does_not_have_the_schema(tmp_path):
    pytest.importorskip("check_jsonschema")
    text = WORKFLOWS[0].read_text(encoding="utf-8").replace("runs-on:", "run-on:")
    (tmp_path / "ci.yml").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run([*command, str(tmp_path / "ci.yml")], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "run-on" in done.stdout + done.stderr


def test_workflows_call_targets_of_the_makefile():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for workflow in WORKFLOWS:
        text = re.sub(r"\$\{\{.*?\}\}", "1", workflow.read_text(encoding="utf-8"))
        for words in re.findall(r"\bmake ((?:[\w-]+(?:=\S+)? ?)+)", text):
            called = [word for word in words.split() if "=" not in word]
            assert [word for word in called if word not in targets] == [], workflow.name


def test_tests_that_the_makefile_names_exist():
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    named = re.findall(r"\btests/[\w/.*-]+", re.sub(r"^#.*", "", text, flags=re.MULTILINE))
    assert len(named) > 10
    assert [path for path in named if not list(ROOT.glob(path))] == []


def test_linters_have_one_version():
    pins = dict(re.findall(r"^(\w+)==([\d.]+)$", (ROOT / "requirements" / "test.txt").read_text(), re.MULTILINE))
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert re.search(r"ruff-pre-commit\n\s+rev: v([\d.]+)", hooks)[1] == pins["ruff"]
    spelling = re.search(r"run codespell==([\d.]+)$", WORKFLOWS[0].read_text(encoding="utf-8"), re.MULTILINE)[1]
    assert re.search(r"codespell\n\s+rev: v([\d.]+)", hooks)[1] == spelling


def test_the_version_to_cite_is_that_of_the_package():
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)[1]
    assert cited == tokenmill.__version__
    assert re.search(rf"^## {re.escape(cited)} ", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_tested_versions_of_python_are_named_everywhere():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = re.findall(r"Python :: (3\.\d+)", project)
    tested = re.search(r"python: \[(.+)\]", (GITHUB / "workflows" / "ci.yml").read_text(encoding="utf-8"))[1]
    assert re.findall(r"3\.\d+", tested) == named
