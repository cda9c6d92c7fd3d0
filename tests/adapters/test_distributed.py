"""Over gloo: one checkpoint for any world size, and ranks that disagree are stopped within the step."""

from __future__ import annotations

import json
import shutil
from datetime import timedelta

import numpy as np
import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.adapters.ranks import call_ranks

from tokenmill import Run
from tokenmill.adapters.torch import TorchLoader, find_rank, flat_state, own_state, torch_loader
from tokenmill.errors import ConfigError, ResumeError, TokenmillError
from tokenmill.live import LiveLoader, LiveOptions, open_live

STEPS, SAVED, BATCH = 14, 5, 16
TOML = """
[run]
seed = {seed}
steps = {steps}
global_batch_size = 16
seq_len = 16

[[sources]]
name = "web"
store = "web"

[[sources]]
name = "books"
store = "{books}"

[[stages]]
name = "base"
start_step = 0
weights = {{ web = 0.96, books = 0.04 }}

[[stages]]
name = "talk"
start_step = 9
global_batch_size = 32
weights = {{ web = 0.5, books = 0.5 }}
"""
MIXED = """
[run]
steps = {steps}
global_batch_size = 16
seq_len = 16

[[sources]]
name = "web"
store = "web"

[[sources]]
name = "text"
documents = ["text.jsonl"]
tokenizer = "bytes"
live = true
window_bytes = 512

[[stages]]
name = "base"
start_step = 0
weights = {{ web = 0.5, text = 0.5 }}

[[stages]]
name = "long"
start_step = 9
seq_len = 24
weights = {{ web = 0.3, text = 0.7 }}
"""
KINDS = ("run", "live", "mixed")
DIST = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


# The worker.


def text_loader(folder, rank, world_size):
    """Make a loader of live text, whose state has the lanes of its rank alone."""
    source = open_live(folder / "text.jsonl", tokenizer="bytes", options=LiveOptions(seq_len=16, window_bytes=512))
    return LiveLoader(source, steps=STEPS, global_batch_size=BATCH, rank=rank, world_size=world_size, micro_batch=2)


def both(folder, group=None, name="run", **options):
    """Make a loader of each kind for this process: of stores, of text alone, of both."""
    rank, world_size = find_rank(group)
    run = Run.from_toml(folder / f"{name}.toml")
    return {
        "run": torch_loader(run, micro_batch=2, group=group, **options),
        "live": TorchLoader(text_loader(folder, rank, world_size), group=group, **options),
        "mixed": torch_loader(Run.from_toml(folder / "mixed.toml"), micro_batch=2, group=group, **options),
    }


def draw(loader, steps):
    """Draw so many steps, or to the end; return the tokens of each in order."""
    found = []
    stream = iter(loader)
    for _ in range(steps):
        step, rows = loader.step, []
        while loader.step == step and step < STEPS:
            rows.append(next(stream)["input_ids"].numpy().copy())
        if rows:
            found.append(np.concatenate(rows))
    return found


def keep(folder, task, rank, loaders, first):
    """Write the steps that are left, one file each."""
    for kind, loader in loaders.items():
        for number, rows in enumerate(draw(loader, STEPS), first):
            np.save(folder / f"{task}-{kind}-{number}-{rank}.npy", rows, allow_pickle=False)


def save(folder):
    loaders = both(folder, check_ranks=True)
    for loader in loaders.values():
        draw(loader, SAVED)
    dcp.save(dict(loaders), checkpoint_id=folder / "checkpoint")
    keep(folder, "save", dist.get_rank(), loaders, SAVED)


def load(folder, task="load", group=None):
    loaders = both(folder, group)
    dcp.load(dict(loaders), checkpoint_id=folder / "checkpoint", process_group=group)
    assert [loader.step for loader in loaders.values()] == [SAVED] * 3
    keep(folder, task, dist.get_rank(group), loaders, SAVED)


def load_pair(folder):
    """Load in a group of two of the processes, as a job of world size 2 does."""
    group = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        load(folder, "pair", group)


