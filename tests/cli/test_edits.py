from __future__ import annotations

import json
import re

import numpy as np
import pytest

from tokenmill.run.run import Run


@pytest.fixture
def edited(run_toml):
    """Return a function that writes run.toml with some text replaced and returns the file."""

    def write(*changes: tuple[str, str], name="other.toml", more=""):
        text = run_toml.read_text(encoding="utf-8")
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        file = run_toml.with_name(name)
        file.write_text(text + more, encoding="utf-8")
        return file

    return write


def test_the_first_difference_its_cause_and_the_rows_are_told(tokenmill, run_toml, edited):
    """[O1.c]"""
    other = edited(("books = 0.5", "books = 0.75"), ('name = "late"', 'name = "late"\nlr_scale = 0.5'))
    done = tokenmill("diff", run_toml, other)
    assert (done.code, done.err) == (1, "")
    assert done.lines[:5] == [
        "first difference at step 6 of 10 (stage 'late')",
        "first difference of the plans: stages[1].weights.books 0.5 -> 0.75",
        "changed keys:",
        "  stages[1].weights.books 0.5 -> 0.75",
        "  stages[1].lr_scale (absent) -> 0.5",
    ]
    assert re.fullmatch(r"\d+ of 16 rows differ after it \(\d+\.\d%\)", done.lines[5])
    assert len(done.lines) == 6


def test_other_changes_follow_and_the_figures_agree_with_json(tokenmill, run_toml, edited):
    other = edited(
        more='[[skip]]\nsteps = "3:5"\nreason = "spike"\n[[quarantine]]\nsource = "books"\nfrom_step = 8\n'
    )
    done = tokenmill("diff", run_toml, other)
    assert done.lines[:7] == [
        "first difference at step 3 of 10 (stage 'base')",
        "first difference of the plans: stages[1].skipped (absent) -> True",
        "changed keys:",
        "  skip[0].steps (absent) -> '3:5'",
        "  quarantine[0].source (absent) -> 'books'",
        "  quarantine[0].from_step (absent) -> 8",
        "  skip[0].reason (absent) -> 'spike'",
    ]
    shown = tokenmill("diff", run_toml, other, "--json")
    assert shown.code == 1
    found = json.loads(shown.out)
    assert (found["first_step"], found["stage"], found["same"], found["complete"]) == (3, "base", False, True)
    assert found["cause"] == {"path": "stages[1].skipped", "old": None, "new": True}
    assert found["changes"][0] == {"path": "skip[0].steps", "old": None, "new": "3:5"}
    assert found["compared_rows"] == found["total_rows"] == 3 * 8 + 4 * 4
    assert 16 <= found["differing_rows"] <= 16 + 8
    assert done.lines[7].startswith(f"{found['differing_rows']} of 40 rows differ after it (")


def test_the_same_batches_are_exit_code_0(tokenmill, run_toml, edited):
    other = edited(('name = "late"', 'name = "cool"'))
    done = tokenmill("diff", run_toml, other)
    assert (done.code, done.err) == (0, "")
    assert done.lines == [
        "the same batches at all 10 steps",
        "changed keys:",
        "  stages[1].name 'late' -> 'cool'",
    ]
    assert tokenmill("diff", run_toml, run_toml).lines == ["the same batches at all 10 steps"]
    assert tokenmill("diff", run_toml, other, "--json").json["same"] is True


def test_beyond_the_rows_that_are_compared_nothing_is_claimed(tokenmill, run_toml, edited):
    other = edited(("seed = 7", "seed = 8"))
    done = tokenmill("diff", run_toml, other, "--rows", 9)
    assert done.code == 1
    assert done.lines[0] == "first difference at step 0 of 10 (stage 'base')"
    assert re.fullmatch(
        r"\d+ of the first 16 rows after it differ \(\d+\.\d%\); the other 48 were not compared, "
        r"raise --rows to compare more",
        done.lines[-1],
    )
    stream = (("seed = 7", 'seed = 7\npacking = "concat"\nshuffle = "none"'),)
    plain = edited(*stream, name="plain.toml")
    late = edited(*stream, more='[[quarantine]]\nsource = "web"\nfrom_step = 0\ndocuments = [59]\n')
    done = tokenmill("diff", plain, late, "--rows", 9)
    assert (done.code, done.lines) == (
        1,
        [
            "no difference within the first 2 steps after step 0, where the plans begin to differ: "
            "stages[0].sources.web.quarantined (absent) -> '1:f443330c25d60ac9ec111fbb48cc882f'",
            "raise --rows to compare more",
            "changed keys:",
            "  quarantine[0].source (absent) -> 'web'",
            "  quarantine[0].from_step (absent) -> 0",
            "  quarantine[0].documents (absent) -> [59]",
        ],
    )


