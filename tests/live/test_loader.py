"""The loader: the same stream whoever draws it, and exactly resumed."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokenmill.live.lanes as lanes_module
from tokenmill.errors import ConfigError, DocumentError, ResumeError, TokenizerError
from tokenmill.live import LiveLoader, LiveOptions, merge_states, open_live
from tokenmill.live.lanes import WindowRows, WindowThreads
from tokenmill.loader import IGNORE, LoaderOptions, stack

PACKINGS = [
    {"packing": "best_fit"},
    {"packing": "concat"},
    {"packing": "bos_best_fit"},
    {"packing": "padded", "split": "truncate_end"},
    {"packing": "best_fit", "shuffle": False},
]
IDS = ["best_fit", "concat", "bos_best_fit", "padded", "unshuffled"]


def saved(loader):
    """Return the state as it comes back from a file."""
    return json.loads(json.dumps(loader.state_dict()))


def lanes_of(state):
    """Return where the lanes of a state stand."""
    return state["live"]["lanes"]["text"]


@pytest.mark.parametrize("options", PACKINGS, ids=IDS)
def test_from_every_batch_on_a_resumed_run_is_the_uninterrupted_one(make_source, make_loader, draw, options):
    """[R1.a]"""
    source = make_source(**options, lanes=4)
    shape = {"steps": 18, "global_batch_size": 12, "micro_batch": 6}
    loader = make_loader(source, **shape)
    stream, states, whole = iter(loader), [saved(loader)], []
    for _ in range(len(loader)):
        whole += draw_one(stream, draw)
        states.append(saved(loader))
    assert max(epoch for epoch, *_ in lanes_of(states[-1]).values()) >= 1  # or the run is too short to show much
    for k in range(0, len(states), 5 if options != PACKINGS[0] else 1):
        fresh = make_loader(source, **shape, threads=k % 3)
        fresh.load_state_dict(states[k])
        assert saved(fresh) == states[k]
        assert fresh.step == k // 2
        assert draw(fresh) == whole[k:], (k, lanes_of(states[k]), fresh.options.threads)
        assert saved(fresh) == states[-1]


def draw_one(stream, draw):
    return draw(_Once(stream), 1)


class _Once:
    """An iteration under way, as something that can be iterated."""

    def __init__(self, stream):
        self._stream = stream

    def __iter__(self):
        return self._stream


@given(cuts=st.lists(st.integers(0, 9), min_size=5, max_size=9), threads=st.integers(0, 2), ahead=st.integers(1, 9))
def test_chains_of_saves_lose_and_repeat_nothing(make_source, make_loader, draw, cuts, threads, ahead):
    """[R1.b, R1.c]"""
    source = make_source()
    whole = draw(make_loader(source, steps=12))
    state, parts = saved(make_loader(source, steps=12)), []
    for cut in cuts:
        loader = make_loader(source, steps=12, threads=threads, ahead=ahead)
        loader.load_state_dict(state)
        assert saved(loader) == state
        parts += draw(loader, min(cut, len(whole) - len(parts)))
        state = saved(loader)
        loader.close()
    last = make_loader(source, steps=12)
    last.load_state_dict(state)
    assert parts + draw(last) == whole


def test_a_state_loaded_in_the_middle_of_an_iteration_takes_it_along(make_source, make_loader, draw):
    """[R1.c]"""
    loader = make_loader(make_source(), steps=8)
    stream = iter(loader)
    first = [draw_one(stream, draw) for _ in range(10)]
    state = saved(loader)
    after = [draw_one(stream, draw) for _ in range(7)]
    loader.load_state_dict(state)
    assert [draw_one(stream, draw) for _ in range(7)] == after
    assert first[0] != after[0]


def global_batches(loaders, steps):
    """Return the global batches of some steps, as the ranks make them up together."""
    streams = [iter(loader) for loader in loaders]
    out = []
    for _ in range(steps):
        parts = [
            {name: array.copy() for name, array in next(stream).items()}
            for stream, loader in zip(streams, loaders, strict=True)
            for _ in range(loader.part.batches(loader.plan.stages[0]))
        ]
        out.append({name: array.tobytes() for name, array in stack(parts).items()})
    return out


@pytest.mark.parametrize("options", PACKINGS[:2], ids=IDS[:2])
def test_every_world_size_gives_the_same_global_batches_and_takes_over_from_any_other(
    make_source, make_loader, options
):
    """[E1.a]"""
    source = make_source(**options)
    steps = 12

    def ranks(world_size, micro_batch):
        shape = {"steps": steps, "global_batch_size": 24, "world_size": world_size, "micro_batch": micro_batch}
        return [make_loader(source, **shape, rank=rank, threads=rank % 2) for rank in range(world_size)]

    whole = global_batches(ranks(1, 24), steps)
    worlds = [(1, 6), (2, 4), (3, 8), (4, 3), (6, 2), (8, 1)]
    for number, (world_size, micro_batch) in enumerate(worlds):
        loaders = ranks(world_size, micro_batch)
        assert {len(loader) for loader in loaders} == {steps * 24 // world_size // micro_batch}
        cut = 2 + number
        assert global_batches(loaders, cut) == whole[:cut]
        state = json.loads(json.dumps(merge_states([saved(loader) for loader in reversed(loaders)])))
        assert list(lanes_of(state)) == [str(lane) for lane in range(24)]
        for loader in loaders:
            loader.close()
        others = ranks(*worlds[(number + 3) % len(worlds)])
        for loader in others:
            loader.load_state_dict(state)
            assert loader.step == cut
        assert global_batches(others, steps - cut) == whole[cut:]


@pytest.mark.parametrize("lanes", [4, 8, 24])
def test_fewer_lanes_than_rows_give_neighbouring_rows(make_source, make_loader, lanes):
    source = make_source(lanes=lanes)
    one = make_loader(source, global_batch_size=24, micro_batch=24)
    two = [make_loader(source, global_batch_size=24, micro_batch=6, world_size=2, rank=rank) for rank in range(2)]
    assert global_batches([one], 10) == global_batches(two, 10)


def test_the_global_batch_may_change_where_the_lanes_stay(make_source, make_loader):
    source = make_source(lanes=4)
    small, large = make_loader(source, global_batch_size=4), make_loader(source, global_batch_size=8)
    global_batches([small], 3)
    large.load_state_dict(saved(small))
    assert large.step == 3
    batch = next(iter(large))
    again = make_loader(source, global_batch_size=4)
    again.load_state_dict(saved(small))
    assert np.array_equal(batch["labels"], next(iter(again))["labels"])


@pytest.mark.deep
@given(
    switches=st.lists(
        st.tuples(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]), st.sampled_from([0, 1, 2, 5]), st.integers(0, 4)),
        min_size=1,
        max_size=20,
    ),
    options=st.sampled_from(PACKINGS),
)
def test_any_chain_of_world_sizes_and_threads_gives_one_run(make_source, make_loader, switches, options):
    """[E1.a]"""
    source = make_source(**options)

    def ranks(world_size, threads):
        shape = {"steps": 20, "global_batch_size": 24, "world_size": world_size, "threads": threads}
        return [make_loader(source, **shape, rank=rank) for rank in range(world_size)]

    whole = global_batches(ranks(1, 0), 20)
    state, seen = saved(ranks(1, 0)[0]), []
    for world_size, threads, count in (*switches, (1, 1, 20)):
        loaders = ranks(world_size, threads)
        for loader in loaders:
            loader.load_state_dict(state)
        seen += global_batches(loaders, min(count, 20 - len(seen)))
        state = merge_states([saved(loader) for loader in loaders])
        for loader in loaders:
            loader.close()
    assert seen == whole


def test_a_resumed_run_reads_one_window_a_lane_before_its_first_step(make_source, make_loader, draw, monkeypatch):
    """[R2.a]"""
    source = make_source()
    loader = make_loader(source, steps=200, micro_batch=4)
    draw(loader, 190)
    state = saved(loader)
    loader.close()
    assert all(epoch >= 1 for epoch, *_ in lanes_of(state).values())
    read = []
    real = lanes_module.tokenize_window

    def counted(*arguments):
        made = real(*arguments)
        if made.encoded.ids.size:
            read.append(made)
        return made

    monkeypatch.setattr(lanes_module, "tokenize_window", counted)
    fresh = make_loader(source, steps=200, micro_batch=4, threads=0)
    fresh.load_state_dict(state)
    draw(fresh, 1)
    assert len(read) == 4


def test_lanes_do_not_come_to_the_end_of_their_windows_at_the_same_step(tmp_path, write, numbers, make_loader):
    path = write(tmp_path / "x.jsonl", ["1 2 3"] * 1000)
    line = path.stat().st_size // 1000
    options = LiveOptions(seq_len=4, packing="padded", window_bytes=40 * line)
    source = open_live(path, tokenizer=numbers(), options=options)
    loader = make_loader(source, steps=100, global_batch_size=8, micro_batch=8)
    # Those that have come to the end of a window are at the start of the next.
    ends = [sum(not drawn for _, _, *drawn in lanes_of(loader.state_dict()).values()) for _ in loader]
    assert max(ends) == 1
    assert sum(ends) >= 16


def test_labels_are_the_inputs_moved_on_and_the_other_arrays_fit_them(make_source, make_loader):
    loader = make_loader(make_source(seq_len=24), steps=20, micro_batch=2)
    for batch in loader:
        labels, inputs, documents = batch["labels"], batch["input_ids"], batch["doc_ids"]
        known = labels[:, :-1] != IGNORE
        assert np.array_equal(labels[:, :-1][known], inputs[:, 1:][known])
        assert (documents[:, 1:] == documents[:, :-1])[known].all()
        assert np.array_equal(batch["loss_mask"], labels != IGNORE)
        bounds = batch["cu_seqlens"]
        assert (int(bounds[0]), int(bounds[-1])) == (0, 48)
        assert int(batch["max_seqlen"]) == np.diff(bounds).max()
        assert np.flatnonzero(batch["position_ids"].ravel() == 0).tolist() == bounds[:-1].tolist()


def test_a_run_has_its_steps_and_then_ends_its_threads(make_source, make_loader):
    """[C2.a]"""
    before = threading.active_count()
    loader = make_loader(make_source(), steps=7, threads=2)
    assert len(list(loader)) == len(loader) == 28
    assert (loader.step, threading.active_count()) == (7, before)
    assert list(loader) == []


def test_a_loader_that_is_dropped_ends_its_threads(make_source):
    before = set(threading.enumerate())
    loader = LiveLoader(make_source(), steps=50, global_batch_size=4, options=LoaderOptions(threads=2))
    stream = iter(loader)
    next(stream)
    mine = set(threading.enumerate()) - before
    assert len(mine) == 2
    del loader, stream
    gc.collect()
    assert not [thread for thread in mine if thread.is_alive()]


@pytest.mark.parametrize(("threads", "ahead"), [(0, 2), (1, 1), (1, 2), (2, 5)])
def test_as_many_windows_are_alive_as_there_are_lanes_and_windows_ahead(
    make_source, make_loader, monkeypatch, threads, ahead
):
    alive: weakref.WeakSet[WindowRows] = weakref.WeakSet()
    most = 0
    real = lanes_module.pack_window

    def watched(*arguments):
        made = real(*arguments)
        alive.add(made)
        return made

    monkeypatch.setattr(lanes_module, "pack_window", watched)
    loader = make_loader(make_source(), steps=30, global_batch_size=6, threads=threads, ahead=ahead)
    for _ in loader:
        most = max(most, len(alive))
    assert 6 <= most <= 6 + (max(threads, ahead) if threads else 0)


@pytest.mark.parametrize("ahead", [1, 4])
def test_the_windows_that_are_needed_first_are_made_first(make_source, make_loader, monkeypatch, ahead):
    loader = make_loader(make_source(), steps=30, global_batch_size=6, ahead=ahead)
    real = WindowThreads.ask
    asked = []

    def ask(self, request):
        held = {number: lane.rows_held for number, lane in loader.text.lanes.items() if lane.task is None}
        asked.append(held[request.lane] == min(held.values()))
        return real(self, request)

    monkeypatch.setattr(WindowThreads, "ask", ask)
    for _ in loader:
        assert sum(lane.task is not None for lane in loader.text.lanes.values()) <= ahead
    assert len(asked) > 12
    assert all(asked)


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
@pytest.mark.parametrize("steps", [1, 2, 9])
def test_windows_that_the_run_does_not_come_to_are_not_asked_for(
    make_source, make_loader, monkeypatch, micro_batch, steps
):
    real = WindowThreads.ask
    asked, taken = [], []
    monkeypatch.setattr(
        WindowThreads, "ask", lambda self, request: (asked.append(request.lane), real(self, request))[1]
    )
    loader = make_loader(make_source(), steps=steps, threads=2, ahead=9, micro_batch=micro_batch)
    take = loader.text._next_window
    monkeypatch.setattr(
        loader.text, "_next_window", lambda number, *rest: (taken.append(number), take(number, *rest))[1]
    )
    list(loader)
    assert sorted(asked) == sorted(taken)


def test_epochs_are_refused_with_the_way_out(make_source):
    with pytest.raises(ConfigError, match=r"epochs: 2 cannot be combined with live text.*\(eager\)"):
        LiveLoader(make_source(), steps=3, global_batch_size=4, epochs=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "steps and global_batch_size must be at least 1, got 0 and 4"),
        ({"ahead": 0}, "loader: ahead must be at least 1, got 0; leave it out"),
        ({"threads": -1}, "threads must be at least 0"),
        ({"timeout": 0}, "timeout more than 0"),
        ({"arrays": ("input_ids", "label")}, "did you mean 'labels'"),
        ({"arrays": ("labels", "num_loss_tokens")}, "arrays: num_loss_tokens cannot be combined with live text"),
        ({"arrays": ("cu_seqlens",)}, "one that has a line for every row"),
        ({"rank": 2, "world_size": 2}, "rank 2 of 2"),
        ({"world_size": 3}, r"divisible by world_size \* micro_batch, got 4 and 3 \* 1; .* world_size 2 or 4"),
        ({"micro_batch": 3}, r"divisible by world_size \* micro_batch, got 4 and 1 \* 3; .* micro_batch 2 or 4"),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_batch(make_source, make_loader, options, message):
    """[E1.b]"""
    with pytest.raises(ConfigError, match=message):
        make_loader(make_source(), **options)


def test_lanes_that_do_not_divide_the_batch_are_refused(make_source, make_loader):
    """[E1.b]"""
    with pytest.raises(ConfigError, match=r"lanes must divide the global_batch_size .* got 9 lanes and 24; use 24"):
        make_loader(make_source(lanes=9), global_batch_size=24)
    with pytest.raises(ConfigError, match=r"world_size must divide its 4 lanes, got 8; use another number"):
        make_loader(make_source(lanes=4), global_batch_size=24, world_size=8)


def test_a_second_iteration_ends_the_first(make_source, make_loader):
    loader = make_loader(make_source())
    old, new = iter(loader), iter(loader)
    next(new)
    with pytest.raises(ConfigError, match="one iteration at a time"):
        next(old)


def test_lanes_without_text_are_an_error_and_no_endless_search(tmp_path, numbers, write, make_loader):
    def loader(texts, shuffle):
        path = write(tmp_path / "x.jsonl", texts)
        options = LiveOptions(seq_len=4, shuffle=shuffle, packing="padded")
        return make_loader(open_live(path, tokenizer="bytes", options=options), steps=9, global_batch_size=8)

    assert len(list(loader(["a", "b"], shuffle=True))) == 72  # each lane finds one of the two, sooner or later
    with pytest.raises(DocumentError, match="no text for lane 2 of 8 in 1 windows"):
        list(loader(["a", "b"], shuffle=False))
    (tmp_path / "x.jsonl").write_text("\n" * 50)
    source = open_live(tmp_path / "x.jsonl", tokenizer=numbers(), options=LiveOptions(seq_len=4))
    with pytest.raises(DocumentError, match=r"no text for lane 0 of \d+ in 256 windows; add text"):
        list(make_loader(source))


def bad_corpus(folder, **bad):
    """Write lines of which two cannot be read, or those that are given."""
    lines = [json.dumps({"text": str(number)}) for number in range(1, 41)]
    for number, line in (bad or {"line7": '{"text": 7', "line29": '{"words": "29"}'}).items():
        lines[int(number[4:]) - 1] = line
    (folder / "x.jsonl").write_text("\n".join(lines) + "\n")


def test_a_bad_line_stops_a_run_with_its_file_and_line(tmp_path, numbers, make_loader):
    bad_corpus(tmp_path, line21='["text"]')
    for window_bytes, place in ((10**6, r"x\.jsonl:21"), (100, r"x\.jsonl bytes 200:300, line 7 of these")):
        source = open_live(tmp_path, tokenizer=numbers(), options=LiveOptions(seq_len=4, window_bytes=window_bytes))
        loader = make_loader(source, steps=90, micro_batch=4)
        with pytest.raises(
            DocumentError, match=f"{place}: a record must have the fields that are read, got .*on_error='skip'"
        ):
            list(loader)
        step, state = loader.step, saved(loader)
        with pytest.raises(DocumentError, match=place):
            list(loader)
        assert (loader.step, saved(loader)) == (step, state)


@pytest.mark.parametrize("window_bytes", [100, 10**6])
def test_bad_lines_can_be_skipped_and_are_counted_on_every_rank_alike(tmp_path, numbers, make_loader, window_bytes):
    bad_corpus(tmp_path)
    options = LiveOptions(seq_len=4, window_bytes=window_bytes, on_error="skip")
    source = open_live(tmp_path, tokenizer=numbers(), options=options)
    loader = make_loader(source, steps=30)
    whole = global_batches([loader], 30)
    ranks = [make_loader(source, steps=30, world_size=4, rank=rank) for rank in range(4)]
    assert global_batches(ranks, 30) == whole
    assert sum((rank.skipped.counts for rank in ranks), start=Counter()) == loader.skipped.counts
    assert set(loader.skipped.counts) == {"json", "missing_field"}
    assert len(loader.skipped.places) == sum(loader.skipped.counts.values())
    assert all("x.jsonl" in one.place for one in loader.skipped.places)


def test_what_is_read_again_is_not_counted_again(tmp_path, numbers, make_loader, draw):
    bad_corpus(tmp_path)
    options = LiveOptions(seq_len=4, window_bytes=100, on_error="skip")
    loader = make_loader(open_live(tmp_path, tokenizer=numbers(), options=options), steps=6)
    start = saved(loader)
    draw(loader)
    counts = dict(loader.skipped.counts)
    assert counts
    loader.load_state_dict(start)
    draw(loader)
    assert loader.skipped.counts == counts


def test_a_run_that_a_bad_line_stopped_goes_on_once_it_may_skip(tmp_path, numbers, make_loader, draw, content):
    bad_corpus(tmp_path)

    def source(on_error):
        options = LiveOptions(seq_len=4, window_bytes=100, on_error=on_error)
        return open_live(tmp_path, tokenizer=numbers(), options=options)

    whole = draw(make_loader(source("skip"), steps=20))
    stopped = make_loader(source("stop"), steps=20)
    parts = []
    with pytest.raises(DocumentError):
        parts.extend(map(content, stopped))
    other = make_loader(source("skip"), steps=20)
    other.load_state_dict(saved(stopped))
    assert parts + draw(other) == whole


def test_a_corrupt_row_group_is_named_or_skipped_as_a_whole(tmp_path, texts, write, numbers, make_loader):
    path = write(tmp_path / "x.parquet", texts([40] * 30), [10])
    data = bytearray(path.read_bytes())
    import pyarrow.parquet as pq

    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    begin = column.dictionary_page_offset or column.data_page_offset
    data[begin : begin + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(data)

    def run(on_error):
        options = LiveOptions(seq_len=16, window_bytes=100, on_error=on_error)
        loader = make_loader(open_live(path, tokenizer=numbers(), options=options), steps=60, global_batch_size=2)
        return loader, [batch["labels"].copy() for batch in loader]

    with pytest.raises(DocumentError, match=r"x\.parquet row groups 1:2.*: must be an intact Parquet file"):
        run("stop")
    loader, labels = run("skip")
    seen = set(np.concatenate(labels).ravel().tolist()) - {IGNORE}
    assert seen == {*range(10, 410), *range(810, 1210)}
    assert set(loader.skipped.counts) == {"broken"}
    assert all("row groups 1:2" in one.place for one in loader.skipped.places)


@pytest.mark.parametrize("on_error", ["stop", "skip"])
@pytest.mark.parametrize("harm", ["missing", "shrunk", "grown"])
def test_a_file_that_goes_or_changes_its_size_ends_the_run(corpus, make_source, make_loader, on_error, harm):
    loader = make_loader(make_source(corpus / "b.jsonl", on_error=on_error), steps=100)
    stream = iter(loader)
    next(stream)
    file = corpus / "b.jsonl"
    if harm == "missing":
        file.unlink()
    else:
        data = file.read_bytes()
        file.write_bytes(data[:-40] if harm == "shrunk" else data + b'{"text": "1"}\n')
    with pytest.raises(
        DocumentError, match=r"b\.jsonl: must (stay readable|keep its \d+ bytes) while it is trained"
    ):
        list(stream)


def test_an_error_of_the_tokenizer_names_the_window(make_source, make_loader, numbers):
    class Small(numbers):
        def get_vocab_size(self):
            return 100

    loader = make_loader(make_source(tokenizer=Small()), steps=99)
    with pytest.raises(TokenizerError, match=r"corpus.*: ids must be below the vocabulary size 100, got \d+"):
        list(loader)


def test_an_error_in_a_thread_reaches_the_caller_as_it_is(make_source, make_loader, monkeypatch):
    class OddError(RuntimeError):
        pass

    def broken(*_):
        raise OddError("as it is")

    monkeypatch.setattr(lanes_module, "tokenize_window", broken)
    with pytest.raises(OddError, match="as it is"):
        next(iter(make_loader(make_source(), threads=2)))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_thread_that_hangs_is_given_up_by_name_and_a_later_try_goes_on(
    make_source, make_loader, draw, monkeypatch, threads
):
    """[C2.b]"""
    source = make_source()
    whole = draw(make_loader(source, steps=5))
    release = threading.Event()
    real = lanes_module.tokenize_window
    with monkeypatch.context() as patch:
        patch.setattr(lanes_module, "tokenize_window", lambda *_: release.wait(60))
        loader = make_loader(source, steps=5, threads=threads, timeout=0.3)
        with pytest.raises(DocumentError, match=r"corpus.*: no progress in reading .* \(timeout 0.3 s\)"):
            next(iter(loader))
    release.set()
    assert lanes_module.tokenize_window is real
    assert draw(loader) == whole


def test_a_thread_that_dies_is_noticed(make_source, make_loader, monkeypatch):
    """[C2.b]"""
    monkeypatch.setattr(WindowThreads, "_work", lambda _: None)
    with pytest.raises(DocumentError, match=r"lane 0: no progress in reading .* check its disk"):
        next(iter(make_loader(make_source())))


def test_a_window_that_takes_long_but_goes_on_is_waited_for(make_source, make_loader, draw, monkeypatch):
    """[C2.b]"""
    real = lanes_module.tokenize_window

    def slow(window, epoch, tokenizer, options, beat):
        for _ in range(8):
            threading.Event().wait(0.15)
            beat()
        return real(window, epoch, tokenizer, options, beat)

    source = make_source()
    whole = draw(make_loader(source, steps=1, global_batch_size=1))
    monkeypatch.setattr(lanes_module, "tokenize_window", slow)
    loader = make_loader(source, steps=1, global_batch_size=1, timeout=1.0)
    assert draw(loader) == whole
    assert loader.waited > loader.options.timeout


def test_waiting_for_text_is_told_now_and_then(make_source, make_loader, monkeypatch, caplog):
    monkeypatch.setattr(lanes_module, "LOG_SECONDS", 0.0)
    monkeypatch.setattr(lanes_module, "MIN_LOGGED_SECONDS", 0.0)
    with caplog.at_level(logging.WARNING, logger="tokenmill"):
        list(make_loader(make_source(), steps=2))
    told = [record.message for record in caplog.records if record.message.startswith("waited")]
    assert told
    assert "of the last" in told[0]
    assert "more threads or a prepared store (eager) would help" in told[0]
    monkeypatch.setattr(lanes_module, "LOG_SECONDS", 3600.0)
    caplog.clear()
    list(make_loader(make_source(), steps=2))
    assert caplog.records == []


PROGRAM = """
import json, sys, xxhash
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from conftest import Numbers
from tokenmill.live import LiveLoader, LiveOptions, open_live
from tokenmill.loader import LoaderOptions

