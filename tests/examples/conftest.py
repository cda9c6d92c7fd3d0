"""The examples as modules, and a short run for them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tokenmill.demo import CORPUS_DIR

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = f"""\
[run]
seed = 1
steps = 24
global_batch_size = 16
seq_len = 32

[[sources]]
name = "prose"
documents = ["{CORPUS_DIR}/prose.jsonl"]
tokenizer = "bytes"

[[sources]]
name = "code"
documents = ["{CORPUS_DIR}/code.jsonl"]
tokenizer = "bytes"

[[stages]]
name = "base"
start_step = 0
weights = {{ prose = 0.7, code = 0.3 }}

[[stages]]
name = "long"
start_step = 8
seq_len = 64
global_batch_size = 8
lr_scale = 0.5
weights = {{ prose = 0.2, code = 0.8 }}
"""


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples.{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def train_tiny() -> ModuleType:
    return load("train_tiny")


@pytest.fixture(scope="session")
def speedrun(train_tiny) -> ModuleType:
    sys.modules["train_tiny"] = train_tiny  # as if both were in the folder of the script
    return load("speedrun")


@pytest.fixture(scope="session")
def prove_resume() -> ModuleType:
    return load("prove_resume")


@pytest.fixture(scope="session")
def short_run(prove_resume, tmp_path_factory) -> Path:
    """Return the config of a short run over the bundled corpus."""
    written = tmp_path_factory.mktemp("config") / "short.toml"
    written.write_text(SHORT, encoding="utf-8")
    return prove_resume.lay_out(tmp_path_factory.mktemp("short"), written)
