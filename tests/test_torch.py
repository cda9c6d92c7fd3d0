"""`tokenmill.torch`: one import for everybody."""

from __future__ import annotations

import pytest

import tokenmill.torch
from tokenmill.adapters import kempnerforge


def test_every_name_resolves_and_those_of_datasets_are_the_adapters_own():
    for name in tokenmill.torch.__all__:
        assert getattr(tokenmill.torch, name).__doc__, name
    for name in tokenmill.torch._DATASETS:
        assert getattr(tokenmill.torch, name) is getattr(kempnerforge, name)
    assert set(kempnerforge.__all__) - {"merge_states"} == set(tokenmill.torch._DATASETS)
    assert dir(tokenmill.torch) == sorted(tokenmill.torch.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Sampler'"):
        _ = tokenmill.torch.Sampler
