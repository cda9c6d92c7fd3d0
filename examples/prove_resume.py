"""Show that a training that is killed and resumed on other ranks is the training that was never interrupted.

python examples/prove_resume.py --out proof --picture docs/pictures/train-tiny.svg

One process trains without a break. Then 2 ranks train until they are killed with kill -9 at a random step. 4 ranks
with another micro-batch resume until they are killed too, and one process finishes. Every rank runs the loop of
`train_tiny.py`, in float64, and reports the digest of every global batch.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil, floor, log10
from pathlib import Path

import tokenmill as tm
from tokenmill.loader import DIGEST_ARRAYS, batch_digest, row_digests
from tokenmill.view.picture import COLOURS, number, text_of, ticks, width_of

EXAMPLES = Path(__file__).resolve().parent
TOLERANCE = 1e-10
"""Largest difference of two losses. Ranks and micro-batches change the order of sums, which in float64 changes a
loss by about 1e-15. Other rows change it by 1e-4 to 1e-1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Stage, loss and digest of the global batch of a trained step."""

    step: int
    stage: str
    loss: float
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Leg:
    """A training from its start or last checkpoint to its end or kill."""

    ranks: int
    micro_batch: int
    steps: tuple[Step, ...] = ()

    @property
    def start(self) -> int:
        """First step that was trained."""
        return self.steps[0].step

    @property
    def end(self) -> int:
        """First step that was not finished."""
        return self.start + len(self.steps)

    @property
    def name(self) -> str:
        """Ranks and micro-batch, for people."""
        return f"{self.ranks} rank{'s' if self.ranks > 1 else ''}, micro-batch {self.micro_batch}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """A straight training, and the legs of one that was killed."""

    straight: Leg
    legs: tuple[Leg, ...]
    other: Leg | None
    """Training on the same mixture in another order, to compare the differences with."""

    @property
    def difference(self) -> float:
        """Largest difference of a loss to that of the straight training."""
        return max(error for leg in self.legs for _, error in errors(leg, self.straight))


def errors(leg: Leg, straight: Leg) -> Iterator[tuple[int, float]]:
    """Yield step and difference of the loss to that of the straight training, for all steps of a leg."""
    for step in leg.steps:
        yield step.step, abs(step.loss - straight.steps[step.step].loss)


_LOSS = re.compile(r"step (\d+) of stage (.+): loss (\S+)")


def read_log(file: Path) -> list[Leg]:
    """Read the output of trainings: ranks, then digest and loss of each step. An unfinished line is skipped."""
    legs: list[Leg] = []
    digest = ""
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    for line in text[: text.rfind("\n") + 1].splitlines():
        if line.startswith("digest "):
            digest = line.split()[1]
        elif trained := _LOSS.fullmatch(line):
            step = Step(step=int(trained[1]), stage=trained[2], loss=float(trained[3]), digest=digest)
            legs[-1] = replace(legs[-1], steps=(*legs[-1].steps, step))
        else:
            legs.append(Leg(**json.loads(line)))
    return legs


# One rank of a training.


def train_rank(run: tm.Run, out: Path, *, micro_batch: int, save_every: int) -> None:
    """Train as `train_tiny.py` does, and report digests; rank and world size are in the environment."""
    import torch
    import torch.distributed as dist
    import train_tiny

    from tokenmill.torch import TorchLoader, torch_loader

    class Reported(TorchLoader):
        """A loader that prints the digest of each global batch, of the rows of all ranks, on rank 0."""

        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            step, rows = self.step, bytearray()
            for batch in super().__iter__():
                for digest in row_digests({name: batch[name].numpy() for name in DIGEST_ARRAYS}):
                    rows += digest
                if self.step > step:
                    parts = [torch.empty(len(rows), dtype=torch.uint8) for _ in range(dist.get_world_size())]
                    dist.all_gather(parts, torch.frombuffer(rows, dtype=torch.uint8))
                    digests = torch.cat(parts).view(-1, 8)
                    if dist.get_rank() == 0:
                        print("digest", batch_digest(row.tobytes() for row in digests.numpy()), flush=True)
                    step, rows = self.step, bytearray()
                yield batch

    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = train_tiny.TinyGPT(vocab_size=259, max_len=max(stage.spec.seq_len for stage in run.plan().stages))
    loader = Reported(torch_loader(run, micro_batch=micro_batch, arrays=train_tiny.ARRAYS).loader)
    train_tiny.train(run, loader, model, out / "checkpoint.pt", save_every)
    dist.destroy_process_group()


# All trainings.


def lay_out(folder: Path, config: Path) -> Path:
    """Copy a config to a folder, with absolute paths, prepare its texts, and return the copy."""
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
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the ranks of a training, and end those that are left at the end."""
    out.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    options = ["--train", "--run", run, "--out", out, "--micro-batch", micro_batch, "--save-every", save_every]
    command = [sys.executable, Path(__file__).resolve(), *options]
    # One thread per rank, so that only ranks and micro-batches change the order of sums.
    shared = {
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
    }
    with (out / "log.txt").open("ab") as log, (out / "messages.txt").open("ab") as messages:
        log.write(json.dumps({"ranks": ranks, "micro_batch": micro_batch}).encode() + b"\n")
        log.flush()
        processes = [
            subprocess.Popen(
                [str(word) for word in command],
                stdout=log,
                stderr=messages,
                env={**os.environ, **shared, "RANK": str(rank)},
            )
            for rank in range(ranks)
        ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def finish(processes: Sequence[subprocess.Popen[bytes]], out: Path) -> None:
    """Wait for the end of all ranks, without an error."""
    codes = [process.wait() for process in processes]
    if any(codes):
        raise tm.TokenmillError(f"{out}: training failed with exit codes {codes}; read {out / 'messages.txt'}")


def kill_at(processes: Sequence[subprocess.Popen[bytes]], out: Path, *, step: int, leg: int, delay: float) -> None:
    """Wait until a step of a leg is logged and `delay` seconds more, then kill -9 all ranks."""
    while True:
        legs = read_log(out / "log.txt")
        if len(legs) > leg and legs[leg].steps and legs[leg].steps[-1].step >= step:
            break
        codes = [process.poll() for process in processes]
        if any(code is not None for code in codes):
            raise tm.TokenmillError(
                f"{out}: training ended with exit codes {codes} before step {step}; read {out / 'messages.txt'}"
            )
        time.sleep(0.002)
    time.sleep(delay)
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


def run_all(run: Path, folder: Path, *, ranks: Sequence[int], save_every: int, seed: int) -> None:
    """Run the straight training, then the one that is killed once per entry of `ranks`."""
    span = tm.Run.from_toml(run).plan().steps // (len(ranks) + 1)
    if not save_every < span:
        raise tm.ConfigError(
            f"--save-every: must be below the {span} steps of one of {len(ranks) + 1} legs, got {save_every}; "
            "lower it"
        )
    with training(run, folder / "straight", ranks=1, micro_batch=8, save_every=save_every) as processes:
        finish(processes, folder / "straight")
    chance = random.Random(seed)
    out = folder / "killed"
    # No kill in the last part of the steps: the end could come first.
    kills = [chance.randrange(max(save_every, leg * span + 1), (leg + 1) * span) for leg in range(len(ranks))]
    for leg, (count, step) in enumerate(zip(ranks, kills, strict=True)):
        with training(run, out, ranks=count, micro_batch=8 // count, save_every=save_every) as processes:
            kill_at(processes, out, step=step, leg=leg, delay=chance.random() / 20)
    with training(run, out, ranks=1, micro_batch=1, save_every=save_every) as processes:
        finish(processes, out)


def run_other_order(run: Path, folder: Path, *, save_every: int) -> Leg:
    """Train on the same mixture with the rows in another order."""
    config, changed = re.subn(r"(?m)^seed = (\d+)$", r"seed = 1\1", run.read_text(encoding="utf-8"))
    if not changed:
        raise tm.ConfigError(f"{run}: run.seed is missing, so there is no other order; add seed = 1")
    other = run.with_name("other.toml")
    other.write_text(config, encoding="utf-8")
    with training(other, folder / "other", ranks=1, micro_batch=8, save_every=save_every) as processes:
        finish(processes, folder / "other")
    return read_log(folder / "other" / "log.txt")[0]


# Comparison.


def planned_digests(run: Path) -> list[str]:
    """Return the digests of all global batches, computed from the plan without training."""
    loader = tm.Run.from_toml(run).loader(arrays=DIGEST_ARRAYS)
    return [batch_digest(row_digests(loader[step])) for step in range(loader.plan.steps)]


def check(proof: Proof, planned: Sequence[str]) -> None:
    """Raise an error if two trainings differ in a batch, a loss or the steps."""
    for leg in (proof.straight, *proof.legs):
        for wanted, step in enumerate(leg.steps, leg.start):
            want, got = f"batch {planned[wanted]} in step {wanted}", f"batch {step.digest} in step {step.step}"
            _require(want == got, f"{leg.name}: expected {want}, got {got}")
        for at, error in errors(leg, proof.straight):
            problem = f"{leg.name}: loss of step {at} differs by {error:g} from that of the straight training"
            _require(error <= TOLERANCE, f"{problem}, more than {TOLERANCE:g}")
    reached = 0
    for leg in proof.legs:
        _require(leg.start <= reached, f"{leg.name}: steps {reached}:{leg.start} are missing")
        reached = leg.end
    for end in (proof.straight.end, reached):
        _require(end == len(planned), f"trainings: expected the end at step {len(planned)}, got {end}")


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise tm.TokenmillError(f"{problem}; report this")


def summary(proof: Proof, seed: int) -> str:
    """Describe the trainings and their differences in a few lines."""
    lines = [f"{leg.name}: steps {leg.start}:{leg.end}" for leg in (proof.straight, *proof.legs)]
    lines[1:-1] = [f"{line}, then kill -9" for line in lines[1:-1]]
    repeated = sum(len(leg.steps) for leg in proof.legs) - len(proof.straight.steps)
    lines.append(f"kills of seed {seed}: {repeated} steps were trained twice, on the same batches")
    lines.append(f"all digests equal, losses differ by at most {proof.difference:.2g} of {TOLERANCE:g} allowed")
    if proof.other is not None:
        apart = sorted(error for _, error in errors(proof.other, proof.straight))
        lines.append(f"another order of the data: losses differ by {apart[len(apart) // 2]:.2g} in the median")
    return "\n".join(lines) + "\n"


# Picture.

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
    """Scales of steps, losses and differences."""

    steps: int
    least: float
    most: float

    def x(self, step: float) -> float:
        """Return x of a step."""
        return LEFT + (RIGHT - LEFT) * step / self.steps

    def loss(self, value: float) -> float:
        """Return y of a loss."""
        return LOSS_BOTTOM - (LOSS_BOTTOM - LOSS_TOP) * (value - self.least) / (self.most - self.least)

    def error(self, value: float) -> float:
        """Return y of a difference, on a scale of powers of ten."""
        power = max(FLOOR, log10(value)) if value else FLOOR
        return ERROR_BOTTOM - (ERROR_BOTTOM - ERROR_TOP) * (power - FLOOR) / (1 - FLOOR)

    def curve(self, leg: Leg) -> str:
        """Return the losses of a leg as the points of a line, each at the middle of its step."""
        return " ".join(f"{number(self.x(s.step + 0.5))},{number(self.loss(s.loss))}" for s in leg.steps)


def picture(proof: Proof) -> str:
    """Draw the losses of all legs over those of the straight training, and the differences."""
    losses = [step.loss for step in proof.straight.steps]
    axes = Axes(steps=len(losses), least=floor(min(losses)), most=ceil(max(losses)))
    title = f"Killed twice and resumed on other ranks: the same {axes.steps} batches, the same losses"
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
    """Yield name, leg, and the style of the line and of the differences of every curve."""
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
    """Draw the stages: their names and borders."""
    names = [step.stage for step in straight.steps]
    begins = [i for i, name in enumerate(names) if i == 0 or name != names[i - 1]]
    for begin, end in pairwise([*begins, axes.steps]):
        yield label((axes.x(begin) + axes.x(end)) / 2, LOSS_TOP - 8, f"stage {names[begin]}")
        for top, bottom in ((LOSS_TOP, LOSS_BOTTOM), (ERROR_TOP, ERROR_BOTTOM)):
            yield line((axes.x(begin),) * 2, (top, bottom), "tt-grid")


def draw_errors(axes: Axes, leg: Leg, proof: Proof, paint: str | None) -> Iterator[str]:
    """Draw the difference to the straight training as a dot for every step."""
    for step, error in errors(leg, proof.straight) if paint else ():
        yield f'<circle cx="{number(axes.x(step + 0.5))}" cy="{number(axes.error(error))}" r="1.8" {paint}/>'


def draw_kills(axes: Axes, legs: Sequence[Leg]) -> Iterator[str]:
    """Draw the kill of each leg but the last, and the step at which the next one resumed."""
    for leg, after in pairwise(legs):
        x = axes.x(leg.end)
        yield line((x, x), (LOSS_TOP, LOSS_BOTTOM), "tt-cut")
        side, anchor = (6, "start") if x < RIGHT - 140 else (-6, "end")
        yield label(x + side, LOSS_TOP + 14, f"kill -9 in step {leg.end},", "tt-ink", anchor)
        yield label(x + side, LOSS_TOP + 28, f"resumed at step {after.start}", "tt-ink", anchor)


def main() -> None:
    """Run all trainings, compare them, and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="new folder to work in")
    parser.add_argument("--run", type=Path, default=EXAMPLES / "train_tiny.toml", help="config of the training")
    parser.add_argument("--save-every", type=int, default=10, help="steps from one checkpoint to the next")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks of the killed legs; divisors of 8"
    )
    parser.add_argument("--seed", type=int, help="seed of the steps to kill at [default: random]")
    parser.add_argument("--picture", type=Path, help="SVG file to draw; also trains on another order of the data")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)  # this process is one rank
    parser.add_argument("--micro-batch", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        rows = options.micro_batch
        train_rank(tm.Run.from_toml(options.run), options.out, micro_batch=rows, save_every=options.save_every)
        return
    options.out.mkdir(parents=True)
    seed = secrets.randbelow(1000) if options.seed is None else options.seed
    run = lay_out(options.out, options.run)
    run_all(run, options.out, ranks=options.ranks, save_every=options.save_every, seed=seed)
    other = run_other_order(run, options.out, save_every=options.save_every) if options.picture else None
    (straight,), legs = (read_log(options.out / name / "log.txt") for name in ("straight", "killed"))
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
