"""The state of a build is read from its folder, and one table decides what a request does in it."""

import pytest
from tests.build.corpus import some_texts, write_file

from tokenmill.build import PrepareOptions, prepare
from tokenmill.build.journal import Journal
from tokenmill.build.publish import publish, read_publication
from tokenmill.build.state import (
    ACTIONS,
    Empty,
    Finished,
    Publishing,
    Request,
    Running,
    action_of,
    read_state,
    state_name,
)
from tokenmill.build.unit import SegmentWriter

TEXTS = some_texts(60)


def build(folder, *, rebuild=False, **options):
    options = PrepareOptions(chunk_bytes=1500, **options)
    return prepare(folder / "in", out=folder / "out", workers=1, rebuild=rebuild, progress=False, options=options)


def stopped_build(folder, monkeypatch, units, **options):
    """Stop a build after some finished units."""
    first, keys = SegmentWriter.append, []

    def append(self, *arguments):
        keys.append(self.name)
        if len(set(keys)) > units:
            raise ZeroDivisionError
        first(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(SegmentWriter, "append", append)
        with pytest.raises(ZeroDivisionError):
            build(folder, **options)


@pytest.fixture
def folder(tmp_path):
    write_file(tmp_path / "in" / "a.jsonl", TEXTS)
    return tmp_path


def test_a_build_goes_from_empty_over_running_and_publishing_to_finished(folder, monkeypatch):
    out, names = folder / "out", []
    assert isinstance(read_state(out), Empty)
    stopped_build(folder, monkeypatch, 0)
    state = read_state(out)
    assert isinstance(state, Running)
    assert (state.build.rebuild, state.has_units, state.base) == (False, False, None)
    stopped_build(folder, monkeypatch, 2)
    assert read_state(out).has_units

    def crash(journal, publication):
        monkeypatch.setattr("tokenmill.build.publish._finish", lambda *_: 1 / 0)
        publish(journal, publication)

    with monkeypatch.context() as patch:
        patch.setattr("tokenmill.build.build.publish", crash)
        with pytest.raises(ZeroDivisionError):
            build(folder)
    monkeypatch.undo()
    names.append(state_name(Journal(out)))
    assert isinstance(read_state(out), Publishing)
    assert read_publication(Journal(out)).ledger.counts.documents == 60
    build(folder)
    assert isinstance(read_state(out), Finished)
    names.append(state_name(Journal(out)))
    assert names == ["publishing", "finished"]


def actions(state, identity, other):
    return [
        action_of(state, Request(identity=asked, rebuild=rebuild))
        for rebuild in (False, True)
        for asked in (identity, other)
    ]


def test_the_table_has_an_action_for_every_state_and_request(folder, monkeypatch):
    """In the order: the same request, another one, and both with `rebuild`."""
    rows = {name: list(row.values()) for name, row in ACTIONS.items()}
    assert actions(Empty(), {"a": 1}, {"a": 2}) == rows["empty"]
    stopped_build(folder, monkeypatch, 2)
    running = read_state(folder / "out")
    assert actions(running, running.build.identity, {"a": 2}) == rows["running"]
    build(folder)
    finished = read_state(folder / "out")
    assert actions(finished, finished.ledger.identity, {"a": 2}) == rows["finished"]
    stopped_build(folder, monkeypatch, 2, rebuild=True)
    replacing = read_state(folder / "out")
    assert replacing.build.rebuild
    assert actions(replacing, replacing.build.identity, {"a": 2}) == rows["replacing"]


def test_a_running_build_without_a_finished_unit_makes_way_for_another_request(folder, monkeypatch):
    stopped_build(folder, monkeypatch, 0)
    assert action_of(read_state(folder / "out"), Request(identity={"a": 2}, rebuild=False)) == "begin"
    build(folder)
    finished = read_state(folder / "out").ledger.identity
    write_file(folder / "in" / "b.jsonl", TEXTS)
    stopped_build(folder, monkeypatch, 0)
    state = read_state(folder / "out")
    assert action_of(state, Request(identity={"a": 2}, rebuild=False)) == "reject"
    assert action_of(state, Request(identity=finished, rebuild=False)) == "resume"
