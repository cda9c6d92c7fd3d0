"""Real files of every kind with documents of all lengths, and ways to draw whole runs."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tokenmill.live import LiveLoader, LiveOptions, open_live
from tokenmill.loader import IGNORE, LoaderOptions
from tokenmill.loader.kernels import SPAN_COLUMNS, copy_rows

ALL = ("input_ids", "labels", "position_ids", "doc_ids", "loss_mask", "cu_seqlens", "max_seqlen")


class Numbers:
    """A tokenizer with nanochat's methods: a text is numbers, and each is its own id; 0 is BOS."""

    def __init__(self, vocab_size=60_000, shift=0):
        self.vocab_size = vocab_size
        self.shift = shift

    def get_bos_token_id(self):
        return 0

    def get_vocab_size(self):
        return self.vocab_size

    def encode(self, text, prepend=None, num_threads=8):  # noqa: ARG002 - its interface
        before = [] if prepend is None else [prepend]
        return [before + [self._id(word) for word in one.split()] for one in text]

    def decode(self, ids):
        return " ".join(map(str, ids))

    def _id(self, word):
        return self.shift + (int(word) if word.isdecimal() else 1 + len(word) % 7)


@pytest.fixture(scope="session")
def numbers():
    return Numbers


@pytest.fixture(scope="session")
def texts():
    """Make texts of unique numbers, with the given lengths: every number is a token that occurs once."""

    def make(lengths, start=10):
        out = []
        for length in lengths:
            out.append(" ".join(map(str, range(start, start + length))))
            start += length
        return out

    return make


def write(path, texts, row_groups=None):
    """Write texts in the format that the name says; Parquet in row groups of the given sizes, the last for ever."""
    lines = "".join(json.dumps({"text": text, "n": n}) + "\n" for n, text in enumerate(texts))
    if path.suffix == ".jsonl":
        path.write_text(lines)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif path.suffix == ".arrow":
        with pa.ipc.new_stream(path, pa.schema({"text": pa.string()})) as writer:
            for begin in range(0, len(texts), 7):
                writer.write_batch(pa.record_batch({"text": texts[begin : begin + 7]}))
    else:
        sizes = list(row_groups or [5])
        with pq.ParquetWriter(path, pa.schema({"text": pa.string()})) as writer:
            begin = 0
            while begin < len(texts):
                size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
                writer.write_table(pa.table({"text": texts[begin : begin + size]}), row_group_size=size)
                begin += size
    return path


@pytest.fixture(scope="session", name="write")
def write_fixture():
    return write


@pytest.fixture
def corpus(tmp_path, texts):
    """Write one corpus in four formats: uneven row groups, empty documents, documents longer than many rows."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    rng = np.random.default_rng(0)
    start = 10
    for name, count, groups in (
        ("a.parquet", 60, [1, 17, 3, 9]),
        ("b.jsonl", 50, None),
        ("c.jsonl.gz", 20, None),
        ("d.arrow", 30, None),
        ("e.parquet", 8, [8]),
    ):
        lengths = rng.integers(0, 30, count)
        lengths[rng.integers(0, count, 3)] = (0, 0, 170)
        write(folder / name, texts(lengths, start), groups)
        start += int(lengths.sum())
    return folder


@pytest.fixture
def make_source(corpus, numbers):
    def make(inputs=None, tokenizer=None, **options):
        values = {"seq_len": 16, "window_bytes": 300, "seed": 3, **options}
        return open_live(inputs or corpus, tokenizer=tokenizer or numbers(), options=LiveOptions(**values))

    return make


@pytest.fixture(scope="session")
def labels_of():
    """Return the labels of some rows of a window, in order, without those that are not trained on."""

    def labels(window, rows, seq_len):
        out = np.empty((len(rows), seq_len), np.int64)
        nothing, none, no_flags = np.empty((0, 0), np.int64), np.empty((0, 0), np.int32), np.empty((0, 0), np.bool_)
        for number, row in enumerate(rows):
            spans = np.frombuffer(bytearray(window.lines[row]), np.int64).reshape(-1, SPAN_COLUMNS)
            places = np.array([[0, len(spans)]])
            copy_rows(places, spans, (0, 0, 0, 0, 1), nothing, out[number : number + 1], nothing, none, no_flags)
        return out[out != IGNORE].tolist()

    return labels


def content(batch):
    """Return what a batch delivers, to be compared."""
    return {name: (array.shape, array.dtype.str, array.tobytes()) for name, array in batch.items()}


@pytest.fixture(scope="session", name="content")
def content_fixture():
    return content


@pytest.fixture(scope="session")
def draw():
    """Draw what is left of a run, or some batches of it."""

    def drawn(loader, count=None):
        stream = iter(loader)
        return [content(next(stream)) for _ in range(count)] if count is not None else list(map(content, stream))

    return drawn


@pytest.fixture
def make_loader(request):
    """Make loaders that are closed when the test ends."""

    def make(source, **options):
        own = {name: options.pop(name) for name in ("threads", "ahead", "arrays", "timeout") if name in options}
        options = {"steps": 10, "global_batch_size": 4, **options}
        loader = LiveLoader(source, **options, options=LoaderOptions(**{"arrays": ALL, **own}))
        request.addfinalizer(loader.close)
        return loader

    return make
