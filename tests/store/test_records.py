"""Documents and records by number, as slices and in order."""

from __future__ import annotations

import json

import numpy as np
import pytest

import tokenmill as tm
from tokenmill.errors import PlanError, TokenizerError
from tokenmill.store import open_store
from tokenmill.store.opening import join_stores
from tokenmill.store.remote.upload import upload

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
    tokenizer = web._opened["tokenizer"]
    _ = [record.text for record in web]
    assert web._opened["tokenizer"] is tokenizer


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


def test_find_returns_the_documents_with_a_kept_field(web):
    found = web.find(url="https://a.b/1")
    assert (found.dtype, found.tolist()) == (np.dtype(np.int64), [1, 10])
    assert web.find(url=["https://a.b/1", "https://a.b/7", "nowhere"]).tolist() == [1, 7, 10]
    assert web.find(url="https://a.b/1", id=10).tolist() == [10]
    assert web.find(id=np.arange(3)).tolist() == [0, 1, 2]
    assert web.find(url="https://a.b").tolist() == []


@pytest.mark.parametrize("value", ["3", 3.5, True])
def test_find_tells_a_number_from_its_text(web, value):
    assert web.find(id=value).tolist() == []


def test_find_names_a_field_that_is_not_kept(web):
    with pytest.raises(tm.ConfigError, match=r"unknown field 'urls'; did you mean 'url'\?"):
        web.find(urls="x")
    with pytest.raises(tm.ConfigError, match="no field to look for"):
        web.find()
    with pytest.raises(tm.ConfigError, match="id: expected text or a number, got None"):
        web.find(id=None)


def test_find_in_a_store_without_kept_fields_says_how_to_keep_them(small_store):
    with pytest.raises(tm.ConfigError, match=r"keeps no fields; prepare it again with keep=\['url'\]"):
        open_store(small_store).find(url="x")


@pytest.mark.parametrize("text", ["plain", "üñí", 'a "quoted" \\ text', "x" * 1000])
def test_find_finds_any_text(tmp_path, text):
    rows = [{"text": "a", "id": other} for other in ("", text, text + "!")]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = tm.PrepareOptions(keep=("id",))
    tm.prepare(tmp_path / "in.jsonl", out=tmp_path / "s", tokenizer="bytes", options=options, progress=False)
    assert open_store(tmp_path / "s").find(id=text).tolist() == [1]


def test_find_looks_through_all_shards_and_joined_stores(web, tmp_path):
    rows = [{"text": "last " * 9, "url": f"https://a.b/{number}", "day": number} for number in range(40)]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = tm.PrepareOptions(keep=("url", "day"), max_tokens_per_shard=500)
    tm.prepare(tmp_path / "b.jsonl", out=tmp_path / "b", tokenizer="bytes", options=options, progress=False)
    other = open_store(tmp_path / "b")
    assert other.num_shards > 2
    assert other.find(url=["https://a.b/39", "https://a.b/0"]).tolist() == [0, 39]
    joined = join_stores([web, other])
    assert joined.find(url="https://a.b/8").tolist() == [8, 20]
    assert joined.find(day=39).tolist() == [51]
    with pytest.raises(tm.ConfigError, match="unknown field 'hour'"):
        joined.find(hour=1)


def test_records_and_fields_of_a_remote_store(web, tmp_path):
    address = f"file://{tmp_path}/remote"
    upload(web.path, address)
    remote = open_store(address)
    assert remote.find(url="https://a.b/1").tolist() == [1, 10]
    assert (words(remote[10].text), remote[10].fields["id"]) == (TEXTS[10], 10)


def test_a_group_has_its_prompt_and_a_list_of_responses(tmp_path):
    group = {"prompt": "q", "responses": ["a", "bb"], "rewards": [1.0, 0.0]}
    (tmp_path / "grpo.jsonl").write_text(json.dumps(group) + "\n")
    tm.prepare(tmp_path / "grpo.jsonl", out=tmp_path / "grpo", tokenizer="bytes", recipe="grpo", progress=False)
    (record,) = open_store(tmp_path / "grpo")
    assert record.texts == {"prompts": "<|bos|>q", "responses": ["a<|eos|>", "bb<|eos|>"]}
    assert (record.text, record.mask) == ("<|bos|>q", None)
    assert [mask.tolist() for mask in record.masks["masks"]] == [[1, 1], [1, 1, 1]]
    assert record.arrays["rewards"].tolist() == [1.0, 0.0]
