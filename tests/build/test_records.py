"""Records in memory become the same store as the same records in a file; nothing of them is lost or changed."""

import datetime
import decimal
import json
import os
import signal
import subprocess
import sys
import weakref
from collections import UserDict, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tests.build.corpus import files_of, some_texts, texts_of

import tokenmill as tm
from tokenmill.errors import ConfigError, DocumentError, StoreExistsError, TokenizerError

TEXTS = some_texts(60)
RECORDS = [{"id": index, "text": text} for index, text in enumerate(TEXTS)]


class Table:
    """Exports a table by the Arrow PyCapsule interface alone, as a DataFrame of any library does."""

    def __init__(self, data):
        self.data = data

    def __arrow_c_stream__(self, requested_schema=None):
        return self.data.__arrow_c_stream__(requested_schema)

    def __iter__(self):
        return iter(["id", "text"])  # as a DataFrame: the names of the columns


def dataset():
    return pytest.importorskip("datasets").Dataset.from_list(RECORDS)


def frame():
    return pytest.importorskip("pandas").DataFrame(RECORDS)


KINDS = {
    "list": lambda: RECORDS,
    "tuple": lambda: tuple(RECORDS),
    "deque": lambda: deque(RECORDS),
    "generator": lambda: (record for record in RECORDS),
    "generator of texts": lambda: (record["text"] for record in RECORDS),
    "mapped texts": lambda: map(str, TEXTS),
    "mixed": lambda: iter([record["text"] if record["id"] % 2 else record for record in RECORDS]),
    "other mappings": lambda: [UserDict(record) for record in RECORDS],
    "numpy array": lambda: np.array(TEXTS),
    "pandas": frame,
    "pandas series": lambda: frame()["text"],
    "arrow table": lambda: pa.Table.from_pylist(RECORDS),
    "arrow record batch": lambda: pa.RecordBatch.from_pylist(RECORDS),
    "arrow reader": lambda: pa.Table.from_pylist(RECORDS).to_reader(max_chunksize=7),
    "arrow array": lambda: pa.array(TEXTS),
    "arrow structs": lambda: pa.array(RECORDS),
    "arrow column": lambda: pa.Table.from_pylist(RECORDS)["text"],
    "arrow dictionary": lambda: pa.chunked_array([pa.array(TEXTS[:30]), pa.array(TEXTS[30:])]).dictionary_encode(),
    "capsule": lambda: Table(pa.Table.from_pylist(RECORDS)),
    "dataset": dataset,
    "dataset column": lambda: dataset()["text"],
    "selected dataset": lambda: dataset().select(range(59, -1, -1)).select(range(59, -1, -1)),
    "formatted dataset": lambda: dataset().with_transform(lambda batch: batch),
    "iterable dataset": lambda: dataset().to_iterable_dataset(num_shards=3),
}


def build(inputs, out, *, workers=1, **arguments):
    return tm.prepare(inputs, out=out, workers=workers, progress=False, **arguments)


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def contents(report):
    """Return what is in all stores of a build: fingerprints, and the bytes of the arrays, by route."""
    return {
        store.route: (
            store.fingerprint,
            {name: data for name, data in files_of(store.path).items() if name.endswith(".bin") and name[0] != "."},
        )
        for store in report.stores
    }


@pytest.fixture(scope="module")
def from_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("file")
    return build(write_jsonl(folder / "a.jsonl", RECORDS), folder / "store")


@pytest.mark.parametrize("kind", KINDS)
def test_records_become_the_store_that_a_file_of_them_becomes(tmp_path, from_file, kind):
    report = build(KINDS[kind](), tmp_path / "store")
    assert report.fingerprint == from_file.fingerprint
    assert texts_of(tm.open_store(tmp_path / "store")) == TEXTS
    assert (report.documents, report.files, report.new_files) == (60, 1, 1)
    assert report.to_json()["stores"] == [{**from_file.to_json()["stores"][0], "path": str(tmp_path / "store")}]
    assert os.listdir(tmp_path) == ["store"]


@pytest.mark.parametrize("kind", ["generator", "arrow reader"])
def test_origins_count_items(tmp_path, kind):
    build(KINDS[kind](), tmp_path / "store", options=tm.PrepareOptions(keep=("id",)))
    origin = tm.open_store(tmp_path / "store").origin(17)
    assert (str(origin), origin.place, origin.counts, origin.kept) == ("records item 18", 18, "item", {"id": 17})


