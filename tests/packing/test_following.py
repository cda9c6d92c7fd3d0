from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.config.run import parse_config
from tokenmill.errors import ConfigError
from tokenmill.packing.packers import MAX_DOCUMENTS
from tokenmill.run.run import Run

PACKINGS = ["best_fit", "bos_best_fit", "concat", "padded"]


def make_run(folder, stages, *, steps, batch=4, shuffle="full", seed=3):
    """Make a run over the store `web` with stages given as (start_step, seq_len, packing, on_change)."""
    tables = {
        "run": {"steps": steps, "global_batch_size": batch, "seq_len": 8, "shuffle": shuffle, "seed": seed},
        "sources": [{"name": "web", "store": "web"}],
        "stages": [
            {
                "name": f"s{start}",
                "start_step": start,
                "seq_len": seq_len,
                "packing": packing,
                "on_change": on_change,
                **({"on_long": "truncate_end"} if packing == "padded" else {}),
            }
            for start, seq_len, packing, on_change in stages
        ],
    }
    return Run(config=parse_config(tables), folder=folder)


def labels_by_step(run, offsets):
    """Yield for every step the tokens of the stream that are labels in it."""
    plan = run.plan()
    for step in range(plan.steps):
        tokens = []
        for use in plan.what(step):
            bos = None
            for span in use.spans:
                begin = int(offsets[span.document]) + span.start
                joined = bos == span.document and span.start > 0
                tokens += range(begin + (not joined), begin + span.length)
                bos = span.document if (span.start, span.length) == (0, 1) else None
        yield tokens


LENGTHS = np.random.default_rng(5).integers(0, 45, 150).tolist()


@pytest.mark.parametrize("first", ["best_fit", "bos_best_fit", "concat"])
@pytest.mark.parametrize("second", ["best_fit", "bos_best_fit", "concat"])
@pytest.mark.parametrize("edge", [1, 13, 40])
def test_no_token_is_trained_twice_before_all_are_trained_once(make_store, tmp_path, first, second, edge):
    """[M1.c] Across a change of sequence length and packing, wherever in the epoch it comes."""
    _, _, offsets = make_store("web", LENGTHS, add_bos=True, max_tokens_per_shard=400)
    stages = [(0, 12, first, "unseen"), (edge, 20, second, "unseen")]
    run = make_run(tmp_path, stages, steps=edge + 120)
    counts = np.zeros(int(offsets[-1]), np.int64)
    trainable = np.ones(int(offsets[-1]), bool)
    trainable[offsets[:-1][np.diff(offsets) > 0]] = False
    if "concat" in (first, second):
        trainable[-12:] = False  # the last partial row of the stream
    complete = False
    for tokens in labels_by_step(run, offsets):
        for token in tokens:
            counts[token] += 1
        if not complete:
            done = counts[trainable].min() >= 1
            if not done:
                # Within the step that completes the pass the next one may begin.
                assert counts.max() <= 1
            complete = done
    assert complete


@given(
    edges=st.lists(st.integers(1, 60), min_size=1, max_size=4, unique=True),
    seq_lens=st.lists(st.integers(3, 40), min_size=5, max_size=5),
    packings=st.lists(st.sampled_from(["best_fit", "bos_best_fit", "concat"]), min_size=5, max_size=5),
    shuffle=st.sampled_from(["full", "window", "none"]),
)
def test_chains_of_changes_repeat_nothing_early(make_store, tmp_path, edges, seq_lens, packings, shuffle):
    _, _, offsets = make_store("web", LENGTHS, add_bos=True)
    stages = [
        (start, seq_len, packing, "unseen")
        for start, seq_len, packing in zip([0, *sorted(edges)], seq_lens, packings, strict=False)
    ]
    run = make_run(tmp_path, stages, steps=90, batch=2, shuffle=shuffle)
    plan = run.plan()
    counts = np.zeros(int(offsets[-1]), np.int64)
    facts = {source.name: source.first_repeat for source in _report(plan).sources}
    for step, tokens in enumerate(labels_by_step(run, offsets)):
        for token in tokens:
            counts[token] += 1
        if facts["web"] is None or step < facts["web"]:
            assert counts.max() <= 1
    if facts["web"] is None:
        assert counts.max() <= 1


def _report(plan):
    from tokenmill.plan.report import report

    return report(plan)


