import numpy as np
import pytest

from tokenmill.config.run import parse_config
from tokenmill.errors import ConfigError
from tokenmill.packing.packers import MAX_DOCUMENTS
from tokenmill.run.reading import Link, Prices, report_reading
from tokenmill.run.run import Run
from tokenmill.store.layout import PAGE_BYTES
from tokenmill.store.remote.upload import upload

LENGTHS = np.random.default_rng(3).integers(1, 9, 4 * MAX_DOCUMENTS).tolist()


def make_run(folder, packing, *, batch=64, epochs=None, steps=1, shuffle="full"):
    run = {"steps": steps, "global_batch_size": batch, "seq_len": 63, "packing": packing, "window_blocks": 2}
    tables = {"run": run | {"shuffle": shuffle}, "sources": [{"name": "web", "store": "web"}]}
    if epochs is not None:
        rows = Run(config=parse_config(tables), folder=folder).plan().stages[0].rows["web"].num_rows
        tables["run"]["steps"] = epochs * rows // batch
    return Run(config=parse_config(tables), folder=folder)


def by_shuffle(report):
    return {reading.shuffle: reading for reading in report.readings}


@pytest.mark.parametrize("page", [1, PAGE_BYTES])
@pytest.mark.parametrize("packing", ["best_fit", "concat"])
def test_requests_of_a_full_shuffle_are_the_ranges_that_its_rows_need(make_store, tmp_path, packing, page):
    """Counted byte by byte, or page by page, for a stage that is one block of a loader."""
    make_store("web", LENGTHS[:5000], max_tokens_per_shard=10_000)
    run = make_run(tmp_path, packing, steps=4)
    reading = by_shuffle(report_reading(run, verify_pages=page > 1))["full"]
    spans = run.plan().stages[0].rows["web"].spans(run.plan().stages[0].order(0, 0).rows(np.arange(256)))
    wanted = set()
    for shard, token, length in zip(spans.shard, spans.token, spans.length, strict=True):
        first, last = int(token) * 2 // page, (int(token + length) * 2 - 1) // page
        wanted |= {(int(shard), number) for number in range(first, last + 1)}
    heads = [1 for shard, number in wanted if (shard, number - 1) not in wanted]
    assert (reading.requests, reading.bytes) == (len(heads), len(wanted) * page)
    assert (reading.rows, reading.counted_rows) == (256, 256)


@pytest.mark.parametrize(("packing", "shuffle"), [("best_fit", "full"), ("concat", "full")])
def test_what_is_told_is_what_a_loader_asks_for(make_store, tmp_path, packing, shuffle):
    """With a horizon that holds a part of the store, as it is with stores that are worth it."""
    make_store("web", np.random.default_rng(3).integers(1, 300, 3000).tolist())
    upload(tmp_path / "web", f"file://{tmp_path}/away")
    sources = [{"name": "web", "store": f"file://{tmp_path}/away"}]
    table = {"steps": 50, "global_batch_size": 64, "seq_len": 127, "packing": packing, "shuffle": shuffle}
    tables = {"run": {**table, "window_blocks": 2}, "sources": sources, "remote": {"horizon_bytes": 1 << 22}}
    run = Run(config=parse_config(tables), folder=tmp_path)
    reading = by_shuffle(run.reading())[shuffle]
    before = run.network.counters.to_json()
    list(run.loader(micro_batch=4))
    asked = run.network.counters
    assert reading.requests == pytest.approx(
        asked.requests - before["requests"], rel=0.25
    )  # its first blocks are small
    assert reading.bytes == pytest.approx(asked.bytes - before["bytes"], rel=0.25)  # its first blocks are small


def test_window_shuffle_asks_for_whole_windows_and_nodes_share_few(make_store, tmp_path):
    make_store("web", LENGTHS)
    run = make_run(tmp_path, "best_fit", epochs=1)
    one = by_shuffle(report_reading(run, verify_pages=False))
    assert set(one) == {"full", "window"}
    assert [shuffle for shuffle, reading in one.items() if reading.is_planned] == ["full"]
    # Neighbouring windows of a group are one range.
    assert one["window"].requests <= 4 < 1000 < one["full"].requests
    stored = 2 * sum(LENGTHS)
    assert one["window"].bytes == pytest.approx(stored, rel=0.02)
    assert one["window"].mirror_bytes <= stored * 1.2
    assert one["full"].mirror_bytes == 0
    two = by_shuffle(report_reading(run, link=Link(nodes=2), verify_pages=False))["window"]
    assert stored * 0.98 <= two.bytes <= stored * 2.02
    assert two.mirror_bytes <= one["window"].mirror_bytes


def test_time_is_of_what_takes_longer_and_money_of_both(make_store, tmp_path):
    make_store("web", LENGTHS[:5000])
    run = make_run(tmp_path, "best_fit", steps=4)
    prices = Prices(thousand_requests=2.0, gigabyte=3.0)
    slow = by_shuffle(run.reading(link=Link(latency_ms=1000, gbit=1000, concurrency=10), prices=prices))["full"]
    assert slow.seconds == pytest.approx(slow.requests / 10)
    assert slow.dollars == pytest.approx(slow.requests / 1000 * 2 + slow.bytes / 1e9 * 3)
    narrow = by_shuffle(run.reading(link=Link(latency_ms=0, gbit=0.001)))["full"]
    assert narrow.seconds == pytest.approx(narrow.bytes * 8 / 1e6)
    shared = by_shuffle(run.reading(link=Link(nodes=2, latency_ms=0, gbit=0.001)))["full"]
    assert shared.seconds == pytest.approx(shared.bytes * 8 / 1e6 / 2)


def test_several_epochs_need_a_mirror_of_what_is_read_again(make_store, tmp_path):
    make_store("web", LENGTHS[:5000])
    run = make_run(tmp_path, "best_fit", epochs=3)
    reading = by_shuffle(report_reading(run, verify_pages=False))["full"]
    assert reading.epochs == pytest.approx(3, rel=0.05)
    assert reading.mirror_bytes == pytest.approx(2 * sum(LENGTHS[:5000]), rel=0.02)
    told = report_reading(run, verify_pages=False).to_json()["readings"]
    line = next(line for line in told if line["shuffle"] == "full")
    assert line["an_epoch"]["bytes"] == pytest.approx(line["bytes"] / line["epochs"], rel=0.01)


@pytest.mark.parametrize("name", ["nodes", "gbit", "concurrency"])
def test_a_link_that_cannot_be_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name}: must be more than 0, got 0"):
        Link(**{name: 0})
