"""Old spellings of a config, and what is said of them."""

from __future__ import annotations

import json
import logging

import pytest

import tokenmill as tm
from tokenmill.config import parse_config
from tokenmill.config.run import to_toml
from tokenmill.errors import ConfigError
from tokenmill.run.fork import native_tables
from tokenmill.run.history import PlanRecord, changes

RUN = {"steps": 6, "global_batch_size": 2, "seq_len": 16}
SOURCES = [{"name": "web", "store": "web"}]


@pytest.fixture
def warnings(caplog):
    """Return a function that returns what was warned of since it was last called."""
    caplog.set_level(logging.WARNING, logger="tokenmill")

    def take():
        messages = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return messages

    return take


def either(old, packed, alone):
    advice = f"write on_long = {packed!r}, or for padded rows, pairs and groups on_long = {alone!r}"
    return f"{old} is an old spelling; {advice}"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"split": "forbid"}, "split = 'forbid' is an old spelling; write on_long = 'stop'"),
        (
            {"split": "truncate_start"},
            "split = 'truncate_start' is an old spelling; write on_long = 'truncate_start'",
        ),
        ({"split": "allow"}, "split = 'allow' is an old spelling; leave it out"),
        (
            {"split": "allow", "on_long": "drop"},
            "split = 'allow' with on_long = 'drop' is an old spelling; write on_long = 'drop'",
        ),
        ({"on_long": "cut"}, either("on_long = 'cut'", "split", "truncate_end")),
        (
            {"on_long": "cut", "packing": "padded"},
            "on_long = 'cut' is an old spelling; write on_long = 'truncate_end'",
        ),
        (
            {"on_long": "cut", "split": "truncate_end"},
            "split = 'truncate_end' with on_long = 'cut' is an old spelling; write on_long = 'truncate_end'",
        ),
        (
            {"shuffle": "block"},
            "shuffle = 'block' is read as 'window', another order of rows; write 'window', and finish runs that "
            "began with 'block' with the release that they began with",
        ),
    ],
)
def test_a_warning_names_the_new_spelling_once(warnings, keys, message):
    parse_config({"run": RUN | keys, "sources": SOURCES}, where="run.toml")
    assert warnings() == [f"run.toml: run: {message}"]
    if "shuffle" not in keys:
        parse_config({"run": RUN, "sources": SOURCES, "evals": [{"name": "e", "store": "val", **keys}]})
        assert warnings() == [f"config: evals[0]: {message}"]


def test_a_stage_that_overrides_its_run_is_told_what_to_write(warnings):
    stages = [{"name": "a", "start_step": 0, "split": "allow"}, {"name": "b", "start_step": 3, "on_long": "cut"}]
    parse_config({"run": RUN | {"on_long": "truncate_start"}, "sources": SOURCES, "stages": stages})
    allow = either("split = 'allow'", "split", "stop")
    assert warnings() == [
        f"config: stages[0]: {allow}",
        "config: stages[1]: on_long = 'cut' is an old spelling; write on_long = 'truncate_start'",
    ]


def test_the_new_spelling_is_silent(warnings):
    for value in (None, "split", "truncate_end", "truncate_start", "drop", "stop"):
        keys = {} if value is None else {"on_long": value}
        stages = [{"name": "a", "start_step": 0, "shuffle": "window", **keys}]
        evals = [{"name": "e", "store": "val", **keys}]
        parse_config({"run": RUN | keys, "sources": SOURCES, "stages": stages, "evals": evals})
        tm.RunConfig(**RUN, **keys)
    assert warnings() == []


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"split": "cut"}, r"run: split must be one of allow, .*, got 'cut'"),
        ({"split": 5}, r"run: split must be one of allow, .*, got '5'"),
        ({"split": ["allow"]}, "run: split must be one of allow"),
        ({"on_long": ["cut"]}, "run.on_long: expected a string"),
        ({"on_long": "cut", "packing": ["padded"]}, "run.packing: expected a string"),
        ({"on_long": "forbid"}, "run: on_long must be one of split, .*, got 'forbid'"),
        ({"on_long": "drop", "split": "forbid"}, "got 'forbid' with on_long = 'drop'; remove split"),
        ({"shuffle": "blocks"}, "run: shuffle must be one of full, window, none, got 'blocks'"),
    ],
)
def test_other_values_are_rejected_by_key(keys, message):
    with pytest.raises(ConfigError, match=message):
        parse_config({"run": RUN | keys, "sources": SOURCES})


