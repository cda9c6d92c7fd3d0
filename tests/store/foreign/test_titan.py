"""The torchtitan fork's own files: ids, labels and ends of sequences, value by value, and nothing else as ids."""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa
import pytest

from tokenmill import Run
from tokenmill.errors import ConfigError, StoreCorruptError, StoreError, StoreMissingError
from tokenmill.store import detect_format, import_store, open_store, verify

LENGTHS = (5, 7, 4, 9, 1)
TOKENS = np.arange(100, 100 + sum(LENGTHS), dtype=np.int32)
LABELS = np.where(np.arange(TOKENS.size) % 3 == 0, -100, TOKENS).astype(np.int32)
ENDS = np.cumsum(LENGTHS)


def memmap(folder, name="X", tokens=TOKENS, labels=LABELS, ends=ENDS):
    """Write a triple of files of the fork's packed_memmap."""
    folder.mkdir(exist_ok=True)
    for part, array in (("token", tokens), ("mask", labels), ("index", ends)):
        np.save(folder / f"{name}_{part}.npy", array)
    return folder


def read(path, **options):
    """Return ids, mask and offsets of all that is at a path."""
    store = open_store(path, **options)
    mask = store.fetch(0, store.num_tokens, "loss_mask").tolist() if "loss_mask" in store.keys else None
    return store.fetch(0, store.num_tokens, "sequence").tolist(), mask, offsets_of(store)


def offsets_of(store):
    return store.document_offsets(0, store.num_documents).tolist()


WANTED = (TOKENS.tolist(), (LABELS != -100).astype(int).tolist(), [0, *ENDS.tolist()])


# packed_memmap


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32, np.uint16])
@pytest.mark.parametrize("index", [np.int32, np.int64, np.uint64])
def test_ids_labels_and_ends_are_those_of_the_three_files(tmp_path, dtype, index):
    folder = memmap(tmp_path / "m", tokens=TOKENS.astype(dtype), ends=ENDS.astype(index))
    assert detect_format(folder) == "packed-memmap"
    assert read(folder) == WANTED
    assert verify(folder).tokens == TOKENS.size


@pytest.mark.parametrize("path", ["", "X_token.npy", "X_mask.npy", "X_index.npy", "*_index.npy", "*.npy"])
def test_the_folder_or_any_file_of_a_triple_names_it(tmp_path, path):
    """A mask or an index is not read as ids, however it is named."""
    assert read(memmap(tmp_path / "m") / path) == WANTED


def test_a_folder_of_several_triples_has_all_of_them(tmp_path):
    memmap(tmp_path / "m", "part10", TOKENS + 500, np.where(LABELS < 0, -100, LABELS + 500))
    memmap(tmp_path / "m", "part9")
    ids, mask, offsets = read(tmp_path / "m")
    assert ids == [*TOKENS.tolist(), *(TOKENS + 500).tolist()]
    assert mask == [*WANTED[1], *WANTED[1]]
    assert offsets == [*WANTED[2], *(ENDS + TOKENS.size).tolist()]


@pytest.mark.parametrize("format", ["npy", "olmo"])
def test_masks_and_ends_are_not_ids_when_a_format_is_given(tmp_path, format):
    with pytest.raises(
        StoreError, match=rf"X_index.npy: belongs to X_token.npy .* got format '{format}'; leave the"
    ):
        open_store(memmap(tmp_path / "m"), format=format, dtype="int32")


def test_ids_after_the_last_end_belong_to_no_sequence(tmp_path):
    """As in the fork, which reads what the index names."""
    ids, mask, offsets = read(memmap(tmp_path / "m", ends=ENDS[:3]))
    assert (ids, mask, offsets) == (WANTED[0][:16], WANTED[1][:16], WANTED[2][:4])


def test_empty_sequences_stay(tmp_path):
    assert read(memmap(tmp_path / "m", ends=np.array([0, 5, 5, 26])))[2] == [0, 0, 5, 5, 26]


def test_an_empty_index_has_no_ids(tmp_path):
    store = open_store(memmap(tmp_path / "m", ends=np.zeros(0, np.int64)))
    assert (store.num_documents, store.num_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("ends", "got"),
    [([5, 27], "got 27"), ([5, -1], "got -1"), ([9, 5, 26], "got 5 to 26"), ([99, 26], "got 26 to 99")],
)
def test_ends_outside_of_the_ids_are_refused(tmp_path, ends, got):
    """[S.e]"""
    folder = memmap(tmp_path / "m", ends=np.array(ends, np.int64))
    with pytest.raises(StoreCorruptError, match=f"ends of sequences must rise within .* ids, {got}"):
        open_store(folder)


