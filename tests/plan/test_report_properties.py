"""Of any run that compiles, the report says what a simulation of all its steps counts."""

from __future__ import annotations

from collections import Counter, defaultdict
from math import ceil, floor

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tokenmill.config.run import parse_config
from tokenmill.config.schedule import limits
from tokenmill.errors import ConfigError
from tokenmill.loader import IGNORE, Loader, LoaderOptions, RankSlice
from tokenmill.plan.report import report
from tokenmill.plan.stages import rows_at
from tokenmill.run.run import Run
from tokenmill.store import StoreSpec, StoreWriter

LENGTHS = {
    "tiny": (40, 0, 7),
    "middle": (30, 2, 41),
    "long": (6, 60, 200),
    "chat": (25, 2, 31),
}
"""Source -> documents, least tokens, and the end of their range; one of them has documents without a label."""


@pytest.fixture(scope="session")
def stores(tmp_path_factory, tokenizer_identity):
    """Return a folder with four stores of very different documents, one of them with a mask."""
    folder = tmp_path_factory.mktemp("report")
    rng = np.random.default_rng(5)
    for name, (count, least, most) in LENGTHS.items():
        offsets = np.cumsum([0, *rng.integers(least, most, count)])
        ids = rng.integers(2, 300, offsets[-1]).astype("<u2")
        ids[offsets[:-1][np.diff(offsets) > 0]] = 1
        values = {"sequence": ids}
        if name == "chat":
            values["loss_mask"] = (rng.random(ids.size) < 0.6).astype("|u1")
        spec = StoreSpec(
            kind="sft" if name == "chat" else "seq",
            keys={key: array.dtype.str for key, array in values.items()},
            tokenizer=tokenizer_identity(300) | {"add_bos": True, "bos_id": 1},
            recipe={},
            max_tokens_per_shard=300,
        )
        with StoreWriter(folder / name, spec) as writer:
            writer.append(values, offsets)
            writer.commit()
    return folder


PACKINGS = [
    {"packing": "best_fit"},
    {"packing": "best_fit", "on_long": "truncate_end"},
    {"packing": "bos_best_fit"},
    {"packing": "bos_best_fit", "crop": "discard"},
    {"packing": "padded", "on_long": "truncate_start"},
    {"packing": "concat"},
]
WEIGHTS = st.sampled_from([1, 1, 2, 5, 0.3, 0.01])


@st.composite
def configs(draw):
    """Draw the tables of a run; most of them compile."""
    names = draw(st.lists(st.sampled_from(sorted(LENGTHS)), min_size=1, max_size=4, unique=True))
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    steps = sum(lengths)
    stages = []
    for number, (start, length) in enumerate(zip(np.cumsum([0, *lengths]).tolist(), lengths, strict=False)):
        stages.append(draw(stage_tables(names, number, start, length)))
    tables = {
        "run": {"steps": steps, "global_batch_size": draw(st.integers(1, 6)), "seq_len": 16}
        | {"seed": draw(st.integers(0, 99)), "shuffle": draw(st.sampled_from(["full", "full", "none"]))},
        "sources": [{"name": name, "store": name} | draw(policies(len(names) > 1)) for name in names],
        "stages": stages,
    }
    edges = draw(st.lists(st.integers(0, steps), max_size=4, unique=True).map(sorted))
    skips = list(zip(edges[::2], edges[1::2], strict=False))
    if sum(last - first for first, last in skips) < steps:
        tables["skip"] = [{"steps": f"{first}:{last}"} for first, last in skips]
    tables["quarantine"] = draw(st.lists(quarantines(names, steps), max_size=2))
    return tables


@st.composite
def stage_tables(draw, names, number, start, length):
    chosen = draw(st.lists(st.sampled_from(names), min_size=1, max_size=len(names), unique=True))
    stage = {"name": f"s{number}", "start_step": start, "weights": {name: draw(WEIGHTS) for name in chosen}}
    stage |= draw(st.sampled_from([{}, {"seq_len": 8}, {"seq_len": 23}]))
    stage |= draw(st.sampled_from([{}, {}, *PACKINGS]))
    stage |= draw(st.sampled_from([{}, {"global_batch_size": 3}, {"global_batch_size": 7}]))
    stage |= draw(st.sampled_from([{}, {}, {"weigh_by": "tokens"}, {"temperature": 2.5}]))
    stage |= draw(st.sampled_from([{}, {}, {}, {"on_change": "restart"}, {"seed": 1}, {"lr_scale": 0.5}]))
    shape = draw(st.sampled_from([None, "linear", "cosine"]))
    if shape is not None:
        stage |= {"ramp": shape, "ramp_steps": draw(st.integers(1, length))}
        if number == 0 or draw(st.booleans()):
            stage["ramp_from"] = {name: draw(WEIGHTS) for name in draw(st.sets(st.sampled_from(names), min_size=1))}
    return stage