folder, out = Path(sys.argv[1]), Path(sys.argv[2])
source = open_live(folder, tokenizer=Numbers(), options=LiveOptions(seq_len=16, window_bytes=300, seed=3))
loader = LiveLoader(source, steps=40, global_batch_size=4, micro_batch=4, options=LoaderOptions(threads=2))
state = out / "state.json"
if state.exists():
    loader.load_state_dict(json.loads(state.read_text()))
for batch in loader:
    # First what was trained on, then the state, as a checkpoint does.
    with (out / "seen").open("a") as file:
        file.write(f"{loader.step - 1} {xxhash.xxh3_64_hexdigest(batch['labels'].tobytes())}\\n")
    if loader.step % 5 == 0:
        (out / "new.json").write_text(json.dumps(loader.state_dict()))
        (out / "new.json").replace(state)
    print(loader.step, flush=True)
    if len(sys.argv) > 4 and loader.step == int(sys.argv[4]):
        sys.stdin.readline()
"""


def test_a_run_that_is_killed_goes_on_from_its_last_state(corpus, tmp_path, make_source, make_loader):
    """[R1.a]"""
    import xxhash

    arguments = [
        sys.executable,
        "-W",
        "error",
        "-c",
        PROGRAM,
        str(corpus),
        str(tmp_path),
        str(Path(__file__).parent),
    ]
    with subprocess.Popen([*arguments, "13"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while process.stdout.readline().strip() != "13":
            assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split() for line in (tmp_path / "seen").read_text().splitlines()]
    assert [int(step) for step, _ in lines] == [*range(13), *range(10, 40)]
    whole = make_loader(make_source(), steps=40, micro_batch=4)
    expected = [xxhash.xxh3_64_hexdigest(batch["labels"].tobytes()) for batch in whole]
    assert [digest for _, digest in lines] == [*expected[:13], *expected[10:]]


def test_a_process_ends_while_threads_are_at_work(corpus):
    """[C2.b]"""
    program = """
import sys
from tokenmill.live import LiveLoader, LiveOptions, open_live
from tokenmill.loader import LoaderOptions
source = open_live(sys.argv[1], tokenizer="bytes", options=LiveOptions(seq_len=8, window_bytes=200))
loader = LiveLoader(source, steps=10**6, global_batch_size=8, options=LoaderOptions(threads=2, ahead=64))
next(iter(loader))
print("drawn")
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, str(corpus)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "drawn\n", "")


def test_a_state_of_one_rank_does_not_do_for_another(make_source, make_loader):
    source = make_source()
    ranks = [make_loader(source, world_size=2, rank=rank) for rank in range(2)]
    with pytest.raises(ResumeError, match=r"the lanes 2:4 of 'text' for rank 1 of 2, got none of \[2, 3\]; join"):
        ranks[1].load_state_dict(saved(ranks[0]))
