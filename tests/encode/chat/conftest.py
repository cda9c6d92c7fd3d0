"""The stock templates that trl carries, a small tokenizer that knows their control strings, and real ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from tests.encode.chat.stock import STOCK
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HuggingFace

from tokenmill.encode.chat.template import ChatTemplate, load_template
from tokenmill.encode.engines import open_tokenizer

REAL = Path(__file__).parents[3] / ".venv" / "tokenizers"
CONTROL = re.compile(
    r"<\|[A-Za-z_0-9\"]{1,40}\|>|<\|[a-z_\"]{1,40}>|<[a-z_]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>"
    r"|<(?:start_of_turn|end_of_turn|end_of_utterance|sop)>|\[(?:gMASK|INST|/INST)\]"
)
WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Added tokens that are no control strings, as in Qwen's tokenizers."""


@pytest.fixture(scope="session")
def small_folder(tmp_path_factory) -> Path:
    """Train a byte-level BPE whose control strings are all that the stock templates write."""
    names = sorted({name for path in STOCK.values() for name in CONTROL.findall(path.read_text(encoding="utf-8"))})
    assert len(names) > 70
    native = HuggingFace(models.BPE())
    native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    native.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>", *names],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Merges across line ends, which is where headers end: tokens that straddle an edge must occur.
    native.train_from_iterator(
        ["assistant\n\nANSWER model\n\n  ANSWER system user\n\n\n", "\n\n \n\n"] * 50, trainer
    )
    native.add_tokens([AddedToken(word, special=False, normalized=False) for word in WORDS])
    folder = tmp_path_factory.mktemp("small")
    native.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def small(small_folder):
    """Open it without a BOS of its own."""
    return open_tokenizer(str(small_folder), add_bos=False, bos_token="<s>")


@pytest.fixture(scope="session")
def small_with_bos(small_folder):
    """Open it such that every document starts with BOS."""
    return open_tokenizer(str(small_folder), add_bos=True, bos_token="<s>")


@pytest.fixture(scope="session")
def real() -> Callable[[str], object]:
    """Open a real tokenizer once, or skip."""

    @cache
    def opened(name: str):
        return open_tokenizer(str(REAL / name))

    def get(name: str):
        if not (REAL / name).is_dir():
            pytest.skip(f"the tokenizer {name} is not there: run tools/fetch_tokenizers.py")
        return opened(name)

    get.folder = REAL
    return get


@pytest.fixture
def chatml() -> ChatTemplate:
    return load_template("chatml", tokenizer=None)