@st.composite
def policies(draw, others):
    if not others:
        return {}
    return draw(
        st.sampled_from(
            [
                *({}, {}, {}, {"on_exhausted": "stop"}, {"on_exhausted": "stop", "max_epochs": 1.5}),
                *({"on_exhausted": "repeat"}, {"on_exhausted": "error", "max_epochs": 60.0}),
            ]
        )
    )


@st.composite
def quarantines(draw, names, steps):
    name = draw(st.sampled_from(names))
    found = {"source": name, "from_step": draw(st.integers(0, steps - 1))}
    if len(names) == 1 or draw(st.integers(0, 3)):
        size = LENGTHS[name][0]
        found["documents"] = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=size // 3, unique=True))
    return found


class Counted:
    """What a simulation of all steps counts, with nothing of the report's arithmetic."""

    def __init__(self, run):
        self.plan = run.plan()
        self.loader = Loader(
            self.plan,
            RankSlice(),
            LoaderOptions(arrays=("labels", "doc_ids", "source"), threads=0),
        )
        self.rows = Counter()
        self.skipped = Counter()
        self.trained = Counter()
        self.held = Counter()
        self.slots = Counter()
        self.uses = defaultdict(Counter)
        """(source, number of its row index) -> row -> how often it is drawn, skipped steps too."""
        self.indexes = {}
        """Number -> (row index, source), a new number whenever the rows of a source change."""
        self.known = defaultdict(set)
        self.first_repeat = {}
        self.last_step = {}
        for step in range(self.plan.steps):
            self._step(step)

    def _step(self, step):
        part = self.plan.stage(step)
        stage, slots = part.spec.number, np.arange(part.spec.global_batch_size)
        skipped = part.spec.skipped is not None
        sources, rows = rows_at(part, np.full_like(slots, step), slots)
        if not skipped:
            given = self.plan.rows(step)
            assert (given[0].tolist(), given[1].tolist()) == (sources.tolist(), rows.tolist())
            self._deliver(step, stage, sources)
        for source in np.unique(sources).tolist():
            name = self.plan.sources[source]
            mine = rows[sources == source]
            self.last_step[name] = step
            (self.skipped if skipped else self.rows)[stage, name] += mine.size
            self._draw(step, name, part.rows[name], mine)

    def _deliver(self, step, stage, sources):
        batch = self.loader[step]
        assert batch["source"].tolist() == sources.tolist()
        for row, source in enumerate(sources.tolist()):
            key = stage, self.plan.sources[source]
            self.trained[key] += int((batch["labels"][row] != IGNORE).sum())
            self.held[key] += int((batch["doc_ids"][row] >= 0).sum())
            self.slots[key] += batch["labels"][row].size

    def _draw(self, step, name, index, rows):
        mine = [number for number, (_, owner) in self.indexes.items() if owner == name]
        if not mine or self.indexes[mine[-1]][0] is not index:
            mine.append(len(self.indexes))
            self.indexes[mine[-1]] = (index, name)
        number = mine[-1]
        spans = index.spans(rows)
        for row in range(rows.size):
            self.uses[name, number][int(rows[row])] += 1
            tokens = {(number, int(rows[row]))}
            for span in range(int(spans.first[row]), int(spans.first[row] + spans.count[row])):
                first = int(spans.start[span]) + (not spans.joined[span])
                document = int(spans.document[span])
                tokens |= {
                    (document, k, "label") for k in range(first, int(spans.start[span] + spans.length[span]))
                }
            if tokens & self.known[name]:
                self.first_repeat.setdefault(name, step)
            self.known[name] |= tokens

    def epochs(self, name):
        """How often a source is read: what is left of an epoch when the rows change completes it."""
        found = 0.0
        for number, (index, owner) in self.indexes.items():
            drawn = sum(self.uses[name, number].values()) if owner == name else 0
            if not drawn:
                continue
            rest = min(drawn, index.num_rest)
            if not index.num_rest:
                found = float(ceil(found - 1e-9))  # nothing is left of the epoch, or none was under way
            if rest:
                found += (floor(found + 1e-9) + 1 - found) * rest / index.num_rest
            found += (drawn - rest) / index.num_rows
        return found


def check_every_row_is_drawn_as_often_as_planned(counted):
    for (_, number), uses in counted.uses.items():
        index = counted.indexes[number][0]
        drawn = sum(uses.values())
        full = [uses[row] for row in range(index.num_rows)]
        rest = [uses[row] for row in range(index.num_rows, index.num_rows + index.num_rest)]
        assert set(uses) <= set(range(index.num_rows + index.num_rest))
        assert (sum(rest), max(rest, default=0)) == (min(drawn, len(rest)), int(bool(rest) and drawn > 0))
        whole, part = divmod(drawn - sum(rest), index.num_rows)
        assert Counter(full) == Counter({whole: index.num_rows - part} | ({whole + 1: part} if part else {}))


