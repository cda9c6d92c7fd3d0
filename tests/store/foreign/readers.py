"""Readers of other projects, in processes of their own: what they load and print is none of ours."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np


def read_by(format, folder):
    """Return array -> items, as the project that a format belongs to reads the files of a folder."""
    places = [str(Path(__file__).parents[3]), *sys.path]
    program = f"import sys; sys.path[:] = {places!r}; from tests.store.foreign.readers import main; main()"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, format, str(folder)],
        capture_output=True,
        text=True,
        check=False,
        env={"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def main():
    import os

    format, folder = sys.argv[1:]
    found = {}
    for key, items in READERS[format](Path(folder)):
        found.setdefault(key, []).extend(items)
    print(json.dumps(found), flush=True)
    os._exit(0)  # threads of such packages do not always let a process end


def read_megatron(folder):
    dataset = import_module("megatron.core.datasets.indexed_dataset").IndexedDataset(str(folder / "tokens"))
    yield "sequence", [dataset[number].tolist() for number in range(len(dataset))]


def read_datatrove(folder):
    merger = import_module("datatrove.pipeline.tokens.merger")
    for file in sorted(folder.glob("*.ds")):
        ends = merger.load_doc_ends(open(f"{file}.index", "rb"))  # noqa: SIM115 - closed there
        size = int(Path(f"{file}.metadata").read_text(encoding="utf-8").splitlines()[0].rpartition("|")[2])
        for column, path, item in (("sequence", file, size), ("loss_mask", Path(f"{file}.loss"), 1)):
            if path.is_file():
                raws = merger.get_data_reader(open(path, "rb"), ends, nb_bytes=item)  # noqa: SIM115 - closed there
                yield column, [np.frombuffer(raw, f"<u{item}").tolist() for raw in raws]


def read_numpy(folder):
    for file in sorted(folder.glob("*.npy")):
        yield "sequence", np.load(file).tolist()


def read_datasets(folder):
    from datasets import load_dataset

    files = sorted(map(str, (folder / "data").glob("*.parquet")))
    for row in load_dataset("parquet", data_files=files, split="train", streaming=True):
        for key, value in row.items():
            yield "sequence" if key == "input_ids" else key, [value]


READERS = {"megatron": read_megatron, "nanoset": read_datatrove, "npy": read_numpy, "hf": read_datasets}
