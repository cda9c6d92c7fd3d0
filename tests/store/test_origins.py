"""A document names the file and line it came from, and the fields that were kept, however a store was built."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tokenmill as tm
from tokenmill.errors import ConfigError, PlanError, StoreCorruptError, StoreExistsError
from tokenmill.inspect.examples import inspect_document
from tokenmill.inspect.stores import tokenizer_of
from tokenmill.store import Origin, open_store, verify
from tokenmill.store.layout import shard_name
from tokenmill.store.opening import join_stores
from tokenmill.store.origins import origins_file
from tokenmill.store.remote.upload import upload
from tokenmill.types import RemoteOptions

GOLDEN = Path(__file__).parent / "golden" / "v1"


def records(count, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {
            "text": f"record {number % 40} " * int(rng.integers(1, 9)),
            "id": number,
            "meta": {"url": f"https://example.org/{number}"},
            "kind": "abc"[number % 3],
        }
        for number in range(count)
    ]


def write_jsonl(path, rows):
    """Write records with blank and bad lines between them."""
    lines = []
    for number, row in enumerate(rows):
        lines.append(json.dumps(row))
        lines += ["", "{no json"] if number % 11 == 5 else []
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def lines_of(path):
    return path.read_text(encoding="utf-8").splitlines()


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    write_jsonl(folder / "a.jsonl", records(70))
    write_jsonl(folder / "b.jsonl", records(30, seed=1))
    return folder


def build(corpus, out, inputs=None, **options):
    options = tm.PrepareOptions(on_error="skip", **options)
    return tm.prepare(inputs or corpus, out=out, workers=1, progress=False, options=options)


def text_of(store, document):
    ids = store.fetch_record(document, "sequence")
    return bytes(ids[ids < 256].astype(np.uint8)).decode()


def check_every_document(corpus, report):
    """Assert that the line that a document names is its own; return how many there are."""
    seen = []
    for each in report.stores:
        store = open_store(each.path)
        for document in range(store.num_documents):
            origin = store.origin(document)
            record = json.loads(lines_of(corpus / origin.file)[origin.place - 1])
            assert record["text"] == text_of(store, document)
            assert str(origin) == f"{origin.file}:{origin.place}"
            seen.append((origin.file, origin.place))
        verify(each.path)
    assert len(set(seen)) == len(seen) == report.documents
    return len(seen)


@pytest.mark.parametrize("keep", [(), ("id", "meta.url", "nothing")], ids=["", "keep"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunk_bytes": 700, "max_tokens_per_shard": 300},
        {"min_chars": 20, "max_chars": 60},
        {"deduplicate": True, "chunk_bytes": 900},
        {"max_items": 33},
        {"val_fraction": 0.3, "chunk_bytes": 900},
        {"domain_key": "kind", "val_fraction": 0.3},
        {"storage_format": "h5"},
    ],
    ids=",".join,
)
def test_every_document_names_its_line(corpus, tmp_path, options, keep):
    report = build(corpus, tmp_path / "out", keep=keep, **options)
    assert check_every_document(corpus, report) > 20
    if keep:
        for each in report.stores:
            store = open_store(each.path)
            for document in range(store.num_documents):
                origin = store.origin(document)
                record = json.loads(lines_of(corpus / origin.file)[origin.place - 1])
                assert origin.kept == {"id": record["id"], "meta.url": record["meta"]["url"]}
        plain = build(corpus, tmp_path / "plain", **options)
        assert report.fingerprint == plain.fingerprint  # what is kept changes no token and no split


def test_files_that_are_added_later_name_their_own_lines(corpus, tmp_path):
    first = build(corpus, tmp_path / "out", corpus / "a.jsonl", keep=("id",))
    kept = {file: file.read_bytes() for file in (tmp_path / "out" / ".origins").iterdir()}
    report = build(corpus, tmp_path / "out", keep=("id",))
    assert check_every_document(corpus, report) == first.documents + report.new_documents
    assert {file: file.read_bytes() for file in kept} == kept
    with pytest.raises(StoreExistsError, match=r"options\.keep"):
        build(corpus, tmp_path / "out", keep=("id", "url"))
    whole = build(corpus, tmp_path / "whole", keep=("id",))
    assert whole.documents == report.documents


def test_rows_of_tables_are_counted_as_rows(tmp_path):
    rows = records(50)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=7)
    with (tmp_path / "b.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["text", "id"])
        writer.writeheader()
        writer.writerows({name: row[name] for name in ("text", "id")} for row in rows)
    (tmp_path / "c.txt").write_text("one\n\ntwo\n", encoding="utf-8")
    options = tm.PrepareOptions(keep=("id", "meta.url"), text_unit="line", chunk_bytes=500)
    files = [tmp_path / name for name in ("a.parquet", "b.csv", "c.txt")]
    tm.prepare(files, out=tmp_path / "out", workers=1, progress=False, options=options)
    store = open_store(tmp_path / "out")
    for number, row in enumerate(rows):
        kept = {"id": row["id"], "meta.url": row["meta"]["url"]}
        assert store.origin(number) == Origin(file="a.parquet", place=number + 1, counts="row", kept=kept)
        assert store.origin(50 + number).kept == {"id": str(row["id"])}
        assert text_of(store, 50 + number) == row["text"]
    assert str(store.origin(3)) == "a.parquet row 4"
    assert [str(store.origin(number)) for number in (100, 101)] == ["c.txt:1", "c.txt:3"]


def test_chats_keep_fields_that_their_recipe_does_not_read(tmp_path):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    chats = [{"messages": turns, "id": number} for number in range(9)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats), encoding="utf-8")
    options = tm.PrepareOptions(chat_template="chatml", keep=("id",))
    tm.prepare(
        tmp_path / "a.jsonl", out=tmp_path / "out", recipe="chat", workers=1, progress=False, options=options
    )
    store = open_store(tmp_path / "out")
    assert [store.origin(number).kept for number in range(9)] == [{"id": number} for number in range(9)]


def test_what_is_kept_of_a_record_is_bounded(tmp_path):
    record = {
        "text": "x",
        "long": "é" * 5000,
        "list": list(range(5000)),
        "flag": True,
        "none": None,
        "pair": [1, "a"],
    }
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    options = tm.PrepareOptions(keep=("long", "list", "flag", "none", "pair"))
    tm.prepare(tmp_path / "a.jsonl", out=tmp_path / "out", workers=1, progress=False, options=options)
    kept = open_store(tmp_path / "out").origin(0).kept
    assert kept == {
        "long": "é" * 1000 + "…",
        "list": json.dumps(list(range(5000)), separators=(",", ":"))[:1000] + "…",
        "flag": True,
        "pair": [1, "a"],
    }
    for keep in (("id", "id"), "id", ("a..b",)):
        with pytest.raises(ConfigError, match=r"keep: expected a list of (strings|fields, each once), got"):
            tm.PrepareOptions(keep=keep)


def test_documents_of_consecutive_lines_take_no_room(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "mill"}\n' * 20_000, encoding="utf-8")
    tm.prepare(tmp_path / "a.jsonl", out=tmp_path / "out", workers=1, progress=False)
    assert origins_file(tmp_path / "out", 0).stat().st_size < 300
    assert str(open_store(tmp_path / "out").origin(19_999)) == "a.jsonl:20000"


def test_a_store_that_does_not_say_lines_still_names_the_file(corpus, tmp_path):
    build(corpus, tmp_path / "out")
    store = open_store(tmp_path / "out")
    files = [store.origin(document).file for document in range(store.num_documents)]
    shutil.rmtree(tmp_path / "out" / ".origins")
    assert [store.origin(document) for document in range(store.num_documents)] == [
        Origin(file=file) for file in files
    ]
    assert str(store.origin(0)) == "a.jsonl"
    assert str(open_store(GOLDEN).origin(0)) == "unknown"
    np.save(tmp_path / "a.npy", np.array([5, 1, 6, 1], np.uint16))
    assert str(open_store(tmp_path / "a.npy", eos_id=1).origin(1)) == "a.npy"


def test_stores_that_are_joined_name_the_lines_of_each(corpus, tmp_path):
    reports = [
        build(
            corpus,
            tmp_path / name,
            corpus / f"{name}.jsonl",
            keep=("id",),
            chunk_bytes=900,
            max_tokens_per_shard=400,
        )
        for name in ("a", "b")
    ]
    store = join_stores([open_store(report.path) for report in reports])
    assert store.num_documents == sum(report.documents for report in reports)
    for document in range(store.num_documents):
        origin = store.origin(document)
        record = json.loads(lines_of(corpus / origin.file)[origin.place - 1])
        assert (record["text"], record["id"]) == (text_of(store, document), origin.kept["id"])


def test_a_document_outside_the_store_is_refused(corpus, tmp_path):
    build(corpus, tmp_path / "out")
    store = open_store(tmp_path / "out")
    for document in (-1, store.num_documents):
        with pytest.raises(PlanError, match=rf"document out of range: {document}"):
            store.origin(document)


def test_any_changed_byte_is_found_and_never_named_wrongly_in_silence(corpus, tmp_path):
    build(corpus, tmp_path / "out", keep=("id",))
    file = origins_file(tmp_path / "out", 0)
    good = file.read_bytes()
    for position in range(0, len(good), 7):
        file.write_bytes(good[:position] + bytes([good[position] ^ 16]) + good[position + 1 :])
        with pytest.raises(StoreCorruptError, match=r"\.origins/00000\.bin: must say where"):
            verify(tmp_path / "out")
        if position < good.find(b'{"id"'):  # kept fields are left to `verify`
            with pytest.raises(StoreCorruptError, match=r"\.origins/00000\.bin: must say where"):
                open_store(tmp_path / "out").origin(len(good) % 90)
    for size in (0, 5, len(good) // 2, len(good) - 1):
        file.write_bytes(good[:size])
        with pytest.raises(StoreCorruptError, match=r"\.origins/00000\.bin"):
            open_store(tmp_path / "out").origin(0)
    file.write_bytes(good)
    verify(tmp_path / "out")


def test_a_store_that_is_built_anew_forgets_the_old_lines(corpus, tmp_path):
    build(corpus, tmp_path / "out", chunk_bytes=700)
    assert len(list((tmp_path / "out" / ".origins").iterdir())) > 3
    options = tm.PrepareOptions(on_error="skip")
    report = tm.prepare(
        corpus / "b.jsonl", out=tmp_path / "out", workers=1, rebuild=True, progress=False, options=options
    )
    assert [file.name for file in (tmp_path / "out" / ".origins").iterdir()] == ["00000.bin"]
    assert check_every_document(corpus, report) == report.documents


def test_one_document_shows_its_origin_tokens_and_masks(tmp_path):
    chats = [{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "id": 7}]
    (tmp_path / "a.jsonl").write_text(json.dumps(chats[0]) + "\n", encoding="utf-8")
    options = tm.PrepareOptions(chat_template="chatml", keep=("id",))
    tm.prepare(
        tmp_path / "a.jsonl", out=tmp_path / "out", recipe="chat", workers=1, progress=False, options=options
    )
    store = open_store(tmp_path / "out")
    found = inspect_document(store, 0, tokenizer_of(store))
    (part,) = found.parts
    assert found.origin == Origin(file="a.jsonl", place=1, kept={"id": 7})
    assert part.ids == tuple(store.fetch_record(0, "sequence").tolist())
    assert part.mask == tuple(store.fetch_record(0, "loss_mask").tolist())
    assert "".join(part.strings) == tokenizer_of(store).decode(store.fetch_record(0, "sequence"))
    assert part.trained == (False, *(bool(flag) for flag in part.mask[1:]))


def test_the_origins_of_a_remote_shard_are_found_by_its_number(tmp_path, make_store):
    path, *_ = make_store("web", [7, 3])
    upload(path, f"file://{tmp_path}/remote")
    (tmp_path / "remote" / ".origins").mkdir()
    for first in (0, 7, 10_000, 99_999, 100_000, 100_007):
        (tmp_path / "remote" / ".origins" / f"{first:05d}.bin").write_bytes(b"of the unit with this first shard")
    options = RemoteOptions(mirror=str(tmp_path / "mirror"))
    (files,) = open_store(f"file://{tmp_path}/remote", remote=options)._remotes
    for shard, first in ((6, 0), (10_003, 10_000), (99_999, 99_999), (100_006, 100_000), (123_456, 100_007)):
        shutil.rmtree(files.folder / ".origins", ignore_errors=True)
        files.download_origins(shard_name(shard))
        assert [file.name for file in (files.folder / ".origins").iterdir()] == [f"{first:05d}.bin"]
