"""One suite for all formats: what was written is read, to the last token, and trains like a store of ours."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys

import msgspec
import numpy as np
import pytest
import xxhash

from tokenmill.errors import ConfigError, StoreCorruptError, StoreError
from tokenmill.run.run import Run
from tokenmill.store import ForeignOptions, detect_format, import_store, open_store, verify
from tokenmill.store.maps import FileRequest, MapCache, MemoryRequest


def test_the_format_is_told_by_the_files(write, name):
    made = write(name)
    assert detect_format(made.path) == made.format


def test_all_tokens_and_documents_are_read_in_order(write, name):
    made = write(name)
    store = open_store(made.path, maps=MapCache(limit=2), **made.options)
    assert store.fetch(0, store.num_tokens, "sequence").tolist() == made.tokens
    assert store.document_offsets(0, store.num_documents).tolist() == made.offsets
    last = store.num_documents - 1
    assert store.fetch_record(last, "sequence").tolist() == made.tokens[made.offsets[last] :]
    if made.mask is not None:
        assert store.fetch(0, store.num_tokens, "loss_mask").tolist() == made.mask
        assert store.manifest.kind == "sft"


def test_tokens_are_mapped_where_they_are(write, name):
    made = write(name)
    store = open_store(made.path, **made.options)
    for shard in range(store.num_shards):
        request = store.file(shard, "sequence.bin")
        assert isinstance(request, FileRequest)
        assert request.path.is_relative_to(os.path.realpath(made.path.parent))


RUN = """
[run]
steps = {steps}
global_batch_size = 2
seq_len = 16
packing = "{packing}"
shuffle = "{shuffle}"