TURNS = [[("user", f"Question {i}?"), ("assistant", f"Answer {i}." * (i % 5))] for i in range(20)]
SAMPLES = {
    "text": [{"text": f"text {i % 7}", "site": f"s{i % 2}"} for i in range(20)],
    "instruction": [{"instruction": f"do {i % 7}", "output": f"done {i}", "site": "s"} for i in range(20)],
    "chat": [
        {"messages": [{"role": role, "content": text} for role, text in turns], "site": f"s{i % 2}"}
        for i, turns in enumerate(TURNS)
    ],
    "dpo": [{"prompt": f"p{i}", "chosen": f"good {i % 3}", "rejected": "bad", "site": "s"} for i in range(20)],
    "grpo": [{"prompt": f"p{i}", "responses": ["a", "b"], "rewards": [1.0, 0.5], "site": "s"} for i in range(20)],
}
FILTERS = {
    "none": {},
    "split": {"val_fraction": 0.3},
    "unique": {"deduplicate": True, "max_items": 9},
    "domains": {"domain_key": "site", "on_error": "skip"},
    "sizes": {"min_chars": 2, "keep": ("site",), "max_seq_len": 120, "on_error": "skip"},
}


CASES = [
    *((recipe, filters, "generator") for recipe in SAMPLES for filters in FILTERS if recipe != "chat"),
    *((recipe, "sizes", "arrow") for recipe in SAMPLES),
    *(("chat", filters, "generator") for filters in ("split", "unique")),  # a process for each build
]


@pytest.mark.parametrize(("recipe", "filters", "form"), CASES)
def test_recipes_and_filters_are_those_of_files(tmp_path, recipe, filters, form):
    records = SAMPLES[recipe]
    chat = {"chat_template": "chatml"} if recipe == "chat" else {}
    asked = {"recipe": recipe, "options": tm.PrepareOptions(**FILTERS[filters], **chat)}
    expected = build(write_jsonl(tmp_path / "a.jsonl", records), tmp_path / "file", **asked)
    inputs = iter(records) if form == "generator" else pa.Table.from_pylist(records)
    report = build(inputs, tmp_path / "store", **asked)
    assert contents(report) == contents(expected)
    assert all(arrays for _, arrays in contents(report).values())
    assert report.skipped == expected.skipped
    assert (report.notes, report.truncated) == (expected.notes, expected.truncated)


def test_any_number_of_workers_and_any_executor_give_the_same_store(tmp_path):
    options = tm.PrepareOptions(chunk_bytes=1000)
    one = build(iter(RECORDS), tmp_path / "one", options=options)
    two = build(iter(RECORDS), tmp_path / "two", options=options, workers=2)
    with ThreadPoolExecutor(2) as executor:
        threads = build(iter(RECORDS), tmp_path / "threads", options=options, executor=executor)
    assert one.units == two.units == threads.units > 2
    assert one.fingerprint == two.fingerprint == threads.fingerprint


def test_records_are_not_kept_in_memory(tmp_path):
    alive, most = weakref.WeakSet(), 0

    class Hashed(dict):
        __hash__ = object.__hash__

    def records():
        nonlocal most
        for index in range(2000):
            record = Hashed(text=f"text {index}")
            alive.add(record)
            most = max(most, len(alive))
            yield record

    assert build(records(), tmp_path / "store").documents == 2000
    assert most <= 3


def test_an_iterable_that_raises_leaves_nothing(tmp_path):
    def records():
        yield {"text": "one"}
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        build(records(), tmp_path / "store")
    assert os.listdir(tmp_path) == []


def test_an_iterable_that_raises_leaves_the_store_that_is_there(tmp_path):
    build(RECORDS, tmp_path / "store")
    before = files_of(tmp_path)

    def records():
        yield {"text": "one"}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(records(), tmp_path / "store", rebuild=True)
    assert files_of(tmp_path) == before


def test_a_build_that_the_hook_stops_is_started_again(tmp_path, from_file):
    def stop(progress):
        if progress.what == "prepare":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(iter(RECORDS), tmp_path / "store", on_progress=stop)
    assert not (tmp_path / "store" / "manifest.json").exists()
    assert os.listdir(tmp_path) == ["store"]
    report = build(iter(RECORDS), tmp_path / "store")
    assert (report.fingerprint, report.resumed_units) == (from_file.fingerprint, 0)


