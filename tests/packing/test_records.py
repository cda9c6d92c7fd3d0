from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import ConfigError
from tokenmill.packing import Policy, RecordRows
from tokenmill.packing.joined import take_rows
from tokenmill.plan.order import Shuffle
from tokenmill.plan.rows import NOTHING, EpochProgress, TokenCounts
from tokenmill.store import StoreSpec, StoreWriter, open_store

CUT_END, CUT_START = (Policy(name="padded", split=split) for split in ("truncate_end", "truncate_start"))


@pytest.fixture
def groups(tmp_path, tokenizer_identity):
    """Return an open store of six prompts with groups of 0 to 4 responses, in three shards."""
    spec = StoreSpec(
        kind="grpo",
        keys={"prompts": "<u2", "responses": "<u2", "rewards": "<f4"},
        tokenizer=tokenizer_identity(300),
        recipe={},
        max_tokens_per_shard=20,
    )
    prompts, sizes, responses = [3, 0, 2, 9, 1, 4], [2, 0, 4, 1, 0, 3], [5, 0, 1, 2, 3, 4, 8, 1, 1, 6]
    with StoreWriter(tmp_path / "groups", spec) as writer:
        writer.append(
            {
                "prompts": np.arange(sum(prompts), dtype="<u2"),
                "responses": np.arange(100, 100 + sum(responses), dtype="<u2"),
                "rewards": np.arange(10, dtype="<f4"),
            },
            {
                "prompts": np.cumsum([0, *prompts]),
                "groups": np.cumsum([0, *sizes]),
                "responses": np.cumsum([0, *responses]),
            },
        )
        writer.commit()
    store = open_store(tmp_path / "groups")
    assert store.num_shards == 3
    return store


def test_the_items_of_records_are_found_across_shards_in_any_order(groups):
    rows = RecordRows(store=groups, seq_len=9, policy=CUT_END)
    items, owner = rows.items("responses", np.array([5, 1, 2, 0, 5]))
    assert items.tolist() == [7, 8, 9, 2, 3, 4, 5, 0, 1, 7, 8, 9]
    assert owner.tolist() == [0, 0, 0, 2, 2, 2, 2, 3, 3, 4, 4, 4]
    assert [array.tolist() for array in rows.items("prompts", np.array([4, 0]))] == [[4, 0], [0, 1]]
    assert (rows.num_rows, rows.largest_group) == (6, 4)


@pytest.mark.parametrize(("policy", "start"), [(CUT_END, 0), (CUT_START, 5)])
def test_runs_are_cut_to_the_length_at_the_end_or_at_the_start(groups, policy, start):
    rows = RecordRows(store=groups, seq_len=4, policy=policy)
    spans = rows.spans(np.array([3, 1]))
    assert [(span.document, span.start, span.length) for i in range(2) for span in spans.row(i)] == [
        (3, start, 4),
        (1, 0, 0),
    ]
    shard, first, length = rows.locate("responses", np.array([6, 0, 1]))
    assert length.tolist() == [4, 4, 0]
    begins = groups.axes["responses"].values[shard] + first
    found = [
        groups.fetch(int(b), int(b) + int(n), "responses").tolist() for b, n in zip(begins, length, strict=True)
    ]
    wanted = [groups.fetch_record(3, "responses")[0], *groups.fetch_record(0, "responses")]
    cut = slice(None, 4) if policy is CUT_END else slice(-4, None)
    assert found == [array[cut].tolist() for array in wanted]


def test_rows_hold_the_tokens_of_all_arrays_cut_to_the_length(groups):
    """[P2.a] Record 1 has neither prompt nor response; a response is trained on from its first token on."""
    rows = RecordRows(store=groups, seq_len=4, policy=CUT_END)
    assert rows.row_slots == 4 * (1 + 4)
    by_record = [rows.held(np.array([record])) for record in range(6)]
    assert [(held.tokens, held.trained) for held in by_record] == [
        (3 + 4 + 0, 4 + 0),
        (0, 0),
        (2 + 1 + 2 + 3 + 4, 1 + 2 + 3 + 4),
        (4 + 4, 4),
        (1, 0),
        (4 + 1 + 1 + 4, 1 + 1 + 4),
    ]
    assert rows.held(np.array([5, 0, 5])) == TokenCounts(tokens=10 + 7 + 10, trained=6 + 4 + 6)
    assert rows.held(np.empty(0, np.int64)) == NOTHING
    assert rows.fates().trained == sum(held.trained for held in by_record)


