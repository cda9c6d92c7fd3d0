"""Prepare, plan, train, kill -9, resume on other ranks, compare, and generate text: five minutes on a laptop CPU.

python examples/speedrun.py          # in a temporary folder
python examples/speedrun.py OUT      # keeps the store, the config, the logs and the checkpoints

The model is `train_tiny.py` with a larger width, on the corpus and the tokenizer of the package. Nothing is loaded
from the network.
"""

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import train_tiny

import tokenmill as tm
from tokenmill.demo import CORPUS_DIR, TOKENIZER_DIR
from tokenmill.torch import torch_loader

RUN = """\
[run]
steps = 240
global_batch_size = 16
seq_len = 128

[[sources]]
name = "prose"
store = "stores/prose"

[[sources]]
name = "dialogue"
store = "stores/dialogue"

[[stages]]
name = "base"
start_step = 0
weights = { prose = 0.8, dialogue = 0.2 }

[[stages]]
name = "anneal"
start_step = 180
lr_scale = 0.3
weights = { prose = 0.3, dialogue = 0.7 }
"""


def show(command: str) -> None:
    """Print a command and run it in the working directory."""
    print(f"\n$ {command}", flush=True)
    subprocess.run([sys.executable, "-m", *command.split()], check=True)


def model_of(run: tm.Run) -> train_tiny.TinyGPT:
    """Return the untrained model; its weights are the same in every process."""
    torch.manual_seed(0)
    return train_tiny.TinyGPT(vocab_size=4096, max_len=run.plan().at(0).seq_len, width=96, layers=3)


def train_rank(checkpoint: Path) -> None:
    """Train as one rank of the run; torchrun would set the same variables of the environment."""
    dist.init_process_group("gloo")
    run = tm.Run.from_toml("run.toml")
    loader = torch_loader(run, micro_batch=8 // dist.get_world_size(), arrays=train_tiny.ARRAYS)
    train_tiny.train(run, loader, model_of(run), checkpoint)
    dist.destroy_process_group()


def train(name: str, ranks: int, kill_at: int | None = None) -> None:
    """Train on some ranks, to the end or until they are killed with kill -9 at a step."""
    log, messages, start = Path(f"{name}.log"), Path(f"{name}.txt"), time.monotonic()
    before = len(losses(name))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    shared["OMP_NUM_THREADS"] = "1"  # the model is too small for more
    command = [sys.executable, __file__, "--rank", f"{name}.pt"]
    with log.open("a") as lines, messages.open("a") as errors:  # ranks complain when another one is killed
        processes = [
            subprocess.Popen(command, stdout=lines, stderr=errors, env=shared | {"RANK": str(rank)})
            for rank in range(ranks)
        ]
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                sys.exit(f"error: a rank failed\n{messages.read_text()[-2000:]}")
            if kill_at is not None and kill_at in losses(name):
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()  # kill -9
            process.wait()
    took = f"{len(losses(name)) - before} new steps in {time.monotonic() - start:.0f} s"
    print(
        f"{name}: {took} on {ranks} rank{'s' * (ranks > 1)}{', then kill -9' * (kill_at is not None)}", flush=True
    )


def losses(name: str) -> dict[int, float]:
    """Return the losses in the log of a training; of a step that was trained twice, the last one."""
    text = Path(f"{name}.log").read_text() if Path(f"{name}.log").exists() else ""
    return {
        int(step): float(loss) for step, loss in re.findall(r"^step (\d+) .*: loss (\S+)\n", text, re.MULTILINE)
    }


def compare(straight: dict[int, float], killed: dict[int, float]) -> None:
    """Print both loss curves, and end with an error if they differ."""
    for step in sorted(straight.keys() - killed.keys()):
        sys.exit(f"error: step {step} is missing")
    print(f"\n{'step':>4}  {'straight':>8}  {'killed':>8}")
    for step in sorted({*range(0, len(straight), max(1, len(straight) // 12)), len(straight) - 1}):
        print(f"{step:4}  {straight[step]:8.2f}  {killed[step]:8.2f}  {'█' * round(5 * straight[step])}")
    difference = max(abs(straight[step] - killed[step]) for step in straight)
    print(f"largest difference of a loss: {difference:.1g}")  # ranks add up in another order, in float32
    if difference > 0.02:
        sys.exit(f"error: losses differ by {difference:.1g}")


@torch.no_grad()
def generate(checkpoint: Path, prompt: str, length: int = 60) -> str:
    """Continue a text with the trained model."""
    run, tokenizer = tm.Run.from_toml("run.toml"), tm.open_tokenizer(str(TOKENIZER_DIR))
    model = model_of(run).eval()
    model.load_state_dict(torch.load(checkpoint, weights_only=True)["model"])
    ids = torch.tensor([tokenizer.encode([prompt]).ids.tolist()])
    torch.manual_seed(1)
    for _ in range(length):
        seen = ids[:, -run.plan().at(0).seq_len :]
        logits = model(seen, torch.arange(seen.shape[1])[None], torch.zeros_like(seen))[0, -1]
        top = (logits / 0.7).topk(20)
        ids = torch.cat([ids, top.indices[torch.multinomial(top.values.softmax(0), 1)][None]], 1)
    return tokenizer.decode(ids[0].tolist())


def main(folder: Path, config: str = RUN, ranks: tuple[int, int] = (2, 4)) -> None:
    """Run all parts in a folder; `ranks` are those of the killed training, before and after the kill."""
    os.chdir(folder)
    for name in ("prose", "dialogue"):
        show(f"tokenmill prepare {CORPUS_DIR}/{name}.jsonl --tokenizer {TOKENIZER_DIR} --out stores/{name} --quiet")
    Path("run.toml").write_text(config)
    show("tokenmill plan run.toml")
    steps = tm.Run.from_toml("run.toml").plan().steps
    print()
    train("straight", ranks=1)
    train("killed", ranks=ranks[0], kill_at=2 * steps // 5)
    train("killed", ranks=ranks[1])
    compare(losses("straight"), losses("killed"))
    print(f"\nA sample of the model that was killed:\n{generate(Path('killed.pt'), 'The miller ')}")


if __name__ == "__main__":
    if "--rank" in sys.argv:
        train_rank(Path(sys.argv[-1]))
    elif len(sys.argv) > 1:
        Path(sys.argv[1]).mkdir(parents=True)
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