[[sources]]
name = "web"
"""


def run_over(folder, path, *, options=None, **values):
    """Make a run over foreign files or over a store, under the same name, of one epoch and a half."""
    text = RUN.format(**({"packing": "best_fit", "shuffle": "full", "steps": 40} | values))
    lines = {"store": os.path.relpath(path, folder), **(options or {})}
    file = folder / "run.toml"
    file.write_text(text + "".join(f"{key} = {json.dumps(value)}\n" for key, value in lines.items()))
    return Run.from_toml(file)


def batches_of(run, **options):
    return [
        {key: value.tolist() for key, value in batch.items()}
        for batch in run.loader(micro_batch=2, arrays=("input_ids", "labels", "position_ids", "doc_ids"), **options)
    ]


@pytest.mark.parametrize(("packing", "shuffle"), [("best_fit", "full"), ("concat", "none")])
def test_batches_are_those_of_the_same_data_imported(write, name, tmp_path, packing, shuffle):
    made = write(name)
    import_store(made.path, out=tmp_path / "ours", options=ForeignOptions(**made.options))
    found = [
        batches_of(run_over(tmp_path, path, options=options, packing=packing, shuffle=shuffle))
        for path, options in ((made.path, made.options), (tmp_path / "ours", {}))
    ]
    assert found[0] == found[1]
    assert len(found[0]) == 40


def test_a_run_over_foreign_files_resumes_exactly(write, name, tmp_path):
    """[R1.a]"""
    made = write(name)
    whole = batches_of(run_over(tmp_path, made.path, options=made.options, steps=20))
    loader = run_over(tmp_path, made.path, options=made.options, steps=20).loader(micro_batch=2)
    stream = iter(loader)
    for _ in range(7):
        next(stream)
    state = loader.state_dict()
    again = run_over(tmp_path, made.path, options=made.options, steps=20).loader(micro_batch=2)
    again.load_state_dict(state)
    assert [{key: value.tolist() for key, value in batch.items()} for batch in again] == whole[7:]


def test_no_token_is_lost_at_the_end_of_a_file(tmp_path):
    """A file shorter than a row, and tails shorter than a row, are all trained on."""
    for number, size in enumerate((5, 23, 40)):
        np.arange(100 * number + 10, 100 * number + 10 + size, dtype=np.uint16).tofile(tmp_path / f"{number}.bin")
    (tmp_path / "run.toml").write_text(
        RUN.format(steps=3, packing="best_fit", shuffle="none") + 'store = "*.bin"\ndtype = "uint16"\n'
    )
    run = Run.from_toml(tmp_path / "run.toml")
    seen = {int(label) for batch in run.loader(micro_batch=2) for label in batch["labels"].ravel()}
    firsts = {10, 110, 210}
    expected = {100 * number + 10 + i for number, size in enumerate((5, 23, 40)) for i in range(size)} - firsts
    assert seen - {-100} == expected


def test_moving_the_files_changes_nothing(write, name, tmp_path):
    made = write(name)
    before = open_store(made.path, **made.options).fingerprint
    shutil.move(tmp_path / name, tmp_path / "elsewhere")
    moved = tmp_path / "elsewhere" / made.path.relative_to(tmp_path / name)
    assert open_store(moved, **made.options).fingerprint == before


def test_files_may_be_linked(write, name, tmp_path):
    made = write(name)
    for folder, _, files in os.walk(tmp_path / name):
        target = tmp_path / "linked" / os.path.relpath(folder, tmp_path / name)
        target.mkdir(parents=True)
        for file in files:
            (target / file).symlink_to(os.path.join(folder, file))
    linked = tmp_path / "linked" / made.path.relative_to(tmp_path / name)
    store = open_store(linked, **made.options)
    assert store.fetch(0, store.num_tokens, "sequence").tolist() == made.tokens


def test_a_file_that_changes_its_size_afterwards_is_refused(write, name):
    """[S.f]"""
    made = write(name)
    store = open_store(made.path, **made.options)
    request = store.file(0, "sequence.bin")
    with request.path.open("ab") as file:
        file.write(b"\0\0\0\0")
    with pytest.raises(StoreCorruptError, match=rf"must have {request.bytes} bytes, got {request.bytes + 4}"):
        store.fetch(0, 1, "sequence")


def test_another_content_is_another_fingerprint(write, name):
    made = write(name)
    store = open_store(made.path, **made.options)
    request = store.file(0, "sequence.bin")
    data = bytearray(request.path.read_bytes())
    data[request.begin + 2 * (store.dtype("sequence").itemsize)] ^= 4
    request.path.write_bytes(data)
    assert open_store(made.path, **made.options).fingerprint != store.fingerprint


def test_the_vocabulary_bounds_the_ids(write, name):
    """[T2.a]"""
    made = write(name)
    largest = max(made.tokens)
    raw = {"dtype": "uint16"} if name == "nanogpt" else {}
    with pytest.raises(StoreError, match=rf"ids must be below the vocabulary size {largest}, got {largest}; say"):
        open_store(made.path, **made.options | raw | {"vocab_size": largest})
    store = open_store(made.path, **made.options | {"vocab_size": largest + 1})
    assert store.manifest.tokenizer["vocab_size"] == largest + 1


def test_a_dtype_that_the_files_contradict_is_refused(write, name):
    made = write(name)
    if made.format in ("bin", "nanogpt", "olmo"):
        pytest.skip("these files say nothing of their dtype")
    with pytest.raises(ConfigError, match=r"dtype must be that of the file, u?int[0-9]+, got uint8; leave it out"):
        open_store(made.path, **made.options | {"dtype": "uint8"})


def test_of_nothing_known_the_dtype_bounds_the_vocabulary(write):
    made = write("npy")
    identity = open_store(made.path).manifest.tokenizer
    assert (identity["kind"], identity["vocab_size"], identity["add_eos"]) == ("unknown", 65536, False)
    identity = open_store(made.path, vocab_size=50_000, **made.options).manifest.tokenizer
    assert (identity["kind"], identity["vocab_size"], identity["add_eos"]) == ("given", 50_000, True)


def test_a_negative_id_is_refused_with_its_place(tmp_path):
    np.save(tmp_path / "a.npy", np.array([1, 2, -100, 4], np.int32))
    with pytest.raises(StoreError, match=r"a\.npy: ids of sequence must not be negative, got -100 at number 2"):
        open_store(tmp_path / "a.npy")


def test_files_of_several_dtypes_are_refused(tmp_path):
    np.save(tmp_path / "a.npy", np.array([1, 2], np.uint16))
    np.save(tmp_path / "b.npy", np.array([1, 2], np.uint32))
    with pytest.raises(StoreError, match=r"one dtype for sequence, got <u2 and <u4 in b\.npy"):
        open_store(tmp_path)


def test_documents_that_start_with_bos_are_known_to(write, tmp_path):
    made = write("llmc")
    assert open_store(made.path, **made.options).manifest.tokenizer["add_bos"] is True
    assert open_store(made.path, eos_id=1).manifest.tokenizer["add_bos"] is False
    batches = batches_of(run_over(tmp_path, made.path, options=made.options, packing="bos_best_fit"))
    assert all(row[0] == 1 for batch in batches for row in batch["input_ids"])


def test_an_empty_file_is_no_document(tmp_path):
    np.save(tmp_path / "a.npy", np.array([], np.uint16))
    np.save(tmp_path / "b.npy", np.array([3, 4], np.uint16))
    store = open_store(tmp_path)
    assert (store.num_documents, store.fetch(0, 2, "sequence").tolist()) == (1, [3, 4])


def test_options_that_contradict_a_store_of_ours_are_refused(make_store):
    path, _, _ = make_store("web", [5], vocab_size=300)
    assert open_store(path, vocab_size=300, dtype="uint16", format="tokenmill").num_tokens == 5
    for options in ({"vocab_size": 301}, {"dtype": "uint32"}, {"eos_id": 4}, {"format": "npy"}):
        with pytest.raises(ConfigError, match=rf"web: {next(iter(options))} must be as the manifest says"):
            open_store(path, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "u2"}, "dtype: expected one of .* got 'u2'; did you mean 'uint"),
        ({"dtype": "float32"}, "dtype: expected one of"),
        ({"format": "megatorn"}, "format: .* did you mean 'megatron'"),
        ({"vocab_size": 0}, "vocab_size: must be from 1"),
        ({"eos_id": 9, "vocab_size": 9}, "eos_id: must be from 0 to below the vocabulary size 9, got 9"),
        ({"bos_id": -1}, "bos_id: must be from 0"),
    ],
)
def test_options_that_cannot_be_right_are_refused(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        open_store(tmp_path, **options)


def mixed(folder, *sources):
    lines = [f'[[sources]]\nname = "{chr(97 + i)}"\n' + text for i, text in enumerate(sources)]
    weights = ", ".join(f"{chr(97 + i)} = 1" for i in range(len(sources)))
    head = f"[run]\nsteps = 2\nglobal_batch_size = 2\nseq_len = 4\nweights = {{ {weights} }}\n"
    (folder / "run.toml").write_text(head + "\n".join(lines))
    return Run.from_toml(folder / "run.toml")


def test_foreign_files_mix_with_others_on_the_users_word_alone(tmp_path, make_store):
    """[T2.a]"""
    make_store("web", [50], vocab_size=300)
    np.save(tmp_path / "a.npy", np.arange(50, dtype=np.uint16))
    ours = 'store = "web"\n'
    with pytest.raises(ConfigError, match=r"differ in kind: 'tokenizer.json' and 'unknown'; give the vocab_size"):
        mixed(tmp_path, ours, 'store = "a.npy"\n').plan()
    with pytest.raises(ConfigError, match="differ in vocab_size: 300 and 301"):
        mixed(tmp_path, ours, 'store = "a.npy"\nvocab_size = 301\n').plan()
    text = 'store = "a.npy"\nvocab_size = 300\neos_id = {}\n'
    with pytest.raises(ConfigError, match="differ in eos_id: 3 and 4"):
        mixed(tmp_path, text.format(3), text.format(4)).plan()
    run = mixed(tmp_path, ours, 'store = "a.npy"\nvocab_size = 300\neos_id = 7\n')
    assert len(list(run.loader(micro_batch=2))) == 2


def test_nothing_of_a_hidden_file_is_read(tmp_path):
    np.save(tmp_path / "a.npy", np.array([1], np.uint16))
    (tmp_path / ".b.npy").write_bytes(b"junk")
    (tmp_path / ".tokenmill").mkdir()
    (tmp_path / ".tokenmill" / "c.npy").write_bytes(b"junk")
    assert open_store(tmp_path).num_tokens == 1


def test_a_pipe_in_place_of_a_file_does_not_make_us_wait(tmp_path):
    os.mkfifo(tmp_path / "a.bin")
    assert stat.S_ISFIFO(os.stat(tmp_path / "a.bin").st_mode)
    with pytest.raises(StoreError, match=r"a\.bin: not a regular file"):
        open_store(tmp_path, dtype="uint16")


# What was found is kept: opening a large file again reads samples, not the file.


COUNT = 1 << 20


@pytest.fixture
def large(tmp_path):
    """Make a file of a million ids with an EOS after every hundredth."""
    tokens = np.random.default_rng(0).integers(2, 30_000, COUNT).astype(np.uint16)
    tokens[99::100] = 1
    (tmp_path / "data").mkdir()
    np.save(tmp_path / "data" / "a.npy", tokens)
    return tmp_path / "data" / "a.npy"


def offsets_of(store):
    return store.document_offsets(0, store.num_documents).tolist()


EXPECTED = [*range(0, COUNT, 100), COUNT]


def test_a_large_index_is_kept_beside_the_data_and_a_small_one_in_memory(large, tmp_path):
    store = open_store(large, eos_id=1)
    request = store.file(0, "documents.bin")
    assert isinstance(request, FileRequest)
    assert request.path.parent == large.parent / ".tokenmill"
    assert offsets_of(store) == EXPECTED
    np.save(tmp_path / "b.npy", np.arange(50, dtype=np.uint16))
    assert isinstance(open_store(tmp_path / "b.npy", eos_id=1).file(0, "documents.bin"), MemoryRequest)
    assert not (tmp_path / ".tokenmill").exists()


def test_opening_again_does_not_read_the_data(large):
    """[S1.a] Only samples: 64 blocks of 4 KiB, whatever the size of the file."""
    program = """
