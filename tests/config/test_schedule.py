"""From a config to parts: weights that are tempered, weighed by tokens or ramped, caps, and every refusal."""

from fractions import Fraction

import numpy as np
import pytest

from tokenmill.config.run import parse_config
from tokenmill.errors import ConfigError
from tokenmill.plan.report import report
from tokenmill.run.run import Run
from tokenmill.run.specs import tokens_of_a_row

RUN = {"steps": 30, "global_batch_size": 12, "seq_len": 16, "seed": 5}


@pytest.fixture
def run_of(make_store, tmp_path):
    """Make a run over a store of long documents and one of short ones, which leave more of a row empty."""
    make_store("long", [33] * 200)
    make_store("short", [9] * 200, seed=1)

    def make(*stages, sources=None, **run):
        tables = {
            "run": RUN | run,
            "sources": sources or [{"name": name, "store": name} for name in ("long", "short")],
            "stages": list(stages) or [{"name": "base", "start_step": 0, "weights": {"long": 1, "short": 1}}],
        }
        return Run(config=parse_config(tables), folder=tmp_path)

    return make


def counts(run):
    """Return how many rows each step draws of the first and the second source."""
    plan = run.plan()
    return [np.bincount(plan.rows(step)[0], minlength=2).tolist() for step in range(plan.steps)]


BASE = {"name": "base", "start_step": 0, "weights": {"long": 16, "short": 1}}


@pytest.mark.parametrize(("temperature", "share"), [(1, 16 / 17), (2, 4 / 5), (4, 2 / 3), (0.5, 256 / 257)])
def test_a_temperature_makes_weights_more_alike(run_of, temperature, share):
    run = run_of(BASE, temperature=temperature)
    assert run.plan().at(0).shares["long"] == pytest.approx(share, rel=1e-9)
    stage = run_of({**BASE, "temperature": temperature}, temperature=9)
    assert stage.plan().fingerprint == run.plan().fingerprint


def test_weights_may_be_shares_of_tokens(run_of):
    """[M1] Rows of short documents are packed in part; by tokens they are drawn more often."""
    run = run_of(
        {"name": "base", "start_step": 0, "weights": {"long": 3, "short": 1}}, weigh_by="tokens", steps=400
    )
    plan = run.plan()
    stage = plan.stages[0]
    means = {name: tokens_of_a_row(index) for name, index in stage.rows.items()}
    assert means == {"long": Fraction(16), "short": Fraction(9)}
    rows = np.sum(counts(run), axis=0)
    tokens = rows * [float(means["long"]), float(means["short"])]
    assert tokens[0] / tokens.sum() == pytest.approx(0.75, abs=1e-3)
    assert plan.at(0).shares["short"] == pytest.approx((1 / 9) / (3 / 16 + 1 / 9))


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_a_ramp_goes_from_the_stage_before_to_its_own_weights(run_of, shape):
    run = run_of(
        {"name": "base", "start_step": 0, "weights": {"long": 1}},
        {"name": "late", "start_step": 10, "weights": {"short": 1}, "ramp": shape, "ramp_steps": 8},
    )
    found = counts(run)
    assert found[:10] == [[12, 0]] * 10
    assert found[18:] == [[0, 12]] * 12
    late = [short for _, short in found[10:18]]
    assert late == sorted(late)
    assert sum(late) == 48
    assert [run.plan().at(step).stage for step in (9, 10, 18)] == ["base", "late", "late"]
    assert run.plan().span(1) == (10, 30)


def test_a_ramp_may_say_where_it_starts(run_of):
    run = run_of(
        {
            "name": "base",
            "start_step": 0,
            "weights": {"short": 1},
            "ramp": "linear",
            "ramp_steps": 4,
            "ramp_from": {"long": 1, "short": 1},
        }
    )
    assert [run.plan().at(step).shares for step in (0, 3, 4)] == [
        {"long": 0.4375, "short": 0.5625},
        {"long": 0.0625, "short": 0.9375},
        {"short": 1.0},
    ]


