"""A unit is a function of its job and task; which records are taken, and where they go, of their content alone."""

import random
import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.build.corpus import files_of, some_texts, texts_of, write_file
from tests.documents.corpora import COMPRESS, CONTENTS

from tokenmill.build import PrepareOptions, prepare
from tokenmill.build import select as module
from tokenmill.build.schedule import WorkerPool
from tokenmill.build.select import DUPLICATE, SURPLUS, TAKEN, domain_name, fates_of, is_validation
from tokenmill.build.tasks import run_index
from tokenmill.errors import ConfigError, DocumentError, StoreExistsError
from tokenmill.store import open_store, read_manifest

WORDS = [f"document number {i}" for i in range(200)]


def build(inputs, out, *, workers=1, rebuild=False, **options):
    return prepare(
        inputs, out=out, workers=workers, rebuild=rebuild, progress=False, options=PrepareOptions(**options)
    )


def write_records(path, records):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    return path


def test_short_and_long_texts_are_left_out_and_counted(tmp_path):
    texts = ["a" * size for size in (0, 4, 5, 9, 10, 11)]
    report = build(write_file(tmp_path / "a.jsonl", texts), tmp_path / "out", min_chars=5, max_chars=10)
    assert texts_of(open_store(tmp_path / "out")) == ["a" * 5, "a" * 9, "a" * 10]
    assert report.skipped == {"max_chars": 1, "min_chars": 2}
    assert report.documents + sum(report.skipped.values()) == len(texts)


SPARSE = ["", "one", "", "", " ", "two", ""]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json.gz", "a.csv", "a.tsv.zst", "a.tar", "a.parquet", "a.arrow"])
def test_empty_texts_are_left_out_of_every_format_and_counted(tmp_path, name):
    suffix, _, compression = name[1:].rpartition(".") if name.count(".") > 1 else (name[1:], "", "")
    if suffix in CONTENTS:
        (tmp_path / name).write_bytes(COMPRESS[compression and f".{compression}"](CONTENTS[suffix](SPARSE)))
    elif suffix == ".parquet":
        pq.write_table(pa.table({"text": SPARSE}), tmp_path / name)
    else:
        feather.write_feather(pa.table({"text": SPARSE}), tmp_path / name)
    report = build(tmp_path / name, tmp_path / "out")
    assert texts_of(open_store(tmp_path / "out")) == ["one", " ", "two"]
    assert report.skipped == {"empty": 4}
    assert read_manifest(tmp_path / "out").skipped["counts"] == {"empty": 4}
    kept = build(tmp_path / name, tmp_path / "kept", keep_empty=True)
    assert (texts_of(open_store(tmp_path / "kept")), kept.skipped) == (SPARSE, {})


def test_empty_text_files_are_counted_too(tmp_path):
    for number, text in enumerate(SPARSE):
        (tmp_path / f"{number}.txt").write_text(text)
    report = build([tmp_path / f"{number}.txt" for number in range(7)], tmp_path / "out")
    assert (texts_of(open_store(tmp_path / "out")), report.skipped) == (["one", " ", "two"], {"empty": 4})


@pytest.mark.parametrize(
    ("options", "route", "skipped"),
    [
        ({"deduplicate": True}, "", {"duplicate": 3, "empty": 8}),
        ({"max_items": 2}, "", {"empty": 8, "max_items": 4}),
        ({"max_seq_len": 9}, "", {"empty": 8}),
        ({"domain_key": "id"}, "1", {"empty": 8}),
        ({"min_chars": 2}, "", {"min_chars": 10}),
    ],
)
def test_empty_texts_are_left_out_whatever_else_is_asked_for(tmp_path, options, route, skipped):
    """They balance: records are documents, or counted by reason."""
    path = write_file(tmp_path / "a.jsonl", SPARSE * 2)
    report = build(path, tmp_path / "out", **options)
    assert "" not in texts_of(open_store(tmp_path / "out" / route))
    assert report.skipped == skipped
    assert report.documents + sum(report.skipped.values()) == 14


def test_a_corpus_of_empty_texts_is_no_store_but_adds_nothing_to_one(tmp_path):
    path = write_file(tmp_path / "a.jsonl", ["", ""])
    with pytest.raises(DocumentError, match=r"no document was taken, 2 skipped \(empty 2\)"):
        build(path, tmp_path / "out")
    build(write_file(tmp_path / "b.jsonl", ["b"]), tmp_path / "out")
    report = build([path, tmp_path / "b.jsonl"], tmp_path / "out")
    assert (report.documents, report.new_documents, report.skipped) == (1, 0, {"empty": 2})


