"""Batches of stores in object storage: the same bytes as from a local copy, for just the bytes that they need."""

from __future__ import annotations

import hashlib
import json
import os
import time

import numpy as np
import pytest
from tests.fault_proxy import Faults, fault_proxy
from tests.object_server import BUCKET, OPEN_BUCKET, ObjectServer

from tokenmill.config.run import parse_config
from tokenmill.errors import StoreCorruptError, StoreUnreachableError
from tokenmill.run.run import Run
from tokenmill.store import StoreSpec, StoreWriter
from tokenmill.store.remote.client import Client, parse_address
from tokenmill.store.remote.fetch import Network
from tokenmill.store.remote.upload import upload
from tokenmill.types import RemoteOptions

RUN = """
[run]
seed = 3
steps = {steps}
global_batch_size = 16
seq_len = 64
packing = "{packing}"
{more}

[remote]
{remote}

[[sources]]
name = "web"
store = "{web}"

[[sources]]
name = "books"
store = "{books}"

[[stages]]
name = "base"
start_step = 0
weights = {{ web = 0.7, books = 0.3 }}

[[stages]]
name = "long"
start_step = {edge}
seq_len = 96
weights = {{ web = 0.5, books = 0.5 }}

{edits}
"""
EDITS = """
[[skip]]
steps = "5:8"

[[quarantine]]
source = "web"
documents = [3, 4, 50]
from_step = 12
"""


def put_store(server: ObjectServer, path, name: str) -> str:
    """Copy a store to the server; return its name there."""
    client = Client(parse_address(server.address(name)))
    for file in sorted(path.rglob("*")):
        if file.is_file():
            client.put(str(file.relative_to(path)), file)
    return name


@pytest.fixture
def make_both(make_store, tmp_path, object_server):
    """Make a run over two local stores, and the same run over their copies in object storage."""
    names = {}

    def make(*, packing="best_fit", steps=24, edge=16, edits="", endpoint=None, remote="", **sizes):
        rng = np.random.default_rng(0)
        for name, count in (("web", 300), ("books", 120)):
            if name not in names:
                lengths = [int(n) for n in rng.integers(0, 200, count)]
                path, _, _ = make_store(name, lengths, **{"max_tokens_per_shard": 9000, "add_bos": True, **sizes})
                names[name] = put_store(object_server, path, f"{tmp_path.name}/{name}")
        more = 'on_long = "truncate_end"' if packing == "padded" else ""
        values = {"more": more, "packing": packing, "steps": steps, "edge": edge, "edits": edits}
        local, away = tmp_path / "local.toml", tmp_path / "away.toml"
        local.write_text(RUN.format(web="web", books="books", remote="", **values))
        places = {name: object_server.address(there, endpoint) for name, there in names.items()}
        away.write_text(RUN.format(**places, remote=remote, **values))
        return Run.from_toml(local), Run.from_toml(away)

    return make


def digests(run, *, world_size=1, state=None, stop=None, **options):
    """Return a digest of the global batch of each step."""
    loaders = [run.loader(rank=rank, world_size=world_size, micro_batch=4, **options) for rank in range(world_size)]
    if state is not None:
        for loader in loaders:
            loader.load_state_dict(state)
    streams = [iter(loader) for loader in loaders]
    plan, found = loaders[0].plan, []
    while loaders[0].step < (plan.steps if stop is None else stop):
        count = loaders[0].part.batches(plan.stage(loaders[0].step))
        drawn = [next(stream) for stream in streams for _ in range(count)]
        arrays = [np.concatenate([batch[name] for batch in drawn]).tobytes() for name in sorted(drawn[0])]
        found.append(hashlib.sha256(b"".join(arrays)).hexdigest())
    return found, loaders[0]


@pytest.mark.parametrize("packing", ["concat", "best_fit", "bos_best_fit", "padded"])
def test_batches_are_those_of_a_local_copy(make_both, packing):
    """[N1.a]"""
    local, away = make_both(packing=packing, edits=EDITS)
    expected, _ = digests(local)
    assert digests(away)[0] == expected


