"""The Trainer of transformers, and those built on it, fed with the batches of a run."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tokenmill.adapters import need

# Before 5.10 the last label of each row is not counted; before 4.53.1 documents of a row see one another.
for _name, _least in (("torch", None), ("accelerate", None), ("datasets", None), ("transformers", "5.10")):
    need(_name, extra="hf", adapter="tokenmill.adapters.transformers", at_least=_least)

import torch
import transformers
from transformers.trainer_callback import ExportableState

from tokenmill.adapters.torch import Tensors, check_rank, joined_state, to_torch
from tokenmill.errors import ConfigError, ResumeError
from tokenmill.loader import IGNORE, Loader
from tokenmill.run.run import Run

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerState, TrainingArguments

ARRAYS = ("input_ids", "labels", "position_ids")
"""What a model of transformers is given; the positions tell it where documents begin."""


def to_transformers(tensors: Tensors, *, flat: bool = False) -> Tensors:
    """Return a batch as models of transformers take it.

    Our labels, which are those of the next token, become `shift_labels`. `labels` are the same one place later, as
    transformers counts, without the last of each row, which has no place there. `flat` lays rows end to end.
    """
    labels = tensors["labels"]
    first = labels.new_full((labels.shape[0], 1), IGNORE)
    out = {name: tensors[name] for name in ARRAYS if name in tensors}
    out |= {"labels": torch.cat([first, labels[:, :-1]], dim=1), "shift_labels": labels}
    return {name: tensor.reshape(1, -1) for name, tensor in out.items()} if flat else out


class TrainData:
    """What a Trainer takes for its DataLoader: accelerate's would share batches out again, and draw one ahead."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.flat = False
        self.arrays = loader.options.arrays
        self.batches_per_step = _batches_per_step(loader)
        self.begin = loader.state_dict()
        if "batches" in self.begin:
            raise ConfigError(
                f"train_dataset: the loader must stand between two steps, got the middle of step {loader.step}; "
                "load a state that was saved between steps"
            )
        self._length = len(loader) - loader.num_drawn

    def __len__(self) -> int:
        """Return the number of micro-batches from where the loader stood to the end of the run."""
        return self._length

    def __iter__(self) -> Iterator[Tensors]:
        for batch in self.loader:
            yield to_transformers(to_torch(batch), flat=self.flat)

    def state_dict(self) -> dict[str, Any]:
        """Return where all ranks stand, as JSON; ranks that read live text must ask together."""
        return joined_state(self.loader)


