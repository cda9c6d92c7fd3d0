"""What the tests of this adapter share: small datasets, and the library of Hugging Face kept off the network."""

import numpy as np
import pytest

from tokenmill.adapters.kempnerforge import MemoryMappedDataset, MixtureDataset


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Keep the cache of the library, and its progress bars, out of the way."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    return datasets


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Make two folders of samples that are known by their first token: 0 to 102, and 1000 to 1036."""
    folder = tmp_path_factory.mktemp("tokens")
    for name, first, count in (("a", 0, 103), ("b", 1000, 37)):
        (folder / name).mkdir()
        np.save(folder / name / "x.npy", np.repeat(np.arange(first, first + count), 4).astype(np.uint16))
    return folder


@pytest.fixture
def single(tokens):
    return MemoryMappedDataset(str(tokens / "a"), 4)


@pytest.fixture
def mixed(tokens):
    parts = [MemoryMappedDataset(str(tokens / name), 4) for name in "ab"]
    return MixtureDataset(parts, ["a", "b"])
