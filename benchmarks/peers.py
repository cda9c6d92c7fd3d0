"""Batches of other loaders over the same tokens, each with its own storage and its own loader.

Every peer delivers (input_ids, labels), both int64 with shape [batch, seq_len], from shuffled windows, in this
process and without workers. Each is set up as its documentation says. If there is a choice, the faster option is
used, and ids stay uint16 as long as possible. Files of a peer are written once, below the cache.

The peers do not deliver exactly the same. Megatron adds loss_mask and position_ids. OLMo masks the last label of
a window. LitData and MosaicML shuffle shards and then within them; all others shuffle single windows.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import shutil
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("LITDATA_DISABLE_VERSION_CHECK", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SEED = 1
Batch = tuple[Any, Any]
"""(input_ids, labels), as the peer delivers them: torch tensors or numpy arrays."""


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The tokens, and where peers keep what they make of them."""

    store: Path
    folder: Path
    tokens: np.ndarray
    seq_len: int

    @property
    def windows(self) -> np.ndarray:
        """Windows of seq_len + 1 tokens side by side, as the formats of rows store them."""
        size = self.seq_len + 1
        return self.tokens[: self.tokens.size // size * size].reshape(-1, size)

    def prepared(self, name: str, write: Callable[[Path], object]) -> Path:
        """Return the folder of a peer's files, written at the first call, all of it read into the page cache."""
        folder = self.folder / name
        if not folder.exists():
            unfinished = self.folder / f"{name}.tmp"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            write(unfinished)
            unfinished.rename(folder)
        for path in folder.rglob("*"):
            if path.is_file():
                path.read_bytes()
        return folder

    def flat_file(self) -> Path:
        """Return a file of nothing but the tokens, as most training code keeps them."""
        return self.prepared("flat", lambda folder: self.tokens.tofile(folder / "tokens.bin")) / "tokens.bin"


def peer_streams(
    cache: Path, tokens: np.ndarray, seq_len: int
) -> Iterator[tuple[str, Callable[[int], Iterator[Batch]]]]:
    """Yield (name and version, make) for each installed peer, and print the others on stderr.

    `make(batch)` prepares the peer's files if need be and returns its batches; whatever goes wrong is raised there.
    """
    corpus = Corpus(store=cache / "store", folder=cache / "peers", tokens=tokens, seq_len=seq_len)
    for label, module, distribution, stream in PEERS:
        if not installed(module):
            name = label.replace(" {}", "")
            print(f"peers: {name} is left out: {distribution} is not installed", file=sys.stderr)
            continue
        yield label.format(version(distribution)), functools.partial(checked, stream, corpus)


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package above it is missing
        return False


def checked(stream: Callable[[Corpus, int], Iterable[Batch]], corpus: Corpus, batch: int) -> Iterator[Batch]:
    """Return the stream, after two batches were taken and checked."""
    if installed("torch"):
        import torch

        torch.set_num_threads(1)  # the benchmark runs on one core
    batches = iter(stream(corpus, batch))
    seen = []
    for _ in range(2):
        inputs, labels = (np.asarray(array) for array in next(batches))
        assert inputs.shape == labels.shape == (batch, corpus.seq_len), (inputs.shape, labels.shape)
        assert inputs.dtype == labels.dtype == np.int64, (inputs.dtype, labels.dtype)
        assert (inputs[:, 1:] == labels[:, :-1]).all(), "labels are not the next tokens"
        seen += [row[:32].tobytes() for row in inputs]
    assert len(set(seen)) == 2 * batch, "a window came twice"
    in_order = {window[:32].astype(np.int64).tobytes() for window in corpus.windows[: 2 * batch]}
    assert set(seen) != in_order, "windows are not shuffled"
    return batches


def split(windows: Any) -> Batch:
    """Widen a uint16 tensor [batch, seq_len + 1] into inputs and labels."""
    return windows[:, :-1].long(), windows[:, 1:].long()


class Windows:
    """A map-style dataset over a flat array: window i holds tokens i * seq_len to (i + 1) * seq_len, inclusive."""

    def __init__(self, corpus: Corpus) -> None:
        self.tokens, self.seq_len = corpus.tokens, corpus.seq_len

    def __len__(self) -> int:
        return (self.tokens.size - 1) // self.seq_len

    def __getitem__(self, index: int) -> np.ndarray:
        begin = index * self.seq_len
        return self.tokens[begin : begin + self.seq_len + 1]


class WidenedWindows(Windows):
    """The same as most training code has it: each window becomes two int64 tensors, which the loader stacks."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        window = torch.from_numpy(super().__getitem__(index).astype(np.int64))
        return {"input_ids": window[:-1], "labels": window[1:]}


def stack_and_split(windows: list[np.ndarray]) -> Batch:
    import torch

    return split(torch.from_numpy(np.stack(windows)))


def torch_widened(corpus: Corpus, batch: int, *, stateful: bool) -> Iterator[Batch]:
    for item in loader_class(stateful)(WidenedWindows(corpus), batch_size=batch, shuffle=True, drop_last=True):
        yield item["input_ids"], item["labels"]


def torch_collated(corpus: Corpus, batch: int, *, stateful: bool) -> Iterable[Batch]:
    """Widen once a batch, in a collate function of our own: the best a DataLoader does window by window."""
    return loader_class(stateful)(
        Windows(corpus), batch_size=batch, shuffle=True, drop_last=True, collate_fn=stack_and_split
    )


def loader_class(stateful: bool) -> Callable[..., Iterable[Any]]:
    if stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader
    from torch.utils.data import DataLoader

    return DataLoader


def grain_map_dataset(corpus: Corpus, batch: int) -> Iterable[Batch]:
    """No threads, as Grain's documentation advises for data in memory; its default of 16 costs more CPU a token."""
    import grain

    dataset = grain.MapDataset.source(Windows(corpus)).shuffle(seed=SEED).batch(batch, drop_remainder=True)
    dataset = dataset.map(lambda rows: (rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)))
    return dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))