@given(drawn=st.integers(1, 5), key=st.integers(0, 2**63), mode=st.sampled_from(["full", "none"]))
def test_the_rest_is_what_was_not_drawn_also_of_a_rest(groups, drawn, key, mode):
    """[M1.c] And its rows stand behind those of an epoch."""
    shuffle = Shuffle(mode=mode)
    first, second, third = (RecordRows(store=groups, seq_len=n, policy=CUT_END) for n in (4, 5, 6))
    seen = EpochProgress(rest=False, size=6, drawn=drawn, key=key, shuffle=shuffle)
    left = [record for record in range(6) if seen.unseen(np.array([record]))[0]]
    followed = second.following(first, seen)
    assert followed.records(np.arange(6, 6 + followed.num_rest)).tolist() == left
    assert followed.num_rows == 6
    assert len(left) == 6 - drawn
    for record in range(6):
        wanted = [record, *([6 + left.index(record)] if record in left else [])]
        assert followed.rows_of(np.array([record]))[0].tolist() == wanted
    assert followed.epoch_description == second.description != followed.description
    if followed.num_rest > 1:
        again = EpochProgress(rest=True, size=followed.num_rest, drawn=1, key=key, shuffle=shuffle)
        rest = third.following(followed, again)
        later = [left[i] for i in range(len(left)) if again.unseen(np.array([i]))[0]]
        assert rest.records(np.arange(6, 6 + rest.num_rest)).tolist() == later
        assert rest.description["rest"] != followed.description["rest"]


def test_another_store_under_the_same_name_has_no_rest(groups, tmp_path, tokenizer_identity):
    spec = StoreSpec(
        kind="grpo",
        keys={"prompts": "<u2", "responses": "<u2", "rewards": "<f4"},
        tokenizer=tokenizer_identity(300),
        recipe={},
    )
    with StoreWriter(tmp_path / "other", spec) as writer:
        values = {key: np.ones(2, dtype) for key, dtype in spec.keys.items()}
        writer.append(values, {axis: np.array([0, 1, 2]) for axis in ("prompts", "groups", "responses")})
        writer.commit()
    other = RecordRows(store=open_store(tmp_path / "other"), seq_len=4, policy=CUT_END)
    seen = EpochProgress(rest=False, size=6, drawn=2, key=0, shuffle=Shuffle())
    with pytest.raises(ConfigError, match="a source must keep its store from stage to stage"):
        other.following(RecordRows(store=groups, seq_len=4, policy=CUT_END), seen)


def test_descriptions_tell_lengths_and_cuts_apart(groups):
    described = [
        RecordRows(store=groups, seq_len=n, policy=p).description for n in (9, 10) for p in (CUT_END, CUT_START)
    ]
    assert len({tuple(sorted(d.items())) for d in described}) == 4


def test_pairs_without_one_side_are_no_rows(tmp_path, tokenizer_identity):
    spec = StoreSpec(kind="dpo", keys={"chosen": "<u2"}, tokenizer=tokenizer_identity(300), recipe={})
    with StoreWriter(tmp_path / "half", spec) as writer:
        writer.append({"chosen": np.ones(2, "<u2")}, {"chosen": np.array([0, 2])})
        writer.commit()
    with pytest.raises(ConfigError, match="a store of dpo must have rejected, got only chosen; prepare it again"):
        RecordRows(store=open_store(tmp_path / "half"), seq_len=4, policy=CUT_END)


def test_pages_of_dropped_records_belong_to_no_row(groups):
    """The last record, of 6 tokens in a response, is dropped; behind it there is no row."""
    rows = RecordRows(store=groups, seq_len=5, policy=Policy(name="padded", split="drop"))
    assert (rows.num_rows, np.flatnonzero(~rows.holds(np.arange(6))).tolist()) == (4, [3, 5])
    begin, end = groups.axes["responses"].values[-2:].tolist()
    numbers, _ = rows.rows_within_shard("responses", 2, np.array([0]), np.array([end - begin]))
    assert numbers.tolist() == []


@pytest.mark.parametrize("taken", [1, 2, 3])
def test_rows_that_an_eval_takes_are_found_by_documents_and_by_pages(groups, taken):
    chosen = np.array([1, 3, 5])
    whole = RecordRows(store=groups, seq_len=4, policy=CUT_END)
    rows = replace(whole, chosen=chosen)
    some = take_rows(rows, taken, 4)
    numbers = {record: number for number, record in enumerate(chosen[:taken].tolist())}
    assert {record: some.rows_of(np.array([record]))[0].tolist() for record in range(6)} == {
        record: [numbers[record]] if record in numbers else [] for record in range(6)
    }
    for shard in range(groups.num_shards):
        runs = ("prompts", shard, np.array([0, 1]), np.array([1, 9]))
        found = zip(*whole.rows_within_shard(*runs), strict=True)
        wanted = [(numbers[row], run) for row, run in found if row in numbers]
        assert list(zip(*some.rows_within_shard(*runs), strict=True)) == wanted