import os, sys
import tokenmill.store.foreign.open as index
from tokenmill.store import open_store
looks = []
look = index._look
index._look = lambda *arguments, **options: looks.append(1) or look(*arguments, **options)
read = 0
pread = os.pread
def counted(descriptor, size, place):
    global read
    data = pread(descriptor, size, place)
    read += len(data)
    return data
os.pread = counted
store = open_store(sys.argv[1], eos_id=1)
print(len(looks), read <= 64 * 4096 + 8, store.num_documents, store.fingerprint)
"""
    lines = [
        subprocess.run(
            [sys.executable, "-c", program, str(large)], capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    ]
    first, second = (line.split() for line in lines)
    assert (first[0], second[0]) == ("1", "0")
    assert first[1:] == second[1:]
    assert second[1:3] == ["True", str(len(EXPECTED) - 1)]


def test_other_options_or_other_bytes_are_not_mistaken_for_the_kept_ones(large):
    assert offsets_of(open_store(large, eos_id=1)) == EXPECTED
    assert open_store(large).num_documents == 1
    tokens = np.load(large)
    tokens[99::100] = 2
    tokens[49::50] = 1
    np.save(large, tokens)
    assert open_store(large, eos_id=1).num_documents == -(-COUNT // 50)


@pytest.mark.parametrize("damage", ["cut", "flip an offset", "flip the footer", "empty", "junk"])
def test_a_damaged_index_is_made_again(large, damage):
    path = open_store(large, eos_id=1).file(0, "documents.bin").path
    data = bytearray(path.read_bytes())
    if damage == "cut":
        data = data[:-5]
    elif damage == "empty":
        data = bytearray()
    elif damage == "junk":
        data = bytearray(b"\xff" * 400)
    else:
        data[1000 if damage == "flip an offset" else -40] ^= 1
    path.write_bytes(data)
    assert offsets_of(open_store(large, eos_id=1)) == EXPECTED


def test_offsets_that_are_too_many_to_verify_when_opened_are_verified_when_used(large, monkeypatch):
    """[S.f]"""
    monkeypatch.setattr("tokenmill.store.foreign.open.CHECKED_BYTES", 0)
    path = open_store(large, eos_id=1).file(0, "documents.bin").path
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreCorruptError, match=rf"^{path}: checksum must be .*; delete it, and it is made again"):
        offsets_of(open_store(large, eos_id=1))
    path.unlink()
    assert offsets_of(open_store(large, eos_id=1)) == EXPECTED


def test_an_index_of_other_sizes_is_made_again_even_if_its_checksums_are_right(large):
    """[S.e] Kernels read by address: a forged file must not lead them past its end."""
    path = open_store(large, eos_id=1).file(0, "documents.bin").path
    data = path.read_bytes()
    length = int.from_bytes(data[-16:-8], "little")
    footer = msgspec.json.decode(data[-16 - length : -16])
    for forged in (
        {**footer, "facts": {**footer["facts"], "items": {"documents": 10**9}}},
        {**footer, "facts": {"items": 3}},
        {**footer, "sections": {}},
    ):
        text = msgspec.json.encode(forged)
        path.write_bytes(
            data[: -16 - length] + text + len(text).to_bytes(8, "little") + xxhash.xxh3_64_digest(text)
        )
        assert offsets_of(open_store(large, eos_id=1)) == EXPECTED


def test_a_large_mask_is_copied_once_with_a_byte_a_token(tmp_path, tools):
    flags = (np.arange(COUNT) % 3 > 0).astype(np.int32)
    tools.save_bin(tmp_path, {"sequence": np.zeros(COUNT, np.int32), "loss_mask": flags})
    for _ in range(2):
        store = open_store(tmp_path)
        request = store.file(0, "loss_mask.bin")
        assert (request.path.parent.name, request.wanted) == (".tokenmill", COUNT)
        assert np.array_equal(store.fetch(0, COUNT, "loss_mask"), flags)
    assert len(list((tmp_path / ".tokenmill").iterdir())) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes where nobody may")
def test_a_folder_that_cannot_be_written_to_is_left_alone_when_read_only(large):
    large.parent.chmod(0o555)
    try:
        assert open_store(large, eos_id=1).num_documents == len(EXPECTED) - 1
    finally:
        large.parent.chmod(0o755)


def test_where_nothing_can_be_kept_beside_the_data_a_folder_of_the_users_is_used(large, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (large.parent / ".tokenmill").write_text("in the way")
    request = open_store(large, eos_id=1).file(0, "documents.bin")
    assert request.path.parent == tmp_path / "temporary" / f"tokenmill-foreign-{os.getuid()}"
    assert request.path.parent.stat().st_mode & 0o777 == 0o700
    before = request.path.stat().st_mtime_ns
    assert offsets_of(open_store(large, eos_id=1)) == EXPECTED
    assert request.path.stat().st_mtime_ns == before


def test_processes_that_open_at_once_agree(large):
    """[C1.c]"""
    program = (
        "import sys\nfrom tokenmill.store import open_store\nprint(open_store(sys.argv[1], eos_id=1).fingerprint)"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", program, str(large)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    found = {process.communicate()[0] for process in running}
    assert found == {open_store(large, eos_id=1).fingerprint + "\n"}
    assert [file.suffix for file in (large.parent / ".tokenmill").iterdir()] == [".index"]


def test_what_was_checked_is_said(write, name):
    made = write(name)
    seen = []
    report = verify(made.path, options=ForeignOptions(**made.options), progress=seen.append)
    assert (report.tokens, report.documents, report.format) == (
        len(made.tokens),
        len(made.offsets) - 1,
        made.format,
    )
    assert report.checked.startswith("the format has no checksums; sizes and boundaries are right")
    assert sum(seen) == report.bytes
    assert report.fingerprint == open_store(made.path, **made.options).fingerprint


def test_an_index_that_is_not_that_of_the_data_is_found(tmp_path, monkeypatch):
    """[S.f] Too large to be read through when it is opened, so it is `verify` that notices."""
    tokens = np.ones(1 << 20, np.uint16)
    np.save(tmp_path / "a.npy", tokens)
    path = open_store(tmp_path / "a.npy", eos_id=1).file(0, "documents.bin").path
    monkeypatch.setattr("tokenmill.store.foreign.open.CHECKED_BYTES", 0)
    data = bytearray(path.read_bytes())
    data[80] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreCorruptError, match=r"documents\.bin of a\.npy must be what the data says.*delete"):
        verify(tmp_path / "a.npy", options=ForeignOptions(eos_id=1))


def test_a_byte_mask_of_other_numbers_is_found(tmp_path, tools):
    mask = np.array([0, 1, 7], np.uint8)
    tools.save_bin(tmp_path, {"sequence": np.arange(3, dtype=np.int32), "loss_mask": mask})
    with pytest.raises(StoreError, match=r"loss_mask must be 0 or 1, got \[7\]"):
        verify(tmp_path)


def test_options_count_for_a_store_of_ours_as_well(make_store):
    path, _, _ = make_store("web", [4], vocab_size=300)
    assert verify(path, options=ForeignOptions(vocab_size=300)).format == "tokenmill"
    with pytest.raises(ValueError, match="vocab_size must be as the manifest says"):
        verify(path, options=ForeignOptions(vocab_size=301))


# A sidecar says once for all readers what files do not say.


@pytest.fixture
def raw(tmp_path):
    """Return a folder with two raw files of 16-bit ids, whose dtype a size does not tell."""
    for name in ("a.bin", "b.bin"):
        np.array([5, 6, 0, 7, 8, 0], np.uint16).tofile(tmp_path / name)
    return tmp_path


def test_a_sidecar_says_what_raw_files_do_not(raw):
    with pytest.raises(StoreError, match="dtype of files without a header must be said"):
        open_store(raw)
    (raw / "tokens.json").write_text('{"dtype": "uint16", "vocab_size": 300, "eos_id": 0}')
    for path in (raw, raw / "*.bin"):
        store = open_store(path)
        assert store.document_offsets(0, store.num_documents).tolist() == [0, 3, 6, 9, 12]
        assert store.manifest.tokenizer["vocab_size"] == 300
    store = open_store(raw / "a.bin", vocab_size=300)
    assert store.fetch(0, 6, "sequence").tolist() == [5, 6, 0, 7, 8, 0]
    assert verify(raw).documents == 4
    report = import_store(raw, out=raw / "out")
    assert (report.documents, report.keys) == (4, {"sequence": "<u2"})


def test_a_sidecar_and_options_must_agree(raw):
    (raw / "tokens.json").write_text('{"dtype": "uint16"}')
    with pytest.raises(ConfigError, match=r"tokens\.json: dtype must be 'uint32', as the options.*got 'uint16'"):
        open_store(raw, dtype="uint32")
    (raw / "more").mkdir()
    np.arange(4, dtype=np.uint32).tofile(raw / "more" / "c.bin")
    (raw / "more" / "tokens.json").write_text('{"dtype": "uint32"}')
    with pytest.raises(ConfigError, match=r"more/tokens\.json: dtype must be 'uint16'.*name the files apart"):
        open_store(raw)
    (raw / "tokens.json").write_text('{"format": "llmc"}')
    with pytest.raises(ConfigError, match=r"format must be 'bin'.*got 'llmc'"):
        open_store(raw / "a.bin", dtype="uint16")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("{", r"tokens\.json: expected JSON"),
        ('{"dtypes": "uint16"}', r"tokens\.json: unknown key: 'dtypes'; did you mean 'dtype'"),
        ('{"dtype": "float32"}', r"dtype: expected one of"),
        ('{"vocab_size": "many"}', r"tokens\.json: vocab_size: expected a whole number"),
        ("[" * 100_000, r"tokens\.json: expected JSON"),
    ],
)
def test_a_sidecar_that_cannot_be_right_is_refused(raw, content, match):
    """[S.e]"""
    (raw / "tokens.json").write_text(content)
    with pytest.raises((StoreError, ConfigError), match=match):
        open_store(raw, dtype="uint16")


def test_an_index_that_is_older_than_the_data_is_made_again(tmp_path):
    """Samples see 64 blocks of a file: an end of a document may be written between two of them."""
    ids = np.full(1 << 20, 7, "<u2")
    file = tmp_path / "data.bin"
    ids.tofile(file)
    assert open_store(file, dtype="uint16", eos_id=0).num_documents == 1
    ids[5000] = 0
    ids.tofile(file)
    assert open_store(file, dtype="uint16", eos_id=0).num_documents == 2
