import shutil

import numpy as np
import pytest

import tokenmill
from tokenmill.config.run import parse_config
from tokenmill.run.overlap import overlaps
from tokenmill.run.run import Run
from tokenmill.store import StoreSpec, StoreWriter

LENGTHS = [5, 9, 1, 30, 12, 8, 2, 17, 9, 4, 26, 11, 3]


@pytest.fixture
def write(tmp_path, tokenizer_identity):
    """Return a function that writes a store of given documents."""

    def make(name, documents, dtype="<u2"):
        spec = StoreSpec(keys={"sequence": dtype}, tokenizer=tokenizer_identity(1000), recipe={"kind": "text"})
        offsets = np.cumsum([0, *map(len, documents)])
        with StoreWriter(tmp_path / name, spec, rebuild=True) as writer:
            writer.append({"sequence": np.concatenate(documents).astype(dtype)}, offsets)
            writer.commit()

    return make


@pytest.fixture
def documents():
    generator = np.random.default_rng(7)
    return [generator.integers(0, 1000, length) for length in LENGTHS]


@pytest.fixture
def make_run(tmp_path):
    def make(*evals, stores=("web",), quarantine=(), steps=12):
        tables = {
            "run": {"steps": steps, "global_batch_size": 4, "seq_len": 8, "weights": dict.fromkeys(stores, 1)},
            "sources": [{"name": name, "store": name} for name in stores],
            "evals": list(evals),
            "quarantine": list(quarantine),
        }
        return Run(config=parse_config(tables), folder=tmp_path)

    return make


def only(run, name="val"):
    (overlap,) = overlaps(run)[name]
    return overlap


def test_an_eval_of_other_documents_is_proven_apart(make_run, write, documents):
    """[V1.b]"""
    write("web", documents[:9])
    write("val", documents[9:])
    overlap = only(make_run({"name": "val", "store": "val"}))
    assert (overlap.by_number, overlap.by_content, overlap.first, overlap.unknown) == (None, 0, (), None)


def test_documents_that_are_trained_on_are_counted_and_named_with_their_first_step(make_run, write, documents):
    """[V1.b]"""
    write("web", [*documents[:9], documents[10]])
    write("val", documents[8:], dtype="<u4")
    run = make_run({"name": "val", "store": "val"})
    overlap = only(run)
    assert overlap.by_content == 2
    assert [(shared.document, shared.trained) for shared in overlap.first] == [(0, 8), (2, 9)]
    assert [shared.step for shared in overlap.first] == [run.plan().when("web", n)[0].step for n in (8, 9)]
    (warning,) = (text for text in run.report().warnings if "'val'" in text)
    steps = [shared.step for shared in overlap.first]
    assert "2 of its 5 documents are among those of 'web', which is trained on: " in warning
    assert (
        f"0 is document 8 there, at step {steps[0]} first, 2 is document 9 there, at step {steps[1]} first; "
        in warning
    )


def test_a_store_that_is_trained_on_is_found_by_number_without_hashes(make_run, write, documents, tmp_path):
    write("web", documents)
    shutil.rmtree(tmp_path / "web" / ".hashes")
    run = make_run({"name": "val", "store": "web", "documents": "3:6"})
    overlap = only(run)
    assert (overlap.by_number, overlap.by_content) == (3, None)
    assert [shared.document for shared in overlap.first] == [3, 4, 5]
    assert (
        overlap.unknown == f"{tmp_path / 'web'} has no hashes of its documents; "
        f"run `tokenmill verify --add-hashes {tmp_path / 'web'}`"
    )


def test_held_out_documents_are_apart_by_number_and_their_copies_are_found_by_content(make_run, write, documents):
    write("web", [*documents, documents[4]])
    overlap = only(make_run({"name": "val", "source": "web", "documents": "3:6"}))
    assert (overlap.by_number, overlap.by_content) == (0, 1)
    assert [(shared.document, shared.trained) for shared in overlap.first] == [(4, 13)]
    both = [{"name": "val", "source": "web", "documents": [3, 4, 5, 13]}]
    assert only(make_run(*both)).documents == 0


def test_a_quarantine_from_the_first_step_takes_documents_out_a_later_one_does_not(make_run, write, documents):
    write("web", documents)
    write("val", documents[5:7])
    item = {"name": "val", "store": "val"}
    early = [{"source": "web", "from_step": 0, "documents": [5, 6]}]
    assert only(make_run(item, quarantine=early)).documents == 0
    late = [{"source": "web", "from_step": 3, "documents": [5, 6]}]
    assert only(make_run(item, quarantine=late)).documents == 2


def test_each_source_is_compared_and_empty_documents_are_no_content(make_run, write, documents):
    nothing = np.empty(0, np.int64)
    write("web", [*documents[:5], nothing])
    write("books", [*documents[5:9], nothing])
    write("val", [*documents[8:], nothing])
    run = make_run({"name": "val", "store": "val"}, stores=("web", "books"))
    assert [(each.source, each.by_content) for each in overlaps(run)["val"]] == [("web", 0), ("books", 1)]


def test_the_report_tells_evals_and_what_they_hold_out(make_run, write, documents):
    write("web", documents)
    run = make_run({"name": "val", "source": "web", "documents": "3:6", "every": 4})
    report = run.report()
    (facts,) = report.evals
    assert (facts.documents, facts.held_out, facts.every, facts.seq_len) == (3, 3, 4, 8)
    assert facts.labels == sum(LENGTHS[3:6]) - 3
    fates = report.sources[0].fates
    assert fates.dropped == {"held out": sum(LENGTHS[3:6])}
    assert fates.tokens == fates.trained + fates.masked + sum(fates.dropped.values())
    assert report.to_json()["evals"][0]["overlaps"][0]["by_content"] == 0
    assert not [warning for warning in report.warnings if "eval" in warning]


def test_live_text_cannot_be_compared(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a mill grinds"}\n' * 30)
    tokenmill.prepare(tmp_path / "a.jsonl", out=tmp_path / "val", tokenizer="bytes", progress=False)
    tables = {
        "run": {"steps": 2, "global_batch_size": 2, "seq_len": 8},
        "sources": [{"name": "web", "documents": ["a.jsonl"], "tokenizer": "bytes", "live": True}],
        "evals": [{"name": "val", "store": "val"}],
    }
    overlap = only(Run(config=parse_config(tables), folder=tmp_path))
    assert (overlap.by_number, overlap.by_content) == (None, None)
    assert overlap.unknown == "'web' is live text, of which documents have no hashes; prepare it"
