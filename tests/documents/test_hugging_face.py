"""Hugging Face datasets are read from the Arrow files that they are made of."""

import json
import sys

import pytest
from tests.documents.corpora import TEXTS, lines_of, read, texts_of

from tokenmill.documents import find_files
from tokenmill.documents.hugging_face import _arrow_files, parse
from tokenmill.errors import DocumentError

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Keep the cache of the library, and its progress bars, out of the way."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def rows(begin, end):
    return datasets.Dataset.from_dict(
        {"id": list(range(begin, end)), "text": [f"text {i}" for i in range(begin, end)]}
    )


def test_saved_dataset_is_read_in_its_order(tmp_path):
    rows(0, 50).save_to_disk(tmp_path / "saved", num_shards=12)
    assert texts_of(read(f"hf:{tmp_path}/saved")) == [f"text {i}" for i in range(50)]
    assert [file.suffix for file in find_files(f"hf:{tmp_path}/saved").files] == [".arrow"] * 12


def test_saved_dataset_can_be_cut_anywhere(tmp_path):
    rows(0, 3000).save_to_disk(tmp_path / "saved")
    for chunk_bytes in (1, 5000, 1 << 30):
        assert texts_of(read(f"hf:{tmp_path}/saved", chunk_bytes)) == [f"text {i}" for i in range(3000)]


def test_split_of_a_saved_dict_is_train_or_what_is_said(tmp_path):
    folder = tmp_path / "saved"
    datasets.DatasetDict({"train": rows(0, 3), "test": rows(3, 5)}).save_to_disk(folder)
    assert texts_of(read(f"hf:{folder}")) == ["text 0", "text 1", "text 2"]
    assert texts_of(read(f"hf:{folder}:test")) == ["text 3", "text 4"]
    assert texts_of(read(f"hf:{folder}::test")) == ["text 3", "text 4"]
    with pytest.raises(DocumentError, match=r"one of the splits train, test, got 'tset'; did you mean 'test'"):
        find_files(f"hf:{folder}:tset")
    with pytest.raises(DocumentError, match=r"a saved dataset has no configs: 'en'"):
        find_files(f"hf:{folder}:en:test")


def test_split_of_a_saved_dataset_must_be_its_own(tmp_path):
    rows(0, 3).save_to_disk(tmp_path / "saved")
    with pytest.raises(DocumentError, match=r"must name the split of a saved dataset, got 'test' for None"):
        find_files(f"hf:{tmp_path}/saved:test")


def test_folder_with_a_saved_dataset_is_read_without_its_notes(tmp_path):
    datasets.DatasetDict({"train": rows(0, 3)}).save_to_disk(tmp_path / "saved")
    found = find_files(tmp_path / "saved")
    assert [file.name for file in found.files] == ["data-00000-of-00001.arrow"]
    assert len(found.passed_over) == 3
    assert texts_of(read(tmp_path / "saved")) == ["text 0", "text 1", "text 2"]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_folder_of_data_files_is_read_through_the_cache(tmp_path, kind):
    folder = tmp_path / "data"
    folder.mkdir()
    if kind == "jsonl":
        (folder / "train.jsonl").write_bytes(lines_of(TEXTS))
        (folder / "test.jsonl").write_bytes(lines_of(["of test"]))
    else:
        datasets.Dataset.from_dict({"text": TEXTS}).to_parquet(folder / "train.parquet")
        datasets.Dataset.from_dict({"text": ["of test"]}).to_parquet(folder / "test.parquet")
    assert texts_of(read(f"hf:{folder}")) == TEXTS
    assert texts_of(read(f"hf:{folder}::test")) == ["of test"]
    with pytest.raises(DocumentError, match=r"must be a dataset that .* can open, got ValueError"):
        find_files(f"hf:{folder}::none")


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows.select([3, 1]),
        lambda rows: rows.shuffle(seed=0),
        lambda rows: rows.filter(lambda row: row["id"] % 2),
    ],
)
def test_selection_of_rows_is_refused_with_the_way_out(tmp_path, change):
    rows(0, 9).save_to_disk(tmp_path / "saved")
    chosen = change(datasets.load_from_disk(tmp_path / "saved"))
    with pytest.raises(DocumentError, match=r"^hf:x: .*indices mapping.*call flatten_indices\(\) and save"):
        _arrow_files("hf:x", chosen)


def test_selection_that_an_old_library_saved_is_refused(tmp_path):
    rows(0, 9).save_to_disk(tmp_path / "saved")
    state = tmp_path / "saved" / "state.json"
    state.write_text(
        json.dumps({**json.loads(state.read_text()), "_indices_data_files": [{"filename": "i.arrow"}]})
    )
    with pytest.raises(DocumentError, match=r"indices mapping"):
        find_files(f"hf:{tmp_path}/saved")


def test_dataset_of_parts_of_files_is_refused(tmp_path):
    rows(0, 9).save_to_disk(tmp_path / "saved")
    saved = datasets.load_from_disk(tmp_path / "saved")
    twice = datasets.concatenate_datasets([saved, saved])
    with pytest.raises(DocumentError, match=r"must be a dataset of whole files, got one of parts of 1 files"):
        _arrow_files("hf:x", twice)
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(lines_of(TEXTS))
    with pytest.raises(DocumentError, match=r"must be a dataset of whole files"):
        find_files(f"hf:{folder}::train[:2]")


def test_a_load_leaves_the_settings_of_the_library_alone(monkeypatch):
    """Other threads may be loading too."""
    seen = []

    def load_dataset(*_, **__):
        seen.append(datasets.config.HF_HUB_OFFLINE)
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DocumentError, match=r"hf:no/such: .* no route to the hub; .*set HF_HUB_OFFLINE=1"):
        find_files("hf:no/such")
    assert seen == [False]


def test_name_that_is_nowhere_is_refused():
    with pytest.raises(DocumentError, match=r"hf:no/such-dataset-here: must be a dataset that .* can open"):
        find_files("hf:no/such-dataset-here")


def test_library_that_is_missing_is_named_with_the_way_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DocumentError, match=r"pip install 'tokenmill\[hf\]'"):
        find_files(f"hf:{tmp_path}")


@pytest.mark.parametrize(
    ("item", "parsed"),
    [
        ("hf:org/name", ("org/name", None, None)),
        ("hf:org/name:en", ("org/name", "en", None)),
        ("hf:org/name:en:test", ("org/name", "en", "test")),
        ("hf:org/name::test", ("org/name", None, "test")),
        ("hf:org/name:en:train[:10%]", ("org/name", "en", "train[:10%]")),
    ],
)
def test_name_config_and_split_are_told_apart(item, parsed):
    assert parse(item) == parsed


def test_folder_with_colons_in_its_name_is_found(tmp_path):
    folder = tmp_path / "c:" / "data:v2"
    folder.mkdir(parents=True)
    assert parse(f"hf:{folder}") == (str(folder), None, None)
    assert parse(f"hf:{folder}:en:test") == (str(folder), "en", "test")


@pytest.mark.parametrize("item", ["hf:", "hf::en", "hf:a:b:c:d"])
def test_other_forms_are_refused(item):
    with pytest.raises(DocumentError, match=r"must be hf:name\[:config\[:split\]\]"):
        parse(item)
