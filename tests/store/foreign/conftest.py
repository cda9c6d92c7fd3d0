"""Files of other projects: by their real writers where these can be had, else by their documented layout."""

from __future__ import annotations

import gzip
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

EOS = 1
VOCAB = 50_000
LENGTHS = (7, 1, 30, 2, 64, 3, 3, 19, 128, 5, 41)
"""Tokens of the documents of a file, EOS included."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """Files of another project, and what must be read from them."""

    path: Path
    options: dict[str, Any]
    tokens: list[int]
    offsets: list[int]
    mask: list[int] | None = None
    format: str = ""


def documents(seed: int, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """Make documents that end with EOS and hold no other."""
    rng = np.random.default_rng(seed)
    return [[*rng.integers(2, VOCAB, size - 1).tolist(), EOS] for size in lengths]


def joined(docs: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    return [token for doc in docs for token in doc], np.cumsum([0, *map(len, docs)]).tolist()


def write_npy(folder: Path) -> Written:
    files = [documents(seed) for seed in range(3)]
    for number, docs in enumerate(files):
        np.save(folder / f"part_{number + 9}.npy", np.array(joined(docs)[0], np.uint16))
    tokens, offsets = joined([*chain(*files)])
    return Written(path=folder, options={"eos_id": EOS}, tokens=tokens, offsets=offsets)


def write_npy_int32(folder: Path) -> Written:
    tokens, offsets = joined(documents(3))
    np.save(folder / "a.npy", np.array(tokens, np.int32))
    return Written(path=folder / "a.npy", options={"eos_id": EOS}, tokens=tokens, offsets=offsets, format="npy")


def write_bin(folder: Path) -> Written:
    files = [documents(seed) for seed in range(2)]
    for number, docs in enumerate(files):
        np.array(joined(docs)[0], np.uint16).tofile(folder / f"tokens_{number}.bin")
    tokens, offsets = joined([*chain(*files)])
    return Written(
        path=folder / "tokens_*.bin", options={"eos_id": EOS, "dtype": "uint16"}, tokens=tokens, offsets=offsets
    )


def write_nanogpt(folder: Path) -> Written:
    tokens, offsets = joined(documents(5))
    np.array(tokens, np.uint16).tofile(folder / "train.bin")
    np.array(tokens[::-1], np.uint16).tofile(folder / "val.bin")
    (folder / "meta.pkl").write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")
    return Written(
        path=folder / "train.bin", options={"eos_id": EOS, "vocab_size": VOCAB}, tokens=tokens, offsets=offsets
    )


def llmc_bytes(tokens: Sequence[int], magic: int = 20240520, version: int = 1, dtype: str = "<u2") -> bytes:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens)
    return header.tobytes() + np.array(tokens, dtype).tobytes()


def write_llmc(folder: Path) -> Written:
    """As llm.c and nanochat write them: a document begins with the mark, there is none at the end."""
    docs = [[EOS, *doc[:-1]] for doc in documents(6)]
    tokens, offsets = joined(docs)
    (folder / "train_000.bin").write_bytes(llmc_bytes(tokens))
    return Written(path=folder, options={"bos_id": EOS}, tokens=tokens, offsets=offsets)


def write_llmc_llama(folder: Path) -> Written:
    tokens, _ = joined(documents(6))
    tokens = [token + 100_000 for token in tokens]
    (folder / "train_000.bin").write_bytes(llmc_bytes(tokens, 20240801, 7, "<u4"))
    return Written(path=folder, options={}, tokens=tokens, offsets=[0, len(tokens)], format="llmc")


def write_olmo(folder: Path) -> Written:
    """As dolma writes them: rows of start, end, id, source, place; the last document has none."""
    tokens, offsets = joined(documents(7))
    np.array(tokens, np.uint32).tofile(folder / "part-00-00000.npy")
    with gzip.open(folder / "part-00-00000.csv.gz", "wt") as table:
        for begin, end in pairwise(offsets[:-1]):
            table.write(f'{begin},{end},id-{begin},"a, b.json.gz",{begin}\n')
    return Written(path=folder, options={"dtype": "uint32"}, tokens=tokens, offsets=offsets)


def write_astrai_bin(folder: Path) -> Written:
    """Write the default of AstrAI: all arrays int32, no boundaries, a folder a shard."""
    files = [documents(seed) for seed in range(2)]
    mask: list[int] = []
    for number, docs in enumerate(files):
        shard = folder / "__default__" / f"shard_{number:04d}"
        shard.mkdir(parents=True)
        tokens = np.array(joined(docs)[0], np.int32)
        flags = (tokens % 3 > 0).astype(np.int32)
        mask += flags.tolist()
        save_bin(
            shard, {"sequence": tokens, "loss_mask": flags, "position_ids": np.arange(tokens.size, dtype=np.int32)}
        )
    tokens, offsets = joined([*chain(*files)])
    return Written(path=folder, options={"eos_id": EOS}, tokens=tokens, offsets=offsets, mask=mask)


def save_bin(folder: Path, arrays: dict[str, Any], offsets: dict[str, list[int]] | None = None) -> None:
    """Write what AstrAI's save_bin writes."""
    meta = {}
    for key, values in arrays.items():
        meta[key] = {"shape": list(values.shape), "dtype": values.dtype.name}
        if offsets and key in offsets:
            meta[key]["offsets"] = offsets[key]
        values.tofile(folder / f"{key}.bin")
    (folder / "meta.json").write_text(json.dumps(meta))


