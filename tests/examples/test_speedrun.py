"""The speedrun in a tiny form: all parts, with fewer steps and ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = """\
import speedrun
config = speedrun.RUN.replace("steps = 240", "steps = 24").replace("seq_len = 128", "seq_len = 32")
speedrun.main(speedrun.Path("."), config.replace("start_step = 180", "start_step = 16"), ranks=(2, 1))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_training_ends_with_the_losses_of_a_straight_one(tmp_path):
    """[R1.a, E1.a]"""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(EXAMPLES)!r})\n{TINY}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(" in ")[0] for line in lines if line.startswith("straight: ")] == ["straight: 24 new steps"]
    killed = [line for line in lines if line.startswith("killed: ")]
    assert killed[0].endswith("on 2 ranks, then kill -9")
    assert killed[1].endswith("on 1 rank")
    (found,) = [line for line in lines if line.startswith("largest difference of a loss: ")]
    assert float(found.rsplit(" ", 1)[1]) < 1e-3
    assert "The miller " in done.stdout.split("A sample of the model that was killed:")[1]


def test_other_losses_are_an_error(speedrun):
    straight = {step: 5.0 - step / 10 for step in range(24)}
    speedrun.compare(straight, straight)
    with pytest.raises(SystemExit, match=r"losses differ by 0\.1"):
        speedrun.compare(straight, {**straight, 7: straight[7] + 0.1})
    with pytest.raises(SystemExit, match="step 7 is missing"):
        speedrun.compare(straight, {step: loss for step, loss in straight.items() if step != 7})
