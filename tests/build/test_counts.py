"""Counts of units add up to those of a build, whatever the units."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.build import counts as module
from tokenmill.build.counts import Counts, ListedRecord, extend_listed


def listed(reason, line):
    return ListedRecord(file="a.jsonl", line=line, reason=reason, detail="")


@pytest.fixture
def three_listed(monkeypatch):
    monkeypatch.setattr(module, "MAX_LISTED", 3)


@pytest.mark.usefixtures("three_listed")
@pytest.mark.parametrize("cuts", [[], [2], [3], [1, 2, 3, 4, 5, 6], [5]])
def test_the_first_bad_records_are_listed_and_one_of_every_other_reason(cuts):
    records = [listed(reason, line) for line, reason in enumerate("aaababca")]
    borders = [0, *cuts, len(records)]
    found = []
    for begin, end in pairwise(borders):
        extend_listed(found, records[begin:end])
    assert [(record.reason, record.line) for record in found] == [("a", 0), ("a", 1), ("a", 2), ("b", 3), ("c", 6)]


def test_a_note_names_the_first_document_of_its_store():
    total = Counts()
    for documents, noted in ((5, {}), (4, {"tools": 3}), (7, {"tools": 0, "flags": 6})):
        unit = Counts()
        unit.note_first("web", noted)
        unit.take("web", documents, 10 * documents)
        unit.take("books", 1, 2)
        total.merge(unit)
    assert total.noted == {"web": {"tools": 8, "flags": 15}}
    assert total.taken == {"web": (16, 160), "books": (3, 6)}
    assert (total.documents, total.tokens) == (19, 166)


records = st.tuples(st.sampled_from("ab"), st.integers(0, 9), st.sampled_from(["", "tools", "flags"]))


@given(st.lists(records, max_size=30), st.lists(st.integers(0, 30), max_size=5))
def test_counts_do_not_depend_on_how_records_are_cut_into_units(taken, cuts):
    def count(part):
        counts = Counts()
        for route, tokens, note in part:
            if note:
                counts.note_first(route, {note: 0})
            counts.take(route, 1, tokens)
            counts.text_bytes += tokens
        return counts

    total, borders = Counts(), [0, *sorted(min(cut, len(taken)) for cut in cuts), len(taken)]
    for begin, end in pairwise(borders):
        total.merge(count(taken[begin:end]))
    assert total == count(taken)
