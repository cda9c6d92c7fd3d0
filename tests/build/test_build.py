"""From files to a store: the same bytes however the work was divided, and every line accounted for."""

import bz2
import gzip
import importlib.util
import json
import re
import time
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from tests.build.corpus import COMPRESS, files_of, lines_of, some_texts, texts_of, write_file

from tokenmill.build import PrepareOptions, prepare
from tokenmill.documents import ReadOptions, cut_files, find_files, read_unit
from tokenmill.errors import ConfigError, DocumentError, StoreExistsError, StoreMissingError, TokenizerError
from tokenmill.store import open_store, read_manifest, verify

TEXTS = some_texts(600)


def build(inputs, out, *, workers=1, rebuild=False, recipe="text", **options):
    return prepare(
        inputs,
        out=out,
        workers=workers,
        rebuild=rebuild,
        recipe=recipe,
        progress=False,
        options=PrepareOptions(**options),
    )


@pytest.fixture
def corpus(tmp_path):
    """Two plain files and one of each compressed kind."""
    folder = tmp_path / "corpus"
    write_file(folder / "part-10.jsonl", TEXTS[450:])
    write_file(folder / "part-9.jsonl.gz", TEXTS[300:450])
    write_file(folder / "part-2.jsonl.zst", TEXTS[200:300])
    write_file(folder / "part-1.jsonl", TEXTS[:200])
    return folder


@pytest.fixture
def straight(corpus, tmp_path):
    """Build the store in one process."""
    build(corpus, tmp_path / "straight", max_tokens_per_shard=20_000)
    return tmp_path / "straight"


def test_documents_are_in_the_store_in_the_natural_order_of_the_files(straight):
    assert texts_of(open_store(straight)) == TEXTS


def test_store_verifies_and_leaves_no_temporary_files(straight):
    assert verify(straight).documents == len(TEXTS)
    assert sorted(path.name for path in straight.iterdir() if path.name.startswith(".")) == [
        ".hashes",
        ".origins",
        ".prepare",
        ".sums",
    ]
    assert [path.name for path in (straight / ".prepare").iterdir()] == ["inputs.json"]
    assert len(read_manifest(straight).shards) > 1


@pytest.mark.parametrize("chunk_bytes", [1 << 10, 7777, 1 << 20, None])
def test_bytes_do_not_depend_on_the_number_of_workers(corpus, tmp_path, chunk_bytes):
    """Workers leave no trace, not even in the manifest [C1, D1.a]."""
    stores = [tmp_path / "1", tmp_path / "3"]
    for store in stores:
        build(corpus, store, workers=int(store.name), chunk_bytes=chunk_bytes, max_tokens_per_shard=20_000)
    assert files_of(stores[0]) == files_of(stores[1])


@pytest.mark.parametrize("chunk_bytes", [1 << 10, 7777, 1 << 20])
def test_documents_do_not_depend_on_where_files_are_cut(corpus, tmp_path, chunk_bytes):
    build(corpus, tmp_path / "store", chunk_bytes=chunk_bytes)
    assert texts_of(open_store(tmp_path / "store")) == TEXTS


