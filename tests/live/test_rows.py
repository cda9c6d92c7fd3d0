"""Live text as a source of a plan."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tokenmill.errors import PlanError
from tokenmill.loader.drawn import live_rows
from tokenmill.packing.stored import stored_rows
from tokenmill.run.run import Run


@pytest.fixture
def stage(tmp_path):
    lines = [json.dumps({"text": "the mill grinds " * (1 + number % 9)}) for number in range(40)]
    (tmp_path / "web.jsonl").write_text("\n".join(lines))
    tables = {
        "run": {"steps": 4, "global_batch_size": 4, "seq_len": 24, "weights": {"books": 1, "web": 1}},
        "sources": [
            {"name": "books", "documents": ["web.jsonl"], "tokenizer": "bytes"},
            {"name": "web", "documents": ["web.jsonl"], "tokenizer": "bytes", "live": True},
        ],
    }
    return Run.from_tables(tables, folder=tmp_path).plan().stages[0]


def test_each_source_is_either_stored_or_live(stage):
    assert (set(stored_rows(stage)), set(live_rows(stage))) == ({"books"}, {"web"})
    assert {name: rows.has_epochs for name, rows in stage.rows.items()} == {"books": True, "web": False}


@pytest.mark.parametrize(
    "ask",
    [
        lambda rows: rows.fates(),
        lambda rows: rows.held(np.arange(2)),
        lambda rows: rows.spans(np.arange(2)),
        lambda rows: rows.rows_of(np.arange(2)),
    ],
)
def test_questions_about_documents_of_live_text_raise_a_plan_error(stage, ask):
    with pytest.raises(PlanError, match=r"web\.jsonl is live text.*remove live = true to prepare the text once"):
        ask(stage.rows["web"])


def test_live_text_has_an_epoch_without_an_end_and_nothing_before_it(stage):
    rows = stage.rows["web"]
    assert rows.num_rows > 10**18
    assert (rows.num_rest, rows.index_arrays, rows.window_starts(rest=False)) == (0, (), None)
    assert rows.following(rows, None) is rows
