"""Two runs side by side: what is found by arithmetic is what all batches say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenmill.config.run import parse_config
from tokenmill.errors import ConfigError
from tokenmill.loader import row_digests
from tokenmill.run.compare import compare
from tokenmill.run.run import Run

RNG = np.random.default_rng(3)
LENGTHS = {"web": RNG.integers(3, 60, 90).tolist(), "books": RNG.integers(3, 60, 40).tolist()}


@pytest.fixture
def folder(tmp_path, make_store):
    """Make two stores whose rows can be told apart by their ids."""
    for number, (name, lengths) in enumerate(LENGTHS.items()):
        make_store(name, lengths, dtype="<u4", seed=number, max_tokens_per_shard=400, add_bos=True)
    return tmp_path


def run_of(folder, tables, **run):
    """Make a run over both stores; tables are those beside [run] and [[sources]], if they do not say these."""
    base = {
        "run": {"steps": 24, "global_batch_size": 6, "seq_len": 16, "weights": {"web": 0.7, "books": 0.3}, **run},
        "sources": [{"name": name, "store": name} for name in LENGTHS],
    }
    return Run(config=parse_config(base | tables), folder=folder)


def compared(old, new, **options):
    return compare(old.plan(), new.plan(), configs=(old.config, new.config), **options)


def trained(run, rows_of):
    """Return the rows of every step; None if nothing is trained."""
    plan = run.plan()
    return [rows_of(step) if plan.next_trained(step) == step else None for step in range(plan.steps)]


def digests(run):
    """Return the digests of the rows of every step."""
    loader = run.loader(rank=0, threads=0)
    return trained(run, lambda step: row_digests(loader[step]))


def contents(run):
    """Return the spans of the rows of every step, with what decides how they are delivered."""
    plan, config = run.plan(), run.config.run
    ways = config.positions, config.cross_document_labels

    def rows(step):
        length = plan.stage(step).spec.seq_len
        return [(run.stores[use.source].path, length, ways, use.spans) for use in plan.what(step)]

    return trained(run, rows)


def brute(old, new, rows_of=contents):
    """Return (first differing step, differing rows, rows from there on) by looking at all steps of both."""
    left, right = rows_of(old), rows_of(new)
    counts = []
    for step in range(max(len(left), len(right))):
        rows = [side[step] if step < len(side) and side[step] else [] for side in (left, right)]
        shared = sum(a == b for a, b in zip(*rows, strict=False))
        counts.append((max(map(len, rows)) - shared, max(map(len, rows))))
    first = next((step for step, (differing, _) in enumerate(counts) if differing), None)
    if first is None:
        return None, 0, 0
    return first, sum(d for d, _ in counts[first:]), sum(n for _, n in counts[first:])


WEIGHTS = st.sampled_from(
    [{"web": 0.7, "books": 0.3}, {"web": 7, "books": 3}, {"web": 0.5, "books": 0.5}, {"web": 1}]
)
PACKINGS = st.sampled_from(
    [
        {"packing": "best_fit"},
        {"packing": "concat"},
        {"packing": "padded", "on_long": "truncate_end"},
        {"packing": "bos_best_fit"},
    ]
)


@st.composite
def configs(draw):
    """Draw the tables of a run, near enough to others that some batches are the same."""
    run = {
        "steps": draw(st.sampled_from([24, 24, 21])),
        "seed": draw(st.sampled_from([1, 1, 1, 2])),
        "global_batch_size": draw(st.sampled_from([6, 6, 4])),
        "positions": draw(st.sampled_from(["document", "document", "row"])),
        "weigh_by": draw(st.sampled_from(["rows", "rows", "tokens"])),
        **draw(PACKINGS),
    }
    stages = [{"name": "a", "start_step": 0, "weights": draw(WEIGHTS)}]
    if draw(st.booleans()):
        late = {"name": "b", "start_step": draw(st.integers(5, 12)), "weights": draw(WEIGHTS)}
        late |= draw(st.sampled_from([{}, {}, {"seq_len": 8}, {"packing": "best_fit", "on_long": "split"}]))
        late |= draw(
            st.sampled_from([{}, {"ramp": "linear", "ramp_steps": 6}, {"ramp": "cosine", "ramp_steps": 4}])
        )
        stages.append(late | draw(st.sampled_from([{}, {"on_change": "restart"}, {"seed": 5}, {"lr_scale": 0.5}])))
    tables = {"stages": stages}
    if draw(st.sampled_from([False, False, True])):
        stop = {"max_epochs": draw(st.sampled_from([0.2, 0.5])), "on_exhausted": "stop"}
        tables["sources"] = [{"name": "web", "store": "web"}, {"name": "books", "store": "books"} | stop]
    if draw(st.booleans()):
        first = draw(st.integers(0, 18))
        tables["skip"] = [{"steps": f"{first}:{first + draw(st.integers(1, 3))}"}]
    if draw(st.booleans()):
        documents = draw(st.sampled_from([[0, 17], [39], [3, 4, 5]]))
        tables["quarantine"] = [
            {
                "source": draw(st.sampled_from(["web", "books"])),
                "from_step": draw(st.integers(0, 20)),
                "documents": documents,
            }
        ]
    return run, tables


def check_pair(folder, pair):
    old, new = (run_of(folder, tables, **run) for run, tables in pair)
    found = compared(old, new)
    first, differing, total = brute(old, new)
    assert (found.first_step, found.complete) == (first, True)
    # No row that is called the same delivers other arrays.
    first_array, arrays, _ = brute(old, new, digests)
    assert found.differing >= arrays
    if first is None:
        assert (found.same, found.differing, first_array) == (True, 0, None)
    else:
        assert (found.differing, found.compared, found.total) == (differing, total, total)
        assert found.begins <= first
        assert found.cause is not None
        assert first_array is None or first <= first_array


@given(pair=st.tuples(configs(), configs()))
def test_first_step_and_number_of_rows_are_those_of_all_batches(folder, pair):
    """[O1.c] Any two configs: what is computed from the plans is what drawing everything says."""
    check_pair(folder, pair)


@given(
    config=configs(),
    other=configs(),
    keys=st.sets(st.sampled_from(["stages", "skip", "quarantine", "sources", "run"])),
)
def test_one_or_two_tables_changed_are_found_as_well(folder, config, other, keys):
    """Pairs that share most of what they say, as edits of a run do."""
    run = other[0] if "run" in keys else config[0]
    names = ("stages", "skip", "quarantine", "sources")
    both = {name: (other if name in keys else config)[1].get(name) for name in names}
    check_pair(folder, (config, (run, {name: table for name, table in both.items() if table is not None})))


@pytest.mark.deep
@settings(max_examples=600)
@given(pair=st.tuples(configs(), configs()))
def test_many_pairs_of_configs(folder, pair):
    check_pair(folder, pair)


TWO = [
    {"name": "base", "start_step": 0, "weights": {"web": 0.9, "books": 0.1}},
    {"name": "anneal", "start_step": 12, "weights": {"web": 0.9, "books": 0.1}},
]


def two(**late):
    """Return two stages of which the second one says this as well."""
    return {"stages": [TWO[0], TWO[1] | late]}


def paths(found):
    return [(change.path, change.old, change.new) for change in found.changes]


@pytest.mark.parametrize(
    ("old", "new", "first", "cause", "keys"),
    [
        (
            two(),
            two(weights={"web": 0.9, "books": 0.3}),
            12,
            "stages[1].weights.books 0.1 -> 0.3",
            [("stages[1].weights.books", 0.1, 0.3)],
        ),
        (
            two(),
            two() | {"skip": [{"steps": "7:9", "reason": "spike"}]},
            7,
            "stages[1].skipped (absent) -> True",
            [("skip[0].steps", None, "7:9"), ("skip[0].reason", None, "spike")],
        ),
        (
            two() | {"skip": [{"steps": "7:9"}]},
            two() | {"skip": [{"steps": "7:10"}]},
            9,
            "stages[1].skipped (absent) -> True",
            [("skip[0].steps", "7:9", "7:10")],
        ),
        (two(), two(seq_len=8), 12, "stages[1].seq_len 16 -> 8", [("stages[1].seq_len", None, 8)]),
        (
            two(),
            two() | {"quarantine": [{"source": "web", "from_step": 5}]},
            5,
            "stages[1].weights.web 0.9 -> (absent)",
            [("quarantine[0].source", None, "web"), ("quarantine[0].from_step", None, 5)],
        ),
    ],
)
def test_the_first_step_the_first_path_and_the_keys_are_named(folder, old, new, first, cause, keys):
    """[O1.c]"""
    left, right = run_of(folder, old), run_of(folder, new)
    found = compared(left, right)
    assert (found.first_step, str(found.cause), paths(found)) == (first, cause, keys)
    assert found.first_step == brute(left, right, digests)[0]


@pytest.mark.parametrize(("key", "new"), [("seed", 5), ("packing", "concat"), ("shuffle", "none"), ("seq_len", 8)])
def test_a_key_of_run_is_named_as_the_config_has_it(folder, key, new):
    found = compared(run_of(folder, {}), run_of(folder, {}, **{key: new}))
    assert (found.first_step, found.stage, found.changes[0].path) == (0, "main", f"run.{key}")


@pytest.mark.parametrize(("key", "own", "new"), [("seed", 3, 5), ("on_long", "split", "drop")])
def test_a_key_of_run_acts_from_the_first_stage_that_does_not_say_it(folder, key, own, new):
    stages = {"stages": [{"name": "a", "start_step": 0, key: own}, {"name": "b", "start_step": 9}]}
    found = compared(run_of(folder, stages), run_of(folder, stages, **{key: new}))
    assert [change.path for change in found.changes] == [f"run.{key}"]
    assert found.first_step == 9


def test_keys_that_change_no_batch_come_last(folder):
    late = {"name": "cool", "lr_scale": 0.1, "weights": {"web": 9, "books": 1}}
    found = compared(run_of(folder, two()), run_of(folder, two(**late), arrays=["input_ids", "labels"]))
    assert found.same
    assert [change.path for change in found.changes] == [
        "stages[1].weights.web",
        "stages[1].weights.books",
        "run.arrays",
        "stages[1].name",
        "stages[1].lr_scale",
    ]


def test_the_same_proportions_in_other_numbers_are_the_same_batches(folder):
    found = compared(run_of(folder, two()), run_of(folder, two(weights={"web": 9, "books": 1})))
    assert (found.same, found.begins, found.first_step, found.differing) == (True, 12, None, 0)
    assert [change.path for change in found.changes] == ["stages[1].weights.web", "stages[1].weights.books"]


def test_an_added_stage_shifts_no_path_of_the_others(folder):
    stages = [TWO[0], {"name": "middle", "start_step": 6, "seq_len": 8}, TWO[1]]
    found = compared(run_of(folder, two()), run_of(folder, {"stages": stages}))
    assert found.first_step == 6
    assert {change.path.partition(".")[0] for change in found.changes} == {"stages[1]"}
    back = compared(run_of(folder, {"stages": stages}), run_of(folder, two()))
    assert (back.first_step, back.differing) == (6, found.differing)
    assert {(change.path.partition(".")[0], change.new) for change in back.changes} == {("stages[1]", None)}


def test_more_steps_differ_where_the_shorter_run_ends(folder):
    found = compared(run_of(folder, {}, steps=20), run_of(folder, {}, steps=24))
    assert (found.first_step, found.differing, found.compared) == (20, 24, 24)
    assert paths(found) == [("run.steps", 20, 24)]
    assert str(found.cause) == "run.steps 20 -> 24"


def test_other_tokens_at_the_same_path_are_named(folder, make_store, tmp_path):
    left = run_of(folder, {})
    left.plan()
    lengths = LENGTHS["books"]
    path, _, _ = make_store("elsewhere/books", lengths, dtype="<u4", seed=9, add_bos=True)
    (path.parent / "web").symlink_to(tmp_path / "web")
    right = Run(config=left.config, folder=path.parent)
    found = compared(left, right)
    assert (found.cause.path, found.changes) == ("stages[0].sources.books.store", ())
    assert (found.cause.old, found.cause.new) == tuple(run.stores["books"].fingerprint for run in (left, right))
    assert found.first_step == brute(left, right, digests)[0]


def test_other_numbers_in_a_file_of_a_quarantine_are_named(folder):
    tables = {"quarantine": [{"source": "web", "from_step": 4, "file": "bad.txt"}]}
    (folder / "bad.txt").write_text("3\n")
    left = run_of(folder, tables)
    left.plan()
    (folder / "bad.txt").write_text("3\n9\n")
    found = compared(left, run_of(folder, tables))
    assert found.cause.path == "stages[1].sources.web.quarantined"
    assert found.begins == 4


def test_rows_that_are_delivered_otherwise_differ(folder):
    """[P1.c] Labels that cross documents, and positions that run through a row."""
    for key, new, options in (("cross_document_labels", True, {"packing": "concat"}), ("positions", "row", {})):
        left, right = run_of(folder, {}, **options), run_of(folder, {}, **options, **{key: new})
        found = compared(left, right)
        assert (found.first_step, found.differing, found.total) == brute(left, right)
        assert 0 < brute(left, right, digests)[1] < found.differing == found.total
        assert [change.path for change in found.changes] == [f"run.{key}"]


def test_a_row_of_another_sequence_length_is_another_row(folder, make_store):
    make_store("short", [9] * 40, dtype="<u4", add_bos=True)
    sources = {"sources": [{"name": "short", "store": "short"}]}
    options = {"packing": "padded", "weights": {"short": 1}}
    left, right = run_of(folder, sources, **options), run_of(folder, sources, **options, seq_len=12)
    found = compared(left, right)
    assert (found.first_step, found.differing, found.total) == brute(left, right) == (0, 144, 144)


def test_the_same_stage_after_more_rows_draws_other_rows(folder):
    """The second stage goes on in the mixture of the first, of which the runs have drawn more or less."""
    late = {"name": "b", "start_step": 5, "global_batch_size": 6}
    left, right = (
        run_of(
            folder, {"stages": [{"name": "a", "start_step": 0, "global_batch_size": batch}, late]}, shuffle="none"
        )
        for batch in (6, 9)
    )
    found = compared(left, right)
    assert (found.first_step, found.differing, found.total) == brute(left, right)
    assert found.differing > 5 * 9


def test_a_path_is_no_run_and_the_way_out_is_named(folder):
    with pytest.raises(ConfigError, match=r"diff: expected a Run, got 'b.toml'; open its config"):
        run_of(folder, {}).diff("b.toml")


def test_a_moved_store_and_sources_in_another_order_are_the_same_batches(folder):
    (folder / "link").symlink_to(folder / "web")
    sources = [{"name": "books", "store": "books"}, {"name": "web", "store": "link"}]
    found = compared(run_of(folder, {}), run_of(folder, {"sources": sources}))
    assert (found.same, found.differing, found.compared) == (True, 0, 24 * 6)
    assert paths(found) == [("sources[1].store", "web", "link")]


def test_beyond_the_limit_it_is_said_how_far_was_compared(folder):
    old, new = run_of(folder, {}, steps=200), run_of(folder, {}, steps=200, seed=5)
    whole, part = compared(old, new), compared(old, new, limit_rows=100)
    assert (whole.complete, whole.compared) == (True, 1200)
    assert (part.complete, part.compared, part.total, part.end_step) == (False, 102, 1200, 17)
    assert part.first_step == whole.first_step == 0
    assert part.differing == brute_until(old, new, 17)


def brute_until(old, new, end):
    left, right = digests(old), digests(new)
    return sum(a != b for step in range(end) for a, b in zip(left[step], right[step], strict=True))


def test_a_difference_beyond_the_limit_is_not_claimed_to_be_none(folder):
    """Without its last document the stream has another description, and the same rows until it ends."""
    options = {"steps": 60, "packing": "concat", "shuffle": "none", "weights": {"web": 1}}
    edit = {"quarantine": [{"source": "web", "from_step": 0, "documents": [89]}]}
    old, new = run_of(folder, {}, **options), run_of(folder, edit, **options)
    whole, part = compared(old, new), compared(old, new, limit_rows=60)
    assert whole.first_step == brute(old, new)[0] > 20
    assert (part.first_step, part.same, part.complete) == (None, False, False)
    assert (part.begins, part.end_step, part.compared, part.total) == (0, 10, 60, 360)
    assert part.cause.path == "stages[0].sources.web.quarantined"


def test_rows_that_must_be_the_same_do_not_count_towards_the_limit(folder):
    """An edit of a few steps is counted to the last row of a run of any length."""
    skip = {"skip": [{"steps": "100:104"}]}
    options = {"steps": 1_000_000, "global_batch_size": 1024}
    found = compared(run_of(folder, {}, **options), run_of(folder, skip, **options), limit_rows=1)
    assert (found.first_step, found.differing, found.complete) == (100, 4 * 1024, True)
    assert found.compared == 999_900 * 1024


def test_progress_is_told_block_by_block(folder):
    told = []
    compared(run_of(folder, {}, steps=50), run_of(folder, {}, steps=50, seed=5), progress=told.append)
    assert told == [300]


@pytest.mark.parametrize("on_long", ["truncate_end", "truncate_start"])
def test_records_are_compared_by_all_their_arrays(tmp_path, tokenizer_identity, on_long):
    """A pair whose first answer fits and whose second one does not is the same only if that is cut alike."""
    from tokenmill.store import StoreSpec, StoreWriter

    sizes = [3, 5, 9, 4]
    spec = StoreSpec(
        kind="dpo",
        keys={"chosen": "<u2", "rejected": "<u2", "chosen_mask": "|u1", "rejected_mask": "|u1"},
        tokenizer=tokenizer_identity(50_000),
        recipe={},
    )
    with StoreWriter(tmp_path / "pairs", spec) as writer:
        for number in range(40):
            chosen, rejected = sizes[number % 4], sizes[number // 4 % 4]
            values = {
                "chosen": np.arange(chosen) + 100 * number,
                "rejected": np.arange(rejected) + 50 + 100 * number,
            }
            values = {key: value.astype("<u2") for key, value in values.items()}
            masks = {f"{key}_mask": np.ones(value.size, "|u1") for key, value in values.items()}
            offsets = {key: np.array([0, value.size]) for key, value in values.items()}
            writer.append(values | masks, offsets)
        writer.commit()
    base = {"sources": [{"name": "pairs", "store": "pairs"}]}
    options = {"seq_len": 6, "weights": {"pairs": 1}, "steps": 12}
    old = run_of(tmp_path, base, **options, on_long="truncate_end")
    new = run_of(tmp_path, base, **options, on_long=on_long)
    found = compared(old, new)
    assert found.differing == brute(old, new, digests)[1]
    assert (found.differing > 0) == (on_long == "truncate_start")