KILLED = """
import os, signal, sys
import tokenmill as tm

when, out = sys.argv[1], sys.argv[2]

def records():
    for index in range(60):
        if when == "reading" and index == 30:
            os.kill(os.getpid(), signal.SIGKILL)
        yield {"text": f"other {index}"}

def stop(progress):
    if progress.what == when and progress.done_bytes:
        os.kill(os.getpid(), signal.SIGKILL)

options = tm.PrepareOptions(chunk_bytes=200)
tm.prepare(records(), out=out, workers=1, progress=False, on_progress=stop, options=options)
"""


@pytest.mark.parametrize("when", ["reading", "prepare"])
def test_a_killed_build_is_started_again_and_leaves_nothing(tmp_path, when):
    done = subprocess.run([sys.executable, "-c", KILLED, when, str(tmp_path / "store")], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.glob(".store.records-*")
    other = tmp_path / f".store.records-{'0' * 16}-1-1-abc"  # of a machine whose processes are not seen
    other.mkdir()
    report = build(iter(RECORDS), tmp_path / "store")
    assert (texts_of(tm.open_store(tmp_path / "store")), report.resumed_units) == (TEXTS, 0)
    assert not left.exists()
    assert other.exists()


def test_two_builds_in_one_process_have_files_of_their_own(tmp_path):
    def outer():
        yield {"text": "one"}
        build([{"text": "inner"}], tmp_path / "store")
        yield {"text": "two"}

    with pytest.raises(StoreExistsError, match="other records from memory"):
        build(outer(), tmp_path / "store")
    assert texts_of(tm.open_store(tmp_path / "store")) == ["inner"]


# A finished store.


def test_the_same_records_again_change_nothing(tmp_path):
    build(iter(RECORDS), tmp_path / "store")
    before = files_of(tmp_path / "store")
    report = build(iter(RECORDS), tmp_path / "store")
    assert (report.new_files, report.new_documents, report.documents) == (0, 0, 60)
    assert files_of(tmp_path / "store") == before


def test_other_records_are_refused_unless_they_replace_or_are_added(tmp_path):
    build(RECORDS[:2], tmp_path / "store")
    with pytest.raises(StoreExistsError, match=r"other records .*rebuild=True .*same_names=True"):
        build(RECORDS[2:3], tmp_path / "store")
    build(RECORDS[2:3], tmp_path / "store", options=tm.PrepareOptions(same_names=True))
    assert texts_of(tm.open_store(tmp_path / "store")) == TEXTS[:3]
    build(RECORDS[:1], tmp_path / "store", rebuild=True)
    assert texts_of(tm.open_store(tmp_path / "store")) == TEXTS[:1]


def test_records_are_added_to_a_store_of_files_and_files_to_one_of_records(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", RECORDS[:2])
    build(file, tmp_path / "store")
    build(RECORDS[2:4], tmp_path / "store")
    build(write_jsonl(tmp_path / "b.jsonl", RECORDS[4:5]), tmp_path / "store")
    store = tm.open_store(tmp_path / "store")
    assert texts_of(store) == TEXTS[:5]
    assert [str(store.origin(document)) for document in (1, 2, 4)] == ["a.jsonl:2", "records item 1", "b.jsonl:1"]


# Values that JSON does not have.


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"raw", r"item 3: field 'text': JSON has no bytes, got b'raw'; decode it"),
        (datetime.date(2020, 1, 2), r"item 3: field 'text': JSON has no datetime\.date, .*; use isoformat"),
        (decimal.Decimal("0.1"), r"item 3: field 'text': JSON has no decimal\.Decimal, .*; use str"),
        (np.int64(3), r"item 3: field 'text': JSON has no numpy\.int64, .*; use item"),
        (np.zeros(2), r"item 3: field 'text': JSON has no numpy\.ndarray, .*; use tolist"),
        ({"a": [{"b": {1}}]}, r"item 3: field 'text\.a\[0\]\.b': JSON has no set, got \{1\}"),
        ({1: "a"}, r"item 3: field 'text\.1': a key must be a str in JSON, got int"),
    ],
)
def test_a_value_that_json_does_not_have_names_item_and_field(tmp_path, value, message):
    with pytest.raises(DocumentError, match=message):
        build([*RECORDS[:2], {"text": value}], tmp_path / "store", options=tm.PrepareOptions(on_error="skip"))
    assert os.listdir(tmp_path) == []