def test_more_ends_than_ids_are_refused(tmp_path):
    """[S.e]"""
    folder = memmap(tmp_path / "m", ends=np.zeros(5000, np.int64))
    with pytest.raises(StoreCorruptError, match="got 5000 ends"):
        open_store(folder)


@pytest.mark.parametrize("part", ["token", "mask"])
def test_a_part_that_is_missing_is_named(tmp_path, part):
    folder = memmap(tmp_path / "m")
    (folder / f"X_{part}.npy").unlink()
    with pytest.raises(
        StoreMissingError, match=rf"X_{part}.npy: a packed_memmap has .*, but it is missing; copy it"
    ):
        open_store(folder)


def test_a_label_for_each_id(tmp_path):
    with pytest.raises(StoreCorruptError, match="must have a label for each of 26 ids, got 25"):
        open_store(memmap(tmp_path / "m", labels=LABELS[:-1]))


@pytest.mark.parametrize("label", [0, 1, -1])
def test_a_label_that_is_no_id_of_its_token_is_refused(tmp_path, label):
    """A mask of 0 and 1 would have been trained on as ids there."""
    labels = LABELS.copy()
    labels[7] = label
    with pytest.raises(StoreError, match=f"got label {label} for id 107 at number 7; write the labels again"):
        open_store(memmap(tmp_path / "m", labels=labels))


def test_ids_of_64_bits_are_copied_once_and_bounded(tmp_path):
    tokens = TOKENS.astype(np.int64)
    tokens[3], labels = 1 << 32, LABELS.astype(np.int64)
    labels[3] = -100
    with pytest.raises(StoreError, match=r"ids of sequence must be from 0 to below 2\*\*32"):
        open_store(memmap(tmp_path / "m", tokens=tokens, labels=labels))


def test_a_large_copy_is_kept_and_used_again(tmp_path):
    tokens = np.arange(1 << 17, dtype=np.int64)
    folder = memmap(
        tmp_path / "m", tokens=tokens, labels=np.where(tokens % 2, tokens, -100), ends=[1000, tokens.size]
    )
    for _ in range(2):
        ids, mask, offsets = read(folder)
        assert ids == tokens.tolist()
        assert mask == (tokens % 2).tolist()
        assert offsets == [0, 1000, tokens.size]
    assert len(list((folder / ".tokenmill").iterdir())) == 1


def test_a_triple_is_imported_with_its_labels(tmp_path):
    import_store(memmap(tmp_path / "m", tokens=TOKENS.astype(np.int64)), out=tmp_path / "ours")
    assert read(tmp_path / "ours") == WANTED


def test_a_single_file_of_that_name_is_an_array_of_ids(tmp_path):
    np.save(tmp_path / "web_token.npy", TOKENS)
    assert detect_format(tmp_path) == "npy"
    assert read(tmp_path) == (TOKENS.tolist(), None, [0, TOKENS.size])


# preprocessed

ROWS = {
    "inputs": [[11, 12, 13, 14], [15, 16, 17, 18], [19, 20, 0, 0]],
    "labels": [[11, -100, 13, 14], [15, 16, 17, -100], [19, 20, -100, -100]],
    "position_ids": [[0, 1, 0, 1], [0, 1, 2, 3], [0, 1, 2, 3]],
    "sequence_lengths": [[2, 2], [4], [2, 2]],
}
IDS, MASK = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 0, 0], [1, 0, 1, 1, 1, 1, 1, 0, 1, 1, 0, 0]


def columns(*names):
    return {name: ROWS[name] for name in names}


@pytest.mark.parametrize(
    ("rows", "mask", "offsets"),
    [
        (ROWS, MASK, [0, 2, 4, 8, 10, 12]),
        (columns("inputs", "labels", "position_ids"), MASK, [0, 2, 4, 8, 12]),
        (columns("inputs", "labels"), MASK, [0, 4, 8, 12]),
        (columns("inputs"), None, [0, 4, 8, 12]),
    ],
    ids=["lengths", "positions", "labels", "ids alone"],
)
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_sequences_end_by_lengths_else_by_positions_else_with_rows(tmp_path, tools, rows, mask, offsets, dtype):
    tools.save_arrow(tmp_path / "data.arrow", [rows], dtype=dtype)
    assert detect_format(tmp_path) == "preprocessed"
    assert read(tmp_path) == read(tmp_path / "data.arrow") == (IDS, mask, offsets)
    assert verify(tmp_path).documents == len(offsets) - 1


