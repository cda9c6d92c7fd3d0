from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.fault_proxy import Faults, fault_proxy

from tokenmill.loader.fetch import next_uses
from tokenmill.plan.stages import LAST_STEP
from tokenmill.run.run import Run
from tokenmill.store.remote.client import Client, parse_address

PAGE = 4096
RUN = """
[run]
seed = 1
steps = {steps}
global_batch_size = 16
seq_len = 512
packing = "{packing}"
[remote]
{remote}
[[sources]]
name = "web"
store = "{store}"
{more}
"""
DRAW = """
import hashlib, json, sys
from tokenmill.run.run import Run
loader = Run.from_toml(sys.argv[1]).loader(rank=int(sys.argv[2]), world_size=2, micro_batch=2)
if len(sys.argv) > 3:
    loader.load_state_dict(json.loads(sys.argv[3]))
for batch in loader:
    print(loader.step, hashlib.sha256(batch["input_ids"].tobytes()).hexdigest(), flush=True)
print(json.dumps(loader.network.counters.to_json()), flush=True)
"""


@pytest.fixture
def make_run(make_store, tmp_path, object_server):
    """Make a run of `epochs` epochs over a store of about 400 pages in object storage."""
    made = []

    def make(*, packing="concat", epochs=3, endpoint=None, remote="", sums=True, more="", longest=800):
        remote += "" if sums else "\nverify_pages = false"
        if not made:
            lengths = [int(n) for n in np.random.default_rng(0).integers(1, longest, 830_000 // longest * 2)]
            path, _, _ = make_store("web", lengths, max_tokens_per_shard=300_000)
            client = Client(parse_address(object_server.address(f"{tmp_path.name}/web")))
            for file in sorted(path.rglob("*")):
                if file.is_file():
                    client.put(str(file.relative_to(path)), file)
            made.append(path)
        steps = epochs * 100
        address = object_server.address(f"{tmp_path.name}/web", endpoint)
        for name, store, options in (("local", "web", ""), ("away", address, remote)):
            text = RUN.format(steps=steps, packing=packing, store=store, remote=options, more=more)
            (tmp_path / f"{name}.toml").write_text(text)
        return Run.from_toml(tmp_path / "away.toml")

    return make


def blocks_of(loader):
    """Return the pages that each block of a loader needs, in order."""
    found = []
    for stage, first, count in loader._runs(0):
        steps, slots = loader.part.places(stage, first, count)
        pages = set()
        for step in np.unique(steps):
            sources, rows = loader.plan.rows(int(step))
            spans = stage.rows["web"].spans(rows[slots[steps == step]])
            firsts, lasts = 2 * spans.token // PAGE, (2 * (spans.token + spans.length) - 1) // PAGE
            for shard, begin, end in zip(spans.shard.tolist(), firsts.tolist(), lasts.tolist(), strict=True):
                pages |= {(shard, page) for page in range(begin, end + 1)}
            assert set(sources.tolist()) == {0}
        found.append(pages)
    return found


def belady(blocks, capacity):
    """Return how many pages the best of all caches fetches, which may keep what it likes after each block."""
    uses = {}
    for number, pages in enumerate(blocks):
        for page in pages:
            uses.setdefault(page, []).append(number)
    cached, fetched, position = set(), 0, dict.fromkeys(uses, 0)
    for pages in blocks:
        fetched += len(pages - cached)
        for page in pages:
            position[page] += 1
        worth = [page for page in cached | pages if position[page] < len(uses[page])]
        worth.sort(key=lambda page: uses[page][position[page]])
        cached = set(worth[:capacity])
    return fetched


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_a_mirror_of_half_the_store_fetches_hardly_more_than_the_best_of_all_caches(
    make_run, object_server, tmp_path, packing
):
    """[N1.e]"""
    faults = Faults(only="sequence.bin")
    with fault_proxy(object_server.endpoint, faults) as endpoint:
        run = make_run(packing=packing, endpoint=endpoint)
        limit = run.stores["web"].num_tokens * 2 // 2 // PAGE * PAGE
        remote = f'mirror = "{tmp_path}/mirror"\nlimit_bytes = {limit}\nhorizon_bytes = 300000'
        run = make_run(packing=packing, endpoint=endpoint, remote=remote)
        loader, most = run.loader(micro_batch=16, threads=0), 0
        for number, _ in enumerate(loader):
            if number % 10 == 0:
                most = max(most, on_disk(tmp_path / "mirror"))
        best = belady(blocks_of(run.loader(micro_batch=16)), limit // PAGE) * PAGE
    assert best < faults.bytes <= 1.05 * best
    assert limit // 2 < most <= limit + 300_000  # and a block


def on_disk(mirror: Path) -> int:
    """Return how much the arrays of a mirror take on disk."""
    return sum(file.stat().st_blocks * 512 for file in mirror.glob("*/pages/*/*.pages"))


def test_what_is_there_is_found_after_a_restart(make_run, object_server, tmp_path):
    faults = Faults(only="sequence.bin")
    with fault_proxy(object_server.endpoint, faults) as endpoint:
        remote = f'mirror = "{tmp_path}/mirror"'
        run = make_run(endpoint=endpoint, remote=remote)
        list(run.loader(micro_batch=16))
        first = faults.bytes
        again = Run.from_toml(tmp_path / "away.toml").loader(micro_batch=16)
        list(again)
    assert first <= 1.02 * run.stores["web"].num_tokens * 2  # every page once, for all three epochs
    assert faults.bytes == first
    assert again.network.counters.hits > 0


@pytest.mark.parametrize("sums", [False, True])
def test_after_the_machine_was_restarted_pages_are_proven_or_fetched_anew(make_run, tmp_path, sums):
    remote = f'mirror = "{tmp_path}/mirror"'
    expected = [
        batch["input_ids"].copy() for batch in make_run(remote=remote, sums=sums, epochs=1).loader(micro_batch=16)
    ]
    (mark,) = (tmp_path / "mirror").glob("*/pages/boot")
    mark.write_text("another start of the machine")
    data = next(iter((tmp_path / "mirror").glob("*/pages/shard-00000/sequence.bin.pages")))
    with data.open("r+b") as file:  # what a power cut leaves of pages that never reached the disk
        file.write(bytes(PAGE))
    loader = Run.from_toml(tmp_path / "away.toml").loader(micro_batch=16)
    assert all(np.array_equal(batch["input_ids"], old) for batch, old in zip(loader, expected, strict=True))
    size = 2 * 700_000  # about what the run reads
    assert (loader.network.counters.bytes < size // 2) is sums


@pytest.mark.slow
def test_a_rank_that_is_killed_leaves_nothing_that_others_trust(make_run, object_server, tmp_path):
    """[N1.e]"""
    faults = Faults(latency=0.02, only="sequence.bin")
    with fault_proxy(object_server.endpoint, faults) as endpoint:
        limit = 200 * PAGE
        make_run(endpoint=endpoint, remote=f'mirror = "{tmp_path}/mirror"\nlimit_bytes = {limit}', epochs=1)
        environment = {**os.environ, **object_server.environment}
        command = [sys.executable, "-c", DRAW, str(tmp_path / "away.toml")]

        def start(rank, *state):
            return subprocess.Popen(
                [*command, str(rank), *state], stdout=subprocess.PIPE, text=True, env=environment
            )

        ranks = [start(0), start(1)]
        for _ in range(60):
            ranks[1].stdout.readline()
        ranks[1].send_signal(signal.SIGKILL)
        lines = ranks[0].communicate(timeout=120)[0].splitlines()
        ranks[1].communicate()
        local = Run.from_toml(tmp_path / "local.toml")
        assert lines[:-1] == expected_lines(local.loader(rank=0, world_size=2, micro_batch=2))
        # The other one goes on from a state of step 10, with what is in the mirror.
        loader = local.loader(rank=1, world_size=2, micro_batch=2)
        loader.seek(10)
        state = json.dumps(loader.state_dict())
        resumed = start(1, state).communicate(timeout=120)[0].splitlines()
    assert resumed[:-1] == expected_lines(loader)
    assert json.loads(resumed[-1])["hits"] > 0


def expected_lines(loader):
    import hashlib

    return [f"{loader.step} {hashlib.sha256(batch['input_ids'].tobytes()).hexdigest()}" for batch in loader]


@pytest.mark.slow
def test_two_runs_share_what_one_of_them_fetched(make_run, object_server, tmp_path):
    faults = Faults(latency=0.01, only="sequence.bin")
    with fault_proxy(object_server.endpoint, faults) as endpoint:
        environment = {**os.environ, **object_server.environment}
        both, local = [], []
        for packing in ("concat", "best_fit"):
            make_run(packing=packing, endpoint=endpoint, remote=f'mirror = "{tmp_path}/mirror"', epochs=1)
            for name in ("away", "local"):
                (tmp_path / f"{name}.toml").rename(tmp_path / f"{packing}-{name}.toml")
            command = [sys.executable, "-c", DRAW, str(tmp_path / f"{packing}-away.toml"), "0"]
            both.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
            run = Run.from_toml(tmp_path / f"{packing}-local.toml")
            local.append(run.loader(rank=0, world_size=2, micro_batch=2))
        lines = [process.communicate(timeout=120)[0].splitlines() for process in both]
    assert [each[:-1] for each in lines] == [expected_lines(loader) for loader in local]
    pages = set().union(*(page for loader in local for page in blocks_of(loader)))
    assert faults.bytes <= 1.02 * len(pages) * PAGE


EDITS = """
[[quarantine]]
source = "web"
documents = [3, 40, 41]
from_step = 130
[[stages]]
name = "base"
start_step = 0
[[stages]]
name = "long"
start_step = 90
seq_len = 700
"""


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@pytest.mark.parametrize("longest", [300, 3000])
def test_when_a_page_is_needed_again_is_what_the_plan_draws(make_run, packing, longest):
    run = make_run(packing=packing, epochs=2, more=EDITS, longest=longest)
    plan, store = run.plan(), run.stores["web"]
    rng = np.random.default_rng(1)
    shard = 1
    size = int(store.token_begins[shard + 1] - store.token_begins[shard])
    begins = rng.integers(0, size - 2048, 12)
    ends = begins + 2048
    uses = [[] for _ in begins]
    for step in range(plan.steps):
        spans = plan.stage(step).rows["web"].spans(plan.rows(step)[1])
        mine = spans.shard == shard
        for number, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            if (mine & (spans.token < end) & (spans.token + spans.length > begin)).any():
                uses[number].append(step)
    for after in (0, 50, 89, 90, 129, 150, 190):
        expected = [min((step for step in steps if step > after), default=LAST_STEP) for steps in uses]
        assert next_uses(plan, store, "documents", shard, (begins, ends), after).tolist() == expected