def test_a_store_that_keeps_empty_texts_is_not_added_to_without_them(tmp_path):
    path = write_file(tmp_path / "a.jsonl", SPARSE)
    build(path, tmp_path / "out", keep_empty=True)
    with pytest.raises(StoreExistsError, match=r"options\.keep_empty '\(absent\)' -> False"):
        build(path, tmp_path / "out")


@pytest.mark.parametrize("workers", [1, 2])
def test_of_records_with_one_content_the_first_in_input_order_is_taken(tmp_path, workers):
    dice = random.Random(0)
    texts = [dice.choice(WORDS) for _ in range(600)]
    inputs = [write_file(tmp_path / f"{i}.jsonl", texts[200 * i : 200 * i + 200]) for i in range(3)]
    report = build(inputs, tmp_path / "out", workers=workers, deduplicate=True, chunk_bytes=2000)
    assert texts_of(open_store(tmp_path / "out")) == list(dict.fromkeys(texts))
    assert report.skipped == {"duplicate": 600 - len(set(texts))}


def test_duplicates_of_what_is_in_the_store_are_found_when_files_are_added(tmp_path):
    write_file(tmp_path / "in" / "a.jsonl", WORDS[:100])
    build(tmp_path / "in", tmp_path / "out", deduplicate=True)
    write_file(tmp_path / "in" / "b.jsonl", WORDS[50:150])
    report = build(tmp_path / "in", tmp_path / "out", deduplicate=True)
    assert texts_of(open_store(tmp_path / "out")) == WORDS[:150]
    assert (report.new_documents, report.skipped) == (50, {"duplicate": 50})


@pytest.mark.parametrize("workers", [1, 2])
def test_only_the_first_items_in_input_order_are_taken(tmp_path, workers):
    write_file(tmp_path / "in.jsonl", WORDS)
    report = build(tmp_path / "in.jsonl", tmp_path / "out", workers=workers, max_items=77, chunk_bytes=1000)
    assert texts_of(open_store(tmp_path / "out")) == WORDS[:77]
    assert report.skipped == {"max_items": 123}


def test_filters_come_before_the_number_of_items(tmp_path):
    texts = ["a", *WORDS[:5], "b", *WORDS[5:10]]
    build(write_file(tmp_path / "in.jsonl", texts), tmp_path / "out", min_chars=3, max_items=7)
    assert texts_of(open_store(tmp_path / "out")) == WORDS[:7]


@given(
    st.lists(st.lists(st.integers(0, 30), max_size=40), min_size=1, max_size=6),
    st.booleans(),
    st.none() | st.integers(0, 60),
)
def test_fates_are_those_of_one_walk_through_all_records(tmp_path_factory, units, deduplicate, max_items):
    """However many parts the hashes are compared in."""
    folder = tmp_path_factory.mktemp("scans")
    for index, unit in enumerate(units):
        hashes = np.array([(value * 7919, value) for value in unit], module._HASH)
        (folder / str(index)).write_bytes(b"".join(module.with_checksum([hashes.tobytes()])))
    paths = [folder / str(index) for index in range(len(units))]
    expected, seen, left = [], set(), max_items
    for unit in units:
        fates = []
        for value in unit:
            fate = DUPLICATE if deduplicate and value in seen else TAKEN
            seen.add(value)
            if fate == TAKEN and left is not None:
                left -= 1
                fate = SURPLUS if left < 0 else TAKEN
            fates.append(fate)
        expected.append(fates)
    before = module._HASHES_AT_ONCE
    try:
        for most in (before, 7):
            module._HASHES_AT_ONCE = most
            found = fates_of(paths, deduplicate=deduplicate, max_items=max_items)
            assert [fates.tolist() for fates in found] == expected
    finally:
        module._HASHES_AT_ONCE = before


