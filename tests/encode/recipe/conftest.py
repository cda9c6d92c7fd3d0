"""Tokenizers and recipes for the tests of encoders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import pytest

from tokenmill.encode.engines import open_tokenizer
from tokenmill.encode.recipe import RecordEncoder, load_recipe, open_encoder
from tokenmill.types import Records


@pytest.fixture
def encoder() -> Callable[..., RecordEncoder]:
    """Open the encoder of a recipe; by default on bytes, where an id is a byte and BOS, EOS are 256, 257."""

    def opened(recipe: str | Mapping[str, object], tokenizer: str = "bytes", **framing: bool) -> RecordEncoder:
        return open_encoder(load_recipe(recipe), open_tokenizer(tokenizer, **framing), tokenizer_spec=tokenizer)

    return opened


@pytest.fixture
def shown() -> Callable[..., list[str]]:
    """Write the items of an axis as text: ^ is BOS, $ is EOS, what is trained stands in brackets."""

    def show(records: Records, key: str, mask_key: str | None = None, axis: str | None = None) -> list[str]:
        ids = records.values[key]
        mask = records.values[mask_key] if mask_key else np.zeros(ids.size, np.uint8)
        return [
            _show(ids[begin:end].tolist(), mask[begin:end].tolist())
            for begin, end in pairwise(records.offsets[axis or key].tolist())
        ]

    return show


def _show(ids: Sequence[int], mask: Sequence[int]) -> str:
    text, inside = "", 0
    for token, trained in zip(ids, mask, strict=True):
        if trained != inside:
            text, inside = text + "[]"[inside], trained
        text += {256: "^", 257: "$"}.get(token) or chr(token)
    return text + "]" * inside
