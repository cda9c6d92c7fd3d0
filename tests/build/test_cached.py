"""Text that a run names is prepared once, by whoever comes first, and never turns into other data."""

import logging
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.build.corpus import files_of, some_texts, texts_of, write_file
from tests.encode.conftest import trained_pieces

from tokenmill.build import PrepareOptions, cached, prepare
from tokenmill.build.cached import cached_store
from tokenmill.errors import DocumentError, StoreBusyError, StoreExistsError
from tokenmill.store import open_store
from tokenmill.store.lease import leased_folder


@pytest.fixture
def get(tmp_path):
    """Return a function that asks for the store of `data/*.jsonl`, of which there are two."""
    write_file(tmp_path / "data" / "a.jsonl", ["one", "two"])
    write_file(tmp_path / "data" / "b.jsonl", ["three"])

    def get(*documents, tokenizer="bytes", text_field="text"):
        return cached_store(
            documents or (f"{tmp_path}/data/*.jsonl",),
            tokenizer=tokenizer,
            text_field=text_field,
            folder=tmp_path / "cache",
            where="source 'web'",
            progress=False,
        )

    return get


@pytest.fixture
def tokenizer_folder(tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=letters, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    return folder


def test_documents_are_prepared_once(get, tmp_path):
    store = get()
    assert re.fullmatch(r"[0-9a-f]{16}", store.relative_to(tmp_path / "cache").as_posix())
    assert texts_of(open_store(store)) == ["one", "two", "three"]
    before = {path: path.stat().st_mtime_ns for path in sorted(store.rglob("*"))}
    assert get() == store
    assert {path: path.stat().st_mtime_ns for path in sorted(store.rglob("*"))} == before


def test_each_of_documents_tokenizer_and_text_field_makes_another_store(get, tmp_path):
    """[T2.c]"""
    (tmp_path / "data" / "a.jsonl").write_text('{"text": "one", "body": "uno"}\n')
    files = [f"{tmp_path}/data/a.jsonl", f"{tmp_path}/data/b.jsonl"]
    stores = [get(), get(*files), get(files[0]), get(files[0], text_field="body")]
    assert len(set(stores)) == 4
    assert get(*reversed(files)) == stores[1]
    assert [texts_of(open_store(store)) for store in stores[2:]] == [["one"], ["uno"]]


def test_the_finished_store_is_found_without_its_tokenizer(get, tokenizer_folder):
    store = get(tokenizer=str(tokenizer_folder))
    shutil.rmtree(tokenizer_folder)
    assert get(tokenizer=str(tokenizer_folder)) == store


def test_another_tokenizer_under_the_same_path_is_refused(get, tokenizer_folder):
    """[T2.a]"""
    store = get(tokenizer=str(tokenizer_folder))
    file = tokenizer_folder / "tokenizer.json"
    file.write_text(file.read_text() + " ")
    with pytest.raises(StoreExistsError) as caught:
        get(tokenizer=str(tokenizer_folder))
    assert str(caught.value) == (
        "source 'web': the tokenizer must stay as it was when the documents were prepared, "
        f"got {file} with other content; put it back, or delete {store} to prepare them again"
    )


def test_another_model_of_sentencepiece_under_the_same_path_is_refused(get, tmp_path):
    """[T2.a]"""
    file = tmp_path / "a.model"
    file.write_bytes(trained_pieces("bpe"))
    get(tokenizer=str(file))
    file.write_bytes(trained_pieces("unigram"))
    with pytest.raises(StoreExistsError, match=r"must stay as it was .*, got .*/a.model with other content"):
        get(tokenizer=str(file))


def add_a_file(data):
    write_file(data / "c.jsonl", ["four"])
    return f"{data}/c.jsonl, which is new or has changed"


def change_a_file(data):
    write_file(data / "b.jsonl", ["other"])
    return f"{data}/b.jsonl, which is new or has changed"


def take_a_file_away(data):
    (data / "b.jsonl").unlink()
    return "no b.jsonl, which was among them"


def give_a_file_twice(data):
    write_file(data / "more" / "b.jsonl", ["three"])
    return "b.jsonl, which is new or has changed"


@pytest.mark.parametrize("change", [add_a_file, change_a_file, take_a_file_away, give_a_file_twice])
def test_other_files_are_refused_with_the_folder_to_delete(get, tmp_path, change):
    folder = f"{tmp_path}/data"
    store = get(folder)
    got = change(tmp_path / "data")
    with pytest.raises(StoreExistsError) as caught:
        get(folder)
    told = str(caught.value)
    assert told.startswith("source 'web': documents must stay as they were when they were prepared, got ")
    assert told.endswith(f"{got}; put the files back, or delete {store} to prepare them again")
    shutil.rmtree(store)
    assert get(folder) == store
    assert texts_of(open_store(store))[:2] == ["one", "two"]


def test_documents_that_are_all_gone_are_refused(get, tmp_path):
    get()
    shutil.rmtree(tmp_path / "data")
    with pytest.raises(StoreExistsError, match=r"documents must stay.*got none \(no such file or folder"):
        get()


def test_a_folder_that_is_no_store_is_refused_at_once(get):
    store = get()
    shutil.rmtree(store)
    store.mkdir()
    (store / "notes.txt").write_text("mine")
    with pytest.raises(StoreExistsError, match=r"must be a folder of its own for the store, got 'notes.txt'"):
        get()


def test_a_build_that_stopped_is_finished_by_the_next(get, tmp_path):
    """[C1]"""
    bad = tmp_path / "data" / "b.jsonl"
    bad.write_text("{")
    with pytest.raises(DocumentError, match=r"b\.jsonl"):
        get()
    write_file(bad, ["three"])
    assert texts_of(open_store(get())) == ["one", "two", "three"]


def test_a_saved_dataset_of_hugging_face_is_prepared_once(get, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    saved = tmp_path / "saved"
    datasets.Dataset.from_dict({"text": ["one", "two"]}).save_to_disk(saved)
    monkeypatch.chdir(tmp_path)
    store = get("hf:saved")
    assert texts_of(open_store(store)) == ["one", "two"]
    assert get("hf:saved") == store
    datasets.Dataset.from_dict({"text": ["one", "other"]}).save_to_disk(tmp_path / "new")
    shutil.rmtree(saved)
    (tmp_path / "new").rename(saved)
    with pytest.raises(StoreExistsError, match=r"got .*\.arrow, which is new or has changed; put the files back"):
        get("hf:saved")
    # From another folder it is no path, but a name on the hub: nothing is looked up there again.
    monkeypatch.chdir(tmp_path / "data")
    assert get("hf:saved") == store


ASK = """
import logging, sys
from pathlib import Path
from tokenmill.build.cached import cached_store
logging.basicConfig(format="%(name)s: %(message)s")
print("ready", flush=True)
sys.stdin.readline()
store = cached_store([sys.argv[1]], tokenizer="bytes", text_field="text", folder=Path(sys.argv[2]),
                     where="source 'web'", progress=False)
print(store, flush=True)
"""


@pytest.fixture
def ask(tmp_path):
    """Return a function that starts a process which asks for a store when it is told to."""
    started = []

    def ask(documents):
        command = [sys.executable, "-c", ASK, str(documents), str(tmp_path / "cache")]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        started.append(subprocess.Popen(command, text=True, **pipes))
        assert started[-1].stdout.readline() == "ready\n"
        return started[-1]

    yield ask
    for process in started:
        process.kill()
        process.communicate()


def test_of_processes_that_ask_at_once_one_builds(ask, tmp_path):
    """[C1.c]"""
    corpus = write_file(tmp_path / "input.jsonl", some_texts(2000))
    processes = [ask(corpus) for _ in range(3)]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    done = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], done
    (store,) = {Path(out.strip()) for out, _ in done}
    prepare(corpus, out=tmp_path / "straight", progress=False, options=PrepareOptions(text_field="text"))
    assert files_of(store) == files_of(tmp_path / "straight")


def test_a_build_of_another_process_is_waited_for_and_said_once(ask, tmp_path):
    """[C1.c]"""
    corpus = write_file(tmp_path / "input.jsonl", ["one", "two"])
    process = ask(corpus)
    store = cached_path(corpus, tmp_path)
    store.mkdir(parents=True)
    with leased_folder(store):
        process.stdin.write("go\n")
        process.stdin.flush()
        said = process.stderr.readline()
        assert not (store / "manifest.json").exists()
    out, rest = process.communicate(timeout=60)
    assert (process.returncode, out, rest) == (0, f"{store}\n", "")
    assert said == f"tokenmill: source 'web': waiting for another process, which prepares {store}\n"
    assert texts_of(open_store(store)) == ["one", "two"]


def cached_path(corpus, tmp_path):
    """Return where the store of a corpus is, or will be."""
    store = cached_store(
        [str(corpus)],
        tokenizer="bytes",
        text_field="text",
        folder=tmp_path / "cache",
        where="source 'web'",
        progress=False,
    )
    shutil.rmtree(store)
    return store


def test_a_build_that_never_ends_is_not_waited_for_for_ever(get, monkeypatch, caplog):
    """[C2.b]"""
    store = get()
    shutil.rmtree(store)
    store.mkdir()
    monkeypatch.setattr(cached, "MAX_WAIT_SECONDS", 0.2)
    caplog.set_level(logging.WARNING, "tokenmill")
    with leased_folder(store), pytest.raises(StoreBusyError) as caught:
        get()
    assert str(caught.value) == (
        f"source 'web': another process has been preparing {store} for more than 0.2 s; "
        "wait for it or stop it, and start again"
    )
    assert len(caplog.records) == 1
    assert os.listdir(store) == []


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_another_bos_or_eos_beside_the_tokenizer_is_refused(get, tokenizer_folder, name):
    """They stand in files of their own: the vocabulary is the same."""
    from tokenizers import Tokenizer

    file = str(tokenizer_folder / "tokenizer.json")
    made = Tokenizer.from_file(file)
    made.add_special_tokens(["<a>", "<b>"])
    made.save(file)
    added = '{"eos_token": "<%s>"}'
    (tokenizer_folder / name).write_text(added % "a")
    store = get(tokenizer=str(tokenizer_folder))
    assert get(tokenizer=str(tokenizer_folder)) == store
    (tokenizer_folder / name).write_text(added % "b")
    with pytest.raises(StoreExistsError, match=rf"the tokenizer must stay as it was.*{name} with other content"):
        get(tokenizer=str(tokenizer_folder))
    (tokenizer_folder / name).unlink()
    with pytest.raises(StoreExistsError, match=rf"the tokenizer must stay as it was.*{name} with other content"):
        get(tokenizer=str(tokenizer_folder))


def test_another_rank_file_of_tiktoken_is_refused(get, tmp_path):
    import base64

    def write(letters):
        ranks = [bytes([byte]) for byte in range(256)] + letters
        lines = [b"%s %d" % (base64.b64encode(word), rank) for rank, word in enumerate(ranks)]
        (tmp_path / "own.tiktoken").write_bytes(b"\n".join(lines) + b"\n")

    write([b"on", b"tw"])
    (tmp_path / "own.json").write_text(
        '{"pattern": "[a-z]+|.", "special_tokens": {"<|end|>": 258}, "eos_token": "<|end|>"}'
    )
    spec = f"tiktoken:{tmp_path}/own.tiktoken?encoding={tmp_path}/own.json"
    store = get(tokenizer=spec)
    assert get(tokenizer=spec) == store
    write([b"tw", b"on"])
    with pytest.raises(StoreExistsError, match="the tokenizer must stay as it was"):
        get(tokenizer=spec)


def test_a_change_of_any_byte_of_a_document_is_refused(get, tmp_path):
    """Also of one that no sample sees, in a file that keeps its size and its time of change."""
    texts = ["x" * 1000 for _ in range(1000)]
    path = write_file(tmp_path / "data" / "large.jsonl", texts)
    store = get()
    assert get() == store
    before = path.stat()
    write_file(path, [*texts[:200], "y" * 1000, *texts[201:]])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    with pytest.raises(StoreExistsError, match=r"got .*large\.jsonl, which is new or has changed"):
        get()
    write_file(path, texts)
    assert get() == store