def read_piece(span: tuple[int, int], path: Path) -> Iterator[Any]:
    """Yield a piece of the corpus for LitData, which calls this in a process of its own."""
    import torch

    yield torch.from_numpy(np.fromfile(path, np.uint16, span[1] - span[0], offset=2 * span[0]))


def litdata_tokens(corpus: Corpus, batch: int) -> Iterator[Batch]:
    import litdata

    loader = litdata.TokensLoader(block_size=corpus.seq_len + 1)
    flat, piece = corpus.flat_file(), 1000 * (corpus.seq_len + 1)
    spans = [(begin, begin + piece) for begin in range(0, corpus.tokens.size - piece + 1, piece)]

    def write(folder: Path) -> None:
        litdata.optimize(
            fn=functools.partial(read_piece, path=flat),
            inputs=spans,
            output_dir=str(folder),
            chunk_size=8 * piece,
            item_loader=loader,
            num_workers=1,
            verbose=False,
        )

    folder = corpus.prepared("litdata", write)
    dataset = litdata.StreamingDataset(str(folder), item_loader=loader, shuffle=True, drop_last=True, seed=SEED)
    for rows in litdata.StreamingDataLoader(dataset, batch_size=batch, num_workers=0, drop_last=True):
        yield split(rows)


def mosaicml_mds(corpus: Corpus, batch: int) -> Iterator[Batch]:
    with torchvision_or_stand_in():
        from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

    def write(folder: Path) -> None:
        columns = {"tokens": f"ndarray:uint16:{corpus.seq_len + 1}"}
        with MDSWriter(out=str(folder), columns=columns) as writer:
            for window in corpus.windows:
                writer.write({"tokens": window})

    folder = corpus.prepared("mds", write)
    dataset = StreamingDataset(local=str(folder), shuffle=True, shuffle_seed=SEED, batch_size=batch)
    for rows in StreamingDataLoader(dataset, batch_size=batch, num_workers=0, drop_last=True):
        yield split(rows["tokens"])


@contextmanager
def torchvision_or_stand_in() -> Iterator[None]:
    """Let MosaicML Streaming be imported where torchvision is missing: only its image datasets use it."""
    if installed("torchvision"):
        yield
        return
    import transformers.tokenization_utils_base  # noqa: F401  # looks for torchvision itself, and must not find this

    names = {"torchvision.datasets": "VisionDataset", "torchvision.transforms.functional": "to_tensor"}
    modules = ("torchvision", "torchvision.transforms", *names)
    for module in modules:
        sys.modules[module] = types.ModuleType(module)
    for module, name in names.items():
        setattr(sys.modules[module], name, type(name, (), {}))
    yield
    for module in modules:
        del sys.modules[module]


