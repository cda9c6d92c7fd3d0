"""A run of some epochs: every row as often, the last step filled, and said."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.config.run import parse_config
from tokenmill.errors import ConfigError
from tokenmill.run.run import Run
from tokenmill.run.specs import EpochCount

LENGTHS = {"web": [5, 9, 1, 30, 12, 8, 2, 17, 9, 4, 26, 11, 3], "chat": [7, 3, 3, 12, 20]}


@pytest.fixture
def make_run(tmp_path, make_store):
    def make(*sources, tables=None, **run):
        for seed, name in enumerate(sources):
            if not (tmp_path / name).exists():
                make_store(name, LENGTHS[name], seed=seed)
        tables = {
            "run": {"global_batch_size": 4, "seq_len": 8} | run,
            "sources": [{"name": name, "store": name} for name in sources],
            **(tables or {}),
        }
        return Run(config=parse_config(tables), folder=tmp_path)

    return make


def rows_read(run):
    """Return how often each row of each source is drawn, in all steps."""
    plan = run.plan()
    drawn = [plan.rows(step) for step in range(plan.steps)]
    return Counter(
        (plan.sources[source], row)
        for sources, rows in drawn
        for source, row in zip(sources, rows.tolist(), strict=True)
    )


@pytest.mark.parametrize("sources", [("web",), ("web", "chat")])
@given(epochs=st.integers(1, 4), batch=st.integers(1, 9))
def test_every_row_is_read_as_often_and_the_last_step_begins_another_epoch(make_run, sources, epochs, batch):
    run = make_run(*sources, epochs=epochs, global_batch_size=batch)
    read = rows_read(run)
    sizes = {name: run.plan().stages[0].rows[name].num_rows for name in sources}
    total = sum(sizes.values())
    assert run.epochs == EpochCount(epochs=epochs, rows=total, filled=run.plan().steps * batch - epochs * total)
    assert 0 <= run.epochs.filled < batch
    assert set(read) == {(name, row) for name in sources for row in range(sizes[name])}
    assert (
        Counter(read.values())
        == Counter({epochs: total - run.epochs.filled, epochs + 1: run.epochs.filled}) - Counter()
    )
    assert run.report().epochs == run.epochs


def test_the_order_of_epochs_is_that_of_as_many_steps(make_run):
    run = make_run("web", epochs=3)
    steps = make_run("web", steps=run.plan().steps)
    assert run.plan().fingerprint == steps.plan().fingerprint
    assert run.lasting(epochs=1).plan().fingerprint_at(3) == run.plan().fingerprint_at(3)


def test_part_of_an_epoch_is_rounded_up_to_whole_rows(make_run):
    run = make_run("web", epochs=0.5, global_batch_size=1)
    size = run.plan().stages[0].rows["web"].num_rows
    assert run.plan().steps == -(-size // 2)
    assert set(rows_read(run).values()) == {1}


def test_documents_in_quarantine_or_held_out_are_in_no_epoch(make_run):
    quarantine = [{"source": "web", "from_step": 0, "documents": [3, 7]}]
    evals = [{"name": "val", "source": "chat", "documents": "0:2"}]
    run = make_run(
        "web", "chat", epochs=2, packing="padded", seq_len=30, tables={"quarantine": quarantine, "evals": evals}
    )
    assert run.epochs.rows == len(LENGTHS["web"]) - 2 + len(LENGTHS["chat"]) - 2
    assert set(rows_read(run).values()) <= {2, 3}
    assert (run.plan().when("web", 3), run.plan().when("chat", 1)) == ((), ())


def test_what_an_epoch_comes_to_is_said_by_the_plan_and_a_loader(make_run, caplog):
    run = make_run("web", epochs=3)
    rows, steps = run.epochs.rows, run.plan().steps
    assert steps * 4 - 3 * rows == 1
    filled = "the last is filled with 1 row of the next epoch"
    said = f"3 epochs of {rows} rows are {steps} steps: {filled}"
    with caplog.at_level("INFO", logger="tokenmill"):
        run.loader()
    assert said in [record.getMessage() for record in caplog.records]


def test_what_an_epoch_comes_to_is_plain_english():
    assert EpochCount(epochs=1, rows=1, filled=1).sentence(1) == (
        "1 epoch of 1 row is 1 step: the last is filled with 1 row of the next epoch"
    )
    assert EpochCount(epochs=2, rows=8, filled=0).sentence(4) == "2 epochs of 8 rows are 4 steps: all are full"


@pytest.mark.parametrize(
    ("run", "tables", "message"),
    [
        ({"epochs": 3, "steps": 5}, {}, "must have steps, tokens or epochs, got 5 and 3; leave one"),
        ({"epochs": 0}, {}, "epochs must be positive, got 0"),
        ({}, {}, "no length; set steps or epochs"),
        ({"epochs": 2, "weights": {"web": 1}}, {}, "leave them out, or say steps"),
        ({"epochs": 2, "temperature": 2}, {}, "leave them out, or say steps"),
        ({"epochs": 2}, {"stages": [{"name": "a", "start_step": 0}]}, "got stages as well; say the steps"),
        ({"epochs": 2}, {"quarantine": [{"source": "web", "from_step": 3}]}, "got quarantine of 'web' as well"),
        ({"epochs": 2}, {"skip": [{"steps": "90:99"}]}, "steps must lie within 0:"),
        (
            {"epochs": 3},
            {"sources": [{"name": "web", "store": "web", "max_epochs": 2, "on_exhausted": "stop"}]},
            "epochs reads every source 3 times, got 'web' that may be read 2 times; leave out max_epochs",
        ),
        (
            {"epochs": 1.5},
            {"sources": [{"name": "web", "store": "web", "on_exhausted": "stop"}]},
            "epochs reads every source 1.5 times, got 'web' that may be read 1 times",
        ),
    ],
)
def test_what_contradicts_epochs_is_refused(make_run, run, tables, message):
    with pytest.raises(ConfigError, match=message):
        make_run("web", tables=tables, **run).plan()


def test_a_fork_of_epochs_has_their_steps(make_run, tmp_path):
    run = make_run("web", epochs=3)
    run.fork(at=4, to=tmp_path / "fork.toml")
    forked = Run.from_toml(tmp_path / "fork.toml")
    assert forked.plan().fingerprint == run.plan().fingerprint
    assert (forked.epochs, forked.config.run.steps) == (None, run.plan().steps)


def test_a_fork_of_a_config_file_with_epochs_has_their_steps_and_batches(make_run, tmp_path):
    make_run("web", "chat", epochs=3)
    (tmp_path / "run.toml").write_text(
        "[run]\nepochs = 3\nglobal_batch_size = 4\nseq_len = 8\n"
        '[[sources]]\nname = "web"\nstore = "web"\n[[sources]]\nname = "chat"\nstore = "chat"\n'
    )
    run = Run.from_toml(tmp_path / "run.toml")
    run.fork(at=4, to=tmp_path / "fork.toml")
    forked = Run.from_toml(tmp_path / "fork.toml")
    assert forked.plan().fingerprint == run.plan().fingerprint
