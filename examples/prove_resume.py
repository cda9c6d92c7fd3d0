"""Prove that a training that is killed and goes on with other ranks is the one that was never interrupted.

python examples/prove_resume.py --out proof --picture docs/pictures/train-tiny.svg

One process trains without a break. Then 2 ranks train until they are killed with kill -9 at a random step, 4 ranks
with another micro-batch go on until they are killed too, and one process ends what they began.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, floor, log10
from pathlib import Path

import tokenmill as tm
from tokenmill.loader import DIGEST_ARRAYS, batch_digest, row_digests
from tokenmill.view.picture import COLOURS, number, text_of, ticks, width_of

EXAMPLES = Path(__file__).resolve().parent
TOLERANCE = 1e-10
"""Most that losses may differ by. The same batch, cut in another way, is summed in another order: in float64 that
makes about 1e-15, which few hundred steps hardly raise. Other rows change a loss by 1e-4 to 1e-1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What a training says of one of its steps."""

    step: int
    stage: str
    loss: float
    digest: str
    """Of the global batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leg:
    """A training from its start or last checkpoint to its end, by nature or by kill."""

    start: int
    pids: tuple[int, ...]
    """Of the ranks, in order."""
    micro_batch: int
    steps: tuple[Step, ...] = ()

    @property
    def end(self) -> int:
        """The step that was not ended any more."""
        return self.start + len(self.steps)

    @property
    def name(self) -> str:
        """What ran, for people."""
        ranks = f"{len(self.pids)} rank{'s' if len(self.pids) > 1 else ''}"
        return f"{ranks}, micro-batch {self.micro_batch}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """Two trainings that were found to be one."""

    straight: Leg
    legs: tuple[Leg, ...]
    other: Leg | None
    """A training on the same mixture in another order: how far apart losses are where the data is not the same."""

    @property
    def difference(self) -> float:
        """Largest difference of a loss to that of the straight training."""
        return max(error for leg in self.legs for _, error in errors(leg, self.straight))


def errors(leg: Leg, straight: Leg) -> Iterator[tuple[int, float]]:
    """Yield step and difference of the loss to that of the straight training, for all steps of a leg."""
    for step in leg.steps:
        yield step.step, abs(step.loss - straight.steps[step.step].loss)


def read_log(file: Path) -> list[Leg]:
    """Read what trainings have written to a log; a line that is being written is left for later."""
    legs: list[Leg] = []
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    for line in text[: text.rfind("\n") + 1].splitlines():
        facts = json.loads(line)
        if "start" in facts:
            legs.append(Leg(**{**facts, "pids": tuple(facts["pids"])}))
        else:
            legs[-1] = replace(legs[-1], steps=(*legs[-1].steps, Step(**facts)))
    return legs


# What is run.


def lay_out(folder: Path, config: Path) -> Path:
    """Write a config into a folder, with paths that hold from there, prepare its texts, and return its file."""
    text = re.sub(
        r'(?m)^(documents = \[|store = )"([^"]+)"',
        lambda found: found[1] + json.dumps(str((config.parent / found[2]).resolve())),
        config.read_text(encoding="utf-8"),
    )
    file = folder / "run.toml"
    file.write_text(text, encoding="utf-8")
    tm.Run.from_toml(file).plan()
    return file


@contextmanager
def training(
    run: Path, out: Path, *, ranks: int, micro_batch: int, save_every: int
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a training and see to its end."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"] if ranks > 1 else []
    options = ["--out", out, "--micro-batch", micro_batch, "--save-every", save_every, "--dtype", "float64"]
    command = [sys.executable, *launcher, EXAMPLES / "train_tiny.py", run, *options]
    # One thread a rank, so that only the way a batch is cut changes the order of sums.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    out.mkdir(parents=True, exist_ok=True)
    with (out / "messages.txt").open("ab") as messages:
        process = subprocess.Popen(
            [str(word) for word in command], stdout=messages, stderr=messages, env=environment
        )
    try:
        yield process
    finally:
        process.terminate()  # torchrun ends its ranks then
        process.wait()


def finish(process: subprocess.Popen[bytes], out: Path) -> None:
    """Wait for the end of a training, which must be a good one."""
    if process.wait() != 0:
        raise tm.TokenmillError(
            f"{out}: a training must end with exit code 0, got {process.returncode}; read {out / 'messages.txt'}"
        )


def kill_at(process: subprocess.Popen[bytes], out: Path, *, step: int, leg: int, delay: float) -> None:
    """Wait until a step of a leg is logged and `delay` seconds more, then kill -9 torchrun and all its ranks."""
    while True:
        legs = read_log(out / "log.jsonl")
        if len(legs) > leg and legs[leg].steps and legs[leg].steps[-1].step >= step:
            break
        if process.poll() is not None:
            raise tm.TokenmillError(
                f"{out}: a training must live until it is killed, got exit code {process.returncode} before "
                f"step {step}; read {out / 'messages.txt'}"
            )
        time.sleep(0.002)
    time.sleep(delay)
    # torchrun first, or it would end the ranks in its own way; not alone, or they would train on without it.
    process.kill()
    for pid in legs[leg].pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def run_all(run: Path, folder: Path, *, ranks: Sequence[int], save_every: int, seed: int) -> None:
    """Run the straight training, then the one that is killed once for each of `ranks`."""
    span = tm.Run.from_toml(run).plan().steps // (len(ranks) + 1)
    if not save_every < span:
        raise tm.ConfigError(
            f"--save-every: must be below the {span} steps of one of {len(ranks) + 1} legs, got {save_every}; "
            "lower it"
        )
    with training(run, folder / "straight", ranks=1, micro_batch=8, save_every=save_every) as process:
        finish(process, folder / "straight")
    chance = random.Random(seed)
    out = folder / "killed"
    # None in the last part of the steps: far enough from the end to be killed in time.
    kills = [chance.randrange(max(save_every, leg * span + 1), (leg + 1) * span) for leg in range(len(ranks))]
    for leg, (count, step) in enumerate(zip(ranks, kills, strict=True)):
        with training(run, out, ranks=count, micro_batch=8 // count, save_every=save_every) as process:
            kill_at(process, out, step=step, leg=leg, delay=chance.random() / 20)
    with training(run, out, ranks=1, micro_batch=1, save_every=save_every) as process:
        finish(process, out)


def run_other_order(run: Path, folder: Path, *, save_every: int) -> Leg:
    """Train on the same mixture with the rows in another order."""
    config, changed = re.subn(r"(?m)^seed = (\d+)$", r"seed = 1\1", run.read_text(encoding="utf-8"))
    if not changed:
        raise tm.ConfigError(f"{run}: must say a seed for another order to have another, got none; add seed = 1")
    other = run.with_name("other.toml")
    other.write_text(config, encoding="utf-8")
    with training(other, folder / "other", ranks=1, micro_batch=8, save_every=save_every) as process:
        finish(process, folder / "other")
    return read_log(folder / "other" / "log.jsonl")[0]


# What is compared.


def planned_digests(run: Path) -> list[str]:
    """Return the digests of all global batches as the plan has them; nothing is trained."""
    loader = tm.Run.from_toml(run).loader(arrays=DIGEST_ARRAYS)
    return [batch_digest(row_digests(loader[step])) for step in range(loader.plan.steps)]


def check(proof: Proof, planned: Sequence[str]) -> None:
    """Refuse trainings that differ: in a batch, in a loss, or in which steps were trained."""
    for leg in (proof.straight, *proof.legs):
        for wanted, step in enumerate(leg.steps, leg.start):
            want, got = f"batch {planned[wanted]} in step {wanted}", f"batch {step.digest} in step {step.step}"
            _require(want == got, f"{leg.name}: must train on {want}, got {got}")
        for at, error in errors(leg, proof.straight):
            same = f"{leg.name}: loss of step {at} must be that of the straight training to {TOLERANCE:g}"
            _require(error <= TOLERANCE, f"{same}, got a difference of {error:g}")
    reached = 0
    for leg in proof.legs:
        _require(leg.start <= reached, f"{leg.name}: must miss no step, got {reached}:{leg.start} missed")
        reached = leg.end
    for end in (proof.straight.end, reached):
        _require(end == len(planned), f"trainings: must end with step {len(planned)}, got {end}")


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise tm.TokenmillError(f"{problem}; report this")


def summary(proof: Proof, seed: int) -> str:
    """Say in a few lines what was proved."""
    lines = [f"{leg.name}: steps {leg.start}:{leg.end}" for leg in (proof.straight, *proof.legs)]
    lines[1:-1] = [f"{line}, then kill -9" for line in lines[1:-1]]
    repeated = sum(len(leg.steps) for leg in proof.legs) - len(proof.straight.steps)
    lines.append(f"kills of seed {seed} cost {repeated} steps, which were trained twice on the same batches")
    lines.append(f"all digests equal, losses differ by at most {proof.difference:.2g} of {TOLERANCE:g} allowed")
    if proof.other is not None:
        apart = sorted(error for _, error in errors(proof.other, proof.straight))
        lines.append(f"another order of the same data: losses differ by {apart[len(apart) // 2]:.2g} in the median")
    return "\n".join(lines) + "\n"


# What is shown.

WIDTH, HEIGHT, LEFT, RIGHT = 1000, 596, 60, 976
LOSS_TOP, LOSS_BOTTOM, ERROR_TOP, ERROR_BOTTOM = 62, 342, 392, 522
FLOOR = -17
"""Power of ten at the bottom of the differences, where 0 is drawn."""
STYLE = """
.tt{font:11px system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}.tt-head{font-size:15px;font-weight:600}
.tt-paper{fill:#fff}.tt-ink{fill:#1c1f24}.tt-dim,.tt-dot{fill:#5b616b}.tt-grid{stroke:#5b616b;stroke-opacity:.25}
.tt-cut{stroke:#1c1f24;stroke-width:1.2;stroke-dasharray:4 3}.tt-leg{fill:none;stroke-width:1.8}
.tt-straight{fill:none;stroke:#1c1f24;stroke-opacity:.2;stroke-width:8;stroke-linejoin:round}
.tt-other{fill:none;stroke:#5b616b;stroke-opacity:.8;stroke-dasharray:2 2}
@media (prefers-color-scheme:dark){.tt-paper{fill:#15181d}.tt-ink{fill:#e8eaed}.tt-dim,.tt-dot{fill:#a2a9b4}
.tt-grid,.tt-other{stroke:#a2a9b4}.tt-cut,.tt-straight{stroke:#e8eaed}}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """Where steps, losses and differences lie on the picture."""

    steps: int
    least: float
    most: float

    def x(self, step: float) -> float:
        """Return how far to the right a step is."""
        return LEFT + (RIGHT - LEFT) * step / self.steps

    def loss(self, value: float) -> float:
        """Return how far down a loss is."""
        return LOSS_BOTTOM - (LOSS_BOTTOM - LOSS_TOP) * (value - self.least) / (self.most - self.least)

    def error(self, value: float) -> float:
        """Return how far down a difference is, on a scale of powers of ten."""
        power = max(FLOOR, log10(value)) if value else FLOOR
        return ERROR_BOTTOM - (ERROR_BOTTOM - ERROR_TOP) * (power - FLOOR) / (1 - FLOOR)

    def curve(self, leg: Leg) -> str:
        """Return the losses of a leg as the points of a line; a step stands at its middle."""
        return " ".join(f"{number(self.x(s.step + 0.5))},{number(self.loss(s.loss))}" for s in leg.steps)


def picture(proof: Proof) -> str:
    """Draw the losses of all legs over those of the straight training, and how far they are apart."""
    losses = [step.loss for step in proof.straight.steps]
    axes = Axes(steps=len(losses), least=floor(min(losses)), most=ceil(max(losses)))
    title = f"Killed twice, gone on with other ranks: the same {axes.steps} batches, the same losses"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" class="tt" role="img">',
        f"<title>{text_of(title)}</title><style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" class="tt-paper"/>',
        label(LEFT, 26, title, "tt-ink tt-head", "start"),
        *draw_scales(axes),
        *draw_stages(axes, proof.straight),
    ]
    x, y = float(LEFT), HEIGHT - 16
    for name, leg, paint, dots in curves(proof):
        parts += [f'<polyline points="{axes.curve(leg)}" {paint}/>', *draw_errors(axes, leg, proof, dots)]
        parts.append(f'<polyline points="{number(x)},{y} {number(x + 22)},{y}" {paint}/>')
        parts.append(label(x + 28, y + 4, name, "tt-ink", "start"))
        x += 42 + width_of(name, 11)
    return "\n".join([*parts, *draw_kills(axes, proof.legs), "</svg>"]) + "\n"


def curves(proof: Proof) -> Iterator[tuple[str, Leg, str, str | None]]:
    """Yield name, leg, and the looks of the line and of its differences, of all that is drawn."""
    yield f"no kill: {proof.straight.name}", proof.straight, 'class="tt-straight"', None
    if proof.other is not None:
        yield "another order", proof.other, 'class="tt-other"', 'class="tt-dot"'
    for place, leg in enumerate(proof.legs):
        colour = COLOURS[place % len(COLOURS)]
        yield leg.name, leg, f'class="tt-leg" stroke="{colour}"', f'fill="{colour}"'


def label(x: float, y: float, text: str, style: str = "tt-dim", anchor: str = "middle") -> str:
    """Return a text of the picture."""
    return f'<text x="{number(x)}" y="{number(y)}" class="{style}" text-anchor="{anchor}">{text_of(text)}</text>'


def line(x: tuple[float, float], y: tuple[float, float], style: str) -> str:
    """Return a straight line of the picture."""
    (x1, x2), (y1, y2) = map(number, x), map(number, y)
    return f'<line x1="{x1}" x2="{x2}" y1="{y1}" y2="{y2}" class="{style}"/>'


def draw_scales(axes: Axes) -> Iterator[str]:
    """Draw the scales of losses, differences and steps."""
    for value in range(int(axes.least), int(axes.most) + 1):
        yield line((LEFT, RIGHT), (axes.loss(value),) * 2, "tt-grid")
        yield label(LEFT - 6, axes.loss(value) + 4, str(value), anchor="end")
    for power in (FLOOR, -13, -9, -5, -1):
        y = axes.error(10.0**power)
        yield line((LEFT, RIGHT), (y, y), "tt-grid")
        yield label(LEFT - 6, y + 4, "0" if power == FLOOR else f"1e{power}", anchor="end")
    yield line((LEFT, RIGHT), (axes.error(TOLERANCE),) * 2, "tt-cut")
    yield label(RIGHT, axes.error(TOLERANCE) + 13, f"tolerance {TOLERANCE:g}", anchor="end")
    yield label(LEFT, ERROR_TOP - 8, "difference of the loss to that of the straight training", "tt-ink", "start")
    yield label(LEFT, LOSS_TOP - 8, "loss", "tt-ink", "start")
    for step in ticks(axes.steps, 12):
        yield label(axes.x(step), ERROR_BOTTOM + 16, str(step))
    yield label((LEFT + RIGHT) / 2, ERROR_BOTTOM + 32, "step", "tt-ink")


def draw_stages(axes: Axes, straight: Leg) -> Iterator[str]:
    """Draw where stages begin, and their names."""
    names = [step.stage for step in straight.steps]
    begins = [i for i, name in enumerate(names) if i == 0 or name != names[i - 1]]
    for begin, end in pairwise([*begins, axes.steps]):
        yield label((axes.x(begin) + axes.x(end)) / 2, LOSS_TOP - 8, f"stage {names[begin]}")
        for top, bottom in ((LOSS_TOP, LOSS_BOTTOM), (ERROR_TOP, ERROR_BOTTOM)):
            yield line((axes.x(begin),) * 2, (top, bottom), "tt-grid")


def draw_errors(axes: Axes, leg: Leg, proof: Proof, paint: str | None) -> Iterator[str]:
    """Draw a dot for every step: how far its loss is from that of the straight training, which has none itself."""
    for step, error in errors(leg, proof.straight) if paint else ():
        yield f'<circle cx="{number(axes.x(step + 0.5))}" cy="{number(axes.error(error))}" r="1.8" {paint}/>'


def draw_kills(axes: Axes, legs: Sequence[Leg]) -> Iterator[str]:
    """Draw where each leg but the last was killed, and from where the next went on."""
    for leg, after in pairwise(legs):
        x = axes.x(leg.end)
        yield line((x, x), (LOSS_TOP, LOSS_BOTTOM), "tt-cut")
        side, anchor = (6, "start") if x < RIGHT - 140 else (-6, "end")
        yield label(x + side, LOSS_TOP + 14, f"kill -9 in step {leg.end},", "tt-ink", anchor)
        yield label(x + side, LOSS_TOP + 28, f"goes on at step {after.start}", "tt-ink", anchor)


def main() -> None:
    """Run all, compare, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to work in; must be new")
    parser.add_argument("--run", type=Path, default=EXAMPLES / "train_tiny.toml", help="config of the training")
    parser.add_argument("--save-every", type=int, default=10, help="steps from one checkpoint to the next")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 4], help="of each training that is killed; divide 8"
    )
    parser.add_argument("--seed", type=int, help="of the steps at which is killed; default: by chance")
    parser.add_argument("--picture", type=Path, help="SVG file to draw; also trains on another order of the data")
    options = parser.parse_args()
    options.out.mkdir(parents=True)
    seed = secrets.randbelow(1000) if options.seed is None else options.seed
    run = lay_out(options.out, options.run)
    run_all(run, options.out, ranks=options.ranks, save_every=options.save_every, seed=seed)
    other = run_other_order(run, options.out, save_every=options.save_every) if options.picture else None
    (straight,), legs = (read_log(options.out / name / "log.jsonl") for name in ("straight", "killed"))
    proof = Proof(straight=straight, legs=tuple(legs), other=other)
    check(proof, planned_digests(run))
    sys.stdout.write(summary(proof, seed))
    if options.picture:
        options.picture.write_text(picture(proof), encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except tm.TokenmillError as error:
        sys.exit(f"error: {error}")
