"""The Hugging Face Trainer, and trainers built on it, fed with the batches of a run."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from tokenmill.adapters import check_schedule, need

# Before 5.10, the last label of each row is not counted. Before 4.53.1, documents of a row attend to each other.
for _name, _least in (("torch", None), ("accelerate", None), ("datasets", None), ("transformers", "5.10")):
    need(_name, extra="hf", adapter="tokenmill.adapters.transformers", at_least=_least)

import datasets
import torch
import transformers
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import IntervalStrategy

from tokenmill.adapters.torch import Tensors, check_rank, joined_state, lr_scheduler, to_torch
from tokenmill.errors import ConfigError, ResumeError
from tokenmill.loader import IGNORE, Loader
from tokenmill.run.evals import Eval, find_evals
from tokenmill.run.run import Run
from tokenmill.store import Store

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainerControl, TrainerState, TrainingArguments

    from tokenmill.plan.lr import TokenSchedule

ARRAYS = ("input_ids", "labels", "position_ids")
"""Arrays that a model receives; the positions show where documents start."""


def to_transformers(tensors: Tensors, *, flat: bool = False) -> Tensors:
    """Return a batch in the form of Hugging Face models.

    The labels, which are those of the next token, become `shift_labels`. `labels` are the same one position later,
    as transformers counts, so the last one of each row has no place. `flat` concatenates the rows.
    """
    labels = tensors["labels"]
    first = labels.new_full((labels.shape[0], 1), IGNORE)
    out = {name: tensors[name] for name in ARRAYS if name in tensors}
    out |= {"labels": torch.cat([first, labels[:, :-1]], dim=1), "shift_labels": labels}
    return {name: tensor.reshape(1, -1) for name, tensor in out.items()} if flat else out


class TrainData:
    """Stands for a DataLoader in a Trainer: accelerate's would shard batches again, and draw one ahead."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        self.flat = False
        self.epochs = 1.0
        """Epochs of the whole run; a run with a number of steps counts as one."""
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
        """Return the number of micro-batches from the first position of the loader to the end of the run."""
        return self._length

    def __iter__(self) -> Iterator[Tensors]:
        for batch in self.loader:
            yield self.inputs(to_torch(batch))

    def inputs(self, tensors: Tensors) -> Tensors:
        """Return a batch in the form that the model receives."""
        return to_transformers(tensors, flat=self.flat)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of all ranks, as JSON; ranks that read live text must call it together."""
        return joined_state(self.loader)


class TokenmillState(transformers.TrainerCallback, ExportableState):
    """Stores the position of the loader in the Trainer's state, under this name; holds no loader."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}
        """Position of the loader after the last step; batches drawn since then have not been trained on."""

    def state(self) -> dict[str, Any]:
        """Return the content for `trainer_state.json`, from which a Trainer can recreate this callback."""
        return {"args": {}, "attributes": {"data": self.data}}

    def on_train_begin(
        self, _args: object, state: TrainerState, _control: object, *, train_dataloader: TrainData, **_: object
    ) -> None:
        """Move the loader to the position of the checkpoint, or to the start."""
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
        self,
        args: TrainingArguments,
        state: TrainerState,
        _control: object,
        *,
        train_dataloader: TrainData,
        **_: object,
    ) -> None:
        """Record the position of the loader: everything that was drawn is trained on now."""
        self.data = train_dataloader.state_dict()
        if args.include_num_input_tokens_seen != "non_padding":
            state.num_input_tokens_seen = train_dataloader.loader.tokens_seen.slots
        # A Trainer that does not skip through its data counts the epoch from 0 again.
        done = state.global_step * train_dataloader.batches_per_step / len(train_dataloader)
        state.epoch = done * train_dataloader.epochs


