from __future__ import annotations

import re

import pytest

from tokenmill.run.run import Run


def test_a_fork_is_written_with_its_state_and_goes_on_from_there(tokenmill, run_toml):
    """[M1.c, R1.a] Before the step the digests are those of the run; the state goes on right there."""
    new = run_toml.with_name("books.toml")
    done = tokenmill(
        "fork", run_toml, "--at", 4, "--to", new, "--name", "more-books", "--weights", "web=1, books=3"
    )
    assert (done.code, done.err) == (0, "")
    assert (
        done.lines[0] == f"wrote {new} and {new.with_name('books.state.json')}: stage 'more-books' begins at step 4"
    )
    assert re.fullmatch(rf"all batches before are those of {run_toml} \(fingerprint \w{{12}}\)", done.lines[1])
    assert len(done.lines) == 2
    old, forked = (tokenmill("batches", file, "--digest").lines for file in (run_toml, new))
    assert forked[:4] == old[:4]
    assert forked[4:6] != old[4:6]
    again = tokenmill("batches", new, "--digest", "--state", new.with_name("books.state.json"))
    assert again.lines == forked[4:]
    assert Run.from_toml(new).config.stages[1].weights == {"web": 1, "books": 3}


def test_without_weights_it_is_said_that_nothing_differs_yet(tokenmill, run_toml):
    new = run_toml.with_name("new.toml")
    done = tokenmill("fork", run_toml, "--at", 8, "--to", new)
    assert done.lines[2] == "so are all after it, until you edit stage 'fork'"
    assert tokenmill("diff", run_toml, new).lines[0] == "the same batches at all 10 steps"


def test_a_fork_as_json(tokenmill, run_toml):
    new = run_toml.with_name("new.toml")
    found = tokenmill("fork", run_toml, "--at", 6, "--to", new, "--weights", "web=1", "--json").json
    plan = Run.from_toml(new).plan()
    assert found == {
        "config": str(new),
        "state": str(new.with_name("new.state.json")),
        "stage": "late",
        "step": 6,
        "plan": plan.fingerprint[:16],
        "shared": Run.from_toml(run_toml).plan().fingerprint_at(6),
        "edited": True,
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--at", 10], r"fork: step must lie within 0:10, got 10; .*"),
        (["--at", 4, "--weights", "web"], r"--weights: must be a list of name=number, got 'web'; for example .*"),
        (["--at", 4, "--weights", "web=x"], r"--weights: must be a list of name=number, got 'web=x'; .*"),
        (["--at", 4, "--weights", "web=1,web=2"], r"--weights: must name each source once, got 'web' twice; .*"),
        (["--at", 4, "--weights", "wbe=1"], r"stage 'fork': .*, got 'wbe'; did you mean 'web'\?"),
        (["--at", 4, "--weights", "web=nan"], r"stage 'fork': weights must be positive, got {'web': nan}; .*"),
        (["--at", 4, "--name", "late"], r"fork: name must be one that no stage has .*, got 'late'; .*"),
    ],
)
def test_what_cannot_be_forked_is_refused(tokenmill, run_toml, arguments, message):
    new = run_toml.with_name("new.toml")
    done = tokenmill("fork", run_toml, *arguments, "--to", new)
    assert (done.code, done.out) == (1, "")
    assert re.fullmatch(f"error: {message}\n", done.err)
    assert not new.exists()


def test_a_file_that_is_there_stays(tokenmill, run_toml):
    before = run_toml.read_bytes()
    done = tokenmill("fork", run_toml, "--at", 4, "--to", run_toml)
    assert done.code == 1
    assert re.fullmatch(r"error: .*run\.toml: a fork must not overwrite a file, .*; choose .*\n", done.err)
    assert run_toml.read_bytes() == before
