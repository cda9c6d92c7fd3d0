from __future__ import annotations

import json

import pytest

from tokenmill.adapters.astrai import DatasetFactory, Pipeline, detect_format
from tokenmill.errors import ConfigError, DocumentError, StoreError
from tokenmill.store import open_store, verify

SFT = {
    "version": 1,
    "input": {
        "sections": [
            {"field": "prompt", "action": "mask", "add_special_tokens": True},
            {"field": "response", "action": "train"},
        ]
    },
    "mask_default": "mask",
    "preprocessing": {"max_seq_len": 2048},
    "output": {"storage_format": "h5", "dtype": {"sequence": "int32", "loss_mask": "bool"}},
}
"""A recipe in the words of AstrAI."""


@pytest.fixture
def records(tmp_path):
    for name, offset in (("a", 0), ("b", 10)):
        lines = [{"prompt": f"{offset + n} + 1 = ", "response": str(offset + n + 1)} for n in range(10)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [tmp_path / "a.jsonl", str(tmp_path / "b.jsonl")]


@pytest.mark.parametrize("spelled", ["table", "path", "string"])
def test_a_recipe_of_astrai_makes_a_store_that_its_datasets_read(tmp_path, records, spelled):
    """[T1.a]"""
    file = tmp_path / "sft.json"
    file.write_text(json.dumps(SFT))
    config = {"table": SFT, "path": file, "string": str(file)}[spelled]
    report = Pipeline(config, records, tmp_path / "out", "bytes").run(workers=1)
    assert (report.kind, report.documents, detect_format(tmp_path / "out")) == ("sft", 20, "h5")
    dataset = DatasetFactory.load("sft", tmp_path / "out", 8)
    assert dataset.keys == ["sequence", "loss_mask", "position_ids"]
    assert (dataset.loaded.opened.dtype("sequence").name, dataset.count) == ("uint32", report.tokens)
    assert dataset[0]["position_ids"].tolist() == [*range(8)]
    record = dataset.loaded.fetch_record(13, ["sequence", "loss_mask"])
    trained = record["sequence"][record["loss_mask"]]
    assert bytes(trained[trained < 256].tolist()) == b"14"


def test_the_store_is_one_of_ours_and_is_verified(tmp_path, records):
    Pipeline(SFT, records, tmp_path / "out", "bytes").run(workers=1)
    assert verify(tmp_path / "out").documents == 20
    assert open_store(tmp_path / "out").manifest.recipe["recipe"]["preprocessing"]["max_seq_len"] == 2048


def test_a_second_run_adds_only_what_is_new(tmp_path, records):
    first = Pipeline("instruction", records[:1], tmp_path / "out", "bytes").run(workers=1)
    again = Pipeline("instruction", records, tmp_path / "out", "bytes").run(workers=1)
    assert (first.documents, again.documents, again.new_documents) == (10, 20, 10)
    with pytest.raises(StoreError, match="rebuild"):
        Pipeline("text", records, tmp_path / "out", "bytes").run(workers=1)


def test_a_bad_record_stops_the_build_unless_it_is_to_be_skipped(tmp_path, records):
    """AstrAI leaves it out with a line in the log."""
    with open(records[0], "a") as file:
        file.write('{"question": 1}\n')
    with pytest.raises(DocumentError, match=r"a\.jsonl:11"):
        Pipeline(SFT, records, tmp_path / "out", "bytes").run(workers=1)
    report = Pipeline(SFT, records, tmp_path / "out", "bytes").run(workers=1, on_error="skip")
    assert (report.documents, dict(report.skipped)) == (20, {"missing_field": 1})


def test_a_wrong_recipe_is_refused_before_anything_is_written(tmp_path, records):
    packed = {**SFT, "preprocessing": {"packing_strategy": "bfd"}}
    for config, message in ((packed, "packing_strategy must be left out"), ("sf.json", "must be a readable file")):
        with pytest.raises(ConfigError, match=message):
            Pipeline(config, records, tmp_path / "out", "bytes")
    assert not (tmp_path / "out").exists()


def test_domains_are_stores_of_their_own_and_named_where_one_is_wanted(tmp_path):
    lines = [{"text": f"text {n}", "domain": "web" if n % 2 else "books"} for n in range(8)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = {"preset": "text", "output": {"domain_key": "domain"}}
    Pipeline(config, [tmp_path / "a.jsonl"], tmp_path / "out", "bytes").run(workers=1)
    assert DatasetFactory.load("seq", tmp_path / "out" / "web", 4).loaded.num_records == 4
    with pytest.raises(StoreError, match="must be one store, got the stores books, web in it; name one of them"):
        DatasetFactory.load("seq", tmp_path / "out", 4)