def test_a_number_of_too_many_digits_is_an_error(tmp_path):
    with pytest.raises(DocumentError, match=r"item 1: cannot be written as JSON: .*digits"):
        build([{"text": "a", "x": 10**5000}], tmp_path / "store")


def test_a_record_that_contains_itself_is_an_error(tmp_path):
    record = {"text": "a", "more": []}
    record["more"].append(record)
    with pytest.raises(DocumentError, match=r"item 1: field .* contains itself"):
        build([record], tmp_path / "store", options=tm.PrepareOptions(keep=("more",)))


def test_a_key_that_is_no_string_is_an_error_in_any_field(tmp_path):
    with pytest.raises(DocumentError, match=r"item 1: field '1': a key must be a str in JSON, got int"):
        build([{"text": "a", 1: "b"}], tmp_path / "store")


@pytest.mark.parametrize("item", [None, 3, ["text"], Path("a.jsonl"), b"text"])
def test_an_item_that_is_no_record_names_its_number(tmp_path, item):
    with pytest.raises(DocumentError, match=r"item 2: expected a text \(str\) or a record \(dict\), got "):
        build([{"text": "a"}, item], tmp_path / "store")


def test_a_string_is_no_record_of_a_conversation(tmp_path):
    with pytest.raises(DocumentError, match=r"item 1: expected a record \(dict\), got str: 'hello'"):
        build(iter(["hello"]), tmp_path / "store", recipe="chat")
    with pytest.raises(DocumentError, match=r"the recipe needs records, got one column of string; pass a table"):
        build(pa.array(["hello"]), tmp_path / "store", recipe="chat")


def test_a_field_that_is_not_read_may_have_any_value(tmp_path):
    build([{"text": "a", "at": datetime.datetime(2020, 1, 1)}, {"text": "b"}], tmp_path / "store")
    assert texts_of(tm.open_store(tmp_path / "store")) == ["a", "b"]


def keep_all(record):
    return record


def test_a_function_of_the_user_needs_all_fields(tmp_path):
    with pytest.raises(DocumentError, match=r"item 1: field 'at': JSON has no bytes"):
        build([{"text": "a", "at": b"x"}], tmp_path / "store", map=keep_all)
    build([{"text": "a", "at": 3}], tmp_path / "store", map=keep_all)
    assert texts_of(tm.open_store(tmp_path / "store")) == ["a"]


def test_strings_and_numbers_stay_as_they_are(tmp_path):
    values = {"s": "\u2028\x00\ufeff🌾é", "big": 2**80, "float": 0.1, "small": 5e-324, "none": None, "flag": True}
    build(
        [{"text": "\ufeffa\r\n\u2028\x00", "v": values}], tmp_path / "store", options=tm.PrepareOptions(keep=("v",))
    )
    store = tm.open_store(tmp_path / "store")
    assert texts_of(store) == ["\ufeffa\r\n\u2028\x00"]
    assert store.origin(0).kept == {"v": values}


def test_nan_and_half_of_a_pair_are_what_they_are_in_a_file(tmp_path):
    records = [{"text": "a", "x": float("nan")}, {"text": "\ud800"}, {"text": "b", "x": float("inf")}]
    options = tm.PrepareOptions(keep=("x",), on_error="skip")
    reports = [
        build(inputs, tmp_path / name, options=options)
        for name, inputs in (("file", write_jsonl(tmp_path / "a.jsonl", records)), ("store", records))
    ]
    assert reports[0].skipped == reports[1].skipped == {"surrogate": 1}
    stores = [tm.open_store(tmp_path / name) for name in ("file", "store")]
    assert [texts_of(store) for store in stores] == [["a", "b"]] * 2
    assert [[store.origin(document).kept for document in (0, 1)] for store in stores] == [[{"x": None}] * 2] * 2
    with pytest.raises(DocumentError, match=r"^item 2: a string must be Unicode text.*U\+D800"):
        build(records, tmp_path / "other")


def test_the_nulls_of_a_dataset_are_fields_that_records_lack(tmp_path):
    datasets = pytest.importorskip("datasets")
    records = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": "x"}]},
        {"messages": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]},
    ]
    asked = {"recipe": "chat", "options": tm.PrepareOptions(chat_template="chatml", keep=("messages",))}
    expected = build(write_jsonl(tmp_path / "a.jsonl", records), tmp_path / "file", **asked)
    assert contents(build(datasets.Dataset.from_list(records), tmp_path / "store", **asked)) == contents(expected)
    assert tm.open_store(tmp_path / "store").origin(1).kept == records[1]


