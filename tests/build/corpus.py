"""Small inputs and ways to look at a store, shared by the tests of prepare."""

import gzip
import random
from pathlib import Path

import msgspec
import zstandard

COMPRESS = {".jsonl": bytes, ".jsonl.gz": gzip.compress, ".jsonl.zst": zstandard.compress}


def some_texts(count: int, seed: int = 0) -> list[str]:
    """Make texts of very different lengths, one of a blank alone among them, in several scripts."""
    dice = random.Random(seed)
    words = ["mill", "grain", "Mühle", "зерно", "粉", "🌾", "<|eos|>", "\n", "\t"]
    texts = [" ".join(dice.choices(words, k=int(dice.paretovariate(0.7)) % 400)) for _ in range(count)]
    texts = [text or "-" for text in texts]
    return [*texts[: count // 2], " ", *texts[count // 2 : -1]]


def lines_of(texts) -> bytes:
    return b"".join(msgspec.json.encode({"id": index, "text": text}) + b"\n" for index, text in enumerate(texts))


def write_file(path: Path, texts) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    suffix = path.name[path.name.index(".jsonl") :]
    path.write_bytes(COMPRESS[suffix](lines_of(texts)))
    return path


def files_of(store: Path) -> dict[str, bytes]:
    """Return every file of a store, byte for byte."""
    return {str(path.relative_to(store)): path.read_bytes() for path in sorted(store.rglob("*")) if path.is_file()}


def texts_of(store) -> list[str]:
    """Return the documents of a store that was made with the tokenizer `bytes`."""
    return [
        store.fetch_record(document, "sequence")[1:-1].astype("u1").tobytes().decode()
        for document in range(store.num_documents)
    ]
