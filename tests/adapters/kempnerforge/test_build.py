"""The config picks the path: token files, text, a stream of text, or a mixture."""

import json
from dataclasses import dataclass, field
from itertools import islice
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.adapters.ranks import call_ranks

from tokenmill.adapters.kempnerforge import (
    DataConfig,
    DatasetSource,
    DistributedSampler,
    HuggingFaceDataset,
    MemoryMappedDataset,
    MixtureDataset,
    MixtureSampler,
    StatefulDataLoader,
    StreamingDataLoader,
    TrainingPhase,
    build_dataloader,
)
from tokenmill.encode.engines import open_tokenizer
from tokenmill.errors import ConfigError


@pytest.fixture
def places(tmp_path, monkeypatch, hub):  # noqa: ARG001 - it keeps the library off the network
    """Make a folder of token files, one of raw ones, and one of text; work there."""
    monkeypatch.chdir(tmp_path)
    for name in ("web", "raw", "tales"):
        (tmp_path / name).mkdir()
    ids = np.random.default_rng(0).integers(1, 40_000, 2000).astype(np.uint16)
    ids[::50] = 0
    np.save("web/a.npy", ids)
    ids.tofile("raw/a.bin")
    lines = (msgspec.json.encode({"text": f"document {number} of the mill"}) + b"\n" for number in range(80))
    (tmp_path / "tales" / "a.jsonl").write_bytes(b"".join(lines))
    return ids


def build(rank=0, world_size=1, *, batch_size=4, grad_accum_steps=1, **options):
    config = DataConfig(num_workers=0, tokenizer_path="bytes", **options)
    return build_dataloader(
        config, rank, world_size, batch_size=batch_size, seq_len=16, grad_accum_steps=grad_accum_steps
    )


MIXED = [DatasetSource(path="web", weight=0.75), DatasetSource(hf_name="tales", weight=0.25, name="stories")]


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize(
    ("options", "loader", "dataset", "sampler"),
    [
        ({"dataset_path": "web"}, StatefulDataLoader, MemoryMappedDataset, DistributedSampler),
        (
            {"dataset_path": "raw", "file_pattern": "*.bin", "dtype": "uint16"},
            StatefulDataLoader,
            MemoryMappedDataset,
            DistributedSampler,
        ),
        ({"hf_dataset_name": "tales"}, StatefulDataLoader, HuggingFaceDataset, DistributedSampler),
        ({"hf_dataset_name": "tales", "hf_streaming": True}, StreamingDataLoader, None, None),
        ({"datasets": MIXED}, StatefulDataLoader, MixtureDataset, MixtureSampler),
        # What goes first where several are named.
        (
            {"datasets": MIXED[:1], "dataset_path": "raw", "hf_dataset_name": "nowhere", "hf_streaming": True},
            StatefulDataLoader,
            MixtureDataset,
            MixtureSampler,
        ),
        (
            {"dataset_path": "web", "hf_dataset_name": "nowhere", "hf_streaming": True},
            StatefulDataLoader,
            MemoryMappedDataset,
            DistributedSampler,
        ),
    ],
)
def test_the_config_picks_the_path_and_every_path_resumes(options, loader, dataset, sampler):
    """[R1.a]"""
    built = build(**options)
    assert type(built) is loader
    if dataset is not None:
        assert (type(built.dataset), type(built.sampler)) == (dataset, sampler)
    batches = [batch["input_ids"].tolist() for batch in islice(iter(built), 12)]
    assert {(len(batch), len(batch[0])) for batch in batches} == {(4, 16)}
    first = build(**options)
    for _ in islice(iter(first), 7):
        pass
    again = build(**options)
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [batch["input_ids"].tolist() for batch in islice(iter(again), 5)] == batches[7:]


