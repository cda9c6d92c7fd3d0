from __future__ import annotations

import importlib
import inspect
import sys

import pytest

from tokenmill.adapters import astrai
from tokenmill.errors import ConfigError

NAMES = {
    "detect_format": "load_path",
    "StoreFactory.create": "storage_type window_size=0 stride=None **unknown",
    "Store": "window_size=0 stride=None **unknown",
    "Store.load": "self path *share_memory=True **unknown",
    "Store.sample_window": "self index",
    "Store.fetch": "self begin end keys",
    "Store.fetch_record": "self index keys",
    "H5Store": "window_size=0 stride=None **unknown",
    "H5Store.share_memory_": "self",
    "MmapStore": "window_size=0 stride=None **unknown",
    "JsonlStore": "window_size=0 stride=None **unknown",
    "JsonlStore.load": "self path *share_memory=True *tokenizer_path=None *max_len=2048 *train_type='sft' "
    "**unknown",
    "BaseDataset": "window_size=0 stride=None store=None **unknown",
    "BaseDataset.load": "self load_path storage_type=None **options",
    "BaseDataset.get_index": "self index",
    "BaseDataset.__getitem__": "self index",
    "BaseDataset.__getitems__": "self indices",
    "DatasetFactory.create": "train_type window_size=0 stride=None store=None **unknown",
    "DatasetFactory.load": "train_type load_path=None window_size=0 stride=None storage_type=None "
    "tokenizer_path=None max_len=2048 store=None **options",
    "DatasetFactory.from_store": "train_type store window_size=0 stride=None",
    "SEQDataset": "window_size=0 stride=None store=None **unknown",
    "SFTDataset": "window_size=0 stride=None store=None **unknown",
    "DPODataset": "window_size=0 stride=None store=None **unknown",
    "GRPODataset": "window_size=0 stride=None store=None **unknown",
    "ResumableDistributedSampler": "data_source start_epoch=0 start_iter=0 seed=42 drop_last=False shuffle=True "
    "process_group=None replica=None **unknown",
    "RDSampler": "data_source start_epoch=0 start_iter=0 seed=42 drop_last=False shuffle=True "
    "process_group=None replica=None **unknown",
    "Pipeline": "config input_paths output_dir tokenizer_path **unknown",
    "Pipeline.run": "self *workers=None *rebuild=False *on_error='stop' **unknown",
    "dpo_collate_fn": "batch",
    "grpo_collate_fn": "batch",
    "save_bin": "file_path tensor_group record_keys=None",
    "load_bin": "file_path",
}
"""Every name of AstrAI's data API, with its parameters; `**unknown` is there to be refused by name."""
STARS = {inspect.Parameter.KEYWORD_ONLY: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def described(name: str) -> str:
    value = astrai
    for part in name.split("."):
        value = getattr(value, part)
    return " ".join(
        f"{STARS.get(each.kind, '')}{each.name}" + ("" if each.default is each.empty else f"={each.default!r}")
        for each in inspect.signature(value).parameters.values()
    )


@pytest.mark.parametrize(("name", "parameters"), NAMES.items(), ids=NAMES)
def test_every_documented_name_has_its_parameters(name, parameters):
    assert described(name) == parameters


def test_all_that_the_folder_offers_is_in_the_list():
    assert sorted({name.split(".")[0] for name in [*NAMES, "DatasetFactory"]}) == sorted(astrai.__all__)


def test_without_torch_one_line_says_what_to_install(monkeypatch):
    """[F1.a]"""
    for name in [name for name in sys.modules if name.startswith("tokenmill.adapters.astrai")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        ImportError, match=r"^tokenmill\.adapters\.astrai: torch is not installed; pip install '.*torch"
    ):
        importlib.import_module("tokenmill.adapters.astrai")


def test_stores_and_datasets_are_found_by_their_names():
    assert dict(astrai.StoreFactory.stores) == {
        "h5": astrai.H5Store,
        "bin": astrai.MmapStore,
        "jsonl": astrai.JsonlStore,
    }
    stores = astrai.StoreFactory.stores
    assert {name: type(astrai.StoreFactory.create(name)) for name in ("h5", "bin", "jsonl")} == stores
    assert {name: type(astrai.DatasetFactory.create(name, 4)) for name in ("seq", "sft", "dpo", "grpo")} == {
        "seq": astrai.SEQDataset,
        "sft": astrai.SFTDataset,
        "dpo": astrai.DPODataset,
        "grpo": astrai.GRPODataset,
    }


def test_the_keys_of_each_training_type_are_those_of_astrai():
    assert {name: kind.required_keys for name, kind in astrai.DatasetFactory.datasets.items()} == {
        "seq": ("sequence",),
        "sft": ("sequence", "loss_mask", "position_ids"),
        "dpo": ("chosen", "rejected", "chosen_mask", "rejected_mask"),
        "grpo": ("prompts", "responses", "masks", "rewards"),
    }


WRONG = {
    "storage type": (
        lambda: astrai.StoreFactory.create("bim"),
        "must be one of h5, bin, jsonl, got 'bim'; did you mean 'bin'",
    ),
    "training type": (lambda: astrai.DatasetFactory.load("sfx", "x", 4), "got 'sfx'; did you mean 'sft'"),
    "load": (lambda: astrai.DatasetFactory.load("seq", "x", 4, strides=2), "got 'strides'; did you mean 'stride'"),
    "create": (
        lambda: astrai.DatasetFactory.create("seq", 4, window=2),
        "got 'window'; did you mean 'window_size'",
    ),
    "dataset": (lambda: astrai.SEQDataset(4, strid=2), "SEQDataset: .* got 'strid'; did you mean 'stride'"),
    "dataset.load": (lambda: astrai.SEQDataset(4).load("x", storage="h5"), "did you mean 'storage_type'"),
    "dataset.load type": (
        lambda: astrai.SEQDataset(4).load("x", storage_type="hdf5"),
        "got 'hdf5'; did you mean 'h5'",
    ),
    "store": (lambda: astrai.MmapStore(share_memory=True), "options must be known, got 'share_memory'"),
    "store.create": (
        lambda: astrai.StoreFactory.create("h5", storage=1),
        "got 'storage'; did you mean 'storage_type'",
    ),
    "store.load": (lambda: astrai.H5Store().load("x", paths=1), "got 'paths'; did you mean 'path'"),
    "sampler": (lambda: astrai.ResumableDistributedSampler([1], start_iters=2), "did you mean 'start_iter'"),
    "pipeline": (
        lambda: astrai.Pipeline("text", ["x"], "y", "bytes", tokenizer=1),
        "did you mean 'tokenizer_path'",
    ),
    "run": (lambda: astrai.Pipeline("text", ["x"], "y", "bytes").run(worker=1), "did you mean 'workers'"),
    "neither": (lambda: astrai.DatasetFactory.load("seq", window_size=4), "load_path or store must be given"),
    "no config": (lambda: astrai.Pipeline(3, ["x"], "y", "bytes"), "config must be a PipelineConfig, .* got int"),
    "config": (lambda: astrai.Pipeline({"inputs": {}}, ["x"], "y", "bytes"), "did you mean 'input'"),
}


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG)
def test_an_unknown_option_is_an_error_that_names_the_nearest(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
