from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

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


@dataclass
class Input:
    sections: list | None = None
    sources: dict | None = None


@dataclass
class Processing:
    max_seq_len: int = 2048
    min_chars: int = 50
    max_chars: int = 2_000_000
    max_items: int | None = None
    batch_size: int = 256
    packing_strategy: str = "simple"
    max_packed_len: int = 8192
    truncation_mode: str = "keep_start"


@dataclass
class Output:
    domain_key: str | None = None
    storage_format: str = "bin"
    max_tokens_per_shard: int = 100_000_000
    dtype: dict = field(default_factory=dict)
    position_ids_mode: str = "doc_reset"


@dataclass
class PipelineConfig:
    """What AstrAI's has, with its defaults; `to_file` writes all of them."""

    version: int = 1
    input: Input = field(default_factory=Input)
    mask: dict = field(default_factory=dict)
    mask_default: str = "mask"
    preprocessing: Processing = field(default_factory=Processing)
    output: Output = field(default_factory=Output)


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


SECTIONS = {
    "seq": [{"field": "response", "action": "train"}],
    "sft": SFT["input"]["sections"],
}


@pytest.mark.parametrize("spelled", ["object", "file"])
def test_a_config_of_astrai_is_taken_as_an_object_and_as_its_to_file_writes_it(tmp_path, records, spelled):
    config = PipelineConfig(input=Input(sections=SECTIONS["sft"]))
    if spelled == "file":
        (tmp_path / "sft.json").write_text(json.dumps(asdict(config), indent=2))
        config = str(tmp_path / "sft.json")
    report = Pipeline(config, input_paths=records, output_dir=tmp_path / "out", tokenizer_path="bytes").run(
        workers=1
    )
    assert (report.kind, report.documents, dict(report.skipped)) == ("sft", 20, {})


@pytest.mark.parametrize(("kind", "taken"), [("seq", 1), ("sft", 3)])
def test_min_chars_and_max_chars_concern_plain_text_alone(tmp_path, kind, taken):
    """AstrAI writes them into every config; records that are masked in part it takes whatever their length."""
    lines = [{"prompt": "?", "response": "x" * size} for size in (1, 60, 300)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = PipelineConfig(input=Input(sections=SECTIONS[kind]), preprocessing=Processing(max_chars=200))
    report = Pipeline(config, [tmp_path / "a.jsonl"], tmp_path / "out", "bytes").run(workers=1)
    assert (report.kind, report.documents) == (kind, taken)
    assert dict(report.skipped) == ({} if kind == "sft" else {"max_chars": 1, "min_chars": 1})


@pytest.mark.parametrize("change", [{"packing_strategy": "bfd"}, {"max_packed_len": 64}])
def test_a_config_of_astrai_that_packs_or_cuts_to_a_row_is_refused(tmp_path, records, change):
    config = PipelineConfig(input=Input(sections=SECTIONS["sft"]), preprocessing=Processing(**change))
    with pytest.raises(ConfigError, match=rf"{next(iter(change))} must be left out, got"):
        Pipeline(config, records, tmp_path / "out", "bytes")


def test_a_store_that_is_loaded_serves_datasets_of_any_training_type_it_has(tmp_path, records):
    Pipeline(SFT, records, tmp_path / "out", "bytes").run(workers=1)
    first = DatasetFactory.load("sft", tmp_path / "out", 8, tokenizer_path="params", max_len=512)
    for again in (
        DatasetFactory.from_store("sft", first.loaded, 8),
        DatasetFactory.load("sft", store=first.loaded, window_size=8),
    ):
        assert again.storage is first.storage
        assert {key: value.tolist() for key, value in again[3].items()} == {
            key: value.tolist() for key, value in first[3].items()
        }
    with pytest.raises(StoreError, match="DPODataset must have keys"):
        DatasetFactory.from_store("dpo", first.loaded)


def test_records_are_loaded_with_a_tokenizer_and_prepared_once(tmp_path):
    pairs = [{"prompt": f"{n}? ", "chosen": "yes", "rejected": "no, " * n} for n in range(1, 13)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    for path in (tmp_path / "pairs.jsonl", str(tmp_path)):
        dataset = DatasetFactory.load("dpo", path, tokenizer_path="bytes", max_len=20)
        assert len(dataset) == 12
        assert max(len(item["rejected"]) for item in dataset.__getitems__(range(12))) == 20
        assert bytes(dataset[2]["chosen"][dataset[2]["chosen"] < 256].tolist()) == b"3? yes"
    assert len(list((tmp_path / ".tokenmill" / "stores").iterdir())) == 1
    with pytest.raises(ConfigError, match=r"pairs\.jsonl: tokenizer_path must be given for records"):
        DatasetFactory.load("dpo", tmp_path)


@pytest.mark.usefixtures("records")
def test_records_are_read_by_the_config_beside_them(tmp_path):
    """As AstrAI's JsonlStore does: its config names the tokenizer too."""
    (tmp_path / "dataset_config.json").write_text(json.dumps({**SFT, "tokenizer_path": "bytes"}))
    dataset = DatasetFactory.load("sft", tmp_path, 8)
    assert dataset.loaded.num_records == 20
    assert dataset.keys == ["sequence", "loss_mask", "position_ids"]
    with pytest.raises(StoreError, match="DPODataset must have keys"):
        DatasetFactory.load("dpo", tmp_path)


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
