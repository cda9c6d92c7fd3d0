"""Documents and records by number, as slices and in order."""

from __future__ import annotations

import json

import numpy as np
import pytest

import tokenmill as tm
from tokenmill.errors import PlanError, TokenizerError
from tokenmill.store import open_store
from tokenmill.store.reader import join_stores

TEXTS = [f"a mill grinds {number} stones" for number in range(12)]


@pytest.fixture
def web(tmp_path):
    path = tmp_path / "web.jsonl"
    rows = [{"text": text, "url": f"https://a.b/{number % 9}", "id": number} for number, text in enumerate(TEXTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = tm.PrepareOptions(keep=("url", "id"))
    tm.prepare(path, out=tmp_path / "web", tokenizer="bytes", options=options, progress=False)
    return open_store(tmp_path / "web")


def words(text):
    return text.removeprefix("<|bos|>").removesuffix("<|eos|>")


def test_a_record_has_ids_text_origin_and_fields(web):
    record = web[3]
    assert record.document == 3
    assert np.array_equal(record.ids, web.fetch_record(3, "sequence"))
    assert (record.mask, record.masks) == (None, {})
    assert words(record.text) == TEXTS[3]
    assert record.texts == {"sequence": record.text}
    assert (str(record.origin), record.fields) == ("web.jsonl:4", {"id": 3, "url": "https://a.b/3"})
    assert repr(record) == f"<Record 3 of {web.path}: sequence {record.ids.size}, from web.jsonl:4>"


def test_records_are_counted_and_read_in_order(web):
    assert len(web) == 12
    assert [words(record.text) for record in web] == TEXTS
    assert [record.document for record in reversed(web)] == list(range(11, -1, -1))
    assert [web[-1].document, web[-12].document, web[np.int64(2)].document] == [11, 0, 2]


@pytest.mark.parametrize("index", [12, -13, 10**30])
def test_an_index_outside_is_an_index_error_with_the_way_out(web, index):
    with pytest.raises(IndexError, match=rf"index out of range: {index}; there are 12 records"):
        _ = web[index]
    with pytest.raises(PlanError, match="index out of range"):
        _ = web[:0][0]


@pytest.mark.parametrize("index", ["3", 2.5, None, slice("a", None), slice(None, None, 0)])
def test_an_index_of_another_type_is_named(web, index):
    with pytest.raises(PlanError, match=r"expected a whole number, got|must not be 0"):
        _ = web[index]


def test_a_slice_reads_nothing_before_it_is_asked(web):
    opened = open_store(web.path)
    part = opened[2:-2:3]
    (web.path / "shard-00000" / "sequence.bin").unlink()
    assert (len(part), part.documents, part[1:].documents) == (3, range(2, 10, 3), range(5, 10, 3))
    assert repr(part) == f"<RecordSlice of {web.path}: 3 records, range(2, 10, 3)>"
    with pytest.raises(FileNotFoundError):
        _ = part[0]


def test_records_of_a_slice(web):
    assert [record.document for record in web[8:100]] == [8, 9, 10, 11]
    assert web[8:100][-1].document == 11
    assert [record.document for record in web[::-5]] == [11, 6, 1]


def test_an_empty_store_has_no_records(small_store):
    store = open_store(small_store)
    assert [record.ids.tolist() for record in store] == [[7, 8, 9]]
    assert list(store[1:]) == []


def test_no_text_names_the_tokenizer_that_is_missing(small_store):
    with pytest.raises(TokenizerError, match=r"no text without its tokenizer: .*open_tokenizer"):
        _ = open_store(small_store)[0].text


def test_the_tokenizer_is_opened_once_per_store(web):
    _ = web[0].text
    tokenizer = web.opened["tokenizer"]
    _ = [record.text for record in web]
    assert web.opened["tokenizer"] is tokenizer


def test_records_of_joined_stores_go_on_with_the_next(web, tmp_path):
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "last"}) + "\n")
    tm.prepare(tmp_path / "b.jsonl", out=tmp_path / "b", tokenizer="bytes", progress=False)
    joined = join_stores([web, open_store(tmp_path / "b")])
    assert (len(joined), words(joined[-1].text), str(joined[12].origin)) == (13, "last", "b.jsonl:1")
    assert joined[12].fields == {}


def test_conversations_and_pairs_have_masks_and_texts(tmp_path):
    pair = {"prompt": "q", "chosen": "yes", "rejected": "no"}
    (tmp_path / "dpo.jsonl").write_text(json.dumps(pair) + "\n")
    tm.prepare(tmp_path / "dpo.jsonl", out=tmp_path / "dpo", tokenizer="bytes", recipe="dpo", progress=False)
    record = open_store(tmp_path / "dpo")[0]
    assert record.texts.keys() == {"chosen", "rejected"}
    assert record.masks.keys() == {"chosen_mask", "rejected_mask"}
    assert record.mask.sum() == record.masks["chosen_mask"].sum() > 0
    assert record.text == record.texts["chosen"]
