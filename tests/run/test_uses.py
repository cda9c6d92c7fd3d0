"""Rows of a step, and uses of a document, as text and by kept fields."""

from __future__ import annotations

import json

import pytest

import tokenmill as tm


@pytest.fixture
def run(tmp_path):
    rows = [{"text": f"page {number} of the mill", "url": f"u/{number % 20}"} for number in range(30)]
    (tmp_path / "web.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = tm.PrepareOptions(keep=("url",))
    tm.prepare(tmp_path / "web.jsonl", out=tmp_path / "web", tokenizer="bytes", options=options, progress=False)
    return tm.Run.build(str(tmp_path / "web"), seq_len=32, global_batch_size=4, steps=12)


def test_what_is_the_plan_with_texts(run):
    for step in (0, 7):
        rows, ids = run.what(step), run.loader(arrays=["input_ids"])[step]["input_ids"]
        for row, use in zip(rows, run.plan().what(step), strict=True):
            assert (row.step, row.slot, row.source, row.row) == (use.step, use.slot, use.source, use.row)
            spans = [(span.document, span.start, span.length) for span in row.spans]
            assert spans == [(span.document, span.start, span.length) for span in use.spans]
            read = [int(token) for span in row.spans for token in span.ids]
            assert ids[row.slot].tolist()[: len(read)] == read[:32]
            assert row.text == tm.open_tokenizer("bytes").decode(read)
    span = rows[0].spans[0]
    assert span.text in span.record.text
    assert span.record.document == span.document
    assert (span.fields["url"], span.origin.place) == (f"u/{span.document % 20}", span.document + 1)


def test_when_by_a_field_has_the_uses_of_all_its_documents_in_order(run):
    by_number = [use for document in (7, 27) for use in run.when("web", document)]
    found = run.when("web", url="u/7")
    assert found == tuple(sorted(by_number, key=lambda use: (use.step, use.slot)))
    assert {span.document for use in found for span in use.spans} == {7, 27}
    assert run.when("web", url="nowhere") == ()


def test_when_names_what_it_needs(run):
    with pytest.raises(tm.ConfigError, match=r"when: expected a document number, or kept fields; pass"):
        run.when("web")
    with pytest.raises(tm.ConfigError, match=r"when: expected a document number, or kept fields; pass"):
        run.when("web", 3, url="u/3")
    with pytest.raises(IndexError, match="unknown source: 'wob'; did you mean 'web'"):
        run.when("wob", url="u/3")


def test_batch_at_is_the_batch_of_the_step_and_leaves_the_position(run):
    loader = run.loader(micro_batch=4)
    batches = list(run.loader(micro_batch=4))
    for step in (0, 11, 5):
        batch = loader.batch_at(step)
        assert batch.keys() == batches[step].keys()
        assert all((batch[name] == batches[step][name]).all() for name in batch)
    assert loader.step == 0
    with pytest.raises(IndexError, match="12"):
        loader.batch_at(12)
