"""A short run of the fuzzer; `make fuzz` runs it for long."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "fuzz.py"


@pytest.mark.slow
def test_no_attack_finds_anything():
    command = [sys.executable, str(TOOL), "--seconds", "0", "--cases", "3", "--seed", "7", "--json"]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    report = json.loads(process.stdout)
    assert report["findings"] == []
    assert {target: sum(counts.values()) for target, counts in report["counts"].items()} == dict.fromkeys(
        (
            *("configs", "foreign", "indexes", "inputs", "manifests", "runs", "states", "stores", "templates"),
            "tokenizers",
        ),
        3,
    )