KINDS = {
    "large lists": lambda rows: pa.array(rows, pa.large_list(pa.int32())),
    "fixed lists": lambda rows: pa.array(rows, pa.list_(pa.int32(), 4)),
    "slices": lambda rows: pa.array([[1, 2, 3], *rows], pa.list_(pa.int32()))[1:],
    "16 bits": lambda rows: pa.array(rows, pa.list_(pa.int16())),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("write", [pa.ipc.new_stream, pa.ipc.new_file], ids=["stream", "file"])
def test_every_kind_of_list_and_file_of_arrow_is_read(tmp_path, kind, write):
    """The fork's own script writes large lists into files with an index; save_to_disk writes streams."""
    table = pa.table({name: KINDS[kind](rows) for name, rows in columns("inputs", "labels").items()})
    with write(tmp_path / "data-00000-of-00001.arrow", table.schema) as file:
        file.write_table(table)
        file.write_table(table)
    assert read(tmp_path) == (2 * IDS, 2 * MASK, [0, 4, 8, 12, 16, 20, 24])


def test_a_dataset_that_the_library_saved_is_read_as_it_was(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(ROWS).save_to_disk(tmp_path / "saved", num_shards=2)
    assert read(tmp_path / "saved") == (IDS, MASK, [0, 2, 4, 8, 10, 12])
    import_store(tmp_path / "saved", out=tmp_path / "ours")
    assert read(tmp_path / "ours") == (IDS, MASK, [0, 2, 4, 8, 10, 12])


def state(folder, *names, **more):
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]} | more))


def test_the_files_of_a_dataset_are_those_that_it_lists(tmp_path, tools):
    """A save into the same folder with fewer files leaves others behind."""
    for name, ids in (("b.arrow", 1), ("a.arrow", 2), ("old.arrow", 3)):
        tools.save_arrow(tmp_path / name, [{"inputs": [[ids, ids]]}])
    state(tmp_path, "b.arrow", "a.arrow")
    assert read(tmp_path) == ([1, 1, 2, 2], None, [0, 2, 4])
    state(tmp_path, "b.arrow", "c.arrow")
    with pytest.raises(StoreMissingError, match=r"c.arrow: listed in state.json, but missing; copy it"):
        open_store(tmp_path)
    for bad in ("../b.arrow", 7):
        state(tmp_path, bad)
        with pytest.raises(StoreCorruptError, match="must list the files of the dataset"):
            open_store(tmp_path)
    state(tmp_path, "b.arrow", _indices_files=[{"filename": "i.arrow"}])
    with pytest.raises(StoreError, match=r"got a selection of rows; call flatten_indices\(\)"):
        open_store(tmp_path)


def test_splits_are_not_mixed(tmp_path, tools):
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
        tools.save_arrow(tmp_path / name / "data-00000-of-00001.arrow", [ROWS])
    with pytest.raises(StoreError, match="must be one split of a dataset, got test, train; name the folder"):
        open_store(tmp_path)
    assert read(tmp_path / "test")[0] == IDS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": [[11, 12, 99, 14], *ROWS["labels"][1:]]}, "got label 99 for id 13 at number 2"),
        ({"labels": [[11], [12], [13]]}, "rows must have a label for each id, got 3 labels for 12 inputs"),
        (
            {"labels": [[11, 12, 13], [14, 15, 16, 17, 18], [19, 20, 0, 0]]},
            "rows must have as many labels as inputs",
        ),
        ({"sequence_lengths": [[2, 1], [4], [4]]}, "must sum to its ids, got 3 for 4 in row 0"),
        ({"sequence_lengths": [[8], [0], [4]]}, "must sum to its ids, got 8 for 4 in row 0"),
        ({"sequence_lengths": [[-2, 6], [4], [4]]}, "got a length of -2 or 6"),
        ({"sequence_lengths": [[0] * 2000 + [4], [4], [4]]}, "got 2003 for 12 ids"),
        ({"position_ids": [[0], [0], [0]]}, "rows must have as many position_ids as inputs, but"),
        ({"inputs": [[-1, 12, 13, 14], *ROWS["inputs"][1:]], "labels": [[-100] * 4] * 3}, "must not be negative"),
        ({"inputs": [[None, 12, 13, 14], *ROWS["inputs"][1:]]}, "lists of whole numbers without nulls"),
    ],
)
def test_rows_that_contradict_themselves_are_refused(tmp_path, tools, change, message):
    """[S.e]"""
    tools.save_arrow(tmp_path / "data.arrow", [ROWS | change])
    with pytest.raises(StoreError, match=message):
        open_store(tmp_path)