def test_the_validation_split_does_not_move_when_files_are_added(tmp_path):
    write_file(tmp_path / "a" / "a.jsonl", WORDS[:100])
    write_file(tmp_path / "b" / "b.jsonl", WORDS[100:])
    build([tmp_path / "a", tmp_path / "b"], tmp_path / "both", val_fraction=0.2)
    build(tmp_path / "a", tmp_path / "one", val_fraction=0.2)
    both, one = texts_of(open_store(tmp_path / "both" / "val")), texts_of(open_store(tmp_path / "one" / "val"))
    assert [text for text in both if text in WORDS[:100]] == one
    kept = texts_of(open_store(tmp_path / "both" / "train"))
    assert [text for text in WORDS if text in kept or text in both] == WORDS
    assert set(kept) & set(both) == set()
    assert 20 <= len(both) <= 60


def test_the_share_for_validation_is_what_was_asked_for():
    taken = sum(is_validation(b"text %d" % i, 0.05) for i in range(20_000))
    assert 900 < taken < 1100
    assert not any(is_validation(text.encode(), 0.0) for text in WORDS)


@pytest.mark.parametrize("workers", [1, 2])
def test_documents_go_to_the_store_of_their_domain(tmp_path, workers):
    records = [{"text": text, "meta": {"lang": ("en", "de", "x/y")[i % 3]}} for i, text in enumerate(WORDS)]
    path = write_records(tmp_path / "in.jsonl", records)
    report = build(path, tmp_path / "out", workers=workers, domain_key="meta.lang", chunk_bytes=2000)
    other = domain_name("x/y")
    assert [store.route for store in report.stores] == ["de", "en", other]
    for place, name in enumerate(("en", "de", other)):
        assert texts_of(open_store(tmp_path / "out" / name)) == WORDS[place::3]
    assert report.documents == 200


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
@pytest.mark.parametrize("text_field", ["text", "meta.text"])
def test_a_field_means_the_same_for_texts_domains_and_what_is_kept(tmp_path, name, text_field):
    """[D1.a] A name with a dot is a field of that very name, before it leads into another field."""
    own = {"text": "a", "meta.text": "b", "meta.site": "web", "meta.id": 1}
    inner = {"text": "a", "meta.text": "b", "meta": {"site": "web", "id": 1, "text": "no"}}
    for index, record in enumerate((own, {**inner, **own}, inner)):
        folder = tmp_path / str(index)
        folder.mkdir()
        path = folder / name
        if name.endswith("jsonl"):
            write_records(path, [record])
        else:
            pq.write_table(pa.Table.from_pylist([record]), path)
        build(path, folder / "out", text_field=text_field, domain_key="meta.site", keep=("meta.id",))
        store = open_store(folder / "out" / "web")
        assert texts_of(store) == [record[text_field]]
        assert store.origin(0).kept == {"meta.id": 1}


def test_domains_and_the_validation_split_go_together(tmp_path):
    records = [{"text": text, "source": "ab"[i % 2]} for i, text in enumerate(WORDS)]
    path = write_records(tmp_path / "in.jsonl", records)
    report = build(path, tmp_path / "out", domain_key="source", val_fraction=0.3)
    assert [store.route for store in report.stores] == ["a/train", "a/val", "b/train", "b/val"]
    assert sum(store.documents for store in report.stores) == 200
    before = files_of(tmp_path / "out")
    write_records(tmp_path / "more.jsonl", [{"text": "one more", "source": "c"}])
    report = build([path, tmp_path / "more.jsonl"], tmp_path / "out", domain_key="source", val_fraction=0.3)
    assert report.documents == 201
    after = files_of(tmp_path / "out")
    assert {name: after[name] for name in before if "shard-" in name} == {
        name: data for name, data in before.items() if "shard-" in name
    }


def test_a_record_without_a_domain_is_a_bad_one(tmp_path):
    path = write_records(tmp_path / "in.jsonl", [{"text": "a", "source": "web"}, {"text": "b"}])
    with pytest.raises(DocumentError, match=r"in\.jsonl:2: the domain must be a name, got None"):
        build(path, tmp_path / "out", domain_key="source")
    report = build(path, tmp_path / "skip", domain_key="source", on_error="skip")
    assert (report.documents, report.skipped) == (1, {"domain": 1})


@pytest.mark.parametrize(
    "name", ["..", ".", "a/../b", "/etc", "shard-00000", "manifest.json", ".prepare", "\0", "ü" * 300]
)
def test_no_domain_leads_out_of_the_folder_or_looks_like_a_part_of_a_store(name):
    """[S.d]"""
    made = domain_name(name)
    assert made is not None
    assert made != name
    assert Path(made).name == made
    assert not made.startswith(".")
    assert len(made) < 100


