"""Items end to end, against the same done item by item."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.encode.recipe.ragged import Ragged, offsets_of

BOS = 9
ITEMS = st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1)), max_size=6), max_size=8)


def ragged(items, owners=None):
    tokens = [pair for item in items for pair in item]
    return Ragged(
        ids=np.array([token for token, _ in tokens], np.uint16),
        mask=np.array([trained for _, trained in tokens], np.uint8),
        offsets=offsets_of(np.array([len(item) for item in items], np.int64)),
        owners=np.array(range(len(items)) if owners is None else owners, np.int64),
    )


def items_of(value):
    pairs = list(zip(value.ids.tolist(), value.mask.tolist(), strict=True))
    return [pairs[a:b] for a, b in zip(value.offsets[:-1].tolist(), value.offsets[1:].tolist(), strict=True)]


@given(ITEMS)
def test_lengths_positions_and_supervision_are_those_of_the_items(items):
    value = ragged(items)
    assert value.lengths.tolist() == [len(item) for item in items]
    assert value.positions.tolist() == [place for item in items for place in range(len(item))]
    assert value.trained.tolist() == [any(trained for _, trained in item) for item in items]


@given(ITEMS, st.data())
def test_items_are_taken_in_any_order(items, data):
    chosen = data.draw(st.lists(st.integers(0, len(items) - 1), max_size=8)) if items else []
    value = ragged(items).taken(np.array(chosen, np.int64))
    assert items_of(value) == [items[index] for index in chosen]
    assert value.owners.tolist() == chosen


@given(ITEMS, st.data())
def test_two_are_merged_in_the_order_of_their_records(items, data):
    sides = data.draw(st.lists(st.booleans(), min_size=len(items), max_size=len(items)))
    halves = []
    for wanted in (False, True):
        owners = [index for index, side in enumerate(sides) if side == wanted]
        halves.append(ragged([items[index] for index in owners], owners))
    value = halves[0].merged(halves[1])
    assert items_of(value) == items
    assert value.owners.tolist() == list(range(len(items)))


@given(ITEMS, st.integers(1, 6), st.booleans())
def test_items_are_cut_at_the_wanted_end_and_keep_their_bos(items, most, keep_end):
    def cut(item):
        if len(item) <= most:
            return item
        if not keep_end:
            return item[:most]
        return [(BOS, 0), *item[len(item) - most + 1 :]] if item[0][0] == BOS else item[-most:]

    before = ragged(items)
    assert items_of(before.shortened(most, keep_end=keep_end, bos_id=BOS)) == [cut(item) for item in items]
    assert items_of(before) == items


@given(ITEMS)
def test_the_trained_run_reaches_from_the_first_trained_token_to_the_last(items):
    items = [item for item in items if any(trained for _, trained in item)]
    value = ragged(items)
    cut = value.sliced(np.arange(len(items)), *value.trained_run())

    def run(item):
        places = [place for place, (_, trained) in enumerate(item) if trained]
        return item[places[0] : places[-1] + 1]

    assert items_of(cut) == [run(item) for item in items]


@given(st.lists(st.lists(st.sampled_from(["", "a", "b", "ab", "ba"]), min_size=1, max_size=4), max_size=5))
def test_items_are_compared_with_the_first_of_their_record(groups):
    words = [(owner, word, group[0]) for owner, group in enumerate(groups) for word in group]
    value = ragged([[(ord(letter) - 97, 0) for letter in word] for _, word, _ in words])
    value = replace(value, owners=np.array([owner for owner, _, _ in words], np.int64))
    assert value.same_as_first().tolist() == [word == first for _, word, first in words]