@pytest.mark.parametrize("scheme", ["gs", "az", "file"])
def test_batches_of_other_clouds_are_those_of_a_local_copy(make_store, tmp_path, object_server, request, scheme):
    """[N1.a] As gs:// no more than reading: the server of these tests takes no writing signed as Google has it."""
    path, *_ = make_store("web", [int(n) for n in np.random.default_rng(0).integers(0, 200, 100)])
    if scheme == "az":
        place = f"az://{BUCKET}/web?endpoint={request.getfixturevalue('azure')}"
        upload(path, place)
    elif scheme == "gs":
        upload(path, f"s3://{OPEN_BUCKET}/{tmp_path.name}?endpoint={object_server.endpoint}")
        key = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
        request.getfixturevalue("monkeypatch").setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(key))
        place = f"gs://{OPEN_BUCKET}/{tmp_path.name}?endpoint={object_server.endpoint}"
    else:
        place = f"file://{tmp_path}/away"
        upload(path, place)
    found = []
    for store in ("web", place):
        (tmp_path / "run.toml").write_text(RECORDS.format(mirror=tmp_path / "mirror", store=store))
        found.append(digests(Run.from_toml(tmp_path / "run.toml")))
    assert found[0][0] == found[1][0]
    assert found[1][1].network.counters.requests > 4


@pytest.mark.parametrize(("world_size", "threads"), [(2, 0), (4, 4), (1, 4)])
def test_ranks_and_threads_do_not_change_them(make_both, world_size, threads):
    """[N1.a]"""
    local, away = make_both()
    assert digests(away, world_size=world_size, threads=threads)[0] == digests(local)[0]


def test_a_step_and_a_resume_are_those_of_a_local_copy(make_both):
    """[N1.a]"""
    local, away = make_both()
    expected, _ = digests(local)
    head, loader = digests(away, stop=7)
    state = loader.state_dict()
    assert head + digests(away, state=state)[0] == expected
    assert {name: array.tobytes() for name, array in away.loader()[20].items()} == {
        name: array.tobytes() for name, array in local.loader()[20].items()
    }


@pytest.mark.parametrize("limit", [None, 0, 8192, 60_000])
def test_a_mirror_of_any_size_does_not_change_them(make_both, tmp_path, limit):
    """[N1.a]"""
    line = "" if limit is None else f"limit_bytes = {limit}"
    local, away = make_both(remote=f'mirror = "{tmp_path}/mirror"\n{line}', edits=EDITS, steps=48)
    expected, _ = digests(local)
    assert digests(away)[0] == expected
    assert digests(Run.from_toml(tmp_path / "away.toml"), world_size=2)[0] == expected


def test_an_eval_through_a_small_mirror_is_that_of_a_local_copy(make_both, tmp_path):
    """[N1.a]"""
    documents = list(range(0, 300, 2))
    evals = f'[[evals]]\nname = "val"\nsource = "web"\ndocuments = {documents}\npacking = "padded"\n'
    evals += 'on_long = "truncate_end"'
    local, away = make_both(remote=f'mirror = "{tmp_path}/mirror"\nlimit_bytes = 8192', edits=evals)
    batches = [[batch["labels"].tolist() for batch in run.evals["val"].loader()] for run in (local, away)]
    assert len(batches[0]) == 150
    assert batches[0] == batches[1]


@pytest.mark.deep
@pytest.mark.parametrize("packing", ["concat", "best_fit", "bos_best_fit", "padded"])
@pytest.mark.parametrize("limit", [None, 0, 8192, 60_000])
def test_no_packing_world_threads_or_mirror_changes_them(make_both, tmp_path, packing, limit):
    """[N1.a]"""
    for world_size in (1, 2, 4):
        for threads in (0, 1, 4):
            line = "" if limit is None else f"limit_bytes = {limit}"
            remote = f'mirror = "{tmp_path}/mirror-{world_size}-{threads}"\n{line}'
            local, away = make_both(packing=packing, remote=remote, edits=EDITS)
            assert digests(away, world_size=world_size, threads=threads)[0] == digests(local)[0]


def test_full_shuffle_reads_exactly_the_bytes_of_its_rows(make_both, object_server):
    """[N1.b]"""
    faults = Faults(only="sequence.bin")
    with fault_proxy(object_server.endpoint, faults) as endpoint:
        remote = "verify_pages = false"
        local, away = make_both(packing="concat", endpoint=endpoint, steps=8, edge=7, remote=remote)
        digests(away, threads=0)
        plan, needed = local.plan(), 0
        for step in range(plan.steps):
            sources, rows = plan.rows(step)
            for number, name in enumerate(plan.sources):
                spans = plan.stage(step).rows[name].spans(rows[sources == number])
                needed += 2 * int(spans.length.sum())
    assert 0 < faults.bytes <= needed


