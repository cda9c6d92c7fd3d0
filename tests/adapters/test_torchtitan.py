"""torchtitan's own interfaces over a run: its base class, its config, its checkpointer, and the fork's builder.

The file is its own worker: what needs torchtitan runs in a process of its own, with stand-ins for the packages that
torchtitan imports beside what is used here, where they are not installed.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from tokenmill import Run, prepare
from tokenmill.adapters import torchtitan as adapter
from tokenmill.adapters.torch import TorchLoader
from tokenmill.adapters.torchtitan import ARRAYS, PairLoader, build_dataloader
from tokenmill.errors import ConfigError, MissingExtraError, ResumeError

STEPS, SAVED = 8, 3
NATIVE = """
[run]
steps = 8
global_batch_size = 16
seq_len = 16

[[sources]]
name = "web"
store = "web"

[[evals]]
name = "held"
source = "web"
documents = "0:9"
"""
STAGED = """
[training]
steps = 8
local_batch_size = 2
global_batch_size = 16
seq_len = 32
dataset = "c4"

[[training.data_stages]]
name = "base"
start_step = 0
end_step = 5
dataset_type = "nanoset"
dataset_folders = ["web", "books"]
dataset_weights = [0.75, 0.25]
seq_len = 16

[[training.data_stages]]
name = "long"
start_step = 5
dataset_type = "nanoset"
dataset_folders = ["books"]
seq_len = 32
"""
STANDINS = {
    "torchdata/__init__.py": "",
    "torchdata/stateful_dataloader.py": "class StatefulDataLoader:\n    pass\n",
    "tyro/__init__.py": "from tyro import constructors\n",
    "tyro/constructors.py": "class ConstructorRegistry:\n    pass\n\n\nclass PrimitiveTypeInfo:\n    pass\n",
}


# The worker.


def build(folder, rank, world_size, *, name="staged", seq_len=32, **options):
    """Build a loader as torchtitan's trainer does."""
    config = adapter.TokenmillDataLoader.Config(config_file=str(folder / f"{name}.toml"), **options)
    return config.build(
        dp_world_size=world_size,
        dp_rank=rank,
        tokenizer=None,
        seq_len=seq_len,
        local_batch_size=2,
        snapshot_every_n_steps=10,
    )


class Trainer:
    """Makes its loader as torchtitan's does: with its own batch known to itself alone."""

    def __init__(self, folder, global_batch_size, microbatches=1):
        self.gradient_accumulation_steps = global_batch_size // (2 * 4 * microbatches)
        self.num_pipeline_parallel_microbatches = microbatches
        self.dataloader = build(folder, 0, 4)

    def validate(self, folder):
        return build(folder, 0, 4)


def validated(folder, rank, world_size, steps=-1):
    """Return the batches of a round as torchtitan's validator draws them: by a loader that it builds anew."""
    loader = build(folder, rank, world_size, name="run", eval="held", infinite=steps != -1)
    stream, seen = iter(loader), []
    while len(seen) != steps:
        try:
            seen.append(next(stream))
        except StopIteration:
            break
    return listed(seen)


def refusal(*sizes):
    """Return what a trainer of a global batch is told; nothing where it is built."""
    try:
        Trainer(*sizes)
    except ConfigError as error:
        return str(error)
    return ""


def checkpointer(folder, loader):
    """Make torchtitan's checkpointer, over the smallest model there is."""
    from torchtitan.components.checkpointer import CheckpointManager

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return CheckpointManager.Config(enable=True, interval=1, keep_latest_k=0).build(
        dataloader=loader,
        model_parts=[model],
        optimizers=optimizer,
        lr_schedulers=torch.optim.lr_scheduler.ConstantLR(optimizer),
        states={},
        sd_adapter=None,
        base_folder=str(folder),
    )


def listed(batches):
    """Return drawn pairs as plain lists."""
    return [
        [{name: tensor.tolist() for name, tensor in inputs.items()}, labels.tolist()] for inputs, labels in batches
    ]


