"""From a config to the loader of one rank: token files, text, a stream of text, or a mixture."""

from __future__ import annotations

from tokenmill.adapters.kempnerforge.config import DataConfig, DatasetSource
from tokenmill.adapters.kempnerforge.datasets import HuggingFaceDataset, MemoryMappedDataset
from tokenmill.adapters.kempnerforge.loader import StatefulDataLoader
from tokenmill.adapters.kempnerforge.mixed import MixtureDataset
from tokenmill.adapters.kempnerforge.mixture import MixtureSampler
from tokenmill.adapters.kempnerforge.ranks import find_rank
from tokenmill.adapters.kempnerforge.samplers import DistributedSampler
from tokenmill.adapters.kempnerforge.streaming import StreamingDataLoader, StreamingHuggingFaceDataset
from tokenmill.errors import ConfigError


def build_dataloader(
    config: DataConfig,
    rank: int | None = None,
    world_size: int | None = None,
    *,
    batch_size: int,
    seq_len: int,
    seed: int = 42,
    grad_accum_steps: int = 1,
    cache_dir: str | None = None,
) -> StatefulDataLoader | StreamingDataLoader:
    """Return the loader that a config asks for: `datasets` go first, then `dataset_path`, then `hf_dataset_name`.

    `batch_size` is that of a rank and a batch; a step has `grad_accum_steps` of them. Phases begin at their step by
    themselves. Batches have `seq_len` inputs and labels. Text is prepared once, below `cache_dir`.
    """
    rank, world_size = find_rank(rank, world_size)
    texts = [source.called for source in config.datasets if source.hf_name]
    if config.hf_streaming and texts:
        raise ConfigError(
            f"data: hf_streaming must be left out where text is mixed, as that is tokenized once, got {texts[0]!r} "
            "among datasets; set hf_streaming to false, or name it alone as hf_dataset_name"
        )
    if config.hf_streaming and config.hf_dataset_name and not config.datasets and not config.dataset_path:
        lanes = batch_size * world_size * grad_accum_steps
        return StreamingDataLoader(
            _stream(config, seq_len, rank=rank, world_size=world_size, seed=seed, lanes=lanes),
            batch_size,
            config,
            grad_accum_steps=grad_accum_steps,
            pin_memory=config.pin_memory,
        )
    dataset: MixtureDataset | MemoryMappedDataset | HuggingFaceDataset
    sampler: MixtureSampler | DistributedSampler
    if config.datasets:
        parts = [_dataset(config, source, seq_len, cache_dir) for source in config.datasets]
        dataset = MixtureDataset(parts, config.dataset_names)
        sampler = MixtureSampler(
            dataset.cumulative_sizes,
            [source.weight for source in config.datasets],
            num_replicas=world_size,
            rank=rank,
            seed=seed,
            temperature=config.mix_temperature,
        )
    else:
        dataset = _dataset(config, _only_source(config), seq_len, cache_dir)
        sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank, seed=seed)
    return StatefulDataLoader(dataset, batch_size, sampler, config, grad_accum_steps=grad_accum_steps)


def _only_source(config: DataConfig) -> DatasetSource:
    if config.dataset_path:
        return DatasetSource(path=config.dataset_path)
    if config.hf_dataset_name:
        return DatasetSource(hf_name=config.hf_dataset_name, hf_config=config.hf_dataset_config or "")
    raise ConfigError(
        "data: dataset_path, hf_dataset_name or datasets must be given, got none; "
        "add the one that says where the data is"
    )


def _dataset(
    config: DataConfig, source: DatasetSource, seq_len: int, cache_dir: str | None
) -> MemoryMappedDataset | HuggingFaceDataset:
    if source.path:
        return MemoryMappedDataset(
            source.path,
            seq_len + 1,
            config.file_pattern,
            config.pack_sequences,
            _eos_id(config) if config.pack_sequences else None,
            dtype=config.dtype,
            vocab_size=config.vocab_size,
        )
    return HuggingFaceDataset(
        source.hf_name,
        config.hf_dataset_split,
        config.hf_dataset_text_field,
        seq_len,
        _tokenizer(config),
        source.hf_config or None,
        config.pack_sequences,
        cache_dir=cache_dir,
    )


def _stream(
    config: DataConfig, seq_len: int, *, rank: int, world_size: int, seed: int, lanes: int
) -> StreamingHuggingFaceDataset:
    assert config.hf_dataset_name
    return StreamingHuggingFaceDataset(
        config.hf_dataset_name,
        config.hf_dataset_split,
        config.hf_dataset_text_field,
        seq_len,
        _tokenizer(config),
        config.hf_dataset_config,
        rank=rank,
        world_size=world_size,
        seed=seed,
        pack_sequences=config.pack_sequences,
        lanes=lanes,
    )


def _tokenizer(config: DataConfig) -> str:
    if not config.tokenizer_path:
        raise ConfigError(
            "data: tokenizer_path must be given to read text of Hugging Face, got nothing; "
            "add the folder of a tokenizer"
        )
    return config.tokenizer_path


def _eos_id(config: DataConfig) -> int | None:
    """Return the id that ends documents: as the config says, else that of the tokenizer, else as the files say."""
    if config.eos_token_id is not None or not config.tokenizer_path:
        return config.eos_token_id
    from tokenmill.encode.load import open_tokenizer

    return open_tokenizer(config.tokenizer_path).identity.eos_id