def test_compressed_arrow_is_refused_with_the_way_out(tmp_path):
    table = pa.table({"inputs": [list(range(100))] * 9})
    with pa.ipc.new_stream(
        tmp_path / "a.arrow", table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
    ) as f:
        f.write_table(table)
    with pytest.raises(StoreError, match="must be uncompressed, but is not; save the dataset with save_to_disk"):
        open_store(tmp_path)


def test_arrow_files_of_texts_are_no_token_files(tmp_path):
    table = pa.table({"text": ["a", "b"]})
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as file:
        file.write_table(table)
    with pytest.raises(StoreError, match=r"got 1 of .arrow.*Texts become a store by `tokenmill prepare`"):
        open_store(tmp_path)


# Under the fork's config: rows as there.


def fork_rows(rows):
    """Return (inputs, labels) of rows as the fork makes them: labels are shifted by one, the last has none."""
    shifted = [[*labels[1:], -100] for labels in rows["labels"]]
    return list(zip(rows["inputs"], shifted, strict=True))


def run_of(folder, kind, place, seq_len=8, key="dataset_path"):
    sizes = f"steps = 6\nlocal_batch_size = 1\nseq_len = {seq_len}"
    (folder / "tt.toml").write_text(f"[training]\n{sizes}\ndataset_type = '{kind}'\n{key} = '{place}'\n")
    return Run.from_toml(folder / "tt.toml", world_size=1)


def delivered(run, steps=6):
    batches = [run.loader(micro_batch=1)[step] for step in range(steps)]
    return [(batch["input_ids"][0].tolist(), batch["labels"][0].tolist()) for batch in batches]


def packs(count, width=8):
    """Make packs of the fork: two sequences and padding each, the first label of a sequence masked."""
    made = {"inputs": [], "labels": [], "position_ids": [], "sequence_lengths": []}
    for number in range(count):
        first = 10 + number * width
        ids = [*range(first, first + width - 2), 0, 0]
        labels = [-100, *ids[1:3], -100, *ids[4:6], -100, -100]
        made["inputs"].append(ids)
        made["labels"].append(labels)
        made["position_ids"].append([0, 1, 2, 0, 1, 2, 3, 4])
        made["sequence_lengths"].append([3, 3, 2])
    return made


@pytest.mark.parametrize("key", ["dataset_path", "dataset"])
@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_rows_of_preprocessed_are_the_packs_of_the_fork(tmp_path, monkeypatch, key, kind):
    """[P1.c] Each row but the last, whose last label would be the first id of the next."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = packs(7)
    made = datasets.Dataset.from_dict(rows)
    if kind == "arrow":
        made.save_to_disk(tmp_path / "saved")
    else:
        (tmp_path / "saved").mkdir()
        made.to_parquet(tmp_path / "saved" / "train-00000-of-00001.parquet")
    drawn = delivered(run_of(tmp_path, "preprocessed", tmp_path / "saved", key=key))
    assert sorted(drawn) == sorted(fork_rows(rows)[:6])


def test_sequences_of_packed_memmap_are_whole_and_labelled_as_there(tmp_path):
    """[P1.c] The fork packs ids and labels of whole sequences, then takes inputs [:-1] and labels [1:]."""
    lengths = [5, 3, 4, 4, 2, 6, 8, 3, 5, 7, 1]
    ends = np.cumsum(lengths)
    tokens = np.arange(1000, 1000 + ends[-1], dtype=np.int32)
    labels = np.where(np.arange(tokens.size) % 4 == 1, -100, tokens).astype(np.int32)
    memmap(tmp_path / "m", tokens=tokens, labels=labels, ends=ends)
    run = run_of(tmp_path, "packed_memmap", "m", seq_len=16)
    assert run.config.run.packing == "best_fit"
    # What a sequence itself says of the id after each of its ids; after the last there is none.
    expected = {}
    for start, end in zip(ends - lengths, ends, strict=True):
        expected |= {1000 + place: int(labels[place + 1]) for place in range(start, end - 1)}
        expected[999 + int(end)] = -100
    found = {}
    for inputs, follow in delivered(run, run.plan().stages[0].rows["m"].num_rows):
        found |= dict(zip(inputs, follow, strict=True))
    found.pop(0, None)  # padding
    # The last id of a row is a label alone.
    assert found == {token: expected[token] for token in found}
    assert len(found) > 40


def test_a_dtype_that_contradicts_the_files_is_refused(tmp_path, tools):
    tools.save_arrow(tmp_path / "data.arrow", [ROWS])
    with pytest.raises(ConfigError, match="dtype must be that of the file, int32, got uint16"):
        open_store(tmp_path, dtype="uint16")
