import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill.errors import PlanError
from tokenmill.packing import ConcatRows
from tokenmill.store import open_store
from tokenmill.store.maps import MapCache
from tokenmill.types import Span


def spans_by_hand(offsets, row, seq_len):
    """Walk the stream token by token."""
    found: list[list[int]] = []
    for token in range(row * seq_len, row * seq_len + seq_len + 1):
        document = int(np.searchsorted(offsets, token, side="right")) - 1
        if found and found[-1][0] == document:
            found[-1][2] += 1
        else:
            found.append([document, token - int(offsets[document]), 1])
    return tuple(Span(document=d, start=s, length=n) for d, s, n in found)


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=40),
    seq_len=st.integers(1, 40),
    shard_tokens=st.sampled_from([1, 7, 50, 10**9]),
    limit=st.sampled_from([4, 64]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_spans_are_those_of_the_stream_across_shards(make_store, lengths, seq_len, shard_tokens, limit):
    path, _tokens, offsets = make_store("any", lengths, max_tokens_per_shard=shard_tokens)
    rows = ConcatRows(store=open_store(path, maps=MapCache(limit)), seq_len=seq_len)
    asked = np.random.default_rng(0).permutation(rows.num_rows)
    spans = rows.spans(asked)
    for i, row in enumerate(asked.tolist()):
        assert spans.row(i) == spans_by_hand(offsets, row, seq_len)


@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=40), seq_len=st.integers(1, 40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_token_is_an_input_or_counted_as_dropped(make_store, lengths, seq_len):
    """[P2.a] Each row brings seq_len new inputs; the last row's extra token is a label only."""
    path, tokens, _ = make_store("any", lengths)
    rows = ConcatRows(store=open_store(path), seq_len=seq_len)
    held = rows.num_rows * seq_len + (1 if rows.num_rows else 0)
    assert held + rows.dropped_tokens == tokens.size
    assert rows.dropped_tokens <= seq_len


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=30),
    seq_len=st.integers(1, 40),
    shard_tokens=st.sampled_from([7, 10**9]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_of_a_document_are_those_whose_spans_name_it(make_store, lengths, seq_len, shard_tokens):
    path, _, _ = make_store("any", lengths, max_tokens_per_shard=shard_tokens)
    rows = ConcatRows(store=open_store(path), seq_len=seq_len)
    spans = rows.spans(np.arange(rows.num_rows))
    for document in range(len(lengths)):
        holding = [r for r in range(rows.num_rows) if document in {span.document for span in spans.row(r)}]
        assert rows.rows_of(np.array([document]))[0].tolist() == holding


def test_many_short_documents_in_a_row_are_all_found(make_store):
    path, _, offsets = make_store("short", [1] * 5_000)
    rows = ConcatRows(store=open_store(path), seq_len=4_000)
    assert rows.spans(np.array([0])).row(0) == spans_by_hand(offsets, 0, 4_000)


def test_a_run_of_empty_documents_is_skipped(make_store):
    path, _, _ = make_store("holes", [3, *[0] * 3_000, 4])
    rows = ConcatRows(store=open_store(path), seq_len=5)
    assert rows.spans(np.array([0])).row(0) == (
        Span(document=0, start=0, length=3),
        Span(document=3_001, start=0, length=3),
    )


def test_few_maps_are_enough_for_many_shards(make_store):
    path, _, offsets = make_store("shards", [10] * 300, max_tokens_per_shard=10)
    store = open_store(path)
    assert store.num_shards == 300
    rows = ConcatRows(store=store, seq_len=8)
    asked = np.arange(rows.num_rows)
    spans = rows.spans(asked)
    assert all(spans.row(i) == spans_by_hand(offsets, i, 8) for i in asked.tolist())
    assert len(store._maps._maps) <= 64


def test_a_stream_shorter_than_a_row_has_none(make_store):
    path, _, _ = make_store("tiny", [3])
    rows = ConcatRows(store=open_store(path), seq_len=3)
    assert (rows.num_rows, rows.dropped_tokens) == (0, 3)


@pytest.mark.parametrize("row", [-1, 2])
def test_a_row_outside_the_store_is_refused(make_store, row):
    path, _, _ = make_store("some", [9])
    with pytest.raises(PlanError, match=r"rows must lie within 0:2"):
        ConcatRows(store=open_store(path), seq_len=4).spans(np.array([row]))


def test_equal_descriptions_mean_equal_rows(make_store):
    one, _, _ = make_store("one", [9, 9], seed=1)
    same, _, _ = make_store("same", [9, 9], seed=1)
    other, _, _ = make_store("other", [9, 9], seed=2)
    described = [ConcatRows(store=open_store(path), seq_len=4).description for path in (one, same, other)]
    assert described[0] == described[1]
    assert described[0] != described[2]