def test_errors_of_a_table_name_the_column_and_the_item(tmp_path):
    with pytest.raises(DocumentError, match=r"^records: no column 'text', only 'body'"):
        build(pa.table({"body": ["a"]}), tmp_path / "store")
    with pytest.raises(DocumentError, match=r"^item 2: a text must be a string, got field 'text' is null"):
        build(pa.table({"text": ["a", None]}), tmp_path / "other")


def test_a_stream_that_breaks_off_passes_its_error_on(tmp_path):
    def batches():
        yield pa.RecordBatch.from_pylist([{"text": "a"}])
        raise ValueError("mine")

    reader = pa.RecordBatchReader.from_batches(pa.schema({"text": pa.string()}), batches())
    with pytest.raises((ValueError, OSError), match="mine"):
        build(reader, tmp_path / "store")
    assert os.listdir(tmp_path) == []


# Paths or texts.


def test_lists_of_strings_and_iterables_of_paths_are_paths(tmp_path, from_file):
    file = write_jsonl(tmp_path / "a.jsonl", RECORDS)
    for number, paths in enumerate(
        ([str(file)], (str(file),), {str(file)}, iter([file]), tmp_path.glob("*.jsonl"))
    ):
        assert build(paths, tmp_path / "stores" / str(number)).fingerprint == from_file.fingerprint


@pytest.mark.parametrize("text", ["Once upon a time.", "word", "x" * 100_000, "two\nlines", "a\0b"])
def test_a_list_of_texts_says_how_to_pass_them(tmp_path, text):
    with pytest.raises(
        DocumentError, match=r"(?s)no such file or folder: .*or pass a text as a record in Python"
    ) as raised:
        build([text], tmp_path / "store")
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize("name", ["a.jsonl", "*.jsonl", "none.parquet", "hf:org/name", "s3://bucket/name", "."])
def test_an_iterator_of_strings_that_are_paths_is_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", RECORDS)
    with pytest.raises(ConfigError, match=r"got a path: .*; pass a list of paths to read the files"):
        build(iter([name]), tmp_path / "store")
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_what_is_no_iterable_of_records_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"got one dict with the keys 'text'; put a record into a list"):
        build({"text": "a"}, tmp_path / "store")
    with pytest.raises(ConfigError, match="expected a path, got 3"):
        build(3, tmp_path / "store")
    with pytest.raises(DocumentError, match="the iterable has no records"):
        build(iter(()), tmp_path / "store")
    with pytest.raises(DocumentError, match="the iterable has no records"):
        build(pa.table({"text": pa.array([], pa.string())}), tmp_path / "store")


def test_a_table_that_does_not_export_arrow_is_refused(tmp_path):
    class OldFrame:
        def __dataframe__(self):
            raise AssertionError

        def __iter__(self):
            return iter(["id", "text"])

    with pytest.raises(ConfigError, match=r"OldFrame does not export Arrow.*pass a pyarrow\.Table"):
        build(OldFrame(), tmp_path / "store")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"tokenizer": "none.json"}, TokenizerError),
        ({"recipe": "nothing"}, ConfigError),
        ({"options": tm.PrepareOptions(format="csv")}, ConfigError),
        ({"workers": 0}, ConfigError),
        ({"unit_timeout": -1}, ConfigError),
    ],
)
def test_a_wrong_argument_is_refused_before_the_records_are_read(tmp_path, arguments, error):
    def records():
        yield {"text": "first"}  # looked at, to tell texts from paths
        raise AssertionError("read on")

    with pytest.raises(error):
        tm.prepare(records(), out=tmp_path / "store", progress=False, **arguments)
    assert os.listdir(tmp_path) == []


def test_the_steps_are_shown(tmp_path):
    seen = []
    build(iter(RECORDS), tmp_path / "store", on_progress=seen.append)
    assert list(dict.fromkeys(progress.what for progress in seen))[:3] == [
        "read the records",
        "open the tokenizer",
        "prepare",
    ]
    assert [progress.documents for progress in seen if progress.what == "read the records"][-1] == 60


def test_records_without_a_kept_field_are_counted(tmp_path):
    records = [{"text": "a", "id": 1}, {"text": "b"}, {"text": "c", "id": None}]
    report = build(records, tmp_path / "store", options=tm.PrepareOptions(keep=("id", "url")))
    assert report.notes == {"kept_field_missing": 3}