def check(run):
    counted = Counted(run)
    plan = counted.plan
    errors, stops = limits(run.config)
    facts = report(plan, stops=stops)
    names = [stage.name for stage in facts.stages]
    assert names == [stage.name for stage in run.config.stages]
    for share in facts.shares:
        key = names.index(share.stage), share.source
        assert share.counted
        assert (share.rows, share.skipped_rows) == (counted.rows[key], counted.skipped[key])
        assert (share.trained, share.held, share.tokens) == (
            counted.trained[key],
            counted.held[key],
            counted.slots[key],
        )
        assert share.tokens == share.trained + share.unlabelled + share.padding
        whole = sum(count for (stage, _), count in counted.held.items() if stage == key[0])
        assert share.realised_tokens == (counted.held[key] / whole if whole else 0)
    reported = {(names.index(share.stage), share.source) for share in facts.shares}
    assert {key for key, rows in (counted.rows + counted.skipped).items() if rows} <= reported
    check_every_row_is_drawn_as_often_as_planned(counted)
    check_stages(facts, plan)
    for source in facts.sources:
        check_source(source, counted, run, {**errors, **stops})


def check_stages(facts, plan):
    for number, stage in enumerate(facts.stages):
        steps = range(*plan.span(number))
        assert (stage.start_step, stage.end_step) == (steps.start, steps.stop)
        assert stage.skipped_steps == sum(plan.at(step).skipped is not None for step in steps)
        assert stage.steps + stage.skipped_steps == len(steps)
        shares = [share for share in facts.shares if share.stage == stage.name]
        assert stage.rows == sum(share.rows for share in shares) == stage.steps * stage.global_batch_size
        assert stage.tokens == sum(share.tokens for share in shares) == stage.rows * stage.seq_len
        assert stage.skipped_rows == sum(share.skipped_rows for share in shares)
        assert stage.skipped_tokens == sum(share.skipped_tokens for share in shares)
        trained = [plan.at(step).shares for step in steps if plan.at(step).skipped is None]
        for share in shares:
            mean = sum(asked.get(share.source, 0) for asked in trained) / max(1, len(trained))
            assert share.asked == pytest.approx(mean)
    assert facts.steps == sum(stage.steps + stage.skipped_steps for stage in facts.stages)
    assert (facts.rows, facts.tokens) == (
        sum(stage.rows for stage in facts.stages),
        sum(stage.tokens for stage in facts.stages),
    )


def check_source(source, counted, run, caps):
    name = source.name
    assert source.skipped == sum(rows for (_, owner), rows in counted.skipped.items() if owner == name)
    trained = sum(rows for (_, owner), rows in counted.rows.items() if owner == name)
    assert source.drawn == trained + source.skipped
    stages = run.config.resolved_stages
    restarted = any(stage.on_change == "restart" for stage in stages)
    changes = sum(owner == name for _, owner in counted.indexes.values()) > 1
    if not restarted:
        assert source.epochs == pytest.approx(counted.epochs(name))
    lossless = name != "tiny" and all((stage.packing, stage.on_long) == ("best_fit", None) for stage in stages)
    if not changes or (lossless and not restarted):
        assert source.first_repeat == counted.first_repeat.get(name)
    elif name in counted.first_repeat:
        # A source that starts again, or of which a packing drops tokens, may then show some for the first time,
        # and so may one with documents that have no label, which no rest of an epoch holds.
        assert source.first_repeat is not None
        assert source.first_repeat <= counted.first_repeat[name]
    if name in caps:
        assert source.epochs <= caps[name] + 1e-9
    if source.gone_from is not None:
        assert source.gone_from == counted.last_step[name] + 1


def compile_or_leave(tables, folder):
    run = Run(config=parse_config(tables), folder=folder)
    try:
        run.plan()
    except ConfigError:
        assume(False)
    return run


@pytest.mark.slow
@settings(max_examples=60)
@given(tables=configs())
def test_the_report_is_what_a_simulation_of_all_steps_counts(stores, tables):
    """[P2.a, M1.b, M1.d]"""
    check(compile_or_leave(tables, stores))


@pytest.mark.deep
@settings(max_examples=3000)
@given(tables=configs())
def test_the_report_of_many_more_runs_is_what_a_simulation_counts(stores, tables):
    """[P2.a, M1.b, M1.d]"""
    check(compile_or_leave(tables, stores))
