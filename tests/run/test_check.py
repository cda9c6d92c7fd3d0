"""A record of coming batches, and the check against it: what changed is found before the first step."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import msgspec
import numpy as np
import pytest

import tokenmill as tm
from tokenmill.errors import ConfigError
from tokenmill.run import check
from tokenmill.run.check import read_record

RECORDS = [{"text": f"document {number} has {'some ' * (number % 7)}words"} for number in range(120)]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    for name in ("web", "books"):
        tm.prepare(RECORDS, out=tmp_path / name, tokenizer="bytes")
    file = tmp_path / "run.toml"
    file.write_text(
        "[run]\nsteps = 12\nglobal_batch_size = 4\nseq_len = 32\nweights = { web = 3, books = 1 }\n"
        '[[sources]]\nname = "web"\nstore = "web"\n[[sources]]\nname = "books"\nstore = "books"\n'
        '[[stages]]\nname = "main"\nstart_step = 0\n'
        '[[stages]]\nname = "late"\nstart_step = 6\nglobal_batch_size = 2\n'
        '[[skip]]\nsteps = "3:5"\n'
    )
    return file


@pytest.fixture
def record_file(run_file: Path, tmp_path: Path) -> Path:
    tm.Run.from_toml(run_file).record_batches(tmp_path / "record.json")
    return tmp_path / "record.json"


def checked(run_file: Path, record_file: Path) -> check.BatchCheck:
    return tm.Run.from_toml(run_file).check_batches(record_file)


def test_an_unchanged_run_has_all_recorded_batches(run_file, record_file):
    result = checked(run_file, record_file)
    assert (result.same, result.first_step, result.end_step, result.cause, result.versions) == (
        True,
        0,
        12,
        None,
        (),
    )
    record = read_record(record_file)
    assert [step for step, sources in enumerate(record.steps) if not sources] == [3, 4]
    assert set(record.steps[0]) <= {"web", "books"}


def test_a_record_of_a_part_is_that_part_of_the_whole_record(run_file, record_file, tmp_path):
    part = tm.Run.from_toml(run_file).record_batches(tmp_path / "part.json", 2, 9)
    assert part.steps == read_record(record_file).steps[2:9]
    assert checked(run_file, tmp_path / "part.json").same


def test_one_flipped_token_is_found_at_the_first_step_that_delivers_it(run_file, record_file, tmp_path):
    run = tm.Run.from_toml(run_file)
    step = 7
    row = next(row for row in run.plan().what(step) if row.source == "web")
    document, start = row.spans[0].document, row.spans[0].start
    uses = [
        use.step
        for use in run.plan().when("web", document)
        if any(s.start <= start < s.start + s.length for s in use.spans)
    ]
    (file,) = (tmp_path / "web").rglob("sequence.bin")
    (offsets,) = (tmp_path / "web").rglob("documents.bin")
    position = int(np.fromfile(offsets, np.int64)[document]) + start
    tokens = np.memmap(file, np.uint16, "r+")
    tokens[position] ^= 1
    tokens.flush()
    result = checked(run_file, record_file)
    assert (result.differing_step, result.differing_sources) == (min(uses), ("web",))
    assert "tokens of web changed on disk" in result.cause
    assert "tokenmill verify" in result.cause


def test_a_store_that_was_prepared_again_is_named_by_its_content(run_file, record_file, tmp_path):
    tm.prepare([*RECORDS[:-1], {"text": "another end"}], out=tmp_path / "books", tokenizer="bytes", rebuild=True)
    result = checked(run_file, record_file)
    assert result.differing_sources == ("books",)
    assert result.cause.startswith("stages[0].sources.books.store: ")


def test_a_changed_weight_is_named_with_both_values(run_file, record_file):
    run_file.write_text(run_file.read_text().replace("web = 3", "web = 1"))
    result = checked(run_file, record_file)
    assert result.differing_step is not None
    assert "weights" in result.cause


def test_a_shorter_run_differs_where_it_ends(run_file, record_file):
    run_file.write_text(run_file.read_text().replace("steps = 12", "steps = 10"))
    result = checked(run_file, record_file)
    assert (result.differing_step, result.cause) == (10, "the run has 10 steps, and the record goes to step 12")


def test_another_version_is_reported_and_is_a_difference_only_if_batches_differ(run_file, record_file):
    saved = json.loads(record_file.read_text())
    saved["versions"]["numpy"] = "1.0"
    record_file.write_text(json.dumps(saved))
    result = checked(run_file, record_file)
    assert (result.same, result.versions) == (True, (f"numpy 1.0 -> {version('numpy')}",))
    saved["steps"][1] = {"web": "0" * 16}
    record_file.write_text(json.dumps(saved))
    result = checked(run_file, record_file)
    assert result.differing_step == 1
    assert result.cause == f"the plan is the same, but versions differ: numpy 1.0 -> {version('numpy')}"


def test_a_damaged_record_is_an_error_that_names_it(record_file):
    whole = record_file.read_bytes()
    record_file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"record\.json"):
        read_record(record_file)
    record_file.write_bytes(msgspec.json.encode({**json.loads(whole), "format": 9}))
    with pytest.raises(ConfigError, match="format 9"):
        read_record(record_file)


def test_steps_outside_the_run_are_rejected(run_file, tmp_path):
    with pytest.raises(ConfigError, match="0:12"):
        tm.Run.from_toml(run_file).record_batches(tmp_path / "record.json", 4, 13)


def test_live_text_and_pairs_are_recorded_as_stores_are(tmp_path):
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    pairs = [{"prompt": "a", "chosen": "b" * (number % 5 + 1), "rejected": "c"} for number in range(40)]
    tm.prepare(pairs, out=tmp_path / "pairs", tokenizer="bytes", recipe="dpo")
    sources = {
        "live": {"name": "live", "documents": ["text.jsonl"], "live": True, "tokenizer": "bytes"},
        "pairs": {"name": "pairs", "store": "pairs"},
    }
    for name, source in sources.items():
        file = tmp_path / f"{name}.json"
        tables = {"run": {"steps": 6, "global_batch_size": 4, "seq_len": 32}, "sources": [source]}
        tm.Run.from_tables(tables, folder=tmp_path).record_batches(file)
        assert tm.Run.from_tables(tables, folder=tmp_path).check_batches(file).same
    text = (tmp_path / "text.jsonl").read_text()
    (tmp_path / "text.jsonl").write_text(text.replace("document ", "dokument "))
    tables = {"run": {"steps": 6, "global_batch_size": 4, "seq_len": 32}, "sources": [sources["live"]]}
    result = tm.Run.from_tables(tables, folder=tmp_path).check_batches(tmp_path / "live.json")
    assert result.differing_sources == ("live",)
    assert result.cause is not None
    assert result.cause.startswith("stages[0].sources.live")
