import gc
import json
import os
import signal
import subprocess
import sys
import warnings

import numpy as np
import pytest

from tokenmill.errors import ConfigError, ResumeError


@pytest.mark.parametrize("shuffle", ["full", "window", "none"])
@pytest.mark.parametrize(
    ("world_size", "micro_batch", "threads", "prefetch"),
    [
        (1, 1, 0, 1),
        (1, 12, 1, 8),
        (2, 3, 0, 1),
        (2, 6, 3, 5),
        (3, 4, 1, 1),
        (4, 1, 2, 64),
        (6, 2, 1, 3),
        (12, 1, 0, 1),
    ],
)
def test_global_batches_do_not_depend_on_how_they_are_cut(
    make_run, global_batches, shuffle, world_size, micro_batch, threads, prefetch
):
    """[E1.a, M1.b] World size, micro-batch, threads and prefetch depth."""
    run = make_run(shuffle=shuffle)
    reference = global_batches(run, micro_batch=12, threads=0)
    options = {"micro_batch": micro_batch, "threads": threads, "prefetch": prefetch}
    assert global_batches(run, world_size=world_size, **options) == reference


def test_all_divisors_of_the_batch_give_the_same_global_batches(make_run, global_batches):
    """[E1.a] Every legal (world size, micro-batch), with several threads and depths."""
    run = make_run()
    reference = global_batches(run, micro_batch=12, threads=0)
    for world_size in (1, 2, 3, 4, 6, 12):
        for micro_batch in (size for size in range(1, 13) if 12 % (size * world_size) == 0):
            for threads, prefetch in ((0, 1), (1, 1), (2, 7), (5, 32)):
                options = {"micro_batch": micro_batch, "threads": threads, "prefetch": prefetch}
                assert global_batches(run, world_size=world_size, **options) == reference


@pytest.mark.parametrize("packing", ["best_fit", "bos_best_fit", "concat"])
@pytest.mark.parametrize(("world_size", "micro_batch", "threads"), [(1, 12, 1), (2, 3, 8), (4, 1, 0), (12, 1, 1)])
def test_elastic_with_every_packing_through_a_change_of_length(
    make_run, global_batches, packing, world_size, micro_batch, threads
):
    """[E1.a] Mixing, packing and shuffling all on, the sequence length changes at step 17."""
    run = make_run(packing=packing, late_seq_len=24, add_bos=True)
    reference = global_batches(run, micro_batch=12, threads=0)
    assert global_batches(run, world_size=world_size, micro_batch=micro_batch, threads=threads) == reference


@pytest.mark.parametrize("packing", ["best_fit", "bos_best_fit", "padded"])
def test_every_step_resumes_exactly_with_every_packing(make_run, packing):
    """[R1.a, R1.b] From every step, on and beside the change of length, at another world size."""
    late = 16 if packing == "padded" else 24
    run = make_run(packing=packing, late_seq_len=late, add_bos=True, lengths=15 if packing == "padded" else 50)
    whole = run.loader(micro_batch=12, threads=0)
    stream = iter(whole)
    states = [whole.state_dict()]
    for _ in range(17 + 26):
        next(stream)
        if "batches" not in whole.state_dict():
            states.append(whole.state_dict())
    for state in states[:-1]:
        loader = run.loader(rank=1, world_size=2, micro_batch=6, threads=0)
        loader.load_state_dict(state)
        step = int(state["step"])
        batch = next(iter(loader))
        rows = whole[step]["labels"].shape[0] // 2
        for name, array in batch.items():
            assert np.array_equal(array, whole[step][name][rows : rows + 6])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 12])
def test_every_rank_gets_the_same_number_of_batches(make_run, world_size):
    """[C2.a]"""
    run = make_run()
    for micro_batch in (size for size in range(1, 13) if 12 % (size * world_size) == 0):
        counts = []
        for rank in range(world_size):
            loader = run.loader(rank=rank, world_size=world_size, micro_batch=micro_batch, threads=0)
            counts.append((len(loader), sum(1 for _ in loader)))
        expected = (17 * 12 + 13 * 24) // (world_size * micro_batch)
        assert counts == [(expected, expected)] * world_size