def test_token_files_give_seq_len_inputs_and_all_their_samples(places):
    loader = build(dataset_path="web", pack_sequences=True, eos_token_id=0)
    rows = {tuple(row) for batch in loader for row in batch["input_ids"].tolist()}
    expected = [tuple(places[17 * n : 17 * n + 16].tolist()) for n in range(2000 // 17)]
    assert len(rows) == len(expected) // 4 * 4
    assert rows <= set(expected)
    assert next(iter(loader))["doc_ids"].shape == (4, 16)


@pytest.mark.usefixtures("places")
def test_the_eos_of_the_tokenizer_ends_documents_unless_it_is_said():
    said = build(dataset_path="web", pack_sequences=True, eos_token_id=0)
    found = build(dataset_path="web", pack_sequences=True)
    assert said.dataset.eos_id == 0
    assert found.dataset.eos_id == open_tokenizer("bytes").identity.eos_id
    assert build(dataset_path="web").dataset.eos_id is None


@pytest.mark.usefixtures("places")
def test_a_mixture_has_its_shares_and_phases_begin_by_themselves():
    """[M1.b]"""
    phases = [TrainingPhase(start_step=6, dataset_weights={"web": 0, "stories": 1})]
    loader = build(datasets=MIXED, phases=phases, batch_size=2, grad_accum_steps=2)
    sources = [batch["dataset_idx"].tolist() for batch in islice(iter(loader), 20)]
    assert abs(sum(sum(batch) for batch in sources[:12]) - 6) < 2
    assert sources[12:] == [[1, 1]] * 8
    anneal = build(datasets=MIXED, anneal_start_step=3, anneal_weights={"web": 0})
    assert [sum(batch["dataset_idx"].tolist()) for batch in islice(iter(anneal), 6)][3:] == [4, 4, 4]
    assert anneal.config.lr_scale_at(3) == 1.0


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "dataset_path, hf_dataset_name or datasets must be given, got none"),
        (
            {"hf_dataset_name": "tales", "tokenizer_path": ""},
            "tokenizer_path: must be given to read the text of 'tales'",
        ),
    ],
)
def test_a_config_without_data_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        build_dataloader(DataConfig(**options), 0, 1, batch_size=2, seq_len=8)


@pytest.mark.usefixtures("places")
def test_a_mixture_of_text_is_never_streamed_and_says_so():
    with pytest.raises(ConfigError, match=r"hf_streaming must be left out where text is mixed, .* got 'stories'"):
        build(datasets=MIXED, hf_streaming=True)


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize("options", [{"hf_streaming": True}, {}])
def test_phases_scale_the_learning_rate_of_any_text_and_so_they_do_after_a_resume(options):
    phases = [TrainingPhase(start_step=2, lr_scale=0.5), TrainingPhase(start_step=4, lr_scale=0.25)]
    loader, scales = build(hf_dataset_name="tales", phases=phases, grad_accum_steps=2, **options), []
    for _ in range(5):
        assert loader.step == len(scales)
        scales.append(loader.lr_scale)
        for _ in islice(iter(loader), 2):
            pass
    assert scales == [1, 1, 0.5, 0.5, 0.25]
    again = build(hf_dataset_name="tales", phases=phases, batch_size=8, **options)
    again.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert (again.step, again.lr_scale, again.state_dict()["batches_yielded"]) == (5, 0.25, 5)


PARTS = [DatasetSource(path="web", weight=3), DatasetSource(path="raw2", weight=1)]


def resumed_by_rank(state):
    """Go on from a state as one rank; return its rank, its batches, and its state after them."""
    dist.init_process_group("gloo")
    config = DataConfig(num_workers=0, tokenizer_path="bytes", datasets=PARTS)
    loader = build_dataloader(config, batch_size=2, seq_len=16)
    loader.load_state_dict(state)
    rows = [batch["input_ids"].tolist() for batch in islice(iter(loader), 6)]
    rank = dist.get_rank()
    dist.destroy_process_group()
    return rank, rows, loader.state_dict()


def test_ranks_of_a_process_group_go_on_from_a_state_of_one(places, tmp_path):
    """[R1.a: into fresh processes, of another number]"""
    (tmp_path / "raw2").mkdir()
    np.save("raw2/a.npy", places[::-1].copy())
    alone = build(datasets=PARTS)
    stream = iter(alone)
    for _ in range(5):
        next(stream)
    state = json.loads(json.dumps(alone.state_dict()))
    whole = [next(stream)["input_ids"].tolist() for _ in range(6)]
    parts = call_ranks(2, resumed_by_rank, state)
    assert [part[0] for part in parts] == [0, 1]
    for step in range(6):
        turns = zip(parts[0][1][step], parts[1][1][step], strict=True)
        here = [sorted(turn) for turn in turns]
        assert here == [sorted(whole[step][2 * n : 2 * n + 2]) for n in range(2)]
    states = [part[2] for part in parts]
    for state in states:
        state["sampler"].pop("rank")
    assert states[0] == states[1]
    assert states[0]["position"] == alone.state_dict()["position"] == 44