def test_small_files_share_a_shard_and_large_ones_are_cut(tmp_path):
    for number in range(50):
        write_file(tmp_path / "small" / f"{number}.jsonl", [f"document {number}"])
    assert build(tmp_path / "small", tmp_path / "a").shards == 1
    assert build(tmp_path / "small", tmp_path / "b", chunk_bytes=400).shards > 3
    one = write_file(tmp_path / "large.jsonl", TEXTS)
    assert build(one, tmp_path / "c", chunk_bytes=one.stat().st_size // 4).shards in (4, 5)


def test_documents_do_not_depend_on_compression(tmp_path):
    for suffix in COMPRESS:
        report = build(write_file(tmp_path / f"input{suffix}", TEXTS), tmp_path / f"store{suffix}")
        assert texts_of(open_store(report.path)) == TEXTS


def test_report_and_manifest_tell_where_tokens_came_from(corpus, straight, tmp_path):
    report = build(corpus, tmp_path / "again", max_tokens_per_shard=20_000)
    manifest = read_manifest(tmp_path / "again")
    text_bytes = sum(len(text.encode()) for text in TEXTS)
    assert (report.documents, report.text_bytes, report.tokens) == (600, text_bytes, text_bytes + 1200)
    assert report.input_bytes == sum(path.stat().st_size for path in corpus.iterdir())
    assert report.fingerprint == read_manifest(straight).fingerprint
    assert report.to_json()["tokens_per_byte"] == report.tokens / text_bytes
    assert msgspec.json.decode(msgspec.json.encode(report.to_json()))["shards"] == len(manifest.shards)
    assert [(file["name"], file["documents"]) for file in manifest.inputs] == [
        ("part-1.jsonl", 200),
        ("part-2.jsonl.zst", 100),
        ("part-9.jsonl.gz", 150),
        ("part-10.jsonl", 150),
    ]
    assert sum(file["tokens"] for file in manifest.inputs) == report.tokens
    assert manifest.skipped == {}
    assert str(tmp_path) not in (tmp_path / "again" / "manifest.json").read_text()


@pytest.fixture
def bad_corpus(tmp_path):
    """Bad lines of every kind, blank lines, in a plain and in a compressed file."""
    lines = lines_of(TEXTS[:200]).split(b"\n")
    lines[20] = b"   \r"
    lines[150] = b'{"text": "broken'
    lines[160] = b'{"text": "\xff"}'
    lines[170] = b'{"no text": 1}'
    lines[171] = b'{"text": 1}'
    folder = tmp_path / "bad"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(b"\n".join(lines))
    (folder / "b.jsonl.gz").write_bytes(COMPRESS[".jsonl.gz"](b"\n\n" + b"\n".join(lines[100:])))
    return folder


@pytest.mark.parametrize(("workers", "chunk_bytes"), [(1, 1 << 20), (1, 500), (2, 500)])
def test_first_bad_line_in_input_order_stops_with_file_and_line(bad_corpus, tmp_path, workers, chunk_bytes):
    with pytest.raises(DocumentError, match=r"bad/a\.jsonl:151: .*one JSON object, got .*on_error="):
        build(bad_corpus, tmp_path / "store", workers=workers, chunk_bytes=chunk_bytes)
    with pytest.raises(StoreMissingError):
        read_manifest(tmp_path / "store")


def test_bad_line_of_a_compressed_file_has_its_line_number(bad_corpus, tmp_path):
    with pytest.raises(DocumentError, match=r"b\.jsonl\.gz:53: a line must be one JSON object"):
        build(bad_corpus / "b.jsonl.gz", tmp_path / "store")


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 500])
def test_skipped_lines_are_counted_listed_and_balance(bad_corpus, tmp_path, chunk_bytes):
    report = build(bad_corpus, tmp_path / "store", on_error="skip", chunk_bytes=chunk_bytes)
    assert report.skipped == {"json": 2, "missing_field": 2, "not_text": 2, "utf8": 2}
    skipped = read_manifest(tmp_path / "store").skipped
    assert skipped["counts"] == report.skipped
    assert [(one["file"], one["line"], one["reason"]) for one in skipped["first"]] == [
        ("a.jsonl", 151, "json"),
        ("a.jsonl", 161, "utf8"),
        ("a.jsonl", 171, "missing_field"),
        ("a.jsonl", 172, "not_text"),
        ("b.jsonl.gz", 53, "json"),
        ("b.jsonl.gz", 63, "utf8"),
        ("b.jsonl.gz", 73, "missing_field"),
        ("b.jsonl.gz", 74, "not_text"),
    ]
    lines, blank = 200 + 102, 1 + 2
    assert report.documents + sum(report.skipped.values()) + blank == lines
    verify(tmp_path / "store")


def test_only_the_first_thousand_bad_lines_are_listed(tmp_path):
    path = tmp_path / "input.jsonl"
    path.write_bytes(b"broken\n" * 3000 + lines_of(["fine"]))
    report = build(path, tmp_path / "store", on_error="skip", chunk_bytes=5000)
    assert report.skipped == {"json": 3000}
    listed = read_manifest(tmp_path / "store").skipped["first"]
    assert [one["line"] for one in listed] == list(range(1, 1001))


def test_input_without_documents_is_refused(tmp_path):
    path = tmp_path / "input.jsonl"
    path.write_bytes(b"\n\nbroken\n")
    with pytest.raises(DocumentError, match=r"no document was taken, 1 skipped"):
        build(path, tmp_path / "store", on_error="skip")