def test_restart_reads_the_source_afresh(make_store, tmp_path):
    _, _, offsets = make_store("web", LENGTHS)
    run = make_run(tmp_path, [(0, 12, "best_fit", "unseen"), (13, 20, "best_fit", "restart")], steps=200)
    plan = run.plan()
    assert plan.stages[1].rows["web"].num_rest == 0
    counts = np.zeros(int(offsets[-1]), np.int64)
    epoch = plan.stages[1].rows["web"].num_rows // 4
    for step, tokens in enumerate(labels_by_step(run, offsets)):
        if 13 <= step < 13 + epoch:
            counts[tokens] += 1
    assert counts.max() == 1


def test_an_unchanged_stage_goes_on_with_the_rest(make_store, tmp_path):
    """A stage that changes nothing in the middle of the rest does not pack it again."""
    make_store("web", LENGTHS)
    stages = [(0, 12, "best_fit", "unseen"), (13, 20, "best_fit", "unseen"), (17, 20, "best_fit", "unseen")]
    plan = make_run(tmp_path, stages, steps=100).plan()
    straight = make_run(tmp_path, stages[:2], steps=100).plan()
    assert plan.stages[2].rows["web"] is plan.stages[1].rows["web"]
    for step in range(100):
        assert plan.rows(step)[1].tolist() == straight.rows(step)[1].tolist()


@pytest.mark.parametrize("packing", PACKINGS)
def test_what_and_when_are_inverse_through_changes(make_store, tmp_path, packing):
    """[O1.b]"""
    make_store("web", LENGTHS, add_bos=True, max_tokens_per_shard=300)
    stages = [(0, 12, packing, "unseen"), (13, 20, packing, "unseen"), (40, 9, "best_fit", "restart")]
    plan = make_run(tmp_path, stages, steps=80).plan()
    seen: dict[int, list] = {}
    for step in range(80):
        for use in plan.what(step):
            for span in use.spans:
                seen.setdefault(span.document, []).append((step, use.slot, use.row, span))
    for document in range(0, 150, 3):
        found = [(use.step, use.slot, use.row, span) for use in plan.when("web", document) for span in use.spans]
        assert found == seen.get(document, [])


def test_the_report_counts_trained_tokens_and_padding(make_store, tmp_path):
    _, _, offsets = make_store("web", LENGTHS, add_bos=True)
    for packing in ("best_fit", "bos_best_fit", "concat"):
        run = make_run(tmp_path, [(0, 12, packing, "unseen"), (13, 20, packing, "unseen")], steps=60)
        plan = run.plan()
        counted = [0, 0]
        for step, tokens in enumerate(labels_by_step(run, offsets)):
            counted[plan.at(step).index] += len(tokens)
        facts = _report(plan)
        assert [share.trained for share in facts.shares] == counted
        loader = run.loader(arrays=("doc_ids",))
        padding = [0, 0]
        for step in range(60):
            padding[plan.at(step).index] += int((loader[step]["doc_ids"] < 0).sum())
        assert [share.padding for share in facts.shares] == padding
        for share in facts.shares:
            assert share.tokens == share.trained + share.unlabelled + share.padding
            assert share.unlabelled >= 0


def test_a_source_must_keep_its_store(make_store):
    from tokenmill.packing import Policy, pack_rows
    from tokenmill.plan import Shuffle
    from tokenmill.plan.rows import EpochProgress
    from tokenmill.store import open_store

    one, _, _ = make_store("one", LENGTHS, seed=1)
    other, _, _ = make_store("other", LENGTHS, seed=2)
    rows = [pack_rows(open_store(path), seq_len=8, policy=Policy()) for path in (one, other)]
    seen = EpochProgress(rest=False, size=rows[0].num_rows, drawn=3, key=1, shuffle=Shuffle())
    with pytest.raises(ConfigError, match="a source must keep its store from stage to stage"):
        rows[1].following(rows[0], seen)


def test_a_stage_that_draws_nothing_of_a_source_forgets_nothing_of_it(make_store, tmp_path):
    """The rest that the first stage left is still owed after a stage that draws no row of the source."""
    _, _, offsets = make_store("web", LENGTHS)
    make_store("books", [30] * 400)
    weights = {"web": 1e-6, "books": 1.0}
    tables = {
        "run": {"steps": 60, "global_batch_size": 4, "seq_len": 12},
        "sources": [{"name": name, "store": name} for name in ("web", "books")],
        "stages": [
            {"name": "a", "start_step": 0, "weights": {"web": 1}},
            {"name": "b", "start_step": 20, "weights": weights, "seq_len": 20},
            {"name": "c", "start_step": 30, "weights": {"web": 1}, "seq_len": 9},
        ],
    }
    run = Run(config=parse_config(tables), folder=tmp_path)
    plan = run.plan()
    assert plan.stages[1].draws["web"] == 0
    assert plan.stages[2].rows["web"].num_rest > 0
    counts = np.zeros(int(offsets[-1]), np.int64)
    for step in [*range(20), *range(30, 60)]:
        for use in plan.what(step):
            for span in use.spans:
                begin = int(offsets[span.document]) + span.start
                counts[begin + 1 : begin + span.length] += 1
    assert counts.max() == 1


