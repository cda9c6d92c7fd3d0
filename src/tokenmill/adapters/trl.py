"""TRL trainers fed with the batches of a run: SFT on sequences, DPO on pairs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tokenmill.adapters import need

need("trl", extra="trl", adapter="tokenmill.adapters.trl", at_least="1.16")

import datasets
import torch
import trl
from accelerate.utils import gather_object  # type: ignore[import-untyped]

from tokenmill.adapters.torch import Tensors
from tokenmill.adapters.transformers import LoaderTrainer, TrainData
from tokenmill.errors import ConfigError

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from tokenmill.run.evals import Eval

PAIR_ARRAYS = ("chosen", "rejected", "chosen_mask", "rejected_mask", "chosen_len", "rejected_len")
REFERENCE = ("ref_chosen_logps", "ref_rejected_logps")
"""Fields of a pair with the log-probabilities of a reference model."""


def to_preference(tensors: Tensors) -> Tensors:
    """Return a batch of pairs for TRL's DPOTrainer: the chosen sides, then the rejected ones.

    All are padded to the longest one. `completion_mask` marks the tokens that the recipe trains on.
    """
    lengths = torch.cat([tensors["chosen_len"], tensors["rejected_len"]])
    longest = int(lengths.max())
    sides = [tensors[name][:, :longest] for name in ("chosen", "rejected")]
    masks = [tensors[name][:, :longest] for name in ("chosen_mask", "rejected_mask")]
    width = max(side.shape[1] for side in sides)  # a loader may have padded each side to its own longest row

    def wide(side: torch.Tensor, fill: int | bool) -> torch.Tensor:
        return torch.nn.functional.pad(side, (0, width - side.shape[1]), value=fill)

    ids = torch.cat([wide(side, 0) for side in sides])
    attention = torch.arange(width) < lengths[:, None]
    out = {
        "input_ids": ids,
        "attention_mask": attention.long(),
        "completion_mask": torch.cat([wide(mask, False) for mask in masks]).long(),
    }
    return out | {name: tensors[name].float() for name in REFERENCE if name in tensors}


class PairData(TrainData):
    """Batches of pairs for one rank."""

    def inputs(self, tensors: Tensors) -> Tensors:
        """Return a batch in the form that TRL's loss expects."""
        return to_preference(tensors)


class SFTTrainer(LoaderTrainer, trl.SFTTrainer):
    """TRL's SFTTrainer with a run or a loader as `train_dataset`."""


class DPOTrainer(LoaderTrainer, trl.DPOTrainer):
    """TRL's DPOTrainer with a run over stores of pairs, or a loader of one, as `train_dataset`.

    `eval_dataset` can be an eval of the run, or a store. Its loss is TRL's, averaged over all pairs.

    With `precompute_ref_log_probs=True`, the log-probabilities of the reference model come from the store, which
    must have the fields `ref_chosen_logps` and `ref_rejected_logps`. No reference model is needed then.
    """

    _args_class = trl.DPOConfig
    _arrays = PAIR_ARRAYS
    _train_data = PairData

    def _columns(self, args: TrainingArguments) -> tuple[str, ...]:
        return REFERENCE if getattr(args, "precompute_ref_log_probs", False) else ()

    @staticmethod
    def _nothing() -> datasets.Dataset:
        """Return one pair. Its prompt is empty, because TRL warns if tokens of a prompt merge with an answer."""
        return datasets.Dataset.from_dict({"prompt": [""], "chosen": ["a"], "rejected": ["b"]})

    def _precompute_ref_logps(self, dataset: Any, name: str, batch_size: int) -> Any:  # noqa: ANN401 - TRL's own
        """Return the data unchanged: stores have these fields. TRL computes them for another `eval_dataset`."""
        if name == "train" or self._has_evals:
            return dataset
        return super()._precompute_ref_logps(dataset, name, batch_size)

    _counts = "pairs"

    def _check_evals(self, args: TrainingArguments) -> None:
        if args.world_size > 1 and (args.fsdp or args.deepspeed):
            raise ConfigError(
                "eval_dataset: pairs of a store need the whole model on every rank, as some ranks have none at the "
                f"end, got {'fsdp' if args.fsdp else 'deepspeed'}; pass a datasets.Dataset, which TRL evaluates on"
            )

    def _evaluate_on(self, item: Eval, prefix: str) -> dict[str, float]:
        """Return the mean loss over all pairs. TRL's other metrics are averaged in the same way."""
        self._logged: list[tuple[str, float, int]] = []
        metrics = super()._evaluate_on(item, prefix)
        totals: dict[str, list[float]] = {}
        for name, value, count in gather_object(self._logged):
            total = totals.setdefault(name, [0.0, 0.0])
            total[0] += value * count
            total[1] += count
        self._metrics["eval"].clear()
        self._metrics["eval"].update({name: [total / count] for name, (total, count) in totals.items()})
        return metrics

    def _counted_rows(self, tensors: Tensors) -> tuple[Tensors, int]:
        is_pair = tensors["chosen_len"] > 0
        return {name: tensor[is_pair] for name, tensor in tensors.items()}, int(is_pair.sum())

    def _eval_loss(self, tensors: Tensors) -> torch.Tensor:
        self._metrics["eval"].clear()
        with _gathering_nothing(self.accelerator):
            loss: torch.Tensor = self.compute_loss(self.model, self._prepare_inputs(to_preference(tensors)))
        count = len(tensors["chosen_len"])
        self._logged += [(name, values[-1], count) for name, values in self._metrics["eval"].items() if values]
        return loss


@contextmanager
def _gathering_nothing(accelerator: Any) -> Iterator[None]:  # noqa: ANN401 - accelerate's, which is not typed
    """Store TRL's metrics on this rank. To gather them, all ranks would need the same number of pairs."""
    names = ("gather", "gather_for_metrics")
    for name in names:
        setattr(accelerator, name, lambda tensor, *_: tensor)
    try:
        yield
    finally:
        for name in names:
            delattr(accelerator, name)