@pytest.mark.parametrize(("suffix", "workers"), [(".jsonl.gz", 1), (".jsonl.zst", 2)])
def test_truncated_input_leaves_no_store_and_is_mended_by_a_rerun(corpus, straight, tmp_path, suffix, workers):
    """A short read is never taken for the whole [C1]."""
    (path,) = corpus.glob(f"*{suffix}")
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    with pytest.raises(DocumentError, match=rf"{path.name}: must be a whole compressed file"):
        build(corpus, tmp_path / "store", workers=workers, max_tokens_per_shard=20_000)
    with pytest.raises(StoreMissingError):
        open_store(tmp_path / "store")
    path.write_bytes(whole)
    build(corpus, tmp_path / "store", max_tokens_per_shard=20_000)
    assert files_of(tmp_path / "store") == files_of(straight)


def break_file(path, text):
    """Write a file of one kind that breaks off, or is none."""
    if path.suffix in (".gz", ".bz2"):
        data = gzip.compress(lines_of([text] * 40_000)) if path.suffix == ".gz" else bz2.compress(lines_of([text]))
        path.write_bytes(data[:-9])
    else:
        path.write_bytes(b"PAR1 or ARROW1, but no more")
    return path


@pytest.mark.parametrize("workers", [1, 2])
def test_broken_files_among_others_are_counted_and_named_if_bad_records_are_skipped(tmp_path, workers):
    """[C1.d] What could be read of a file before it breaks off is taken."""
    good = [write_file(tmp_path / f"{letter}.jsonl", [letter * 9] * 500) for letter in "ac"]
    names = ["b.jsonl.gz", "d.parquet", "e.arrow", "f.jsonl.bz2"]
    broken = [break_file(tmp_path / name, "xyz") for name in names]
    with pytest.raises(DocumentError, match=r"must be .*copy or download it again"):
        build([*good, *broken], tmp_path / "stopped")
    report = build([*good, *broken], tmp_path / "out", workers=workers, on_error="skip", chunk_bytes=5000)
    texts = texts_of(open_store(tmp_path / "out"))
    assert len(texts) > 1001
    assert texts == ["a" * 9] * 500 + ["xyz"] * (len(texts) - 1001) + ["c" * 9] * 500 + ["xyz"]
    assert report.skipped == {"broken": 4}
    listed = read_manifest(tmp_path / "out").skipped["first"]
    assert [(entry["file"], entry["reason"]) for entry in listed] == [(name, "broken") for name in names]
    assert all("must be" in entry["detail"] and "copy or download it again" in entry["detail"] for entry in listed)


def test_a_file_that_is_written_to_stops_a_build_that_skips(tmp_path):
    path = write_file(tmp_path / "a.jsonl.gz", ["a"] * 2000)
    (unit,) = cut_files(find_files(path).files, chunk_bytes=1 << 20)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DocumentError, match=r"must keep its .* bytes while it is read"):
        list(read_unit(unit, ReadOptions(skip_broken=True)))