@pytest.mark.parametrize("tables", [{"run": 5}, {"run": RUN, "stages": 5}, {"run": RUN, "evals": [5]}])
def test_what_is_no_table_is_left_to_the_reader(tables):
    with pytest.raises(ConfigError, match=r"expected a (table|list of tables)"):
        parse_config(tables | {"sources": SOURCES})


def test_records_made_in_python_take_old_keys_with_a_warning(warnings):
    assert tm.RunConfig(**RUN, split="forbid") == tm.RunConfig(**RUN, on_long="stop")
    assert tm.RunConfig(**RUN, shuffle="block") == tm.RunConfig(**RUN, shuffle="window")
    assert tm.EvalConfig(name="e", store="val", packing="padded", on_long="cut").on_long == "truncate_end"
    assert tm.StageConfig(name="a", start_step=0, split="truncate_end").on_long == "truncate_end"
    told = [message.partition(" is ")[0] for message in warnings()]
    assert told == [
        "RunConfig: split = 'forbid'",
        "RunConfig: shuffle = 'block'",
        "EvalConfig: on_long = 'cut'",
        "StageConfig: split = 'truncate_end'",
    ]
    with pytest.raises(ConfigError, match="RunConfig: split must be one of"):
        tm.RunConfig(**RUN, split="cut")
    assert "split" not in tm.RunConfig.__dataclass_fields__


def test_native_output_has_the_new_spelling(tmp_path, warnings):
    keys = {"split": "truncate_end", "shuffle": "block"}
    run = tm.Run.from_tables({"run": RUN | keys, "sources": SOURCES}, folder=tmp_path)
    assert len(warnings()) == 2
    text = to_toml(run.translation.tables)
    assert "split" not in text
    assert 'on_long = "truncate_end"' in text
    assert 'shuffle = "window"' in text


@pytest.mark.parametrize("has_store", [True, False])
def test_what_is_written_for_an_old_config_has_the_new_spelling(make_store, tmp_path, has_store):
    """Without the store, only where its kind does not matter."""
    if has_store:
        make_store("web", [40] * 60)
    old = to_toml({"run": RUN | {"on_long": "cut", "split": "allow"}, "sources": SOURCES})
    (tmp_path / "old.toml").write_text(old)
    run = tm.Run.from_toml(tmp_path / "old.toml")
    word = "split" if has_store else "cut"
    assert native_tables(run, run.translation)["run"] == RUN | {"on_long": word}
    if has_store:
        fork = run.fork(at=3, to=tmp_path / "new.toml")
        assert 'on_long = "split"' in fork.config.read_text()


def test_a_state_of_an_old_config_loads_with_the_new_one(make_store, tmp_path):
    make_store("web", [40] * 60)
    batches = {}
    for name, keys in (
        ("old", {"split": "truncate_end", "packing": "padded"}),
        ("new", {"on_long": "truncate_end", "packing": "padded"}),
    ):
        run = tm.Run.from_tables({"run": RUN | keys, "sources": SOURCES}, folder=tmp_path, name="run")
        loader = run.loader(micro_batch=1, threads=0)
        if name == "old":
            next(iter(loader))
            state = json.loads(json.dumps(loader.state_dict()))
        loader.load_state_dict(state)
        batches[name] = [batch["input_ids"].tolist() for batch in loader]
    assert len(batches["old"]) == 2 * RUN["steps"] - 1
    assert batches["old"] == batches["new"]


def test_a_plan_that_was_recorded_with_old_keys_shows_no_difference(make_store, tmp_path):
    make_store("web", [40] * 60)
    new = tm.Run.from_tables({"run": RUN | {"on_long": "split"}, "sources": SOURCES}, folder=tmp_path)
    record = PlanRecord.of(new.plan(), new.config)
    old = PlanRecord(
        version=record.version,
        contract=record.contract,
        stages=record.stages,
        config={"run": RUN | {"split": "allow", "on_long": "cut"}, "sources": SOURCES},
    )
    assert changes(old, record) == []
