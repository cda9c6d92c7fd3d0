"""`tokenmill.torch`: one import for everybody."""

from __future__ import annotations

import tokenmill.torch
from tokenmill.adapters import kempnerforge


def test_all_that_the_adapter_offers_is_there_and_its_own():
    offered = set(kempnerforge.__all__) - {"merge_states"}  # of that name there is one for live text
    assert offered <= set(tokenmill.torch.__all__)
    for name in offered:
        assert getattr(tokenmill.torch, name) is getattr(kempnerforge, name)