def test_item_of_a_step_is_what_the_iteration_gives(make_run):
    loader = make_run().loader(rank=1, world_size=2, micro_batch=6)
    stream = iter(loader)
    for step in range(30):
        drawn = [next(stream) for _ in range(1 if step < 17 else 2)]
        for name, array in loader[step].items():
            assert np.array_equal(np.concatenate([batch[name] for batch in drawn]), array)


def test_batches_that_are_kept_are_never_overwritten(make_run):
    loader = make_run().loader(micro_batch=4, threads=2)
    kept = list(loader)
    copies = [{name: array.copy() for name, array in batch.items()} for batch in kept]
    again = make_run().loader(micro_batch=4, threads=0)
    for batch, copied, fresh in zip(kept, copies, again, strict=True):
        for name, array in batch.items():
            assert np.array_equal(array, copied[name])
            assert np.array_equal(array, fresh[name])


def test_a_view_or_tensor_keeps_its_batch_alive(make_run):
    torch = pytest.importorskip("torch")
    loader = make_run().loader(micro_batch=4, threads=0)
    held = []
    for batch in loader:
        row = batch["input_ids"][2]
        held.append((row, torch.from_numpy(batch["labels"])[1], row.copy(), batch["labels"][1].copy()))
    for row, tensor, row_then, tensor_then in held:
        assert np.array_equal(row, row_then)
        assert np.array_equal(tensor.numpy(), tensor_then)


def test_memory_is_used_again_once_a_batch_is_dropped(make_run):
    loader = make_run().loader(micro_batch=4, threads=0)
    places = {batch["input_ids"].ctypes.data for batch in loader}
    assert len(places) == 2  # as the loop holds a batch until it has the next
    assert len(loader) > 100


def test_memory_is_never_used_again_where_reference_counts_are_not_exact(make_run, monkeypatch):
    """Free-threaded Python, where a buffer may be in use although its count says that it is not."""
    monkeypatch.setattr("tokenmill.loader.buffers._HAS_GIL", False)
    loader = make_run().loader(micro_batch=4, threads=0)
    stream = iter(loader)
    first = next(stream)
    kept = {name: array.copy() for name, array in first.items()}
    for _ in stream:
        assert not loader._pools or all(not pool._buffers for pool in loader._pools.values())
    assert all(np.array_equal(first[name], array) for name, array in kept.items())


def test_the_loader_itself_holds_no_batch(make_run):
    """Memory that was written to a moment ago is still in the cache of the processor."""
    loader = make_run().loader(micro_batch=4, threads=0)
    assert len(set(map(lambda batch: batch["input_ids"].ctypes.data, loader))) == 1  # noqa: C417 - holds none


@pytest.mark.parametrize(
    ("world_size", "micro_batch", "message"),
    [
        (5, 1, r"got 12 and 5 \* 1; use global_batch_size 10 or 15, or world_size 4 or 6"),
        (2, 4, r"got 12 and 2 \* 4; use global_batch_size 8 or 16, or micro_batch 3 or 6"),
        (16, 1, r"got 12 and 16 \* 1; use global_batch_size 16, or world_size 12"),
    ],
)
def test_a_batch_that_cannot_be_cut_names_the_nearest_that_can(make_run, world_size, micro_batch, message):
    """[E1.b] At start-up, never at step N."""
    with pytest.raises(ConfigError, match=message):
        make_run().loader(rank=0, world_size=world_size, micro_batch=micro_batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2, "world_size": 2}, "rank: must lie within 0:world_size, got rank 2 of 2"),
        ({"micro_batch": 0}, "micro_batch: must be at least 1, got 0"),
        ({"micro_batch": 10**9}, "micro_batch: must be at most 16777216 rows, which a process holds at once, got"),
        ({"arrays": ("input_id",)}, r"got 'input_id'; did you mean 'input_ids'\?"),
        ({"arrays": ()}, r"arrays: must name each array once, and one that has a line for every row, got \[\]"),
        ({"arrays": ["input_ids"] * 2}, r"arrays: must name each array once, .* got \['input_ids', 'input_ids'\]"),
        ({"arrays": ["num_loss_tokens"]}, r"one that has a line for every row, got \['num_loss_tokens'\]"),
        ({"threads": -1}, "threads must be at least 0"),
    ],
)
def test_impossible_options_are_refused(make_run, options, message):
    with pytest.raises(ConfigError, match=message):
        make_run().loader(**options)


