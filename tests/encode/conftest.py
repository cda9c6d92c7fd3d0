"""Real tokenizers for the tests: a tiny one trained here, and the files that litellm carries."""

from __future__ import annotations

import copy
import functools
import importlib.util
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer as HuggingFace
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from tokenmill.encode.engines import ADVERSARIAL, engines_of, open_tokenizer

O200K = "fb374d419588a4632f3f557e76b4b70aebbca790"
CL100K = "9b5ad71b2ce5302211f9c61530b329a4922fc6a4"
P50K = "ec7223a39ce59f226a68acc30dc1af2788490e15"

CORPUS = [
    *ADVERSARIAL,
    "Once upon a time a miller ground the grain of three villages. ",
    "He said: \"I'll grind it, don't worry!\" and then he ground 1234 bags, 56 a day.\n\n",
    "for step in range(1_000):\n    loss = model(batch[step])  # café, 中文, 👍🏽\n",
] * 3


@pytest.fixture(scope="session")
def vocabs() -> Path:
    """Find the folder of litellm's rank files and tokenizer.json, without importing litellm."""
    found = importlib.util.find_spec("litellm")
    assert found is not None, "litellm is not installed: run `make test`, which installs it with --no-deps"
    assert found.origin is not None
    folder = Path(found.origin).parent / "litellm_core_utils" / "tokenizers"
    assert (folder / O200K).is_file()
    return folder


@pytest.fixture(scope="session")
def tiny() -> dict:
    """Train a byte-level BPE: four control strings, one added word, a template that adds BOS."""
    native = HuggingFace(models.BPE())
    native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    native.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<s>", "</s>", "<pad>", "<|im_start|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    native.train_from_iterator(CORPUS, trainer)
    native.add_tokens(["<tool>"])
    native.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", native.token_to_id("<s>"))]
    )
    return json.loads(native.to_str())


@pytest.fixture
def write(tiny, tmp_path) -> Callable[..., str]:
    """Write a variant of the tiny tokenizer, changed by a function, and files beside it; return its path."""

    def written(change: Callable[[dict], object] | None = None, **siblings: dict) -> str:
        value = copy.deepcopy(tiny)
        if change is not None:
            change(value)
        (tmp_path / "tokenizer.json").write_text(json.dumps(value), encoding="utf-8")
        for name, content in siblings.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
        return str(tmp_path / "tokenizer.json")

    return written


@pytest.fixture(scope="session")
def specs(vocabs, tiny, tmp_path_factory) -> dict[str, str]:
    """Name each tokenizer under test."""
    folder = tmp_path_factory.mktemp("tokenizers")
    (folder / "tokenizer.json").write_text(json.dumps(tiny), encoding="utf-8")
    # The first 50,256 ranks of p50k are the r50k file, byte for byte; its hash is checked when it is recognised.
    lines = (vocabs / P50K).read_bytes().splitlines(keepends=True)[:50256]
    (folder / "ranks").write_bytes(b"".join(lines))
    return {
        "bytes": "bytes",
        "tiny": str(folder),
        "claude": str(vocabs / "anthropic_tokenizer.json"),
        "r50k": f"tiktoken:{folder / 'ranks'}",
        "p50k": f"tiktoken:{vocabs / P50K}",
        "cl100k": f"tiktoken:{vocabs / CL100K}",
        "o200k": f"tiktoken:{vocabs / O200K}",
    }


@pytest.fixture(scope="session")
def opened(specs) -> Callable[[str, str], object]:
    """Open a tokenizer under test by name and engine, once: the large ones take a second or two."""

    @functools.cache
    def once(name: str, engine: str) -> object:
        return open_tokenizer(specs[name], engine=engine)

    def get(name: str, engine: str = "auto") -> object:
        return once(name, engines_of(specs[name])[0] if engine == "auto" else engine)

    return get


def trained_pieces(kind: str, **options: object) -> bytes:
    """Train a model of SentencePiece and return its file; without the library the test is skipped."""
    sentencepiece = pytest.importorskip("sentencepiece")
    file = io.BytesIO()
    lines = [line for text in CORPUS for line in text.splitlines() if line.strip() and "\x00" not in line]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 4),
        model_writer=file,
        model_type=kind,
        vocab_size=600,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return file.getvalue()