def work(folder):
    from torchtitan.components.dataloader import BaseDataLoader

    store = torch.distributed.FileStore(str(folder / "ranks"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    loader = build(folder, 0, 4)
    stream = iter(loader)
    first = [next(stream) for _ in range(2 * SAVED)]  # 2 batches a step
    manager = checkpointer(folder, loader)
    saved = manager.save(SAVED)
    resumed = {}
    for world_size in (2, 8):
        for rank in range(world_size):
            again = build(folder, rank, world_size, check_ranks=False)
            found = checkpointer(folder, again).load(SAVED)
            resumed[f"{rank} of {world_size}"] = [found, again.step, listed(again)]
    next(stream)
    try:
        manager.save(SAVED + 1)
        within = ""
    except ConfigError as error:
        within = str(error)
    try:
        build(folder, 0, 4, seq_len=31)
        long = ""
    except ConfigError as error:
        long = str(error)
    config = adapter.TokenmillDataLoader.Config(config_file="run.toml")
    trainer = Trainer(folder, 16)
    trainer.gradient_accumulation_steps = (
        7  # what is made later, as by its validator, takes no steps of the trainer
    )
    answers = {
        "batches": {size: refusal(folder, size) for size in (8, 16, 32)},
        "pipelined": [refusal(folder, 16, 2), refusal(folder, 32, 2)],
        "validated": len(trainer.validate(folder)),
        "evaluated": {f"{rank} of 3": [validated(folder, rank, 3) for _ in range(2)] for rank in range(3)},
        "some": len(validated(folder, 0, 1, steps=2)),
        "is_theirs": isinstance(loader, BaseDataLoader),
        "config": replace(config, infinite=False).to_dict(),
        "pickled": pickle.loads(pickle.dumps(config)) == config,
        "copied": copy.deepcopy(config) == config,
        "first": listed(first),
        "saved": saved,
        "resumed": resumed,
        "within": within,
        "long": long,
        "same_class": adapter.TokenmillDataLoader is adapter.TokenmillDataLoader,
    }
    (folder / "answers.json").write_text(json.dumps(answers))
    torch.distributed.destroy_process_group()


class Scores(torch.nn.Module):
    """A model of two tables, which knows the token before and nothing else."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = torch.nn.Embedding(300, 8), torch.nn.Linear(8, 300)

    def forward(self, inputs, **_):
        return self.out(self.table(inputs))


class Noted:
    """Keeps what a validator tells, where its processor of metrics would want a GPU."""

    def __init__(self):
        self.losses, self.ntokens_since_last_log = [], 0

    def log_validation(self, loss, step):
        self.losses.append((step, loss))


def validate(folder, rank, world_size):
    """Run torchtitan's own validator for two rounds as one of several ranks; write the losses that it logs."""
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.validate import Validator
    from torchtitan.config import ParallelismConfig
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.tools import utils

    utils.device_type = parallel_dims.device_type = "cpu"  # it takes a machine without a GPU for one with
    store = torch.distributed.FileStore(str(folder / f"ranks-{world_size}"), world_size)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    dims = ParallelDims(dp_replicate=1, dp_shard=world_size, cp=1, tp=1, pp=1, ep=1, world_size=world_size)
    dims.build_mesh()
    loader = adapter.TokenmillDataLoader.Config(config_file=str(folder / "run.toml"), eval="held")
    noted = Noted()
    validator = Validator(
        Validator.Config(enable=True, steps=-1, dataloader=loader),
        parallelism=ParallelismConfig(),
        dp_world_size=world_size,
        dp_rank=rank,
        tokenizer=None,
        parallel_dims=dims,
        loss_fn=CrossEntropyLoss(CrossEntropyLoss.Config()),
        validation_context=nullcontext,
        metrics_processor=noted,
        seq_len=16,
        local_batch_size=2,
    )
    model = Scores()
    for step in (1, 2):
        validator.validate([model], step)
    (folder / f"losses-{rank}-{world_size}.json").write_text(json.dumps(noted.losses))
    torch.distributed.destroy_process_group()


# The tests.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("titan")
    rng = np.random.default_rng(0)
    for name in ("web", "books"):
        lines = [" ".join(map(str, rng.integers(0, 10**6, rng.integers(1, 12)))) for _ in range(150)]
        (place / f"{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
        prepare(place / f"{name}.jsonl", out=place / name, tokenizer="bytes", workers=1, progress=False)
    (place / "run.toml").write_text(NATIVE)
    (place / "staged.toml").write_text(STAGED)
    return place


@pytest.fixture(scope="module")
def answers(folder):
    """Do in a process of its own what needs torchtitan; return what it found."""
    if find_spec("torchtitan") is None:
        pytest.skip("needs torchtitan")
    for name, text in STANDINS.items():
        if find_spec(name.split("/")[0]) is None:
            file = folder / "standins" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    paths = [str(folder / "standins"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, __file__, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "answers.json").read_text())


@pytest.fixture(scope="module")
def whole(folder):
    """Return the global batches of the staged run, step by step."""
    loader = Run.from_toml(folder / "staged.toml", world_size=4).loader(micro_batch=16)
    return [loader[step] for step in range(STEPS)]


def pairs_of(batch, rank, world_size):
    """Return the micro-batches of 2 rows of a rank, as torchtitan takes them."""
    rows = 16 // world_size
    return [
        [
            {
                "input": batch["input_ids"][b : b + 2].tolist(),
                "positions": batch["position_ids"][b : b + 2].tolist(),
            },
            batch["labels"][b : b + 2].tolist(),
        ]
        for b in range(rank * rows, (rank + 1) * rows, 2)
    ]


def test_the_loader_is_one_of_torchtitan_and_yields_its_pairs(answers, whole):
    assert (answers["is_theirs"], answers["same_class"]) == (True, True)
    assert (answers["pickled"], answers["copied"]) == (True, True)
    assert answers["first"] == [pair for batch in whole[:SAVED] for pair in pairs_of(batch, 0, 4)]
    assert any(label == -100 for _, labels in answers["first"] for row in labels for label in row)


def test_its_config_is_written_and_changed_as_theirs(answers):
    """The validator replaces `infinite`; the trainer logs `to_dict`."""
    assert answers["config"] == {
        "dataset": "",
        "dataset_path": None,
        "config_file": "run.toml",
        "threads": 1,
        "check_ranks": False,
        "eval": "",
        "infinite": False,
    }


def test_a_checkpoint_of_torchtitan_is_resumed_at_any_world_size(answers, whole):
    """[E1.a, E1.c] By its own checkpointer, over a change of the sequence length: saved by rank 0 of 4."""
    assert answers["saved"] is True
    assert list(answers["resumed"]) == [f"{rank} of {size}" for size in (2, 8) for rank in range(size)]
    for name, (found, step, drawn) in answers["resumed"].items():
        rank, size = map(int, name.split(" of "))
        assert (found, step) == (True, SAVED)
        assert drawn == [pair for batch in whole[SAVED:] for pair in pairs_of(batch, rank, size)]


def test_a_checkpoint_within_a_step_of_the_run_is_refused(answers):
    """[A1.b] The trainer and the run must take the same number of rows a step; nobody else would notice."""
    assert answers["within"] == (
        "torchtitan: a step must take all micro-batches of a step of the run, got a checkpoint after 1 of them in "
        "step 3; give the run and [training] one global_batch_size, and the stages of the run too"
    )


def test_another_global_batch_in_the_trainer_is_refused_when_the_loader_is_made(answers):
    """[A1.a]"""
    told = (
        "stage 'base': global_batch_size must be that of the trainer, {}, got 16; set training.global_batch_size "
        "to that of the run, or change the run"
    )
    assert answers["batches"] == {"8": told.format(8), "16": "", "32": told.format(32)}
    assert answers["pipelined"] == ["", told.format(32)]
    assert answers["validated"] == 2 * STEPS


@pytest.mark.skipif(find_spec("torchtitan") is None, reason="needs torchtitan")
def test_torchtitans_trainer_knows_its_batch_when_it_makes_its_loader():
    """What `Trainer` above stands for, as the real one wants a GPU: by its source."""
    source = Path(find_spec("torchtitan").origin).with_name("trainer.py").read_text()
    making = source[source.index("def __init__(self, config: Config):") :]
    made = making.index("self.dataloader = config.dataloader.build(")
    for name in ("gradient_accumulation_steps", "num_pipeline_parallel_microbatches"):
        assert 0 < making.index(f"self.{name} = ") < made


def test_rows_longer_than_the_model_takes_are_refused_before_the_first_step(answers):
    assert answers["long"] == (
        "stage 'long': seq_len must be at most training.seq_len 31, for which the model is built, got 32; "
        "raise training.seq_len"
    )


@dataclass
class Job:
    config_file: str | None = None


@dataclass
class DataStage:
    """A stage as the fork's config has it."""

    name: str
    start_step: int
    dataset_type: str
    seq_len: int
    end_step: int | None = None
    dataset: str | None = None
    dataset_path: str | None = None
    dataset_folders: list[str] = field(default_factory=list)
    dataset_weights: list[float] | None = None
    dataset_random_seed: int | None = None


@dataclass
class Training:
    steps: int = STEPS
    local_batch_size: int = 2
    global_batch_size: int = 16
    seq_len: int = 32
    dataset: str = "c4"
    dataset_path: str | None = None
    data_stages: list[DataStage] = field(default_factory=list)


@dataclass
class JobConfig:
    job: Job
    training: Training
    optimizer: dict[str, float] = field(default_factory=lambda: {"lr": 1e-3})


def job_config(folder, **training):
    stages = [
        DataStage(
            name="base",
            start_step=0,
            end_step=5,
            dataset_type="nanoset",
            seq_len=16,
            dataset_folders=["web", "books"],
            dataset_weights=[0.75, 0.25],
        ),
        DataStage(name="long", start_step=5, dataset_type="nanoset", seq_len=32, dataset_folders=["books"]),
    ]
    return JobConfig(
        job=Job(config_file=str(folder / "staged.toml")), training=Training(data_stages=stages, **training)
    )


def test_the_builder_reads_the_data_stages_of_the_config_object(folder, whole):
    """[M1.b] As torchtitan calls it; the batches are those of the file."""
    for rank in range(4):
        loader = build_dataloader(dp_world_size=4, dp_rank=rank, tokenizer=None, job_config=job_config(folder))
        assert len(loader) == 2 * STEPS
        assert listed(loader) == [pair for batch in whole for pair in pairs_of(batch, rank, 4)]


def test_what_the_command_line_overrides_counts(folder):
    loader = build_dataloader(4, 0, None, job_config(folder, steps=6, global_batch_size=-1, local_batch_size=3))
    assert (len(loader), loader.loader.plan.steps) == (6, 6)
    assert loader.loader.plan.stages[0].spec.global_batch_size == 12


def test_the_builder_refuses_rows_longer_than_the_model_takes(folder):
    """[A1.a]"""
    with pytest.raises(
        ConfigError, match=r"stage 'long': seq_len must be at most training.seq_len 31.*got 32; raise"
    ):
        build_dataloader(2, 0, None, job_config(folder, seq_len=31))


def test_the_builder_takes_tables_and_counts_paths_from_the_working_directory(folder, monkeypatch, whole):

    monkeypatch.chdir(folder)
    loader = build_dataloader(2, 1, None, tomllib.loads(STAGED))
    assert listed(loader) == [pair for batch in whole for pair in pairs_of(batch, 1, 2)]


def test_the_builder_refuses_what_is_no_config():
    with pytest.raises(ConfigError, match="job_config: must be a dataclass or a mapping, got str"):
        build_dataloader(1, 0, None, "run.toml")


def test_a_misspelt_key_of_a_stage_is_named():
    """[A1.a]"""
    tables = {"training": {"steps": 4, "data_stages": [{"name": "a", "start_stp": 0}]}}
    with pytest.raises(ConfigError, match=r"'start_stp'.*did you mean 'start_step'"):
        build_dataloader(1, 0, None, tables)


def test_a_loader_goes_on_from_a_state_that_is_loaded_while_it_runs(folder):
    """[A1.a] Before or after iter(), as the trainer of torchtitan may."""
    run = Run.from_toml(folder / "run.toml")
    loader = PairLoader(run.loader(rank=1, world_size=2, micro_batch=8, arrays=ARRAYS))
    stream = iter(loader)
    drawn = [next(stream) for _ in range(4)]
    state = loader.state_dict()
    assert (loader.step, json.loads(state["dataloader_state"])["step"]) == (4, 4)
    rest = listed(stream)
    loader.load_state_dict(state)
    assert listed(loader) == rest
    other = PairLoader(run.loader(rank=1, world_size=2, micro_batch=8, arrays=ARRAYS))
    begun = iter(other)
    assert torch.equal(next(begun)[1], drawn[0][1])
    other.load_state_dict(state)
    assert listed(begun) == rest


THREE_STAGES = """
[training]
steps = 15
local_batch_size = 2
seq_len = 16

[[training.data_stages]]
name = "stage_1_general"
start_step = 0
end_step = 5
dataset_type = "nanoset"
dataset_folders = ["web", "books"]
dataset_weights = [0.75, 0.25]
seq_len = 16

[[training.data_stages]]
name = "stage_2_reasoning"
start_step = 5
end_step = 10
dataset_type = "nanoset"
dataset_folders = ["web", "books"]
dataset_weights = [0.25, 0.75]
seq_len = 16

[[training.data_stages]]
name = "stage_3_final"
start_step = 10
dataset_type = "nanoset"
dataset_folders = ["books"]
seq_len = 16
dataset_random_seed = 9999
"""


def test_three_stages_resume_from_step_7_as_the_forks_own_test_run(folder, monkeypatch, caplog):
    """Stage and position are restored, each step has the same batch, and two transitions are logged."""
    monkeypatch.chdir(folder)
    caplog.set_level("INFO", logger="tokenmill")

    def made():
        return build_dataloader(1, 0, None, tomllib.loads(THREE_STAGES))

    whole = made()
    stream, states, batches = iter(whole), [whole.state_dict()], []
    for _ in range(15):
        batches.append(listed([next(stream)])[0])
        states.append(whole.state_dict())
    assert [state["stage_name"] for state in states[:15:5]] == [
        "stage_1_general",
        "stage_2_reasoning",
        "stage_3_final",
    ]
    told = [message for message in caplog.messages if "changes:" in message]
    assert [message.partition(": stage")[0] for message in told] == ["step 5", "step 10"]
    assert [message.partition("changes: ")[2] for message in told] == [
        "weights",
        "sources (books, web -> books), weights, seed 1234 -> 9999",
    ]
    resumed = made()
    resumed.load_state_dict(states[7])
    assert resumed.state_dict() == states[7]
    assert listed(resumed) == batches[7:]
    assert len({json.dumps(batch) for batch in batches}) == 15


def test_the_state_has_the_keys_that_the_fork_documents_on_every_rank_at_any_time(folder):
    """[E1.a, E1.c] A distributed checkpoint loads the keys of a fresh loader: a number or a text each."""
    loaders = [build_dataloader(4, rank, None, job_config(folder)) for rank in range(4)]
    fresh = [loader.state_dict() for loader in loaders]
    for loader in loaders:
        for _, _pair in zip(range(2 * 6), loader, strict=False):  # 2 batches a step
            pass
    states = [loader.state_dict() for loader in loaders]
    assert [list(state) for state in (*fresh, *states)] == [["stage_idx", "stage_name", "dataloader_state"]] * 8
    assert fresh == fresh[:1] * 4
    assert states == states[:1] * 4
    assert [type(value) for value in states[0].values()] == [int, str, str]
    assert (states[0]["stage_idx"], states[0]["stage_name"]) == (1, "long")
    # The last one is the state of the run: any loader of ours takes it.
    plain = Run.from_toml(folder / "staged.toml", world_size=4).loader()
    within = json.loads(states[0]["dataloader_state"])
    TorchLoader(plain).load_state_dict(within)
    assert (plain.step, within["step"]) == (6, 6)
    assert len(json.dumps(states[0])) <= 400


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({}, "nothing"),
        (None, "NoneType"),
        ({"stage_idx": 0, "dataloader_state": {"rank_0": 7}}, "stage_idx, dataloader_state"),
        ({"dataloader_state": "{"}, "dataloader_state"),
    ],
)
def test_a_state_that_is_none_of_ours_is_refused(folder, state, told):
    """[E1.a] torchtitan's own loaders take an empty one for a start at step 0."""
    loader = PairLoader(Run.from_toml(folder / "run.toml").loader(micro_batch=2, arrays=ARRAYS))
    with pytest.raises(ResumeError) as caught:
        loader.load_state_dict(state)
    assert str(caught.value) == (
        "state: must have stage_idx, stage_name, dataloader_state, the last one as JSON text, got "
        f"{told}; use a state of this loader"
    )


def test_what_is_missing_is_said_in_one_line(monkeypatch):
    """[F1.a]"""
    adapter._dataloader.cache_clear()
    monkeypatch.setattr("tokenmill.adapters.find_spec", lambda _: None)
    with pytest.raises(
        MissingExtraError, match=r"torchtitan is not installed; pip install 'tokenmill\[torchtitan\]'"
    ):
        _ = adapter.TokenmillDataLoader
    with pytest.raises(AttributeError, match="no attribute 'Lodaer'"):
        _ = adapter.Lodaer


def test_the_validator_is_given_every_row_of_an_eval_once_in_every_round(folder, answers):
    rounds = [answers["evaluated"][f"{rank} of 3"] for rank in range(3)]
    assert all(first == second for first, second in rounds)
    item = Run.from_toml(folder / "run.toml").evals["held"]
    alone = [batch["input_ids"][0].tolist() for batch in item.loader()]
    assert len({len(first) for first, _ in rounds}) == 1
    batches = [batch for parts in zip(*(first for first, _ in rounds), strict=True) for batch in parts]
    rows = [row for inputs, _ in batches for row in inputs["input"]]
    labels = [row for _, labels in batches for row in labels]
    assert rows[: len(alone)] == alone
    assert len(rows) % 6 == 0
    assert all(label == -100 for row in labels[len(alone) :] for label in row)
    assert answers["some"] == 2


@pytest.mark.skipif(
    any(find_spec(name) is None for name in ("torchtitan", "torchdata", "tyro", "spmd_types", "triton")),
    reason="torchtitan's validator imports all that torchtitan does: torchdata, tyro, spmd_types, triton, ...",
)
@pytest.mark.parametrize("world_size", [1, 3])
def test_torchtitans_own_validator_logs_the_exact_mean_in_every_round(folder, world_size):
    """With steps=-1, where the rows of 3 ranks do not divide: no hang, no batch lost, the same in each round."""
    command = [sys.executable, __file__, str(folder), str(world_size)]
    ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(world_size)]
    assert [rank.wait(timeout=240) for rank in ranks] == [0] * world_size
    model, total, labels = Scores(), 0.0, 0
    for batch in Run.from_toml(folder / "run.toml").evals["held"].loader():
        inputs, targets = (torch.from_numpy(batch[name]) for name in ("input_ids", "labels"))
        scores = model(inputs)[0].detach()
        total += float(torch.nn.functional.cross_entropy(scores, targets[0], reduction="sum"))
        labels += int((targets >= 0).sum())
    for rank in range(world_size):
        losses = json.loads((folder / f"losses-{rank}-{world_size}.json").read_text())
        assert losses == [[1, losses[0][1]], [2, losses[0][1]]]
        assert losses[0][1] == pytest.approx(total / labels, rel=1e-6)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        validate(Path(sys.argv[1]), int(sys.argv[3]), int(sys.argv[2]))
    else:
        work(Path(sys.argv[1]))