def test_sources_stop_repeat_or_are_refused_when_they_are_used_up(run_of):
    """[M1.d]"""
    sources = [{"name": "long", "store": "long"}, {"name": "short", "store": "short", "on_exhausted": "stop"}]
    found = np.array(counts(run_of(sources=sources)))
    rows = run_of().plan().stages[0].rows["short"].num_rows
    assert found.sum(axis=0).tolist() == [360 - min(rows, 180), min(rows, 180)]
    found = np.array(counts(run_of(sources=sources, steps=60)))
    assert found[:, 1].sum() == rows
    assert (found.sum(axis=1) == 12).all()
    for values in ({"on_exhausted": "error"}, {"max_epochs": 1}):
        sources[1] = {"name": "short", "store": "short", **values}
        with pytest.raises(ConfigError, match=r"source 'short': max_epochs must not be passed, got 1\.\d+ epochs"):
            run_of(sources=sources, steps=60).plan()
    sources[1] = {"name": "short", "store": "short", "on_exhausted": "repeat"}
    assert run_of(sources=sources, steps=60).plan().fingerprint == run_of(steps=60).plan().fingerprint


LATE = {"name": "late", "start_step": 10, "weights": {"short": 1}}


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (
            {"ramp": "liner", "ramp_steps": 3},
            "stage 'late': ramp must be one of linear, cosine, got 'liner'; did you mean 'linear'?",
        ),
        (
            {"ramp": "linear"},
            "stage 'late': a ramp must have ramp_steps of at least 1, got none; say how many",
        ),
        (
            {"ramp": "linear", "ramp_steps": 0},
            "stage 'late': a ramp must have ramp_steps of at least 1, got 0; say how many",
        ),
        (
            {"ramp": "linear", "ramp_steps": 21},
            "stage 'late': ramp_steps must be at most the 20 steps of the stage, got 21; shorten it",
        ),
        (
            {"ramp_steps": 3},
            'stage \'late\': ramp_steps is for a ramp, got no ramp; add ramp = "linear" or "cosine"',
        ),
        (
            {"ramp_from": {"long": 1}},
            'stage \'late\': ramp_from is for a ramp, got no ramp; add ramp = "linear" or "cosine"',
        ),
        (
            {"ramp": "linear", "ramp_steps": 3, "ramp_from": {"lang": 1}},
            "stage 'late', ramp_from: weights must name sources, got 'lang'; did you mean 'long'?",
        ),
        ({"lr_scale": 0.0}, "stage 'late': lr_scale must be positive, got 0.0; leave it out for 1"),
        (
            {"temperature": 1e-5, "weights": {"short": 0.1}},
            "stage 'late': temperature = 1e-05 makes a weight 0 or infinite; choose a value closer to 1",
        ),
        (
            {"temperature": 1e-5, "weights": {"short": 3}},
            "stage 'late': temperature = 1e-05 makes a weight 0 or infinite; choose a value closer to 1",
        ),
        ({"temperature": -1}, "stage 'late': temperature must be positive, got -1; leave it out for 1"),
        (
            {"weigh_by": "bytes"},
            "stage 'late': weigh_by must be one of rows, tokens, got 'bytes'; did you mean 'tokens'?",
        ),
        ({"start_step": -1}, "stage 'late': start_step must not be negative, got -1; count from 0"),
    ],
)
def test_stages_that_make_no_sense_are_refused(run_of, stage, message):
    with pytest.raises(ConfigError) as error:
        run_of(BASE, LATE | stage).plan()
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            {"on_exhausted": "halt", "store": "x"},
            "source 'x': on_exhausted must be one of repeat, stop, error, got 'halt'; choose one of them",
        ),
        (
            {"on_exhausted": "repeat", "max_epochs": 2, "store": "x"},
            "source 'x': on_exhausted = repeat is for sources without a limit, got max_epochs 2; "
            "leave one of the two out",
        ),
        (
            {},
            "source 'x': expected a store, or documents with a tokenizer, but neither is set; "
            'for example store = "stores/web"',
        ),
        (
            {"store": "x", "documents": ["y"], "tokenizer": "bytes"},
            "source 'x': expected a store, or documents with a tokenizer, but both are set; "
            'for example store = "stores/web"',
        ),
        (
            {"documents": ["y"]},
            "source 'x': `documents` without a tokenizer; "
            'for example tokenizer = "path/to/tokenizer.json", or "bytes"',
        ),
    ],
)
def test_sources_that_make_no_sense_are_refused(source, message):
    with pytest.raises(ConfigError) as error:
        parse_config({"run": RUN, "sources": [{"name": "x", **source}]})
    assert str(error.value) == message