def hugging_face_arrow(corpus: Corpus, batch: int) -> Iterator[Batch]:
    import datasets

    datasets.disable_progress_bars()
    size = corpus.seq_len + 1
    features = datasets.Features({"tokens": datasets.Sequence(datasets.Value("uint16"), length=size)})

    def write(folder: Path) -> None:
        import pyarrow

        rows = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(corpus.windows.ravel()), size)
        table = pyarrow.table({"tokens": rows}, schema=features.arrow_schema)
        datasets.Dataset(table).save_to_disk(str(folder))

    dataset = datasets.load_from_disk(str(corpus.prepared("arrow", write))).shuffle(seed=SEED)
    dataset.set_format("numpy", dtype=np.uint16)
    for rows in dataset.iter(batch, drop_last_batch=True):
        yield rows["tokens"][:, :-1].astype(np.int64), rows["tokens"][:, 1:].astype(np.int64)


class NoTokenizer:
    """What Megatron asks of a tokenizer when the tokens are there already."""

    vocab_size, eod, pad = 50_000, 0, 50_000

    def __init__(self) -> None:
        self.unique_identifiers = {"class": "NoTokenizer"}


def megatron_gpt(corpus: Corpus, batch: int) -> Iterator[Batch]:
    """Documents in its own format and its own shuffled index; the torch DataLoader, as its trainer uses it."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    from tokenmill.store import open_store

    def write(folder: Path) -> None:
        store = open_store(corpus.store)
        builder = IndexedDatasetBuilder(str(folder / "corpus.bin"), dtype=np.uint16)
        for begin, end in itertools.pairwise(store.document_offsets(0, store.num_documents).tolist()):
            builder.add_document(corpus.tokens[begin:end], [end - begin])
        builder.finalize(str(folder / "corpus.idx"))

    folder = corpus.prepared("megatron", write)
    config = GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=corpus.seq_len,
        blend=([str(folder / "corpus")], None),
        split="1,0,0",
        path_to_cache=str(folder / "index"),
        tokenizer=NoTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    samples = corpus.tokens.size // corpus.seq_len * 9 // 10
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, config)
    for item in loader_class(stateful=False)(builder.build()[0], batch_size=batch, drop_last=True):
        yield item["tokens"], item["labels"]


def olmo_fixed_length(corpus: Corpus, batch: int) -> Iterator[Batch]:
    """No threads, which would read ahead while the limit is measured."""
    from olmo_core.data import DataCollator, NumpyFSLDataLoader, NumpyFSLDataset
    from olmo_core.data.utils import get_labels

    work = corpus.folder / "olmo"
    work.mkdir(parents=True, exist_ok=True)
    dataset = NumpyFSLDataset(
        corpus.flat_file(),
        sequence_length=corpus.seq_len,
        pad_token_id=NoTokenizer.pad,
        eos_token_id=NoTokenizer.eod,
        vocab_size=NoTokenizer.vocab_size,
        dtype=np.uint16,
        include_instance_metadata=False,
    )
    dataset.work_dir = work
    dataset.prepare()
    loader = NumpyFSLDataLoader(
        dataset,
        collator=DataCollator(pad_token_id=NoTokenizer.pad),
        global_batch_size=batch * corpus.seq_len,
        work_dir=work,
        seed=SEED,
        num_threads=0,
    )
    loader.reshuffle(epoch=1)
    for item in loader:
        yield item["input_ids"], get_labels(item)


PEERS = (
    ("torch {} DataLoader", "torch", "torch", functools.partial(torch_widened, stateful=False)),
    ("torch {} DataLoader, own collate", "torch", "torch", functools.partial(torch_collated, stateful=False)),
    ("torchdata {}", "torchdata", "torchdata", functools.partial(torch_widened, stateful=True)),
    ("torchdata {}, own collate", "torchdata", "torchdata", functools.partial(torch_collated, stateful=True)),
    ("litdata {} TokensLoader", "litdata", "litdata", litdata_tokens),
    ("grain {} MapDataset", "grain", "grain", grain_map_dataset),
    ("datasets {}, arrow", "datasets", "datasets", hugging_face_arrow),
    ("olmo-core {} NumpyFSLDataset", "olmo_core", "ai2-olmo-core", olmo_fixed_length),
    ("megatron-core {} GPTDataset", "megatron.core", "megatron-core", megatron_gpt),
    ("mosaicml-streaming {} MDS", "streaming", "mosaicml-streaming", mosaicml_mds),
)
"""(label, module, distribution, stream); the order is that of the table."""