def test_documents_that_were_not_drawn_are_whole_at_the_new_length(make_store, tmp_path):
    """What truncation would have dropped at the old length is not dropped at the new one."""
    make_store("web", [30] * 40)
    run = make_run(tmp_path, [(0, 8, "padded", "unseen"), (5, 40, "best_fit", "unseen")], steps=20)
    plan = run.plan()
    seen = {use.spans[0].document for step in range(5) for use in plan.what(step)}
    rest = plan.stages[1].rows["web"]
    spans = rest.spans(np.arange(rest.num_rows, rest.num_rows + rest.num_rest))
    assert set(spans.document.tolist()) == set(range(40)) - seen
    assert (spans.length == 30).all()


def test_epochs_of_other_rows_have_orders_of_their_own(make_store, tmp_path):
    make_store("web", [9] * 40)
    stages = [(0, 8, "padded", "unseen"), (10, 9, "padded", "unseen"), (20, 8, "padded", "unseen")]
    plan = make_run(tmp_path, stages, steps=30).plan()
    orders = [[row for step in range(a, a + 10) for row in plan.rows(step)[1].tolist()] for a in (0, 10, 20)]
    assert all(sorted(order) == list(range(40)) for order in orders)
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]


def test_one_pass_through_a_change_is_one_epoch(make_store, tmp_path):
    """[M1.d] The rest completes the epoch, however many rows it has."""
    make_store("web", LENGTHS)
    stages = [(0, 12, "best_fit", "unseen"), (13, 20, "best_fit", "unseen")]
    plan = make_run(tmp_path, stages, steps=200).plan()
    rest = plan.stages[1].rows["web"].num_rest
    exact = make_run(tmp_path, stages, steps=13 + rest // 4).plan()
    assert 0.95 < float(exact.stages[1].epochs("web")) <= 1
    past = make_run(tmp_path, stages, steps=13 + -(-rest // 4) + 1).plan()
    assert float(past.stages[1].epochs("web")) > 1
    assert _report(past).sources[0].first_repeat is not None


def test_labels_that_cross_documents_refuse_a_rest(make_store, tmp_path):
    make_store("web", LENGTHS)
    tables = {
        "run": {
            "steps": 40,
            "global_batch_size": 4,
            "seq_len": 12,
            "packing": "concat",
            "cross_document_labels": True,
        },
        "sources": [{"name": "web", "store": "web"}],
        "stages": [{"name": "a", "start_step": 0}, {"name": "b", "start_step": 9, "seq_len": 20}],
    }
    with pytest.raises(ConfigError, match="cross_document_labels with a change of rows; use on_change = restart"):
        Run(config=parse_config(tables), folder=tmp_path).plan()
    tables["stages"][1]["on_change"] = "restart"
    Run(config=parse_config(tables), folder=tmp_path).plan()


def test_rows_of_several_packing_windows_are_read_once_through_a_change_of_length(make_store, tmp_path):
    """Groups of `shuffle = "window"` are whole windows of real rows; what is left of them is packed anew."""
    lengths = np.random.default_rng(1).integers(1, 5, 5 * MAX_DOCUMENTS).tolist()
    _, _, offsets = make_store("web", lengths, add_bos=True)
    stages = [(0, 63, "best_fit", "unseen"), (7, 31, "best_fit", "unseen")]
    run = make_run(tmp_path, stages, steps=17, batch=256, shuffle="window")
    run = replace(run, config=replace(run.config, run=replace(run.config.run, window_blocks=2)))
    plan = run.plan()
    assert plan.stages[1].rows["web"].num_rest
    seen = np.zeros(int(offsets[-1]), np.int64)
    for tokens in labels_by_step(run, offsets):
        seen[tokens] += 1
        assert seen.max() == 1
    windows = [{span.document // MAX_DOCUMENTS for use in plan.what(step) for span in use.spans} for step in (0, 1)]
    assert len(set().union(*windows)) <= 2
    for document in (0, 3 * MAX_DOCUMENTS + 11):
        for use in plan.when("web", document):
            (same,) = [found for found in plan.what(use.step) if found.slot == use.slot]
            assert set(use.spans) <= set(same.spans)