def test_a_foreign_config_is_compared_by_its_native_keys(tokenmill, folder):
    (folder / "tokens").mkdir()
    np.save(folder / "tokens" / "a.npy", np.arange(4000, dtype=np.uint16))
    text = '[data]\ndataset_path = "tokens"\n[train]\nbatch_size = 4\nmax_steps = 9\nseq_len = 16\n'
    (folder / "a.toml").write_text(text)
    (folder / "b.toml").write_text(text.replace("batch_size = 4", "batch_size = 5"))
    done = tokenmill("diff", folder / "a.toml", folder / "b.toml", "--world-size", 2)
    assert done.code == 1
    assert done.lines[:2] == [
        "first difference at step 0 of 9 (stage 'base')",
        "first difference of the plans: stages[0].global_batch_size 8 -> 10",
    ]
    assert done.err.count("taken as a KempnerForge config:") == 2


def test_a_config_that_is_not_there_is_an_error_of_one_line(tokenmill, run_toml):
    done = tokenmill("diff", run_toml, "nowhere.toml")
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(r"error: config not found: .*nowhere\.toml; fix the path\n", done.err)


def test_a_fork_is_written_with_its_state_and_goes_on_from_there(tokenmill, run_toml):
    """[M1.c, R1.a] Before the step the digests are those of the run; the state goes on right there."""
    new = run_toml.with_name("books.toml")
    done = tokenmill(
        "fork",
        run_toml,
        "--at",
        4,
        "--out",
        new,
        "--name",
        "more-books",
        "--weights",
        "web=1",
        "--weights",
        "books=3",
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
    done = tokenmill("fork", run_toml, "--at", 8, "--out", new)
    assert done.lines[2] == "so are all after it, until you edit stage 'fork'"
    assert tokenmill("diff", run_toml, new).lines[0] == "the same batches at all 10 steps"


def test_a_fork_as_json(tokenmill, run_toml):
    new = run_toml.with_name("new.toml")
    found = tokenmill("fork", run_toml, "--at", 6, "--out", new, "--weights", "web=1", "--json").json
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
        (["--at", 4, "--weights", "web"], r"--weights: expected a list of name=number, got 'web'; for example .*"),
        (["--at", 4, "--weights", "web=x"], r"--weights: expected a list of name=number, got 'web=x'; .*"),
        (["--at", 4, "--weights", "web=1,web=2"], r"--weights: must name each source once, got 'web' twice; .*"),
        (["--at", 4, "--weights", "wbe=1"], r"stage 'fork': .*, got 'wbe'; did you mean 'web'\?"),
        (["--at", 4, "--weights", "web=nan"], r"stage 'fork': weights must be positive, got {'web': nan}; .*"),
        (["--at", 4, "--name", "late"], r"fork: name must be one that no stage has .*, got 'late'; .*"),
    ],
)
def test_what_cannot_be_forked_is_refused(tokenmill, run_toml, arguments, message):
    new = run_toml.with_name("new.toml")
    done = tokenmill("fork", run_toml, *arguments, "--out", new)
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(f"error: {message}\n", done.err)
    assert not new.exists()


def test_a_file_that_is_there_stays(tokenmill, run_toml):
    before = run_toml.read_bytes()
    done = tokenmill("fork", run_toml, "--at", 4, "--out", run_toml)
    assert done.code == 2
    assert re.fullmatch(r"error: file exists: .*run\.toml; choose another name or remove it\n", done.err)
    assert run_toml.read_bytes() == before