def save_within_a_step(folder):
    """Save in the middle of a step, resume with as many ranks, and be refused with fewer."""
    loaders = both(folder)
    streams = {kind: iter(loader) for kind, loader in loaders.items()}
    for stream in streams.values():
        for _ in range(3):  # of 2 batches a step
            next(stream)
    dcp.save(dict(loaders), checkpoint_id=folder / "within")
    fresh = both(folder)
    dcp.load(dict(fresh), checkpoint_id=folder / "within")
    for kind, loader in fresh.items():
        assert (next(iter(loader))["labels"] == next(streams[kind])["labels"]).all()
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        for kind, loader in both(folder, group).items():
            with pytest.raises(ResumeError, match=r"must stay (4 and 2, got 2 and 2|2, 4, 16, got 2, 2, 16)"):
                dcp.load({kind: loader}, checkpoint_id=folder / "within", process_group=group)


def told(loader, stream=None):
    """Draw to the end, or to an error: return it, and where the loader stands."""
    try:
        for _ in stream or loader:
            pass
    except TokenmillError as error:
        return [type(error).__name__, str(error), loader.step]
    return ["", "", loader.step]


def disagree(folder):
    """Let ranks differ in each of the ways there are; return what each says."""
    rank = dist.get_rank()
    run = Run.from_toml(folder / "run.toml")
    answers = {}
    loader = torch_loader(run, micro_batch=2, check_ranks=True)
    loader.load_state_dict(json.loads((folder / "state.json").read_text()) if rank == 2 else loader.state_dict())
    answers["step"] = told(loader)
    answers["seed"] = told(both(folder, name="seed" if rank == 1 else "run", check_ranks=True)["run"])
    loader = torch_loader(run, micro_batch=2, rank=rank // 2, world_size=4, check_ranks=True)
    answers["rank"] = told(loader)
    answers["tokens"] = told(both(folder, name="bad" if rank == 3 else "run", check_ranks=True)["run"])
    loader = torch_loader(Run.from_toml(folder / ("bad.toml" if rank == 3 else "run.toml")), check_ranks=True)
    stream = iter(loader)
    for number in range(7):  # 4 batches a step
        next(stream)
        if number == 4:
            state = loader.state_dict()
    loader.load_state_dict(state)
    for _ in range(2):
        next(stream)
    answers["resumed"] = told(loader, stream)
    place = folder / "other" if rank == 1 else folder
    answers["text"] = told(TorchLoader(text_loader(place, rank, 4), check_ranks=True))
    (folder / f"answers-{rank}.json").write_text(json.dumps(answers))


def group_of_some(folder):
    """Ask for the state of live text in a group that lacks ranks."""
    group = dist.new_group([0, 1, 2])
    if dist.get_rank() < 3:
        with pytest.raises(ResumeError, match=r"lanes of all 4 ranks, got none of \[3\] from the process group"):
            TorchLoader(text_loader(folder, dist.get_rank(), 4), group=group).state_dict()


def work(folder, tasks):
    """Be one rank: do the tasks, one after another."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    for task in tasks:
        task(folder)
        dist.barrier()
    dist.destroy_process_group()


# The tests.


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Write two stores, a copy of one with other tokens under the same manifest, runs of them, and texts."""
    from tokenmill import prepare

    place = tmp_path_factory.mktemp("ranks")
    rng = np.random.default_rng(0)
    (place / "other").mkdir()
    for name in ("web", "books", "text", "other/text"):
        lines = [" ".join(map(str, rng.integers(0, 10**6, rng.integers(1, 12)))) for _ in range(150)]
        (place / f"{name}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    for name in ("web", "books"):
        prepare(place / f"{name}.jsonl", out=place / name, tokenizer="bytes", workers=1, progress=False)
    shutil.copytree(place / "books", place / "bad")
    file = next((place / "bad").rglob("sequence.bin"))
    tokens = np.fromfile(file, np.uint8)
    file.unlink()  # the copy may be a link
    (tokens ^ 1).tofile(file)
    for name, values in (("run", {}), ("seed", {"seed": 2}), ("bad", {"books": "bad"})):
        (place / f"{name}.toml").write_text(TOML.format(**({"seed": 1, "steps": STEPS, "books": "books"} | values)))
    (place / "mixed.toml").write_text(MIXED.format(steps=STEPS))
    ahead = Run.from_toml(place / "run.toml").loader()
    ahead.seek(3)
    (place / "state.json").write_text(json.dumps(ahead.state_dict()))
    return place


@pytest.fixture(scope="module")
def four_ranks(folder):
    """Run all that four ranks can do, in one job; return where it wrote."""
    call_ranks(4, work, folder, (save, load_pair, save_within_a_step, disagree, group_of_some))
    return folder


@pytest.fixture(scope="module")
def truth(folder):
    """Draw both runs in this process, on one rank."""
    return {
        "run": draw(TorchLoader(Run.from_toml(folder / "run.toml").loader(micro_batch=4)), STEPS),
        "live": draw(TorchLoader(text_loader(folder, 0, 1)), STEPS),
        "mixed": draw(TorchLoader(Run.from_toml(folder / "mixed.toml").loader(micro_batch=8)), STEPS),
    }


def drawn(folder, task, world_size):
    """Return the global batches that a job drew after the checkpoint."""
    return {
        kind: [
            np.concatenate([np.load(folder / f"{task}-{kind}-{step}-{rank}.npy") for rank in range(world_size)])
            for step in range(SAVED, STEPS)
        ]
        for kind in KINDS
    }


def same(found, truth):
    return all(
        len(found[kind]) == len(truth[kind][SAVED:])
        and all(np.array_equal(a, b) for a, b in zip(found[kind], truth[kind][SAVED:], strict=True))
        for kind in KINDS
    )


def test_a_checkpoint_of_four_ranks_is_resumed_by_two(four_ranks, truth):
    """[E1.a] Of stored text, of live text and of both, through torch.distributed.checkpoint over gloo."""
    assert same(drawn(four_ranks, "save", 4), truth)
    assert same(drawn(four_ranks, "pair", 2), truth)


@DIST
def test_a_checkpoint_of_four_ranks_is_resumed_by_eight(four_ranks, truth):
    """[E1.a, E1.c] Each rank alone reads the one record that there is."""
    run = Run.from_toml(four_ranks / "run.toml")
    ranks = []
    for rank in range(8):
        loaders = {
            "run": torch_loader(run, micro_batch=2, rank=rank, world_size=8),
            "live": TorchLoader(text_loader(four_ranks, rank, 8)),
            "mixed": torch_loader(Run.from_toml(four_ranks / "mixed.toml"), micro_batch=2, rank=rank, world_size=8),
        }
        # A rank that is asked alone has its own lanes as a form to fill in; the record has all of them.
        dcp.load(dict(loaders), checkpoint_id=four_ranks / "checkpoint")
        ranks.append({kind: draw(loader, STEPS) for kind, loader in loaders.items()})
    found = {
        kind: [np.concatenate([rank[kind][step] for rank in ranks]) for step in range(STEPS - SAVED)]
        for kind in KINDS
    }
    assert same(found, truth)


@pytest.mark.deep
def test_a_checkpoint_goes_from_four_to_two_and_eight_processes(four_ranks, truth):
    """[E1.a] The same, with every world size a job of its own."""
    for world_size in (2, 8, 1):
        call_ranks(world_size, work, four_ranks, (load,))
        assert same(drawn(four_ranks, "load", world_size), truth)


def test_a_checkpoint_keeps_one_small_record(four_ranks):
    """[E1.c]"""
    metadata = dcp.FileSystemReader(four_ranks / "checkpoint").read_metadata()
    names = [f"run.{key}" for key in torch_loader(Run.from_toml(four_ranks / "run.toml")).state_dict()]
    names += [f"live.{key}" for key in TorchLoader(text_loader(four_ranks, 0, 1)).state_dict()]
    names += [f"mixed.{key}" for key in torch_loader(Run.from_toml(four_ranks / "mixed.toml")).state_dict()]
    assert sorted(metadata.state_dict_metadata) == sorted(names)


@pytest.fixture(scope="module")
def answers(four_ranks):
    """Return what the ranks said where they were made to disagree; all must say the same."""
    found = [json.loads((four_ranks / f"answers-{rank}.json").read_text()) for rank in range(4)]
    assert [{name: answer[:2] for name, answer in one.items()} for one in found] == [
        {name: answer[:2] for name, answer in found[0].items()}
    ] * 4
    return {name: (*answer[:2], [one[name][2] for one in found]) for name, answer in found[0].items()}


def test_a_rank_at_another_step_is_named_before_the_first_batch(answers):
    assert answers["step"] == (
        "ResumeError",
        "ranks: all must be at one step, got 3 on rank 2, 0 on the others; load the same state on every rank",
        [0, 0, 3, 0],
    )


def test_a_rank_with_another_plan_is_named_before_the_first_batch(answers):
    assert answers["seed"] == (
        "ConfigError",
        "stages[0].seed: must be the same on all ranks, got 2 on rank 1 and 1 on rank 0 at step 0; "
        "give every rank the same config and stores",
        [0, 0, 0, 0],
    )


def test_a_rank_that_two_processes_take_is_named_before_the_first_batch(answers):
    """[A1.a]"""
    assert answers["rank"] == (
        "ConfigError",
        "ranks: each of the 4 must be taken by one process, got [0, 0, 1, 1]; "
        "pass the rank in the data-parallel group",
        [0, 0, 0, 0],
    )


def first_step_with(run, source, ranks):
    """Return the first step at which one of these ranks of four reads a source."""
    plan = run.plan()
    for step in range(plan.steps):
        slices = np.split(plan.rows(step)[0], 4)
        if any((slices[rank] == plan.sources.index(source)).any() for rank in ranks):
            return step
    raise AssertionError


def test_a_rank_that_reads_other_tokens_is_named_with_the_source_at_the_step(four_ranks, answers):
    """Rank 3 has another copy of the books: it differs where it reads them, or the rank after it does."""
    step = first_step_with(Run.from_toml(four_ranks / "run.toml"), "books", (3, 0))
    assert step > 0
    assert answers["tokens"] == (
        "StoreCorruptError",
        f"source 'books': all ranks must read the same tokens at step {step}, got others on rank 3; "
        "run `tokenmill verify` on the copy of the store there, and put it right",
        [step + 1] * 4,  # the batch was drawn, and not handed out
    )


def test_a_state_that_is_loaded_within_a_step_does_not_confuse_the_check(answers):
    assert answers["resumed"] == answers["tokens"]


def test_a_rank_with_other_text_is_named_with_the_file(answers):
    kind, message, steps = answers["text"]
    assert (kind, steps) == ("ConfigError", [0, 0, 0, 0])
    assert message.startswith("files.text.jsonl: must be the same on all ranks, got ")
    assert " on rank 1 and " in message


def test_a_check_needs_ranks_to_compare(folder):
    run = Run.from_toml(folder / "run.toml")
    with pytest.raises(ConfigError, match=r"check_ranks: torch.distributed must run to compare 2 ranks"):
        torch_loader(run, rank=0, world_size=2, check_ranks=True)
    alone = torch_loader(run, micro_batch=8, check_ranks=True)
    assert len(list(alone)) == len(alone)


@pytest.mark.parametrize(
    ("environment", "found"),
    [({}, (0, 1)), ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8))],
)
def test_the_rank_comes_from_the_environment(monkeypatch, environment, found):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert find_rank() == found