SCRIPT = """
import json, sys
import tokenmill as tm
from tokenmill.loader import batch_digest, row_digests
loader = tm.Run.from_toml(sys.argv[1]).loader(micro_batch=6)
states = json.loads(sys.argv[2])
out = []
for state in states:
    loader.load_state_dict(state)
    out.append([batch_digest(row_digests(batch)) for batch in loader])
print(json.dumps(out))
"""


def test_every_saved_state_resumes_exactly_in_a_fresh_process(make_run):
    """[R1.a] For every k: the rest of the stream is identical, in order."""
    from tokenmill.loader import batch_digest, row_digests

    loader = make_run().loader(micro_batch=6)
    states = [loader.state_dict()]
    stream = []
    for batch in loader:
        stream.append(batch_digest(row_digests(batch)))
        states.append(loader.state_dict())
    assert len(stream) == 17 * 2 + 13 * 4
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(loader_file(make_run)), json.dumps(states)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [stream[k:] for k in range(len(states))]


def loader_file(make_run):
    return make_run().folder / "run.toml"


@pytest.mark.parametrize("threads", [0, 2])
def test_a_newer_iteration_ends_the_older_one(make_run, threads):
    """[A1.a] Two at once would both move the one place that a state saves."""
    loader = make_run().loader(micro_batch=12, threads=threads)
    old = iter(loader)
    next(old)
    new = iter(loader)
    second = next(new)
    with pytest.raises(ConfigError, match="one iteration at a time, got a newer one"):
        next(old)
    assert np.array_equal(second["labels"], loader[1]["labels"])
    assert loader.step == 2


def test_iterations_that_are_given_up_keep_no_maps(make_run):
    """[C1.d, S1.a]"""
    run = make_run(max_tokens_per_shard=8)
    loader = run.loader(micro_batch=12, threads=2)
    for step in range(20):
        loader.seek(step)
        for _ in loader:
            break
    del loader
    gc.collect()
    maps = run.stores["web"]._maps
    assert len(maps._maps) <= 64
    assert [sys.getrefcount(file) for file in maps._maps.values()] == [3] * len(maps._maps)  # the cache alone


def test_an_error_comes_again_and_is_no_end_of_the_run(make_run):
    run = make_run()
    for file in run.folder.glob("*/shard-*/sequence.bin"):
        file.rename(file.with_suffix(".away"))
    for threads in (0, 2):
        stream = iter(run.loader(micro_batch=12, threads=threads))
        for _ in range(3):
            with pytest.raises(FileNotFoundError, match=r"sequence\.bin: must exist"):
                next(stream)


def test_sources_in_another_order_are_another_contract(make_run):
    """The ids in `source` are the order of the config, so a state of another order is refused."""
    old = make_run("old")
    loader = old.loader(micro_batch=12)
    next(iter(loader))
    text = (old.folder / "old.toml").read_text()
    web, books = (f'[[sources]]\nname = "{name}"\nstore = "{name}"\n' for name in ("web", "books"))
    (old.folder / "new.toml").write_text(text.replace(web, "@").replace(books, web).replace("@", books))
    new = type(old).from_toml(old.folder / "new.toml").loader(micro_batch=12)
    with pytest.raises(ResumeError, match=r"first difference: stages\[0\]\.sources\.books\.id 1 -> 0"):
        new.load_state_dict(loader.state_dict())


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_a_forked_child_goes_on_with_an_iterator_of_its_parent(make_run, threads):
    """Its threads stay behind in the parent: to wait for them would be to wait for ever."""
    loader = make_run().loader(micro_batch=4, threads=threads)
    whole = [batch["input_ids"].tobytes() for batch in make_run().loader(micro_batch=4, threads=0)]
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forks of processes with threads
        child = os.fork()
    if child == 0:
        signal.alarm(60)
        code = 1
        try:
            assert [batch["input_ids"].tobytes() for batch in batches] == whole[5:]
            assert loader[0]["input_ids"].tobytes() == b"".join(whole[:3])
            del batches
            loader.seek(0)
            assert [batch["input_ids"].tobytes() for batch in loader] == whole
            code = 0
        finally:
            os._exit(code)
    assert [batch["input_ids"].tobytes() for batch in batches] == whole[5:]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