@dataclass
class TheirSource:
    """As KempnerForge has it."""

    path: str = ""
    weight: float = 1.0
    name: str = ""
    hf_name: str = ""
    hf_config: str = ""


@dataclass
class TheirData:
    """As KempnerForge has it, as far as it is not the default, and with what is for images."""

    dataset_path: str = "web"
    num_workers: int = 0
    hf_dataset_image_field: str = "image"
    pack_sequences: bool = False
    tokenizer_path: str = ""
    datasets: list[TheirSource] = field(default_factory=list)
    phases: list[SimpleNamespace] = field(default_factory=list)


THEIR_TRAIN = SimpleNamespace(batch_size=4, seq_len=16, grad_accum_steps=2, seed=1, data_seed=7)


@pytest.mark.usefixtures("places")
@pytest.mark.parametrize("data_seed", [7, None])
def test_a_job_of_kempnerforge_says_all_that_a_loader_needs(data_seed):
    train = SimpleNamespace(**vars(THEIR_TRAIN) | {"data_seed": data_seed})
    loader = build_dataloader(SimpleNamespace(data=TheirData(), train=train, model=None), 0, 1)
    ours = build_dataloader(
        DataConfig(dataset_path="web", num_workers=0),
        0,
        1,
        batch_size=4,
        seq_len=16,
        seed=data_seed or 1,
        grad_accum_steps=2,
    )
    assert loader.state_dict() == ours.state_dict()
    assert [batch["input_ids"].tolist() for batch in loader] == [batch["input_ids"].tolist() for batch in ours]


@pytest.mark.usefixtures("places")
def test_a_config_of_kempnerforge_is_read_by_the_names_of_its_fields():
    theirs = TheirData(
        datasets=[TheirSource("web", 3.0, "a"), TheirSource("web", 1.0, "b")],
        phases=[SimpleNamespace(start_step=2, dataset_weights={"a": 0.0}, lr_scale=0.5)],
    )
    ours = DataConfig(
        dataset_path="web",
        num_workers=0,
        datasets=[DatasetSource("web", 3.0, "a"), DatasetSource("web", 1.0, "b")],
        phases=[TrainingPhase(2, {"a": 0.0}, 0.5)],
    )
    assert DataConfig.of(theirs) == ours
    loader = build_dataloader(theirs, 0, 1, batch_size=4, seq_len=16)
    assert loader.config == ours
    assert StatefulDataLoader(loader.dataset, 4, loader.sampler, theirs).config == ours


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            TheirData(),
            "build_dataloader: batch_size must be given where the config has no .train., got none",
        ),
        ({"dataset_path": "web"}, "config: must be a DataConfig of this package or of KempnerForge, got dict"),
    ],
)
def test_a_config_that_says_too_little_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        build_dataloader(config, 0, 1)


@pytest.mark.usefixtures("places")
def test_a_batch_is_made_of_samples_as_it_is_asked_for():
    dataset = MemoryMappedDataset("web", 17)

    def collate(samples):
        return {"ids": torch.stack([sample["input_ids"] for sample in samples]) + 1}

    plain = next(iter(StatefulDataLoader(dataset, 4, config=DataConfig(num_workers=0))))
    made = next(iter(StatefulDataLoader(dataset, 4, config=DataConfig(num_workers=0), collate_fn=collate)))
    assert list(made) == ["ids"]
    assert made["ids"].tolist() == (plain["input_ids"] + 1).tolist()


@pytest.mark.usefixtures("places")
def test_the_dtype_of_raw_files_can_be_said_by_the_environment(monkeypatch):
    monkeypatch.setenv("TOKENMILL_DTYPE", "uint16")
    raw, files = MemoryMappedDataset("raw", 17, "*.bin"), MemoryMappedDataset("web", 17)
    assert [raw[index]["labels"].tolist() for index in range(len(raw))] == [
        files[index]["labels"].tolist() for index in range(len(files))
    ]
