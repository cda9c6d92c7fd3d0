"""torchtitan's data loader over a run, and a builder that reads the data stages of its config."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.adapters import need
from tokenmill.adapters.torch import TorchLoader
from tokenmill.config.dialects import translate
from tokenmill.config.run import parse_config
from tokenmill.errors import ConfigError, ResumeError
from tokenmill.run.run import Run

if TYPE_CHECKING:
    from tokenmill.loader import Loader
    from tokenmill.plan import Plan

ARRAYS = ("input_ids", "labels", "position_ids")
STATE_KEYS = ("stage_idx", "stage_name", "dataloader_state")
"""Keys of a state that the fork documents."""
_TABLES = ("training", "model", "debug", "tokenmill")
"""Tables of a torchtitan config that concern data."""
_log = logging.getLogger("tokenmill")


class PairLoader(TorchLoader):
    """Batches in torchtitan's form: ({"input": ids, "positions": positions}, labels), on the CPU.

    Labels that are not trained on are -100, as in torchtitan. The state is that of the run, the same on every rank.
    """

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield {"input": batch["input_ids"], "positions": batch["position_ids"]}, batch["labels"]

    def state_dict(self) -> dict[str, int | str]:
        """Return the position of the run; an error within a step, because torchtitan saves only between steps.

        The keys are those that the fork documents. `dataloader_state` is the state of the run's loader, as JSON
        text, because a distributed checkpoint stores one entry per key and needs the same keys from every rank at
        any time.
        """
        state = super().state_dict()
        if state["batches"]:
            raise ConfigError(
                f"torchtitan: a step must take all micro-batches of a step of the run, got a checkpoint after "
                f"{state['batches']} of them in step {state['step']}; give the run and [training] one "
                "global_batch_size, and the stages of the run too"
            )
        return {**{key: state[key] for key in STATE_KEYS[:2]}, STATE_KEYS[2]: json.dumps(state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of any number of ranks; a running iteration continues from there."""
        try:
            inner = json.loads(state[STATE_KEYS[2]])
        except (KeyError, TypeError, ValueError) as error:
            keys = ", ".join(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise ResumeError(
                f"state: must have {', '.join(STATE_KEYS)}, the last one as JSON text, got {keys or 'nothing'}; "
                "use a state of this loader"
            ) from error
        super().load_state_dict(inner)


def _rank_loader(run: Run, rank: int, world_size: int, micro_batch: int, *, threads: int = 1) -> Loader:
    """Return the loader of one data-parallel rank; the first rank logs the translated keys."""
    loader = run.loader(rank=rank, world_size=world_size, micro_batch=micro_batch, threads=threads, arrays=ARRAYS)
    if rank == 0 and run.translation is not None:
        for note in run.translation.notes:
            _log.info("%s", note)
    return loader


def build_dataloader(
    dp_world_size: int,
    dp_rank: int,
    tokenizer: object,  # noqa: ARG001 - is passed; texts are encoded by that of the config
    job_config: object,
) -> PairLoader:
    """Return the loader for a `job_config` with [training.data_stages], as `build_dataloader_fn` of a TrainSpec.

    Values come from the object, so command line overrides apply. Relative paths start at the folder of
    `job.config_file`, or at the working directory if that is unknown.
    """
    tables = _plain(job_config)
    file = Path(tables.get("job", {}).get("config_file") or "job_config").resolve()
    of_data = {name: tables[name] for name in _TABLES if name in tables}
    translation = translate(of_data, where=file.name, world_size=dp_world_size)
    if dp_rank == 0:
        translation.log(file.name)
    config = parse_config(translation.tables, where=file.name)
    run = Run(config=config, folder=file.parent, name=file.stem, translation=translation, records_plans=True)
    if "seq_len" in tables["training"]:
        _check_length(run.plan(), tables["training"]["seq_len"])
    rows = tables["training"].get("local_batch_size", config.clock.stretches[0].batch // dp_world_size)
    return PairLoader(_rank_loader(run, dp_rank, dp_world_size, rows))


def _plain(job_config: object) -> dict[str, Any]:
    """Return a config object as tables, without values that are None."""
    if is_dataclass(job_config) and not isinstance(job_config, type):
        job_config = asdict(job_config)
    if not isinstance(job_config, Mapping):
        raise ConfigError(
            f"job_config: must be a dataclass or a mapping, got {type(job_config).__name__}; "
            "pass that of torchtitan"
        )
    return {key: _without_none(value) for key, value in job_config.items()}


def _without_none(value: Any) -> Any:  # noqa: ANN401 - any value of a config
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list | tuple) else value


def _check_length(plan: Plan, seq_len: int) -> None:
    """Reject rows that are longer than the model supports."""
    for stage in plan.stages:
        if stage.spec.seq_len > seq_len:
            raise ConfigError(
                f"stage {stage.spec.name!r}: seq_len must be at most training.seq_len {seq_len}, for which "
                f"the model is built, got {stage.spec.seq_len}; raise training.seq_len"
            )


def _check_batch(loader: Loader, in_trainer: int) -> None:
    """Reject stages whose steps have more or fewer micro-batches than those of the trainer."""
    part = loader.part
    for stage in loader.plan.trained_stages:
        if part.batches(stage) != in_trainer:
            wanted = in_trainer * part.micro_batch * part.world_size
            raise ConfigError(
                f"stage {stage.spec.name!r}: global_batch_size must be that of the trainer, {wanted}, got "
                f"{stage.spec.global_batch_size}; set training.global_batch_size to that of the run, or change "
                "the run"
            )


def _batches_of_trainer() -> int | None:
    """Return the number of micro-batches per step of the trainer that is creating this loader; None without one.

    torchtitan passes the batch size of the rank to a loader, but not the global one. So it is looked up in the
    trainer, which is on the stack at this time. Its validator has no steps, and is created later.
    """
    frame = inspect.currentframe()
    while frame is not None:
        trainer = frame.f_locals.get("self") if frame.f_code.co_name == "__init__" else None
        accumulated = getattr(trainer, "gradient_accumulation_steps", None)
        if isinstance(accumulated, int):
            return accumulated * int(getattr(trainer, "num_pipeline_parallel_microbatches", 1))
        frame = frame.f_back
    return None


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a class over one that is only known where torchtitan is
    """Create `TokenmillDataLoader` on first use, because the builder works without torchtitan's imports."""
    if name != "TokenmillDataLoader":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _dataloader()


@cache
def _dataloader() -> type[PairLoader]:
    for module in ("torchtitan", "torchdata", "tyro"):
        need(module, extra="torchtitan", adapter="tokenmill.adapters.torchtitan")
    from torchtitan.components.dataloader import BaseDataLoader

    class TokenmillDataLoader(PairLoader, BaseDataLoader):
        """A run under torchtitan's trainer: `dataloader=TokenmillDataLoader.Config(config_file="run.toml")`."""

        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            """Options of the run and its loader."""

            config_file: str = ""
            """TOML of the run: a tokenmill config, or torchtitan's with [training.data_stages]."""
            threads: int = 1
            """Threads that assemble batches ahead."""
            check_ranks: bool = False
            """Whether to compare the ranks at every step."""
            eval: str = ""
            """Name of an eval of the run, for the validator: `Validator.Config(dataloader=...)`."""
            infinite: bool = True
            """Set by the validator, and ignored: the run ends after its steps, and an eval after its rows."""

        def __init__(
            self,
            config: Config,
            *,
            dp_world_size: int,
            dp_rank: int,
            tokenizer: object,  # noqa: ARG002 - is passed; texts are encoded by that of the run
            seq_len: int,
            local_batch_size: int,
            snapshot_every_n_steps: int | None = None,  # noqa: ARG002 - a state costs nothing
        ) -> None:
            run = Run.from_toml(config.config_file, world_size=dp_world_size)
            if config.eval:
                loader: Loader = run.evals[config.eval].loader(
                    rank=dp_rank, world_size=dp_world_size, micro_batch=local_batch_size, arrays=ARRAYS
                )
                _check_length(loader.plan, seq_len)
            else:
                _check_length(run.plan(), seq_len)
                loader = _rank_loader(run, dp_rank, dp_world_size, local_batch_size, threads=config.threads)
                in_trainer = _batches_of_trainer()
                if in_trainer is not None:
                    _check_batch(loader, in_trainer)
            super().__init__(loader, check_ranks=config.check_ranks)

    # A copy in another process is created by these names, which __getattr__ of this module resolves.
    TokenmillDataLoader.__qualname__ = TokenmillDataLoader.__name__
    TokenmillDataLoader.Config.__qualname__ = f"{TokenmillDataLoader.__name__}.Config"
    return TokenmillDataLoader