def save_h5(file: Path, arrays: dict[str, list[Any]], **options: Any) -> None:
    """Write what AstrAI's save_h5 writes."""
    import h5py

    with h5py.File(file, "w") as opened:
        for key, values in arrays.items():
            group = opened.create_group(key)
            for index, value in enumerate(values):
                group.create_dataset(f"data_{index}", data=value, **options)


def write_astrai_h5(folder: Path) -> Written:
    """Write a dataset a document; twelve, so that their names do not sort as their numbers do."""
    docs = documents(8, (*LENGTHS, 6))
    save_h5(folder / "data_0000.h5", {"sequence": [np.array(doc, np.int32) for doc in docs]})
    tokens, offsets = joined(docs)
    return Written(path=folder, options={}, tokens=tokens, offsets=offsets)


def labelled(docs: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Return labels of the torchtitan fork, -100 for every id that 3 divides, and the mask that they are."""
    labels = [-100 if token % 3 == 0 else token for doc in docs for token in doc]
    return labels, [int(label != -100) for label in labels]


def write_packed_memmap(folder: Path) -> Written:
    """Two triples of files of the torchtitan fork: ids of 32 bits, labels, and ends of sequences of 64 bits."""
    files = [documents(seed) for seed in range(2)]
    for number, docs in enumerate(files):
        tokens, offsets = joined(docs)
        np.save(folder / f"part{number}_token.npy", np.array(tokens, np.int32))
        np.save(folder / f"part{number}_mask.npy", np.array(labelled(docs)[0], np.int32))
        np.save(folder / f"part{number}_index.npy", np.array(offsets[1:], np.int64))
    tokens, offsets = joined([*chain(*files)])
    return Written(path=folder, options={}, tokens=tokens, offsets=offsets, mask=labelled([*chain(*files)])[1])


def preprocessed_rows(docs: Sequence[Sequence[int]], width: int) -> dict[str, list[list[int]]]:
    """Pack documents into rows of the torchtitan fork, `width` documents each."""
    rows = [docs[begin : begin + width] for begin in range(0, len(docs), width)]
    return {
        "inputs": [joined(row)[0] for row in rows],
        "labels": [labelled(row)[0] for row in rows],
        "position_ids": [[place for doc in row for place in range(len(doc))] for row in rows],
        "sequence_lengths": [[len(doc) for doc in row] for row in rows],
    }


def save_arrow(file: Path, batches: Sequence[dict[str, list[list[int]]]], *, dtype: str = "int32") -> None:
    """Write an Arrow stream of record batches, as Hugging Face datasets do; lists of lists of a dtype."""
    import pyarrow as pa

    tables = [
        pa.table({name: pa.array(rows, pa.list_(pa.type_for_alias(dtype))) for name, rows in each.items()})
        for each in batches
    ]
    with pa.ipc.new_stream(file, tables[0].schema) as stream:
        for table in tables:
            stream.write_table(table)


def write_preprocessed(folder: Path) -> Written:
    """As save_to_disk writes them: two files of two record batches each, and a list of the files."""
    files = [documents(seed) for seed in range(2)]
    names = [f"data-{number:05d}-of-00002.arrow" for number in range(2)]
    for name, docs in zip(names, files, strict=True):
        save_arrow(folder / name, [preprocessed_rows(docs[:6], 2), preprocessed_rows(docs[6:], 3)])
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    tokens, offsets = joined([*chain(*files)])
    return Written(path=folder, options={}, tokens=tokens, offsets=offsets, mask=labelled([*chain(*files)])[1])


class Quiet:
    """Stands for loguru's logger."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_arguments, **_options: None


@pytest.fixture(scope="session")
def datatrove() -> Iterator[ModuleType]:
    """Import the writer of datatrove; of what it needs, a logger and the words of a number may not be there."""
    needed = {"loguru": {"logger": Quiet()}, "humanize": {"metric": lambda value, unit: f"{value} {unit}"}}
    with pytest.MonkeyPatch.context() as patch:
        for name, content in needed.items():
            module = ModuleType(name)
            vars(module).update(content)
            try:
                __import__(name)
            except ImportError:
                patch.setitem(sys.modules, name, module)
        import datatrove.pipeline.tokens.tokenizer as writer

        logging.getLogger("datatrove").setLevel(logging.ERROR)
        yield writer


def write_datatrove(folder: Path, writer: ModuleType) -> Written:
    """Two files, of 11 documents each."""
    files = [documents(seed) for seed in range(2)]
    for number, docs in enumerate(files):
        out = writer.TokenizedFile(
            str(folder), f"{number:05d}_shuffled.ds", tokenizer_name_or_path="gpt2", save_final_metadata=True
        )
        for doc in docs:
            out.write(doc, None)
        out.close()
    tokens, offsets = joined([*chain(*files)])
    return Written(path=folder, options={}, tokens=tokens, offsets=offsets)


MEGATRON = """
import json, sys, warnings
warnings.simplefilter("ignore")
import numpy, torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
folder, docs = sys.argv[1], json.load(sys.stdin)
for name, dtype in (("u2", numpy.uint16), ("i4", numpy.int32), ("i8", numpy.int64)):
    builder = IndexedDatasetBuilder(f"{folder}/{name}.bin", dtype=dtype)
    for doc in docs:  # of two sequences each
        for part in (doc[: len(doc) // 2], doc[len(doc) // 2 :]):
            builder.add_item(torch.tensor(part, dtype=torch.int64))
        builder.end_document()
    builder.finalize(f"{folder}/{name}.idx")
builder = IndexedDatasetBuilder(f"{folder}/open.bin", dtype=numpy.uint16)
builder.add_document(torch.tensor(docs[0]), [len(docs[0])])
builder.add_item(torch.tensor(docs[1]))
builder.finalize(f"{folder}/open.idx")
builder = IndexedDatasetBuilder(f"{folder}/multi.bin", dtype=numpy.int32, multimodal=True)
builder.add_document(torch.tensor(docs[0]), [len(docs[0])], [0])
builder.finalize(f"{folder}/multi.idx")
"""


@pytest.fixture(scope="session")
def megatron(made_once: Callable[[str, Callable[[Path], None]], Path]) -> Path:
    """Let megatron-core write datasets u2, i4, i8, open (its last document not ended) and multi (multimodal).

    In a process of its own: importing it warns of what is not installed. Once for all workers of the test runner.
    """

    def write(folder: Path) -> None:
        program = [sys.executable, "-W", "ignore", "-c", MEGATRON, str(folder)]
        subprocess.run(program, input=json.dumps(documents(9)), text=True, check=True, capture_output=True)

    return made_once("megatron", write)


def write_megatron(folder: Path, made: Path, name: str) -> Written:
    for ending in (".bin", ".idx"):
        (folder / f"{name}{ending}").write_bytes((made / f"{name}{ending}").read_bytes())
    tokens, offsets = joined(documents(9))
    return Written(path=folder / name, options={}, tokens=tokens, offsets=offsets, format="megatron")


WRITERS = {
    "npy": write_npy,
    "npy-int32": write_npy_int32,
    "bin": write_bin,
    "nanogpt": write_nanogpt,
    "llmc": write_llmc,
    "llmc-llama": write_llmc_llama,
    "olmo": write_olmo,
    "astrai-bin": write_astrai_bin,
    "astrai-h5": write_astrai_h5,
    "packed-memmap": write_packed_memmap,
    "preprocessed": write_preprocessed,
}
NAMES = [*WRITERS, "datatrove", "megatron-u2", "megatron-i4"]


@pytest.fixture
def write(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[str], Written]:
    """Return a function that writes files of a format into a new folder."""

    def make(name: str) -> Written:
        folder = tmp_path / name
        folder.mkdir()
        if name == "datatrove":
            made = write_datatrove(folder, request.getfixturevalue("datatrove"))
        elif name.startswith("megatron-"):
            made = write_megatron(folder, request.getfixturevalue("megatron"), name.removeprefix("megatron-"))
        else:
            made = WRITERS[name](folder)
        return Written(**{**vars(made), "format": made.format or name})

    return make


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what makes megatron-core, and torch with it, be imported."""
    for item in items:
        function = item if isinstance(item, pytest.Function) else None
        if function and ("megatron" in item.name or {"megatron", "pair"} & set(function.fixturenames)):
            item.add_marker(pytest.mark.slow)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", NAMES)


@pytest.fixture
def tools() -> ModuleType:
    """Return the functions of this file, for tests that write files of their own."""
    module = ModuleType("tools")
    vars(module).update(
        documents=documents,
        joined=joined,
        save_bin=save_bin,
        save_h5=save_h5,
        llmc_bytes=llmc_bytes,
        labelled=labelled,
        preprocessed_rows=preprocessed_rows,
        save_arrow=save_arrow,
        EOS=EOS,
        VOCAB=VOCAB,
    )
    return module