class LoaderTrainer(transformers.Trainer):
    """A Trainer with a run or a loader as `train_dataset`; it resumes from its checkpoints exactly and at once.

    `class SFT(LoaderTrainer, trl.SFTTrainer): ...` does the same for another Trainer. The arguments set the batch
    size per device. Leave `gradient_accumulation_steps` out, because it comes from the run. The length of the
    training is that of the run, in steps or epochs; a run without a length takes that of the arguments. `every` of
    the evals sets when to evaluate, if the arguments do not. `lr_schedule`, from `run.lr_schedule(...)`, follows
    the tokens of the run.
    """

    def __init__(
        self,
        model: PreTrainedModel | str | None = None,
        args: TrainingArguments | None = None,
        *,
        train_dataset: Run | Loader,
        eval_dataset: object = None,
        lr_schedule: TokenSchedule | None = None,
        **others: object,
    ) -> None:
        if not isinstance(args, self._args_class):
            kind = "None" if args is None else type(args).__name__
            raise ConfigError(
                f"args: expected {self._args_class.__name__}, got {kind}; pass one with output_dir and "
                "per_device_train_batch_size"
            )
        if not isinstance(model, torch.nn.Module | str | None):
            raise ConfigError(f"model: expected a model, got {model!r}; pass one that is loaded")
        if lr_schedule is not None:
            check_schedule(lr_schedule)
        if isinstance(train_dataset, Run):
            train_dataset = _of_length(train_dataset, args)
        else:
            _refuse_epochs(args, "a loader, which has its length")
        self._data = self._train_data(_loader_of(train_dataset, args, self._arrays, self._columns(args)))
        if isinstance(train_dataset, Run) and train_dataset.epochs is not None:
            self._data.epochs = train_dataset.epochs.epochs
        evals = find_evals(eval_dataset, train_dataset, where="eval_dataset", beside="train_dataset")
        for item in evals.values():
            _check_kinds("eval_dataset", {part.name: part.store for part in item.parts}, self._arrays)
        if evals:
            self._check_evals(args)
        else:
            _check_dataset(eval_dataset)
        self._has_evals = bool(evals)
        self._opened = (eval_dataset, evals)
        """The given `eval_dataset`, and its evals: stores are opened once."""
        # Some trainers look into their datasets while they are created: they get a row without labels.
        super().__init__(
            model=model,
            args=_settle_evals(_settle(args, self._data), evals.values()),
            train_dataset=self._nothing(),
            eval_dataset=self._nothing() if evals else eval_dataset,
            **others,
        )
        self.train_dataset = train_dataset
        if evals:
            self.eval_dataset: object = eval_dataset
        self._lr_schedule = lr_schedule
        _check_model(self.model, self._data.arrays)
        # Such kernels know about documents only if the batch is one row.
        config = getattr(self.model, "config", None)
        self._data.flat = "flash" in str(getattr(config, "_attn_implementation", ""))
        self.add_callback(TokenmillState())

    _args_class: type[transformers.TrainingArguments] = transformers.TrainingArguments
    """Class of the arguments."""
    _arrays: tuple[str, ...] = ARRAYS
    """Arrays that the loader of a run delivers to it."""
    _train_data: type[TrainData] = TrainData

    def _columns(self, args: TrainingArguments) -> tuple[str, ...]:  # noqa: ARG002 - as those of pairs have it
        """Return the fields of records that it needs in addition to the arrays."""
        return ()

    @staticmethod
    def _nothing() -> datasets.Dataset:
        """Return a dataset of one row without labels."""
        return datasets.Dataset.from_dict({"input_ids": [[0, 0]], "labels": [[0, 0]]})

    def evaluate(
        self,
        eval_dataset: object = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Evaluate on evals of a run or on stores: the mean loss over all labels, for any batch size.

        For any other dataset, the Trainer evaluates as usual.
        """
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        given, evals = self._opened
        if data is not given:
            evals = find_evals(data, self.train_dataset, where="eval_dataset", beside="train_dataset")
        if not evals:
            _check_dataset(data)
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)  # type: ignore[no-any-return]
        was_training = self.model.training
        self.model.train(False)
        metrics: dict[str, float] = {}
        for name, item in evals.items():
            metrics |= self._evaluate_on(item, f"{metric_key_prefix}_{name}" if name else metric_key_prefix)
        self.log(metrics)
        self.model.train(was_training)
        self.control: TrainerControl = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def _evaluate_on(self, item: Eval, prefix: str) -> dict[str, float]:
        """Return the mean loss over everything that an eval counts, over all ranks."""
        args, began = self.args, time.perf_counter()
        loader = item.loader(
            rank=args.process_index,
            world_size=args.world_size,
            micro_batch=args.eval_batch_size,
            arrays=self._arrays,
            columns=self._columns(args),
        )
        total = torch.zeros(2, dtype=torch.float64, device=args.device)
        for batch in loader:
            tensors, count = self._counted_rows(to_torch(batch))
            # The rows that fill the last batch have no labels. With sharded parameters, all ranks must run the
            # model on them even so, because each waits for the others.
            if count or (args.world_size > 1 and len(next(iter(tensors.values())))):
                with torch.no_grad(), self.compute_loss_context_manager():
                    loss = float(self._eval_loss(tensors))
                if count:  # otherwise it is not a number
                    total += torch.tensor([loss * count, count], dtype=torch.float64, device=args.device)
        summed, count = self.accelerator.reduce(total, reduction="sum").tolist()
        seconds = time.perf_counter() - began
        return {
            f"{prefix}_loss": summed / max(count, 1),
            f"{prefix}_{self._counts}": int(count),
            f"{prefix}_runtime": round(seconds, 4),
        }

    _counts = "labels"
    """Unit over which a loss is averaged."""

    def _check_evals(self, args: TrainingArguments) -> None:
        """Reject arguments with which it cannot evaluate on evals."""

    def _counted_rows(self, tensors: Tensors) -> tuple[Tensors, int]:
        """Return the rows of a batch that are not padding, and the number of units for the mean loss."""
        return tensors, int((tensors["labels"] != IGNORE).sum())

    def _eval_loss(self, tensors: Tensors) -> torch.Tensor:
        """Return the same loss as in training, averaged over the labels of the batch."""
        inputs = self._prepare_inputs(to_transformers(tensors, flat=self._data.flat))
        loss: torch.Tensor = self.model(**inputs, use_cache=False).loss
        return loss

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:  # noqa: ANN401 - theirs
        """Create the learning rate scheduler: the one that follows tokens, if there is one."""
        if self._lr_schedule is None:
            return super().create_scheduler(num_training_steps, optimizer)
        self.lr_scheduler: Any = lr_scheduler(optimizer or self.optimizer, self._lr_schedule)
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def get_train_dataloader(self) -> TrainData:
        """Return the batches of this rank, which accelerate must not shard again."""
        return self._data


def _check_dataset(given: object) -> None:
    """Reject data that neither tokenmill nor a Trainer can evaluate on."""
    for item in given.values() if isinstance(given, Mapping) else (given,):
        is_dataset = isinstance(item, torch.utils.data.IterableDataset) or hasattr(item, "__getitem__")
        if (item is not None and not is_dataset) or isinstance(item, bytes):
            raise ConfigError(
                f"eval_dataset: expected an eval of a run, a store, the path of one or a dataset, got {item!r}; "
                "pass run.evals[...], dict(run.evals), or a datasets.Dataset"
            )


def _settle_evals(args: TrainingArguments, evals: Iterable[Eval]) -> TrainingArguments:
    """Return the arguments, with the steps of evaluation from the evals if the arguments do not set them."""
    every = {item.every for item in evals if item.every is not None}
    if len(every) == 1 and args.eval_strategy == "no":
        args.eval_strategy, args.eval_steps, args.do_eval = IntervalStrategy.STEPS, every.pop(), True
    return args


def _of_length(run: Run, args: TrainingArguments) -> Run:
    """Return the run with a length: its own, or that of the arguments; reject two that differ."""
    if run.config.run.steps is None:
        return (
            run.lasting(steps=args.max_steps) if args.max_steps > 0 else run.lasting(epochs=args.num_train_epochs)
        )
    if run.epochs is None:
        _refuse_epochs(args, f"a run of {run.config.run.steps} steps")
    elif args.num_train_epochs != run.epochs.epochs:
        _refuse_epochs(args, f"a run of {run.epochs.epochs:g} epochs")
    return run


def _refuse_epochs(args: TrainingArguments, got: str) -> None:
    """Reject a number of epochs that would have no effect; the default of the arguments is accepted."""
    default = next(item.default for item in fields(args) if item.name == "num_train_epochs")
    if args.num_train_epochs != default:
        raise ConfigError(
            f"args: num_train_epochs must be left out where the run says its length, got {args.num_train_epochs:g} "
            f"and {got}; leave out one of the two"
        )


def _loader_of(
    data: Run | Loader, args: TrainingArguments, arrays: tuple[str, ...], columns: tuple[str, ...]
) -> Loader:
    """Return the loader of this rank; reject one of another rank, which would train on rows twice."""
    parallel = getattr(args, "parallelism_config", None) is not None
    if isinstance(data, Run):
        if parallel:
            raise ConfigError(
                "train_dataset: must be a loader where args.parallelism_config is set, got a run; pass "
                "run.loader(rank=..., world_size=...) of the data-parallel group"
            )
        _check_kinds("train_dataset", data.stores, arrays)
        return data.loader(
            rank=args.process_index,
            world_size=args.world_size,
            micro_batch=args.train_batch_size,
            arrays=arrays,
            columns=columns,
        )
    if not isinstance(data, Loader):
        raise ConfigError(
            f"train_dataset: must be a Run or a loader of one, got {data!r}; open a config with Run.from_toml"
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


def _check_kinds(where: str, stores: Mapping[str, Store], arrays: tuple[str, ...]) -> None:
    """Reject stores of another training type than that of the arrays."""
    kinds = ("dpo",) if "chosen" in arrays else ("seq", "sft")
    for name, store in stores.items():
        if store.manifest.kind not in kinds:
            raise ConfigError(
                f"{where}: stores must be of kind {' or '.join(kinds)} for this Trainer, got {name!r} of "
                f"{store.manifest.kind}; prepare it with another recipe=..., or take the Trainer for such data"
            )


def _settle(args: TrainingArguments, data: TrainData) -> TrainingArguments:
    """Return a copy of the arguments with the values of the run; reject arguments that contradict it."""
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
    args.ignore_data_skip = True  # the loader moves to its position itself, so nothing has to be skipped
    return args


def _batches_per_step(loader: Loader) -> int:
    """Return the number of micro-batches per step; a Trainer takes the same number in all steps."""
    sizes = {loader.part.batches(stage): stage.spec for stage in loader.plan.trained_stages}
    if len(sizes) > 1:
        stages = " and ".join(f"{spec.global_batch_size} in stage {spec.name!r}" for spec in sizes.values())
        raise ConfigError(
            f"run: global_batch_size must be one for all stages, as a Trainer takes as many micro-batches in every "
            f"step, got {stages}; use one, or a run and a Trainer for each stage"
        )
    return next(iter(sizes))


def _check_model(model: PreTrainedModel, arrays: tuple[str, ...]) -> None:
    """Reject a model that would not know where documents start, or which tokens are labels."""
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
    if (
        "labels" in arrays
        and "shift_labels" not in taken
        and not any(p.kind is p.VAR_KEYWORD for p in taken.values())
    ):
        raise ConfigError(
            f"model: must take shift_labels, the labels of the next token, got {name}; use one whose forward hands "
            "its keyword arguments on to the loss"
        )