@pytest.mark.parametrize("environment", [{"RANK": "3"}, {"RANK": "x", "WORLD_SIZE": "8"}])
def test_half_an_environment_is_refused(monkeypatch, environment):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"RANK and WORLD_SIZE must both be whole numbers.*torchrun"):
        find_rank()


def test_ranks_that_are_given_win_over_the_environment(monkeypatch, folder):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    run = Run.from_toml(folder / "run.toml")
    parts = [
        torch_loader(run).loader.part,
        torch_loader(run, rank=1).loader.part,
        torch_loader(run, rank=0, world_size=2).loader.part,
    ]
    assert [(part.rank, part.world_size) for part in parts] == [(3, 8), (1, 8), (0, 2)]


def test_a_state_has_the_same_keys_at_any_time_and_any_loader_takes_it(folder):
    """A distributed checkpoint loads only the keys that the fresh loader has."""
    for make in (
        lambda: Run.from_toml(folder / "run.toml").loader(micro_batch=8),
        lambda: text_loader(folder, 0, 1),
    ):
        loader = make()
        fresh = flat_state(loader)
        stream = iter(loader)
        next(stream)
        within = flat_state(loader)
        assert list(fresh) == list(within)
        assert {type(value) for value in within.values()} == {int, str}
        assert (fresh["batches"], fresh["world_size"], within["batches"], within["world_size"]) == (0, 0, 1, 1)
        assert json.loads(json.dumps(within)) == within
        again = make()
        again.load_state_dict(own_state(within))
        assert again.state_dict() == loader.state_dict()
        again.load_state_dict(own_state(loader.state_dict()))
        assert (next(iter(again))["labels"] == next(stream)["labels"]).all()


@pytest.mark.parametrize(
    ("state", "message"),
    [(None, "must be the dict that state_dict"), ({"live": "{"}, "live must be JSON, got '{'")],
)
def test_what_is_no_state_is_refused(folder, state, message):
    with pytest.raises(ResumeError, match=message):
        TorchLoader(text_loader(folder, 0, 1)).load_state_dict(state)