def test_names_that_would_become_one_stay_apart():
    assert len({domain_name(name) for name in ("a/b", "a?b", "a b", "a_b")}) == 4
    assert [domain_name(value) for value in (None, True, 1.5, "", [], 3)] == [None, None, None, None, None, "3"]


def test_an_option_of_another_recipe_is_refused(tmp_path):
    path = write_file(tmp_path / "in.jsonl", WORDS[:3])
    with pytest.raises(ConfigError, match=r"text_field: must be given with the recipe 'text' only, got 'chat'"):
        prepare(path, out=tmp_path / "out", recipe="chat", options=PrepareOptions(text_field="body"))
    with pytest.raises(ConfigError, match=r"val_fraction"):
        build(path, tmp_path / "out", val_fraction=1.5)


def test_hashes_of_a_build_with_other_filters_are_not_used_again(tmp_path):
    """A rebuild with a filter has other records to compare; the hashes of the first build are not theirs."""
    texts = ["ab", "ab", "long text 1", "long text 2", "long text 1", "long text 3"]
    path = write_file(tmp_path / "in.jsonl", texts)
    build(path, tmp_path / "out", deduplicate=True)
    build(path, tmp_path / "out", deduplicate=True, min_chars=5, rebuild=True)
    assert texts_of(open_store(tmp_path / "out")) == ["long text 1", "long text 2", "long text 3"]
    build(path, tmp_path / "out", rebuild=True)
    assert sorted(file.name for file in (tmp_path / "out" / ".prepare").iterdir()) == ["inputs.json"]


def test_a_record_that_is_not_taken_makes_no_other_a_duplicate(tmp_path):
    records = [{"text": "same"}, {"text": "same", "source": "web"}, {"text": "same", "source": "web"}]
    path = write_records(tmp_path / "in.jsonl", records)
    report = build(path, tmp_path / "out", domain_key="source", deduplicate=True, on_error="skip")
    assert (report.documents, report.skipped) == (1, {"domain": 1, "duplicate": 1})


def test_files_that_add_nothing_are_taken_into_the_store_all_the_same(tmp_path):
    write_file(tmp_path / "in" / "a.jsonl", WORDS[:100])
    build(tmp_path / "in", tmp_path / "out", deduplicate=True, max_items=120)
    for number, texts in enumerate(([], WORDS[:50], WORDS[90:130], WORDS[130:])):
        write_file(tmp_path / "in" / f"b{number}.jsonl", texts)
        report = build(tmp_path / "in", tmp_path / "out", deduplicate=True, max_items=120)
    assert texts_of(open_store(tmp_path / "out")) == WORDS[:120]
    assert (report.new_documents, report.skipped) == (0, {"max_items": 70})
    assert build(tmp_path / "in", tmp_path / "out", deduplicate=True, max_items=120).new_files == 0
    (tmp_path / "in" / "c.jsonl").write_bytes(b"broken")
    with pytest.raises(DocumentError, match="one JSON object"):
        build(tmp_path / "in", tmp_path / "out", deduplicate=True, max_items=120)


def test_files_added_one_by_one_give_what_all_at_once_give(tmp_path):
    """Every record is counted once: taken by file and store, or left out by reason, or bad."""
    dice = random.Random(1)
    records = [{"text": dice.choice(WORDS), "source": dice.choice(["a", "b", None, "c/d"])} for _ in range(400)]
    chosen = {
        "domain_key": "source",
        "val_fraction": 0.3,
        "deduplicate": True,
        "max_items": 90,
        "min_chars": 17,
        "on_error": "skip",
        "chunk_bytes": 3000,
        "storage_format": "h5",
    }
    for number in range(4):
        write_records(tmp_path / f"{number}.jsonl", records[100 * number :][:100])
        build([tmp_path / f"{i}.jsonl" for i in range(number + 1)], tmp_path / "one", **chosen)
    report = build([tmp_path / f"{i}.jsonl" for i in range(4)], tmp_path / "all", workers=2, **chosen)
    assert report.documents + sum(report.skipped.values()) == 400
    assert report.documents == 90
    for store in report.stores:
        one, whole = open_store(tmp_path / "one" / store.route), open_store(store.path)
        assert texts_of(one) == texts_of(whole)
        assert one.manifest.skipped == whole.manifest.skipped
        assert whole.manifest.skipped["counts"] == report.skipped
        assert one.manifest.inputs == whole.manifest.inputs
        assert sum(file["documents"] for file in whole.manifest.inputs) == whole.num_documents
        assert sum(file["tokens"] for file in whole.manifest.inputs) == whole.num_tokens


