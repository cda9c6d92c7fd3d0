"""What the tests of this adapter share: the library of Hugging Face kept off the network and the home folder."""

import pytest


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Keep the cache of the library, and its progress bars, out of the way."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    return datasets
