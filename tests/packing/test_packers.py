from bisect import bisect_left, bisect_right

from hypothesis import given
from hypothesis import strategies as st

from tokenmill.compiled import kernel
from tokenmill.packing.packers import at_least, at_most, empty_set, insert, remove


@kernel
def change(bits, number, add):
    if add:
        insert(bits, number)
    else:
        remove(bits, number)


@kernel
def above(bits, number):
    return at_least(bits, number)


@kernel
def below(bits, number):
    return at_most(bits, number)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9_999)), max_size=200), st.lists(st.integers(0, 9_999)))
def test_a_set_of_bits_finds_what_a_sorted_list_finds(changes, questions):
    bits = empty_set(10_000)
    members: set[int] = set()
    for add, number in changes:
        if add or number in members:
            change(bits, number, add)
            members = members | {number} if add else members - {number}
    ordered = sorted(members)
    for number in [*questions, *ordered[:5], 0, 9_999]:
        next_, last = bisect_left(ordered, number), bisect_right(ordered, number) - 1
        assert above(bits, number) == (ordered[next_] if next_ < len(ordered) else -1)
        assert below(bits, number) == (ordered[last] if last >= 0 else -1)


def test_numbers_past_the_end_are_not_found():
    bits = empty_set(10)
    change(bits, 9, True)
    assert above(bits, 10) == -1
    assert above(bits, 64) == -1