def test_a_ramp_of_the_first_stage_must_say_where_it_starts(run_of):
    with pytest.raises(ConfigError) as error:
        run_of(BASE | {"ramp": "linear", "ramp_steps": 3}).plan()
    assert str(error.value) == (
        "stage 'base': a ramp in the first stage needs weights to start from; add ramp_from = { ... }"
    )


def test_text_is_prepared_when_it_is_first_used_and_then_found(tmp_path):
    (tmp_path / "texts.jsonl").write_text("".join(f'{{"text": "document {i} {"x" * i}"}}\n' for i in range(50)))
    tables = {
        "run": RUN | {"steps": 5, "global_batch_size": 2},
        "sources": [{"name": "x", "documents": ["texts.jsonl"], "tokenizer": "bytes"}],
    }
    first = Run(config=parse_config(tables), folder=tmp_path)
    assert first.plan().rows(0)[1].size == 2
    assert first.stores["x"].num_documents == 50
    again = Run(config=parse_config(tables), folder=tmp_path)
    assert again.plan().fingerprint == first.plan().fingerprint
    assert len(list((tmp_path / ".tokenmill" / "stores").glob("*/manifest.json"))) == 1


@pytest.mark.parametrize(
    ("sizes", "options", "share"),
    [
        ("tokens", {}, 33 / 42),
        ("documents", {}, 1 / 2),
        ("rows", {}, 0.6666),
        ("tokens", {"temperature": 2}, 33**0.5 / (33**0.5 + 9**0.5)),
        ("tokens", {"weigh_by": "tokens"}, (33 / 16) / (33 / 16 + 9 / 9)),
    ],
)
def test_weights_may_be_the_sizes_of_the_sources(run_of, sizes, options, share):
    """[M1] 200 documents of 33 tokens, cut into rows of 17, and 200 of 9, one a row."""
    run = run_of({"name": "base", "start_step": 0}, weights=sizes, **options)
    assert run.plan().at(0).shares["long"] == pytest.approx(share, abs=1e-3)
    of_stage = run_of({"name": "base", "start_step": 0, "weights": sizes}, **options)
    assert of_stage.plan().fingerprint == run.plan().fingerprint


def test_by_rows_every_source_is_read_equally_often(run_of):
    plan = run_of({"name": "base", "start_step": 0, "weights": "rows"}, steps=500).plan()
    first, second = (source.epochs for source in report(plan).sources)
    assert first == pytest.approx(second, abs=0.01)
    assert first > 5


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("token", "stages.0..weights: expected a table of numbers or one of tokens, rows, documents, got 'token'"),
        ({"long": "1"}, "stages.0..weights: expected a table of numbers or one of tokens, rows, documents, got"),
    ],
)
def test_weights_that_are_neither_numbers_nor_sizes_are_refused(run_of, weights, message):
    with pytest.raises(ConfigError, match=message):
        run_of({"name": "base", "start_step": 0, "weights": weights})


def test_the_size_of_live_text_is_not_known(run_of):
    live = {"name": "live", "documents": ["x.jsonl"], "tokenizer": "bytes", "live": True}
    run = run_of(
        {"name": "base", "start_step": 0}, weights="tokens", sources=[{"name": "long", "store": "long"}, live]
    )
    with pytest.raises(ConfigError) as caught:
        run.plan()
    assert str(caught.value) == (
        "stage 'base': weights by size cannot be combined with live text in 'live'; write numbers"
    )


def test_an_empty_source_has_no_size(run_of, make_store):
    make_store("short", [])
    with pytest.raises(
        ConfigError, match="source 'short': it has no tokens, so weights = 'tokens' gives it no share"
    ):
        run_of({"name": "base", "start_step": 0, "weights": "tokens"}).plan()


def test_a_ramp_leads_from_shares_to_shares_whatever_their_scale(run_of):
    ramp = {"name": "ramp", "start_step": 10, "weights": "tokens", "ramp": "linear", "ramp_steps": 10}
    plan = run_of({"name": "base", "start_step": 0, "weights": {"long": 1, "short": 1}}, ramp).plan()
    begin, end = 1 / 2, 33 / 42
    assert plan.at(15).shares["long"] == pytest.approx((begin + end) / 2, abs=0.04)
    assert plan.at(20).shares["long"] == pytest.approx(end, abs=1e-9)