def test_rows_that_a_quote_takes_along_are_counted(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text\none\n" + '"open\n' + "lost\n" * 99)
    with pytest.raises(
        DocumentError, match=r"a\.csv row 2: a row must be well-formed CSV, got the quoted cell that"
    ):
        build(path, tmp_path / "stopped")
    report = build(path, tmp_path / "out", on_error="skip")
    assert (report.documents, report.skipped) == (1, {"csv": 100})


def test_a_second_dump_with_the_same_file_names_is_added(tmp_path):
    first, second = (write_file(tmp_path / name / "part-0.jsonl", [name]) for name in ("one", "two"))
    build(first.parent, tmp_path / "out")
    with pytest.raises(StoreExistsError, match=r"must stay as they were, got .*say same_names=True if it is"):
        build(second.parent, tmp_path / "out")
    report = build(second.parent, tmp_path / "out", same_names=True)
    assert (texts_of(open_store(tmp_path / "out")), report.new_files) == (["one", "two"], 1)
    assert build([first.parent, second.parent], tmp_path / "out").new_files == 0
    build(first.parent, tmp_path / "both")
    assert build([first.parent, second.parent], tmp_path / "both").new_files == 1
    assert texts_of(open_store(tmp_path / "both")) == ["one", "two"]


def test_an_empty_folder_is_refused_with_the_way_out(tmp_path):
    (tmp_path / "in").mkdir()
    with pytest.raises(DocumentError, match=r"in: must hold files that end in .*, got no file at all; fix"):
        build(tmp_path / "in", tmp_path / "out")


def test_a_mended_input_goes_on_with_what_the_other_files_gave(tmp_path):
    """The units of files that did not change are not done again."""
    good = write_file(tmp_path / "in" / "a.jsonl", TEXTS[:300])
    bad = tmp_path / "in" / "b.jsonl"
    bad.write_bytes(lines_of(TEXTS[300:310]) + b"broken\n" + lines_of(TEXTS[310:]))
    chunk = good.stat().st_size
    with pytest.raises(DocumentError, match=r"b\.jsonl:11"):
        build(tmp_path / "in", tmp_path / "store", chunk_bytes=chunk)
    write_file(bad, TEXTS[300:])
    report = build(tmp_path / "in", tmp_path / "store", chunk_bytes=chunk)
    assert (report.resumed_units, texts_of(open_store(tmp_path / "store"))) == (1, TEXTS)


def test_finished_store_is_replaced_only_when_asked(corpus, straight):
    before = files_of(straight)
    with pytest.raises(StoreExistsError, match=r"max_tokens_per_shard 20000 -> None.*rebuild=True"):
        build(corpus, straight)
    with pytest.raises(DocumentError):
        build(corpus / "missing.jsonl", straight, rebuild=True)
    with pytest.raises(TokenizerError):
        prepare(corpus, out=straight, tokenizer="missing", rebuild=True)
    assert files_of(straight) == before
    build(corpus / "part-1.jsonl", straight, rebuild=True)
    assert texts_of(open_store(straight)) == TEXTS[:200]


def test_left_overs_of_an_interrupted_build_are_removed(corpus, straight, tmp_path):
    """No clean-up by hand [C1.d]."""
    store = tmp_path / "store"
    (store / ".prepare" / "units" / "0123").mkdir(parents=True)
    (store / ".prepare" / "units" / "0123" / "result.json").write_bytes(b"rubbish")
    (store / ".prepare" / "units" / ".tmp-4567").mkdir()
    build(corpus, store, max_tokens_per_shard=20_000)
    assert files_of(store) == files_of(straight)


def test_files_of_unknown_kind_in_a_folder_are_told_once(corpus, tmp_path, capsys):
    (corpus / "part-3.xml").touch()
    build(corpus, tmp_path / "store")
    told = capsys.readouterr().err
    assert told.count("1 files in the given folders are not read") == 1
    assert "part-3.xml" in told


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_error": "skp"}, r"on_error: .*got 'skp'; did you mean 'skip'\?"),
        ({"chunk_bytes": 0}, r"chunk_bytes: must be at least 1, got 0"),
        ({"text_field": "a."}, r"text_field: must be a name"),
        ({"text_unit": "lines"}, r"text_unit: .*did you mean 'line'\?"),
    ],
)
def test_impossible_option_is_refused_with_the_way_out(options, message):
    with pytest.raises(ConfigError, match=message):
        PrepareOptions(**options)


def test_no_workers_is_refused(corpus, tmp_path):
    with pytest.raises(ConfigError, match="workers: must be at least 1, got 0"):
        build(corpus, tmp_path / "store", workers=0)


def test_progress_is_shown_when_asked_for_on_stderr_alone(corpus, tmp_path, capfd):
    prepare(corpus, out=tmp_path / "store", workers=2, progress=True)
    shown = capfd.readouterr()
    assert shown.out == ""
    for word in ("100%", "600 documents", " tokens/s", " MB/s"):
        assert word in shown.err.replace("\n", " ")


def test_a_line_tells_how_far_a_build_is_where_there_is_no_terminal(corpus, tmp_path, capfd, monkeypatch):
    module = importlib.import_module("tokenmill.build.progress")
    monkeypatch.setattr("tokenmill.progress.LINE_SECONDS", 0.0)
    monkeypatch.setattr(module, "_SECONDS_BETWEEN", 0.0)
    prepare(corpus, out=tmp_path / "out", workers=2, options=PrepareOptions(chunk_bytes=5000))
    out, lines = capfd.readouterr()
    assert out == ""
    pattern = r"prepare: \d MB of \d MB, \d+%; ([\d,]+ documents, )?[\d,.]+ MB/s(, [\d,]+ tokens/s)?"
    assert len(lines.splitlines()) > 2
    assert [line for line in lines.splitlines() if not re.fullmatch(pattern, line)] == []
    assert "100%; 600 documents" in lines.splitlines()[-1]
    prepare(corpus, out=tmp_path / "quiet", workers=1, progress=False)
    assert capfd.readouterr() == ("", "")


