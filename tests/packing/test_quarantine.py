"""Packing without some documents: whole epochs, and what is kept of them."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tokenmill.packing.rows as packed
from tokenmill.errors import ConfigError, PlanError
from tokenmill.packing import ConcatRows, Policy, RecordRows, pack_rows
from tokenmill.plan import StageSpec, compile_plan
from tokenmill.plan.order import Shuffle
from tokenmill.plan.rows import NOTHING, EpochProgress
from tokenmill.store import open_store
from tokenmill.store.maps import MapCache

POLICIES = [
    Policy(name="concat"),
    Policy(),
    Policy(split="truncate_start"),
    Policy(split="truncate_end"),
    Policy(name="bos_best_fit"),
    Policy(name="bos_best_fit", crop="discard"),
    Policy(name="padded", split="truncate_start"),
    Policy(name="padded", split="truncate_end"),
    Policy(split="drop"),
    Policy(name="padded", split="drop"),
]
NAMES = [f"{policy.name}-{policy.split}-{policy.crop}" for policy in POLICIES]
shapes = st.tuples(
    st.integers(1, 20),
    st.lists(st.tuples(st.one_of(st.integers(0, 4), st.integers(0, 70)), st.booleans()), min_size=1, max_size=40),
)


def rows_of_store(store, policy, seq_len, excluded=None, **options):
    """Make the rows of a store, under any policy."""
    if excluded is not None:
        options["excluded"] = np.array(excluded, np.int64)
    if policy.name == "concat":
        return ConcatRows(store=store, seq_len=seq_len, **options)
    return pack_rows(store, seq_len=seq_len, policy=policy, **options)


def spans_of(rows, numbers=None):
    """Return the spans of rows as (document, start, length), row by row."""
    numbers = np.arange(rows.num_rows + rows.num_rest) if numbers is None else numbers
    spans = rows.spans(numbers)
    return [[(s.document, s.start, s.length) for s in spans.row(i)] for i in range(numbers.size)]


def renumbered(rows, kept):
    return [[(kept[document], start, length) for document, start, length in row] for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES, ids=NAMES)
@given(shape=shapes, crossing=st.booleans(), place=st.sampled_from([(150, 4), (150, 64), (10**9, 64)]))
def test_rows_are_those_of_a_store_that_never_had_the_documents(make_store, policy, shape, crossing, place):
    """[O1.c, P2.a] Row by row, in any order, and every count; what is left out is counted as quarantined."""
    seq_len, documents = shape
    lengths = [length for length, _ in documents]
    out = [number for number, (_, gone) in enumerate(documents) if gone]
    kept = [number for number in range(len(lengths)) if number not in out]
    path, tokens, _ = make_store("any", lengths, add_bos=True, max_tokens_per_shard=place[0])
    store = open_store(path, maps=MapCache(place[1]))
    rows = rows_of_store(store, policy, seq_len, out, cross_document_labels=crossing)
    fates = rows.fates()
    quarantined = sum(lengths[number] for number in out)
    assert fates.dropped.get("quarantined", 0) == quarantined
    assert fates.tokens == tokens.size == fates.trained + fates.masked + sum(fates.dropped.values())
    order = np.random.default_rng(0).permutation(rows.num_rows)
    found = spans_of(rows, order)
    if kept:
        path, _, _ = make_store("without", [lengths[number] for number in kept], add_bos=True)
        without = rows_of_store(open_store(path), policy, seq_len, cross_document_labels=crossing)
        assert rows.num_rows == without.num_rows
        assert found == renumbered(spans_of(without, order), kept)
        other = without.fates()
        assert (fates.rows, fates.trained, fates.masked) == (other.rows, other.trained, other.masked)
        assert (fates.padding, fates.added) == (other.padding, other.added)
        assert dict(fates.dropped) == other.dropped | ({"quarantined": quarantined} if quarantined else {})
        assert rows.held(order[::2]) == without.held(order[::2])
        assert rows.row_slots == without.row_slots
    for number in range(len(lengths)):
        holding = [row for row, spans in zip(order.tolist(), found, strict=True) if number in {s[0] for s in spans}]
        assert rows.rows_of(np.array([number]))[0].tolist() == sorted(holding)
        assert not (number in out and holding)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES, ids=NAMES)
@given(shape=shapes, seed=st.integers(0, 3))
def test_trained_are_the_labels_that_the_mask_leaves_of_the_others(make_masked, policy, shape, seed):
    """[P2.a] With a loss mask as well, the totals balance and what rows hold adds up to them."""
    seq_len, documents = shape
    path, mask, offsets = make_masked([length for length, _ in documents], seed, size=200)
    rows = rows_of_store(open_store(path), policy, seq_len, [n for n, (_, gone) in enumerate(documents) if gone])
    fates = rows.fates()
    assert fates.trained == sum(int(mask[token]) for token in labels_of(rows, offsets))
    assert fates.tokens == mask.size == fates.trained + fates.masked + sum(fates.dropped.values())
    parts = np.array_split(np.random.default_rng(seed).permutation(rows.num_rows), 3)
    held = sum((rows.held(part) for part in parts), NOTHING)
    assert (held.trained, held.tokens) == (fates.trained, fates.rows * rows.row_slots - fates.padding)


def labels_of(rows, offsets, numbers=None):
    """Return the tokens of the stream that are labels in rows, once for every time they are one."""
    labels = []
    for row in spans_of(rows, numbers):
        before = None
        for document, start, length in row:
            begin = int(offsets[document]) + start
            labels += range(begin + (before != (document, 0, 1) or start == 0), begin + length)
            before = (document, start, length)
    return labels


@pytest.mark.parametrize("policy", [POLICIES[0], POLICIES[1], POLICIES[4]], ids=lambda policy: policy.name)
def test_holes_may_lie_across_windows_and_shards(make_store, policy):
    lengths = np.random.default_rng(1).integers(0, 12, 40_000)
    path, _, offsets = make_store("many", lengths.tolist(), max_tokens_per_shard=900, add_bos=True)
    out = np.zeros(40_000, np.bool_)
    out[np.random.default_rng(2).integers(0, 40_000, 3_000)] = True
    out[16_000:17_000] = out[32_766:32_770] = out[:5] = out[-3:] = True
    rows = rows_of_store(open_store(path), policy, 50, np.flatnonzero(out))
    assert rows.store.num_shards > 200
    counts = np.bincount(labels_of(rows, offsets), minlength=offsets[-1])
    expected = np.repeat(~out, lengths).astype(np.int64)
    expected[offsets[:-1][lengths > 0]] = 0
    if policy.name == "concat":
        dropped = np.flatnonzero(np.repeat(~out, lengths))[rows.num_rows * 50 + 1 :]
        assert dropped.size == rows.dropped_tokens
        expected[dropped] = 0
    assert np.array_equal(counts, expected)
    assert rows.fates().trained == counts.sum()
    assert len(rows.store._maps._maps) <= 64


def test_holes_of_a_stream_cost_by_what_is_excluded_not_by_the_store(make_store):
    """Where the 300,000 documents begin is never read whole: that alone would be 2.4 MB."""
    path, _, _ = make_store("many", [3] * 300_000)
    store = open_store(path)
    out, asked = np.arange(0, 300_000, 3_000), np.arange(0, 50_000, 10_000)

    def look():
        rows = ConcatRows(store=store, seq_len=16, excluded=out)
        holding = rows.rows_of(np.array([299_999]))[0]
        return rows.num_rows, rows.spans(asked), holding, rows.held(asked), rows.description

    look()  # kernels are compiled
    tracemalloc.start()
    try:
        look()
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("policy", POLICIES, ids=NAMES)
def test_no_documents_are_the_same_as_none(make_store, policy):
    path, _, _ = make_store("web", [9, 30, 0, 5], add_bos=True)
    store = open_store(path)
    none, empty, one = (rows_of_store(store, policy, 8, excluded) for excluded in (None, [], [2]))
    assert none.description == empty.description
    assert "quarantined" not in none.description
    assert spans_of(none) == spans_of(empty) == spans_of(one)
    assert none.fates() == empty.fates() == one.fates()
    assert dict(one.description) == none.description | {"quarantined": one.description["quarantined"]}
    assert one.epoch_description == one.description


@pytest.mark.parametrize("policy", POLICIES, ids=NAMES)
def test_a_store_without_a_document_left_has_no_rows(make_store, policy):
    path, tokens, _ = make_store("web", [9, 30, 0, 5], add_bos=True, max_tokens_per_shard=10)
    store = open_store(path)
    rows = rows_of_store(store, policy, 8, range(4))
    assert (rows.num_rows, rows.num_rest) == (0, 0)
    nothing = np.empty(0, np.int64)
    assert spans_of(rows, nothing) == []
    assert rows.held(nothing) == NOTHING
    assert [rows.rows_of(np.array([document]))[0].size for document in range(4)] == [0] * 4
    assert (rows.fates().rows, dict(rows.fates().dropped)) == (0, {"quarantined": tokens.size})
    with pytest.raises(PlanError, match="rows must lie within 0:0"):
        rows.spans(np.zeros(1, np.int64))
    before = rows_of_store(store, policy, 8)
    seen = EpochProgress(rest=False, size=before.num_rows, drawn=1, key=3, shuffle=Shuffle())
    assert rows.following(before, seen) is rows


@pytest.mark.parametrize("excluded", [[4], [-1], [1, 1], [2, 1]])
@pytest.mark.parametrize("policy", POLICIES[:2], ids=NAMES[:2])
def test_wrong_documents_are_refused_when_rows_are_made(make_store, policy, excluded):
    path, _, _ = make_store("web", [9, 30, 0, 5])
    with pytest.raises(ConfigError, match=r"web: documents that are quarantined or held out"):
        rows_of_store(open_store(path), policy, 8, excluded)


@pytest.mark.parametrize("name", ["best_fit", "padded"])
def test_a_document_that_must_not_be_cut_may_be_quarantined(make_store, name):
    path, _, _ = make_store("any", [5, 13, 12, 14])
    policy = Policy(name=name, split="forbid")
    with pytest.raises(ConfigError, match="got 14 in document 3"):
        pack_rows(open_store(path), seq_len=11, policy=policy, excluded=np.array([1]))
    rows = pack_rows(open_store(path), seq_len=11, policy=policy, excluded=np.array([1, 3]))
    assert {span[0] for row in spans_of(rows) for span in row} == {0, 2}


def cached_files(path):
    return sorted(file for file in (path / ".rows").glob("*.rows") if file.name[0] != ".")


def footer(file):
    data = file.read_bytes()
    return msgspec.json.decode(data[-16 - int.from_bytes(data[-16:-8], "little") : -16])


def test_indexes_of_other_quarantines_are_other_files(make_store, monkeypatch):
    """And the file of a store without one has the counts that it always had."""
    path, _, _ = make_store("web", [9, 30, 0, 5] * 50)
    choices = [None, [1], [2], [1, 7]]
    in_memory = [spans_of(rows_of_store(open_store(path), Policy(), 8, out)) for out in choices]
    assert cached_files(path) == []
    monkeypatch.setattr(packed, "IN_MEMORY_DOCUMENTS", 0)
    for number, out in enumerate(choices, 1):
        built = rows_of_store(open_store(path), Policy(), 8, out)
        read = rows_of_store(open_store(path), Policy(), 8, out)
        assert len(cached_files(path)) == number
        assert spans_of(built) == spans_of(read) == in_memory[number - 1]
        assert built.fates() == read.fates()
    described = {
        msgspec.json.encode(footer(file)["description"].get("quarantined")): file for file in cached_files(path)
    }
    assert len(described) == 4
    assert sorted(len(footer(file)["counts"]) for file in described.values()) == [10, 10, 11, 11]
    assert len(footer(described[b"null"])["counts"]) == 10


CUT_END, CUT_START = (Policy(name="padded", split=split) for split in ("truncate_end", "truncate_start"))


@pytest.mark.parametrize("kind", ["dpo", "grpo"])
@pytest.mark.parametrize("masked", [True, False])
@given(gone=st.lists(st.booleans(), min_size=1, max_size=25), seq_len=st.integers(1, 9), end=st.booleans())
def test_rows_of_records_are_those_of_a_store_that_never_had_them(make_records, kind, masked, gone, seq_len, end):
    """[O1.c, P2.a]"""
    out = np.flatnonzero(gone)
    kept = np.flatnonzero(~np.array(gone)).tolist()
    policy = CUT_END if end else CUT_START
    store = make_records(kind, range(len(gone)), masked=masked)
    rows = RecordRows(store=store, seq_len=seq_len, policy=policy, excluded=out)
    assert rows.num_rows == len(kept)
    assert rows.records(np.arange(rows.num_rows)).tolist() == kept
    assert [rows.rows_of(np.array([record]))[0].tolist() for record in range(len(gone))] == [
        [kept.index(record)] if record in kept else [] for record in range(len(gone))
    ]
    fates, whole = rows.fates(), RecordRows(store=store, seq_len=seq_len, policy=policy).fates()
    assert fates.tokens == whole.tokens == fates.trained + fates.masked + sum(fates.dropped.values())
    if not kept:
        assert (fates.rows, fates.trained, set(fates.dropped)) == (0, 0, {"quarantined"} if fates.tokens else set())
        return
    store = make_records(kind, kept, masked=masked, name="without")
    without = RecordRows(store=store, seq_len=seq_len, policy=policy)
    other = without.fates()
    assert (fates.rows, fates.trained, fates.masked) == (other.rows, other.trained, other.masked)
    quarantined = whole.tokens - other.tokens
    assert dict(fates.dropped) == other.dropped | ({"quarantined": quarantined} if quarantined else {})
    order = np.random.default_rng(0).permutation(len(kept))
    assert rows.held(order[::2]) == without.held(order[::2])
    assert spans_of(rows, order) == renumbered(spans_of(without, order), kept)


def test_the_shape_of_groups_stays_when_the_largest_is_quarantined(make_records):
    """A model that was compiled for a shape need not be compiled again."""
    store = make_records("grpo", range(12))
    whole = RecordRows(store=store, seq_len=9, policy=CUT_END)
    sizes = [whole.items("responses", np.array([record]))[0].size for record in range(12)]
    largest = np.flatnonzero(np.array(sizes) == max(sizes))
    rows = RecordRows(store=store, seq_len=9, policy=CUT_END, excluded=largest)
    assert (rows.largest_group, rows.row_slots) == (whole.largest_group, whole.row_slots)
    assert rows.fates().padding == rows.num_rows * rows.row_slots - rows.held(np.arange(rows.num_rows)).tokens


def test_a_record_that_must_not_be_cut_may_be_quarantined(make_records):
    store = make_records("dpo", range(20))
    longest = [max(len(store.fetch_record(i, key)) for key in ("chosen", "rejected")) for i in range(20)]
    long = np.flatnonzero(np.array(longest) > 6)
    policy = Policy(name="padded", split="forbid")
    rows = RecordRows(store=store, seq_len=6, policy=policy, excluded=long)
    assert rows.num_rows == 20 - long.size > 0
    with pytest.raises(ConfigError, match=rf"in record {long[-1]}; raise seq_len"):
        RecordRows(store=store, seq_len=6, policy=policy, excluded=long[:-1])
    with pytest.raises(ConfigError, match="quarantined or held out must be among the store's 20, 0:20, got 20"):
        RecordRows(store=store, seq_len=6, policy=CUT_END, excluded=np.array([20]))
    with pytest.raises(PlanError, match="document out of range: 20"):
        rows.rows_of(np.array([20]))[0]


def trainable(offsets):
    """Return the tokens of the stream that can be a label: all but the first of each document."""
    return set(range(int(offsets[-1]))) - set(offsets[:-1].tolist())


def tokens_of(documents, offsets):
    return {token for number in documents for token in range(int(offsets[number]), int(offsets[number + 1]))}


def draw(rows, share, key, mode):
    """Draw a share of the rest of an epoch, or of an epoch: what was seen, the rows of it, those that are left."""
    size = rows.num_rest or rows.num_rows
    seen = EpochProgress(
        rest=rows.num_rest > 0, size=size, drawn=1 + int(share * (size - 1)), key=key, shuffle=Shuffle(mode=mode)
    )
    numbers = np.arange(size)
    left = seen.unseen(numbers)
    base = rows.num_rows if rows.num_rest else 0
    return seen, numbers[~left] + base, numbers[left] + base


@st.composite
def chains(draw):
    """Give (lengths, links); a link is a policy, a seq_len, more documents to exclude, and the share then drawn."""
    lengths = draw(st.lists(st.one_of(st.integers(0, 4), st.integers(0, 50)), min_size=2, max_size=30))
    numbers = st.integers(0, len(lengths) - 1)
    link = st.tuples(
        st.sampled_from([POLICIES[0], POLICIES[1], POLICIES[4]]),
        st.integers(2, 20),
        st.frozensets(numbers, max_size=4) | st.frozensets(numbers),
        st.floats(0, 1),
    )
    return lengths, draw(st.lists(link, min_size=2, max_size=5))


@given(
    chain=chains(),
    key=st.integers(0, 2**63),
    mode=st.sampled_from(["full", "none"]),
    shard_tokens=st.sampled_from([80, 10**9]),
)
def test_a_pass_with_quarantines_loses_nothing_else_and_repeats_nothing(make_store, chain, key, mode, shard_tokens):
    """[M1.c, O1.c] Label by label, whatever else changes with them, wherever in the pass or its rest they come."""
    lengths, links = chain
    path, _, offsets = make_store("web", lengths, add_bos=True, max_tokens_per_shard=shard_tokens)
    store = open_store(path)
    out: set[int] = set(links[0][2])
    rows = rows_of_store(store, links[0][0], links[0][1], sorted(out))
    if not rows.num_rows:
        return
    # The last partial row of a stream is lost with what others have drawn of its documents.
    lost = (trainable(offsets) - tokens_of(out, offsets)) - set(labels_of(rows, offsets))
    seen_labels: list[int] = []
    for (*_, share), (policy, seq_len, more, _) in pairwise(links):
        seen, drawn, left = draw(rows, share, key, mode)
        seen_labels += labels_of(rows, offsets, drawn)
        undrawn = set(labels_of(rows, offsets, left))
        out |= more
        rows = rows_of_store(store, policy, seq_len, sorted(out)).following(rows, seen)
        rest = labels_of(rows, offsets, np.arange(rows.num_rows, rows.num_rows + rows.num_rest))
        gone = tokens_of(out, offsets)
        assert len(seen_labels + rest) == len(set(seen_labels + rest))
        assert undrawn - gone <= set(rest)
        assert trainable(offsets) - gone - lost <= set(seen_labels + rest)
        assert not set(rest) & gone
        for number in out:
            assert rows.rows_of(np.array([number]))[0].tolist() == []
        for number in set(range(len(lengths))) - out:
            holding = [row for row, spans in enumerate(spans_of(rows)) if number in {span[0] for span in spans}]
            assert rows.rows_of(np.array([number]))[0].tolist() == holding
        if not rows.num_rest:
            break


@pytest.mark.parametrize("before", [POLICIES[0], POLICIES[1]], ids=lambda policy: policy.name)
def test_a_rest_of_several_windows_lacks_what_lies_across_them(make_store, before):
    """[M1.c, O1.c] Holes of the rows before and of those after it reach over the edges of windows."""
    lengths = np.random.default_rng(3).integers(0, 6, 34_000)
    path, _, offsets = make_store("many", lengths.tolist())
    store = open_store(path)
    first = {*range(16_300, 16_500), *range(0, 34_000, 50)}
    more = {*range(32_760, 32_780), *range(7, 34_000, 90)}
    rows = rows_of_store(store, before, 60, sorted(first))
    seen, drawn, left = draw(rows, 0.4, 11, "full")
    following = rows_of_store(store, Policy(), 33, sorted(first | more)).following(rows, seen)
    rest = labels_of(following, offsets, np.arange(following.num_rows, following.num_rows + following.num_rest))
    owed = set(labels_of(rows, offsets, left))
    if before.name == "concat":  # the last partial row is owed of documents that were not met
        met = {span[0] for row in spans_of(rows, drawn) for span in row}
        last = {span[0] for span in spans_of(rows, np.array([rows.num_rows - 1]))[0]}
        owed |= tokens_of(set(range(max(last), 34_000)) - met - first, offsets) & trainable(offsets)
    assert sorted(rest) == sorted(owed - tokens_of(more, offsets))


@pytest.mark.slow
@pytest.mark.parametrize("before", POLICIES, ids=NAMES)
@given(chain=chains(), after=st.sampled_from(POLICIES), key=st.integers(0, 9))
def test_policies_that_drop_tokens_keep_to_what_was_not_drawn(make_store, before, chain, after, key):
    """[M1.c] Of a document that was not met all is left, of others what the rows that were not drawn hold."""
    lengths, ((_, short, first, share), (_, long, more, _), *_) = chain
    path, _, offsets = make_store("web", lengths, add_bos=True)
    store = open_store(path)
    rows = rows_of_store(store, before, short, sorted(first))
    if not rows.num_rows:
        return
    seen, drawn, left = draw(rows, share, key, "full")
    met = {span[0] for row in spans_of(rows, drawn) for span in row}
    owed = set(labels_of(rows, offsets, left)) & tokens_of(met, offsets)
    owed |= trainable(offsets) - tokens_of(met | first, offsets)
    owed -= tokens_of(more, offsets)
    following = rows_of_store(store, after, long, sorted(first | more)).following(rows, seen)
    rest = labels_of(following, offsets, np.arange(following.num_rows, following.num_rows + following.num_rest))
    assert len(rest) == len(set(rest))
    assert set(rest) <= owed
    if after.split == "allow" and after.crop == "return":
        assert set(rest) == owed


@pytest.mark.parametrize("policy", [POLICIES[0], POLICIES[1], POLICIES[4]], ids=lambda policy: policy.name)
def test_of_a_document_half_seen_the_other_half_is_quarantined(make_store, policy):
    """[P2.a] What was trained on stays so; the tokens that are left out are counted in the rest."""
    path, _, offsets = make_store("web", [100, 8, 9, 30, 31], add_bos=True)
    store = open_store(path)
    rows = rows_of_store(store, policy, 10)
    seen, drawn, left = draw(rows, 0.5, 5, "full")
    half = set(labels_of(rows, offsets, drawn))
    assert 20 < len(half & tokens_of([0], offsets)) < 80
    following = rows_of_store(store, policy, 10, [0]).following(rows, seen)
    rest = following.parts[1].fates()
    beginning = any(span[:2] == (0, 0) and span[2] > 1 for row in spans_of(rows, left) for span in row)
    owed = (tokens_of([0], offsets) & trainable(offsets)) - half
    assert rest.dropped["quarantined"] == len(owed) + beginning
    assert rest.tokens == rest.trained + rest.masked + rest.dropped["quarantined"]
    assert following.fates() == following.whole_epoch.fates()
    assert following.fates().dropped["quarantined"] == 100


@pytest.mark.parametrize("policy", [POLICIES[1], POLICIES[4]], ids=lambda policy: policy.name)
def test_documents_that_were_seen_are_missing_from_the_next_epochs(make_store, policy):
    path, _, offsets = make_store("web", [11, 4] * 20, add_bos=True)
    store = open_store(path)
    rows = rows_of_store(store, policy, 10)
    seen, drawn, left = draw(rows, 0.5, 7, "none")
    met, owed = ({span[0] for row in spans_of(rows, part) for span in row} for part in (drawn, left))
    done = met - owed
    assert len(done) > 5
    following = rows_of_store(store, policy, 10, sorted(done)).following(rows, seen)
    epoch, rest = np.arange(following.num_rows), np.arange(following.num_rest) + following.num_rows
    assert sorted(labels_of(following, offsets, epoch)) == sorted(trainable(offsets) - tokens_of(done, offsets))
    assert sorted(labels_of(following, offsets, rest)) == sorted(labels_of(rows, offsets, left))


@pytest.mark.parametrize("policy", POLICIES, ids=NAMES)
def test_nothing_comes_before_the_epochs_when_all_that_was_left_is_quarantined(make_store, policy):
    path, _, _ = make_store("web", [11, 9, 3] * 20, add_bos=True)
    store = open_store(path)
    rows = rows_of_store(store, policy, 10)
    seen, _, left = draw(rows, 0.8, 7, "none")
    owed = {span[0] for row in spans_of(rows, left) for span in row}
    met = {span[0] for row in spans_of(rows) for span in row}
    out = sorted(owed | (set(range(60)) - met))
    full = rows_of_store(store, policy, 10, out)
    assert 0 < full.num_rows < rows.num_rows
    assert full.following(rows, seen) is full


def test_a_document_that_is_released_comes_with_the_next_epoch(make_store):
    """It was no part of the epoch under way, so it is not left of it."""
    path, _, _ = make_store("web", [11] * 30)
    store = open_store(path)
    for policy in POLICIES[:2]:
        rows = rows_of_store(store, policy, 10, [3, 28])
        seen, _, _ = draw(rows, 0.2, 7, "none")
        following = rows_of_store(store, policy, 10, [3]).following(rows, seen)
        epoch, rest = following.rows_of(np.array([28]))[0], following.num_rows
        assert following.num_rest > 0
        assert epoch.size > 0
        assert (epoch < rest).all()


@pytest.mark.parametrize("policy", POLICIES[:2], ids=NAMES[:2])
def test_descriptions_tell_apart_after_what_the_rest_is_left(make_store, policy, monkeypatch):
    """So no rest is taken for another, in a plan or in a file."""
    path, _, _ = make_store("web", [11, 9, 3] * 20)
    store = open_store(path)
    monkeypatch.setattr(packed, "IN_MEMORY_DOCUMENTS", 0)
    first, second = (rows_of_store(store, policy, 10, out) for out in ([1], [1, 40]))
    followings = []
    for before in (first, second):
        for drawn in (5, 6):
            seen = EpochProgress(rest=False, size=before.num_rows, drawn=drawn, key=1, shuffle=Shuffle())
            fewer = (rows_of_store(store, policy, 8, out) for out in ([1, 40], [1, 41]))
            followings += [rows.following(before, seen) for rows in fewer]
    described = [msgspec.json.encode(dict(rows.description), order="sorted") for rows in followings]
    assert len(set(described)) == 8
    assert [rows.epoch_description["quarantined"][:2] for rows in followings] == ["2:"] * 8
    rests = {file.name for file in cached_files(path) if "after" in footer(file)["description"]}
    assert len(rests) == 8


def test_labels_that_cross_documents_refuse_a_rest_less_some_documents(make_store):
    path, _, _ = make_store("web", [11] * 30)
    store = open_store(path)
    rows = [rows_of_store(store, POLICIES[0], 10, out, cross_document_labels=True) for out in (None, [3])]
    shared = {"global_batch_size": 1, "seq_len": 10, "seed": 0, "shuffle": Shuffle(), "weights": {"web": 1}}
    stages = [
        StageSpec(name=f"s{i}", start_step=2 * i, rows={"web": part}, **shared) for i, part in enumerate(rows)
    ]
    with pytest.raises(ConfigError, match="cross_document_labels with a change of rows; use on_change = restart"):
        compile_plan(stages, sources=["web"], steps=5)


@pytest.mark.parametrize("kind", ["dpo", "grpo"])
@given(
    steps=st.lists(st.tuples(st.frozensets(st.integers(0, 24)), st.floats(0, 1)), min_size=2, max_size=5),
    key=st.integers(0, 2**63),
)
def test_a_pass_over_records_loses_nothing_else_and_repeats_nothing(make_records, kind, steps, key):
    """[M1.c, O1.c] Quarantines after each other, within the epoch and within its rest."""
    store = make_records(kind, range(25))
    out = set(steps[0][0])
    rows = RecordRows(store=store, seq_len=4, policy=CUT_END, excluded=np.array(sorted(out), np.int64))
    met: list[int] = []
    for number, (more, share) in enumerate(steps[1:]):
        if not rows.num_rows:
            break
        seen, drawn, _ = draw(rows, share, key, "full")
        met += rows.records(drawn).tolist()
        out |= more
        excluded = np.array(sorted(out), np.int64)
        before, rows = rows, RecordRows(store=store, seq_len=5 + number, policy=CUT_END, excluded=excluded)
        rows = rows.following(before, seen)
        rest = rows.records(np.arange(rows.num_rows, rows.num_rows + rows.num_rest)).tolist()
        assert rest == sorted(set(range(25)) - set(met) - out)
        assert rows.records(np.arange(rows.num_rows)).tolist() == sorted(set(range(25)) - out)
        for record in range(25):
            wanted = [] if record in out else [sorted(set(range(25)) - out).index(record)]
            wanted += [rows.num_rows + rest.index(record)] if record in rest else []
            assert rows.rows_of(np.array([record]))[0].tolist() == wanted
        if not rest:
            break
