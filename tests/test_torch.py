"""`tokenmill.torch`: what torch users import."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import tokenmill.torch
from tokenmill.adapters import kempnerforge


def test_only_torch_names_are_exported():
    homes = {name: getattr(tokenmill.torch, name).__module__ for name in tokenmill.torch.__all__}
    assert set(homes.values()) == {"tokenmill.adapters.torch"}


def test_names_of_the_kempnerforge_adapter_can_still_be_imported():
    for name in set(kempnerforge.__all__) - {"merge_states"}:  # of that name there is one for live text
        assert getattr(tokenmill.torch, name) is getattr(kempnerforge, name)
    with pytest.raises(AttributeError, match=r"'tokenmill\.torch' has no attribute 'merge_states'"):
        _ = tokenmill.torch.merge_states
