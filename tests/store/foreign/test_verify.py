from __future__ import annotations

import numpy as np
import pytest

from tokenmill.errors import StoreCorruptError, StoreError
from tokenmill.store import ForeignOptions, open_store, verify


def test_what_was_checked_is_said(write, name):
    made = write(name)
    seen = []
    report = verify(made.path, options=ForeignOptions(**made.options), progress=seen.append)
    assert (report.tokens, report.documents, report.format) == (
        len(made.tokens),
        len(made.offsets) - 1,
        made.format,
    )
    assert report.checked.startswith("the format has no checksums; sizes and boundaries are right")
    assert sum(seen) == report.bytes
    assert report.fingerprint == open_store(made.path, **made.options).fingerprint


def test_an_index_that_is_not_that_of_the_data_is_found(tmp_path, monkeypatch):
    """[S.f] Too large to be read through when it is opened, so it is `verify` that notices."""
    tokens = np.ones(1 << 20, np.uint16)
    np.save(tmp_path / "a.npy", tokens)
    path = open_store(tmp_path / "a.npy", eos_id=1).file(0, "documents.bin").path
    monkeypatch.setattr("tokenmill.store.foreign.index.CHECKED_BYTES", 0)
    data = bytearray(path.read_bytes())
    data[80] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreCorruptError, match=r"documents\.bin of a\.npy must be what the data says.*delete"):
        verify(tmp_path / "a.npy", options=ForeignOptions(eos_id=1))


def test_a_byte_mask_of_other_numbers_is_found(tmp_path, tools):
    mask = np.array([0, 1, 7], np.uint8)
    tools.save_bin(tmp_path, {"sequence": np.arange(3, dtype=np.int32), "loss_mask": mask})
    with pytest.raises(StoreError, match=r"loss_mask must be 0 or 1, got \[7\]"):
        verify(tmp_path)


def test_options_count_for_a_store_of_ours_as_well(make_store):
    path, _, _ = make_store("web", [4], vocab_size=300)
    assert verify(path, options=ForeignOptions(vocab_size=300)).format == "tokenmill"
    with pytest.raises(ValueError, match="vocab_size must be as the manifest says"):
        verify(path, options=ForeignOptions(vocab_size=301))