class TokenmillState(transformers.TrainerCallback, ExportableState):
    """Keeps where the loader stands in the Trainer's own state, under this name; holds no loader itself."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}
        """Where the loader stood after the last step; what was drawn since has not been trained on."""

    def state(self) -> dict[str, Any]:
        """Return what a Trainer keeps of this in `trainer_state.json`, from which it may make another."""
        return {"args": {}, "attributes": {"data": self.data}}

    def on_train_begin(
        self, _args: object, state: TrainerState, _control: object, *, train_dataloader: TrainData, **_: object
    ) -> None:
        """Go to where the checkpoint says, or to the start."""
        kept = train_dataloader.begin
        if state.global_step:
            kept = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes", {}).get("data")
            if not kept:
                raise ResumeError(
                    f"checkpoint: must say in trainer_state.json where the data stood at step {state.global_step}, "
                    "got nothing; resume from one of a LoaderTrainer, or load its weights and seek the loader"
                )
        train_dataloader.loader.load_state_dict(kept)
        self.data = train_dataloader.state_dict()

    def on_step_end(
        self, _args: object, state: TrainerState, _control: object, *, train_dataloader: TrainData, **_: object
    ) -> None:
        """Note where the loader stands: all that was drawn is trained on now."""
        self.data = train_dataloader.state_dict()
        # A Trainer that does not skip through its data counts the epoch from 0 again.
        state.epoch = state.global_step * train_dataloader.batches_per_step / len(train_dataloader)


class LoaderTrainer(transformers.Trainer):
    """A Trainer whose `train_dataset` is a run or a loader; resumes from its checkpoints exactly, at once.

    `class SFT(LoaderTrainer, trl.SFTTrainer): ...` does the same for a Trainer of someone else. The arguments say
    the batch of a device; `max_steps` and `gradient_accumulation_steps` come from the run: leave them out.
    """

    def __init__(
        self,
        model: PreTrainedModel | str | None = None,
        args: TrainingArguments | None = None,
        *,
        train_dataset: Run | Loader,
        **others: object,
    ) -> None:
        import datasets

        if args is None:
            raise ConfigError("args: must be TrainingArguments, got None; say output_dir and the batch of a device")
        self._data = TrainData(_loader_of(train_dataset, args))
        # Some look into their dataset while they are made: they get a row of nothing.
        nothing = datasets.Dataset.from_dict({"input_ids": [[0, 0]], "labels": [[0, 0]]})
        super().__init__(model=model, args=_settle(args, self._data), train_dataset=nothing, **others)
        self.train_dataset = train_dataset
        _check_model(self.model, self._data.arrays)
        # Such kernels are told of documents only where the batch is one row.
        config = getattr(self.model, "config", None)
        self._data.flat = "flash" in str(getattr(config, "_attn_implementation", ""))
        self.add_callback(TokenmillState())

    def get_train_dataloader(self) -> TrainData:
        """Return the batches of this rank, which accelerate must not share out again."""
        return self._data


def _loader_of(data: Run | Loader, args: TrainingArguments) -> Loader:
    """Return the loader of this rank; refuse one of another rank, which would train on rows twice."""
    parallel = getattr(args, "parallelism_config", None) is not None
    if isinstance(data, Run):
        if parallel:
            raise ConfigError(
                "train_dataset: must be a loader where args.parallelism_config is set, got a run; pass "
                "run.loader(rank=..., world_size=...) of the data-parallel group"
            )
        return data.loader(
            rank=args.process_index, world_size=args.world_size, micro_batch=args.train_batch_size, arrays=ARRAYS
        )
    part = data.part
    if not parallel:
        way_out = "pass the run itself, or rank and world_size to its loader"
        check_rank(data, args.process_index, args.world_size, where="train_dataset", way_out=way_out)
    if part.micro_batch != args.train_batch_size:
        raise ConfigError(
            f"train_dataset: micro_batch must be that of the arguments, {args.train_batch_size}, got "
            f"{part.micro_batch}; say per_device_train_batch_size={part.micro_batch}"
        )
    return data


def _settle(args: TrainingArguments, data: TrainData) -> TrainingArguments:
    """Return a copy of the arguments with what the run decides; refuse what contradicts it."""
    for name, way_out in (
        ("auto_find_batch_size", "the run says the rows of a step: choose per_device_train_batch_size"),
        ("label_smoothing_factor", "it would leave out the last label of each row: smooth in compute_loss"),
    ):
        if getattr(args, name, None):
            raise ConfigError(f"args: {name} must be left out, got {getattr(args, name)}; {way_out}")
    steps, accumulated = len(data) // data.batches_per_step, data.batches_per_step
    if args.gradient_accumulation_steps not in (1, accumulated):
        raise ConfigError(
            f"args: gradient_accumulation_steps must be {accumulated}, which is global_batch_size / (world_size * "
            f"micro_batch), got {args.gradient_accumulation_steps}; leave it out"
        )
    if args.max_steps > steps:
        raise ConfigError(
            f"args: max_steps must be at most the {steps} steps of the run, got {args.max_steps}; raise run.steps"
        )
    args = copy.copy(args)
    args.gradient_accumulation_steps = accumulated
    args.max_steps = args.max_steps if args.max_steps > 0 else steps
    args.ignore_data_skip = True  # the loader goes to its place itself: there is nothing to skip through
    return args


def _batches_per_step(loader: Loader) -> int:
    """Return how many micro-batches a step has: a Trainer takes the same number in all of them."""
    sizes = {loader.part.batches(stage): stage.spec for stage in loader.plan.stages if stage.spec.skipped is None}
    if len(sizes) > 1:
        stages = " and ".join(f"{spec.global_batch_size} in stage {spec.name!r}" for spec in sizes.values())
        raise ConfigError(
            f"run: global_batch_size must be one for all stages, as a Trainer takes as many micro-batches in every "
            f"step, got {stages}; use one, or a run and a Trainer for each stage"
        )
    return next(iter(sizes))


def _check_model(model: PreTrainedModel, arrays: tuple[str, ...]) -> None:
    """Refuse a model that would not know where documents begin, or which tokens are labels."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not isinstance(inner, transformers.PreTrainedModel):
        return
    taken, name = inspect.signature(inner.forward).parameters, type(inner).__name__
    if "position_ids" in arrays and "position_ids" not in taken:
        raise ConfigError(
            f"model: must take position_ids, so that documents of a row do not see one another, got {name}; "
            "if they may, pass run.loader(arrays=['input_ids', 'labels'])"
        )
    if "position_ids" in arrays and getattr(inner.config, "use_cache", False):
        raise ConfigError(
            "model: config.use_cache must be False, as a model with a cache lets the documents of a row see one "
            "another, got True; set it, and leave it out of the arguments"
        )
    if "shift_labels" not in taken and not any(p.kind is p.VAR_KEYWORD for p in taken.values()):
        raise ConfigError(
            f"model: must take shift_labels, the labels of the next token, got {name}; use one whose forward hands "
            "its keyword arguments on to the loss"
        )
