from bisect import bisect_left, bisect_right

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.packing.best_fit import at_least, at_most, empty_set, insert, remove


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9_999)), max_size=200), st.lists(st.integers(0, 9_999)))
def test_a_set_of_bits_finds_what_a_sorted_list_finds(changes, questions):
    bits = empty_set(10_000)
    members: set[int] = set()
    for add, number in changes:
        if add:
            insert(bits, number)
            members.add(number)
        elif number in members:
            remove(bits, number)
            members.discard(number)
    ordered = sorted(members)
    for number in [*questions, *ordered[:5], 0, 9_999]:
        above, below = bisect_left(ordered, number), bisect_right(ordered, number) - 1
        assert at_least(bits, number) == (ordered[above] if above < len(ordered) else -1)
        assert at_most(bits, number) == (ordered[below] if below >= 0 else -1)


def test_numbers_past_the_end_are_not_found():
    bits = empty_set(10)
    insert(bits, 9)
    assert at_least(bits, 10) == -1
    assert at_least(np.asarray(bits), 64) == -1