def test_a_tokenizer_that_takes_long_to_open_is_told(corpus, tmp_path, capfd, monkeypatch):
    module = importlib.import_module("tokenmill.build.job")
    opened = module._open_tokenizer
    monkeypatch.setattr("tokenmill.build.progress.SLOW_SECONDS", 0.05)
    monkeypatch.setattr(module, "_open_tokenizer", lambda *given: time.sleep(0.5) or opened(*given))
    prepare(corpus, out=tmp_path / "out", workers=1)
    assert capfd.readouterr() == ("", "open the tokenizer: this takes a while\n")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_hook_is_told_how_far_a_build_is(corpus, tmp_path, workers):
    told = []
    options = PrepareOptions(chunk_bytes=5000, deduplicate=True)
    report = prepare(corpus, out=tmp_path / "out", workers=workers, on_progress=told.append, options=options)
    steps = ["open the tokenizer", "look for duplicates", "prepare"]
    assert list(dict.fromkeys(each.what for each in told)) == steps
    for step in steps:
        done = [each.done_bytes for each in told if each.what == step]
        assert done == sorted(done)
    assert told[-1].done_bytes == told[-1].total_bytes == report.input_bytes
    last = [each for each in told if each.what == "prepare"][-1]
    assert last.done_bytes == last.total_bytes == report.input_bytes
    assert (last.documents, last.tokens) == (report.documents, report.tokens)
    assert last.seconds >= 0


def test_what_a_hook_raises_stops_the_build_which_goes_on_later(corpus, tmp_path):
    def stop(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(corpus, out=tmp_path / "out", workers=1, on_progress=stop)
    assert prepare(corpus, out=tmp_path / "out", workers=1, progress=False).documents == 600


def test_memory_does_not_grow_with_the_input(tmp_path):
    """64 MB of text, 128 MB of ids: what is held at a time is a batch of texts and its ids."""
    path = tmp_path / "input.jsonl.gz"
    path.write_bytes(COMPRESS[".jsonl.gz"](lines_of(["x" * 8000]) * 1000) * 8)
    tracemalloc.start()
    try:
        report = build(path, tmp_path / "store")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert report.tokens == 8000 * 8002
    assert peak < 48 << 20


def real_bpe() -> str:
    """Name the rank file of cl100k among the data files of litellm, which is not imported."""
    found = importlib.util.find_spec("litellm")
    if found is None or not found.submodule_search_locations:
        pytest.skip("litellm is not installed")
    folder = Path(found.submodule_search_locations[0])
    return f"tiktoken:{folder}/litellm_core_utils/tokenizers/9b5ad71b2ce5302211f9c61530b329a4922fc6a4"


def test_engine_is_recorded_and_plays_no_part_in_the_fingerprint(corpus, tmp_path):
    spec = real_bpe()
    fast = prepare(
        corpus, out=tmp_path / "fast", tokenizer=spec, workers=2, options=PrepareOptions(chunk_bytes=50_000)
    )
    slow = prepare(
        corpus,
        out=tmp_path / "slow",
        tokenizer=spec,
        workers=1,
        options=PrepareOptions(engine="tiktoken", chunk_bytes=50_000),
    )
    assert slow.engine.startswith("tiktoken")
    assert read_manifest(tmp_path / "fast").recipe["engine"] == fast.engine
    assert fast.fingerprint == slow.fingerprint
    assert verify(tmp_path / "fast").tokens == slow.tokens


def test_a_worker_opens_the_reference_when_a_text_needs_it(tmp_path):
    """The tokenizer goes to workers by content; what they unpack is there for as long as they may need it."""
    from tokenmill.encode.engines import DIVERGENT

    corpus = tmp_path / "a.jsonl"
    texts = ["plain words"] * 50 + [*DIVERGENT]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    options = PrepareOptions(chunk_bytes=512)
    prints = []
    for workers in (1, 2):
        out = tmp_path / f"by-{workers}"
        prepare(corpus, out=out, tokenizer=real_bpe(), workers=workers, progress=False, options=options)
        prints.append(open_store(out).fingerprint)
    assert prints[0] == prints[1]