def test_requests_are_counted_and_told(make_both, object_server):
    faults = Faults(only="sequence.bin")
    with fault_proxy(object_server.endpoint, faults) as endpoint:
        _, away = make_both(endpoint=endpoint)
        _, loader = digests(away)
    counted = loader.network.counters
    assert counted.requests == faults.requests
    assert counted.bytes > faults.bytes
    assert loader.network._held == 0
    assert loader.waited > 0


def test_a_line_says_that_training_waits_and_not_too_often(caplog, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr("tokenmill.store.remote.fetch.monotonic", lambda: clock[0])
    network, told = Network(), []
    for second in range(100):
        clock[0] += 1.0
        network.record_wait(1.0)
        if len(caplog.messages) > len(told):
            told.append(second + 1)
    assert told == [5, 36, 67, 98]
    assert caplog.messages[1].startswith("training waits for the network: 36.0 s so far, 0 requests")


def test_while_the_server_is_down_the_line_names_the_last_error(caplog, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr("tokenmill.store.remote.fetch.monotonic", lambda: clock[0])
    network, told = Network(RemoteOptions(deadline=60.0)), []
    for second in range(40):
        clock[0] += 1.0
        network.record_failure("a refused connection")
        if len(caplog.messages) > len(told):
            told.append(second)
    assert told == [5, 36]
    assert caplog.messages[0] == (
        "object storage has not answered for 5 s: 6 retries, last error: a refused connection; requests are "
        "retried for up to 60 s, so check that the server runs"
    )
    clock[0] += 30.0
    network.record_wait(71.0)
    assert caplog.messages[2].endswith("40 retries; last error: a refused connection; check that the server runs")
    network.record_latency(0.1)
    clock[0] += 60.0
    network.record_wait(60.0)
    assert caplog.messages[3].endswith(
        "40 retries; more concurrency or horizon_bytes under [remote] may help, or a mirror"
    )


def test_a_row_index_that_was_built_beside_a_store_is_fetched(make_store, tmp_path, monkeypatch):
    monkeypatch.setattr("tokenmill.packing.rows.IN_MEMORY_DOCUMENTS", 10)
    path, *_ = make_store("web", [int(n) for n in np.random.default_rng(0).integers(0, 200, 100)])
    table = {
        "run": {"steps": 4, "global_batch_size": 4, "seq_len": 64},
        "sources": [{"name": "web", "store": "web"}],
    }
    expected, _ = digests(Run(config=parse_config(table), folder=tmp_path))
    upload(path, f"file://{tmp_path}/away")
    monkeypatch.setattr("tokenmill.packing.rows.compute_in_order", None)  # nothing is packed again
    table["sources"][0]["store"] = f"file://{tmp_path}/away"
    table["remote"] = {"mirror": str(tmp_path / "mirror")}
    assert digests(Run(config=parse_config(table), folder=tmp_path))[0] == expected


def test_a_first_batch_waits_for_three_round_trips_whatever_the_stores(make_both, object_server, tmp_path):
    """Manifests and what page sums there are; offsets and page sums; ranges."""
    faults = Faults(latency=0.3)
    with fault_proxy(object_server.endpoint, faults) as endpoint:
        _, away = make_both(endpoint=endpoint, remote=f'mirror = "{tmp_path}/new"\nlimit_bytes = 0')
        next(iter(away.loader(micro_batch=4)))
    assert faults.rounds == 3


def test_never_more_than_the_horizon_is_held(make_both):
    horizon = 1 << 20
    _, away = make_both(remote=f"horizon_bytes = {horizon}", steps=120, edge=90)
    loader = away.loader(micro_batch=4)
    most = 0
    for _ in loader:
        most = max(most, loader.network._held)
    assert horizon // 2 < most <= horizon + horizon // 4  # and a block that was waited for


def test_no_descriptor_is_left_open_in_ten_thousand_batches(make_both, tmp_path):
    remote = f'mirror = "{tmp_path}/mirror"\nlimit_bytes = 30000'
    _, away = make_both(remote=remote, steps=2600, edge=2550)
    loader = away.loader(micro_batch=4)
    counts = []
    for number, _ in enumerate(loader):
        if number in (100, 10_390):
            counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[1] <= counts[0] + 2


def test_errors_truncations_and_stalls_do_not_change_a_batch(make_both, object_server):
    """[N1.c]"""
    faults = Faults(errors=0.1, truncated=0.05, stalled=0.01, stall=1.0)
    with fault_proxy(object_server.endpoint, faults) as endpoint:
        local, away = make_both(endpoint=endpoint, remote="deadline = 20.0")
        found, loader = digests(away)
    assert found == digests(local)[0]
    assert loader.network.counters.retries > 0


def test_flipped_bits_are_fetched_again_where_a_store_has_page_sums(make_both, object_server):
    """[N1.c, N1.d]"""
    faults = Faults(flipped=0.3, only="sequence.bin")
    with fault_proxy(object_server.endpoint, faults) as endpoint:
        local, away = make_both(endpoint=endpoint)
        found, loader = digests(away)
    assert found == digests(local)[0]
    assert loader.network.counters.corrupt == len(faults.changed) > 0


def test_a_page_that_stays_wrong_is_named(make_both, object_server, tmp_path):
    """[N1.d]"""
    _, away = make_both()
    client = Client(parse_address(object_server.address(f"{tmp_path.name}/web")))
    name = "shard-00001/sequence.bin"
    body = bytearray(client.get(name))
    body[5000] ^= 1
    client.put(name, bytes(body))
    with pytest.raises(StoreCorruptError, match=r"web/shard-00001/sequence.bin: bytes \d+:\d+.*twice, in page 1"):
        digests(away)


@pytest.mark.parametrize("empty", ["a shard", "all"])
def test_page_sums_that_no_listing_has_end_the_run(make_both, object_server, tmp_path, empty):
    """[N1.d] What a server leaves out of a listing does not turn verification off."""
    _, away = make_both()
    client = Client(parse_address(object_server.address(f"{tmp_path.name}/web")))
    for item in client.list(".sums"):
        if empty == "all" or item.name.endswith("1.bin"):
            client.delete(item.name)
    with pytest.raises(
        StoreCorruptError,
        match=r"web/\.sums/shard-0000[01]\.bin: page sums not found; copy .* verify_pages = false",
    ):
        digests(away)


def test_page_sums_may_be_left_unread(make_both, object_server, tmp_path):
    local, away = make_both(remote="verify_pages = false")
    Client(parse_address(object_server.address(f"{tmp_path.name}/web"))).delete(".sums/shard-00001.bin")
    assert digests(away)[0] == digests(local)[0]


def test_with_page_sums_whole_pages_are_read_and_no_more(make_both, object_server):
    """[N1.b]"""
    faults = Faults(only="sequence.bin")
    with fault_proxy(object_server.endpoint, faults) as endpoint:
        _, away = make_both(packing="concat", endpoint=endpoint, steps=8, edge=7)
        digests(away, threads=0)
        plan = away.plan()
        needed = 0
        for block in ((0, 2), (2, 7), (7, 8)):  # as the loader groups the steps of this run
            pages = set()
            for step in range(*block):
                sources, rows = plan.rows(step)
                for number, name in enumerate(plan.sources):
                    spans = plan.stage(step).rows[name].spans(rows[sources == number])
                    firsts, lasts = 2 * spans.token // 4096, (2 * (spans.token + spans.length) - 1) // 4096
                    for shard, first, last in zip(spans.shard, firsts, lasts, strict=True):
                        pages |= {(name, int(shard), page) for page in range(first, last + 1)}
            needed += 4096 * len(pages)
    assert 0 < faults.bytes <= 1.01 * needed


RECORDS = """
[run]
steps = 12
global_batch_size = 4
seq_len = 24
packing = "padded"
on_long = "truncate_end"
[remote]
mirror = "{mirror}"
limit_bytes = 4096
[[sources]]
name = "pairs"
store = "{store}"
"""


def make_records(path, kind, identity):
    rng = np.random.default_rng(0)
    count = 60

    def values(lengths, high, dtype):
        return rng.integers(0, high, int(np.sum(lengths))).astype(dtype)

    def offsets(lengths):
        return np.concatenate([[0], np.cumsum(lengths)])

    if kind == "sft":
        lengths = rng.integers(1, 30, count)
        keys = {"sequence": "<u2", "loss_mask": "|u1"}
        arrays = {"sequence": values(lengths, 500, "<u2"), "loss_mask": values(lengths, 2, "|u1")}
        cuts = offsets(lengths)
    elif kind == "dpo":
        lengths = {axis: rng.integers(1, 40, count) for axis in ("chosen", "rejected")}
        keys = {name: dtype for axis in lengths for name, dtype in ((axis, "<u2"), (f"{axis}_mask", "|u1"))}
        arrays = {axis: values(size, 500, "<u2") for axis, size in lengths.items()}
        arrays |= {f"{axis}_mask": values(size, 2, "|u1") for axis, size in lengths.items()}
        cuts = {axis: offsets(size) for axis, size in lengths.items()}
    else:
        groups = rng.integers(1, 4, count)
        prompts, responses = rng.integers(1, 20, count), rng.integers(1, 20, int(groups.sum()))
        keys = {"prompts": "<u2", "responses": "<u2", "masks": "|u1", "rewards": "<f4"}
        arrays = {
            "prompts": values(prompts, 500, "<u2"),
            "responses": values(responses, 500, "<u2"),
            "masks": values(responses, 2, "|u1"),
            "rewards": rng.random(int(groups.sum())).astype("<f4"),
        }
        cuts = {"prompts": offsets(prompts), "responses": offsets(responses), "groups": offsets(groups)}
    spec = StoreSpec(keys=keys, tokenizer=identity(500), recipe={}, kind=kind, max_tokens_per_shard=900)
    with StoreWriter(path, spec) as writer:
        writer.append(arrays, cuts)
        writer.commit()


@pytest.mark.parametrize("kind", ["sft", "dpo", "grpo"])
def test_records_are_those_of_a_local_copy(tmp_path, object_server, tokenizer_identity, kind):
    """[N1.a]"""
    make_records(tmp_path / "pairs", kind, tokenizer_identity)
    name = put_store(object_server, tmp_path / "pairs", f"{tmp_path.name}/pairs")
    found = []
    for place in ("pairs", object_server.address(name)):
        (tmp_path / "run.toml").write_text(RECORDS.format(mirror=tmp_path / "mirror", store=place))
        found.append(digests(Run.from_toml(tmp_path / "run.toml"))[0])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("faults", "deadline", "kind"),
    # A busy machine may take a second for the first answer, whatever it is.
    [({"errors": 1.0}, 4, "status (429|5)"), ({"stalled": 1.0, "stall": 30.0}, 1, "a time-out")],
)
def test_a_server_that_never_answers_ends_the_run_within_the_deadline(
    make_both, object_server, faults, deadline, kind
):
    """[N1.c]"""
    with fault_proxy(object_server.endpoint, Faults(**faults, only="sequence.bin")) as endpoint:
        _, away = make_both(endpoint=endpoint, remote=f"deadline = {deadline}.0")
        began = time.monotonic()
        rule = rf"sequence.bin: bytes \d+:\d+ must be read within {deadline} s, got {kind}"
        with pytest.raises(StoreUnreachableError, match=rule):
            digests(away)
    assert time.monotonic() - began < 15  # on a busy machine; 30 if it had waited


def test_an_object_that_is_overwritten_ends_the_run_with_its_name(make_both, object_server, tmp_path):
    """[N1.c]"""
    _, away = make_both(remote="horizon_bytes = 4096\nverify_pages = false")
    loader = away.loader(micro_batch=4)
    stream = iter(loader)
    next(stream)
    client = Client(parse_address(object_server.address(f"{tmp_path.name}/web")))
    for item in client.list():
        if item.name.endswith("sequence.bin"):
            client.put(item.name, bytes(item.bytes))
    with pytest.raises(StoreCorruptError, match=r"web/shard-\d+/sequence.bin: an object must stay as it is"):
        list(stream)


def test_no_secret_is_in_any_file_or_message(make_both, tmp_path, object_server, monkeypatch):
    _, away = make_both(remote=f'mirror = "{tmp_path}/mirror"')
    _, loader = digests(away)
    secret = object_server.environment["AWS_SECRET_ACCESS_KEY"]
    texts = [repr(loader.state_dict()), repr(away), repr(away.stores), repr(loader.network.options)]
    assert not [text for text in texts if secret in text]
    for file in tmp_path.rglob("*"):
        if file.is_file():
            assert secret.encode() not in file.read_bytes(), file
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"{secret}-wrong")
    with pytest.raises(Exception, match="must be allowed to read it") as caught:
        digests(Run.from_toml(tmp_path / "away.toml"))
    assert secret not in str(caught.value)
