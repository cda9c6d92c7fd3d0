from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import ConfigError
from tokenmill.packing import ConcatRows
from tokenmill.packing.holes import check_excluded, describe_excluded, holes_of
from tokenmill.store import open_store

stretches = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=20)


def made_by_hand(parts):
    """Return holes given as (numbers before the hole, numbers of the hole), and the numbers that they leave."""
    begins, lengths, left = [], [], []
    number = 0
    for stay, go in parts:
        left += range(number, number + stay)
        begins.append(number + stay)
        lengths.append(go)
        number += stay + go
    left += range(number, number + 30)
    return holes_of(np.array(begins, np.int64), np.array(lengths, np.int64)), np.array(left)


@given(parts=stretches)
def test_numbers_close_up_over_holes_and_open_again(parts):
    holes, left = made_by_hand(parts)
    assert holes.opened(np.arange(left.size)).tolist() == left.tolist()
    assert holes.closed(left).tolist() == list(range(left.size))
    assert holes.size == sum(go for _, go in parts)
    everything = np.arange(int(left[-1]) + 1)
    assert holes.closed(everything).tolist() == np.searchsorted(left, everything).tolist()


@given(parts=stretches, length=st.integers(1, 12), key=st.integers(0, 9))
def test_runs_are_cut_at_holes_and_nowhere_else(parts, length, key):
    holes, left = made_by_hand(parts)
    begins = np.random.default_rng(key).integers(0, left.size - length, 15)
    first, sizes, count = holes.runs(begins, length)
    assert int(count.sum()) == first.size == sizes.size
    assert (sizes > 0).all()
    place = 0
    for begin, number in zip(begins.tolist(), count.tolist(), strict=True):
        mine = range(place, place + number)
        found = [token for i in mine for token in range(first[i], first[i] + sizes[i])]
        assert found == left[begin : begin + length].tolist()
        assert all(first[i] + sizes[i] < first[i + 1] for i in mine[:-1])
        place += number


def test_holes_that_touch_are_one_and_empty_documents_none(make_store):
    """So a run of a thousand documents costs no more than one."""
    path, _, _ = make_store("web", [4, *[3] * 1_000, 0, 5, 0, 2], max_tokens_per_shard=100)
    holes = ConcatRows(store=open_store(path), seq_len=8, excluded=np.array([*range(1, 1_001), 1_003])).holes
    assert (holes.begins.tolist(), holes.before.tolist()) == ([4], [0, 3_000])
    assert holes_of(np.array([2, 3, 7]), np.ones(3, np.int64)).begins.tolist() == [2, 7]


@pytest.mark.parametrize(
    ("excluded", "message"),
    [
        ([1, 5], r"web: .* quarantined or held out must be among the store's 5, 0:5, got 5; count from 0"),
        ([-1, 2], r"web: .* quarantined or held out must be among the store's 5, 0:5, got -1; count from 0"),
        ([0, 2, 2], r"web: .* quarantined or held out, of 5, .* named once each, .* got 2 after 2; sort them"),
        ([0, 3, 2], r"web: .* quarantined or held out, of 5, .* in ascending order, got 2 after 3; sort them"),
    ],
)
def test_wrong_documents_are_refused_by_number(make_store, excluded, message):
    path, _, _ = make_store("web", [3] * 5)
    with pytest.raises(ConfigError, match=message):
        check_excluded(open_store(path), np.array(excluded))


def test_a_description_says_how_many_and_tells_others_apart():
    described = [describe_excluded(np.array(numbers)) for numbers in ([1, 2], [1, 3], [1, 2, 3])]
    assert len({found["quarantined"] for found in described}) == 3
    assert described[0] == describe_excluded(np.arange(5)[1:3])
    assert described[0] == {"quarantined": "2:556c70b5fae5b2a44967295965e4d325"}  # on any machine
    assert describe_excluded(np.empty(0, np.int64)) == {}