def test_there_may_be_more_domains_than_files_that_can_be_open(tmp_path):
    resource = pytest.importorskip("resource")
    path = write_records(tmp_path / "in.jsonl", [{"text": "x", "source": number} for number in range(150)])
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/dev/fd").iterdir())) + 60, before[1]))
    try:
        report = build(path, tmp_path / "out", domain_key="source")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert (len(report.stores), report.documents) == (150, 150)


def test_bad_records_are_listed_and_stop_a_build_in_the_order_of_their_lines(tmp_path):
    """Whether a line could not be read or its record cannot be taken."""
    path = write_records(tmp_path / "in.jsonl", [{"text": "a", "source": "web"}, {"text": "b"}])
    path.write_bytes(path.read_bytes() + b"broken\n" + msgspec.json.encode({"text": "c", "source": None}) + b"\n")
    with pytest.raises(DocumentError, match=r"in\.jsonl:2: the domain must be a name"):
        build(path, tmp_path / "out", domain_key="source")
    report = build(path, tmp_path / "skip", domain_key="source", on_error="skip")
    first = open_store(tmp_path / "skip" / "web").manifest.skipped["first"]
    assert [(one["line"], one["reason"]) for one in first] == [(2, "domain"), (3, "json"), (4, "domain")]
    assert report.documents + sum(report.skipped.values()) == 4


def test_memory_does_not_grow_with_the_number_of_files(tmp_path):
    """Records of many files are joined to batches by their size, not by their number alone."""
    for number in range(50):
        write_records(tmp_path / "in" / f"{number}.jsonl", [{"text": "x" * 1_000_000, "source": "web"}])
    tracemalloc.start()
    try:
        report = build(tmp_path / "in", tmp_path / "out", domain_key="source", chunk_bytes=1 << 30)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (report.units, report.documents) == (1, 50)
    assert peak < 30 << 20


def test_conversations_in_which_others_say_the_same_are_no_duplicates(tmp_path):
    def chat(*texts):
        roles = ("user", "assistant")
        return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}

    records = [chat("A\nB", "C"), chat("A", "B\nC"), chat("A\nB", "C"), {**chat("A", "B\nC"), "id": 7}]
    path = write_records(tmp_path / "in.jsonl", records)
    options = PrepareOptions(deduplicate=True, chat_template="chatml")
    report = prepare(path, out=tmp_path / "out", recipe="chat", workers=1, progress=False, options=options)
    assert (report.documents, report.skipped) == (2, {"duplicate": 2})


@pytest.mark.parametrize("chunk_bytes", [None, 200])
def test_what_stands_behind_the_items_that_are_wanted_is_not_looked_at(tmp_path, chunk_bytes):
    path = tmp_path / "in.jsonl"
    write_file(path, WORDS[:10])
    path.write_bytes(path.read_bytes() + b"BROKEN\n" + path.read_bytes())
    report = build(path, tmp_path / "out", max_items=7, chunk_bytes=chunk_bytes)
    assert texts_of(open_store(tmp_path / "out")) == WORDS[:7]
    assert report.skipped == {"max_items": 14}
    with pytest.raises(DocumentError, match=r"in\.jsonl:11"):
        build(path, tmp_path / "more", max_items=11, chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("options", [{}, {"deduplicate": True, "val_fraction": 0.3, "max_seq_len": 50}])
def test_units_may_be_done_in_any_order_and_more_than_once(tmp_path, monkeypatch, options):
    """[C1] By any process that sees the files, which needs no more than the index of a task."""
    corpus = write_file(tmp_path / "a.jsonl", some_texts(200) * 2)
    build(corpus, tmp_path / "straight", chunk_bytes=3000, **options)
    num_tasks = []

    def run(_pool, journal, tasks, indices, _tick):
        num_tasks.append(len(indices))
        for index in [*reversed(indices), *indices]:
            run_index(str(journal.out), tasks.head.checksum, index)
        yield from indices

    monkeypatch.setattr(WorkerPool, "run", run)
    build(corpus, tmp_path / "elsewhere", chunk_bytes=3000, **options)
    assert min(num_tasks) > 3
    assert files_of(tmp_path / "elsewhere") == files_of(tmp_path / "straight")
