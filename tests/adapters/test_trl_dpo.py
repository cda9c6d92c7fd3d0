"""TRL's DPOTrainer on our pairs has the losses that it has on its own data."""

from __future__ import annotations

import json

import datasets
import numpy as np
import pytest
import torch
import transformers
import trl
from accelerate.logging import MultiProcessAdapter
from tests.adapters.ranks import call_ranks

import tokenmill as tm
from tokenmill.adapters.torch import to_torch
from tokenmill.adapters.trl import DPOTrainer, to_preference
from tokenmill.demo import TOKENIZER_DIR
from tokenmill.errors import ConfigError

STEPS, BATCH, VOCAB = 6, 4, 4096
PAIRS = [
    {
        "prompt": f"How much is {n} and {n}?\n",
        "chosen": f"That makes {2 * n}.",
        "rejected": "I do not know" + ", really" * (n % 4),
        "ref_chosen_logps": -40.0 - n / 8,
        "ref_rejected_logps": -50.0 + n / 4,
    }
    for n in range(30)
]


class OwnData(trl.DPOTrainer):
    """TRL's own path, in the order of its dataset."""

    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def run_in(folder):
    tables = {"run": {"steps": STEPS, "global_batch_size": BATCH, "seq_len": 64}}
    return tm.Run.from_tables(tables | {"sources": [{"name": "pairs", "store": "pairs"}]}, folder=folder)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dpo")
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    options = tm.PrepareOptions(keep=("ref_chosen_logps", "ref_rejected_logps"), add_bos=False)
    tokenizer = str(TOKENIZER_DIR)
    tm.prepare(
        folder / "pairs.jsonl", out=folder / "pairs", tokenizer=tokenizer, recipe="dpo", workers=1, options=options
    )
    return run_in(folder)


def tokenizer():
    return transformers.PreTrainedTokenizerFast.from_pretrained(
        TOKENIZER_DIR, eos_token=tm.open_tokenizer(str(TOKENIZER_DIR)).decode([EOS_ID]), pad_token="<|pad|>"
    )


EOS_ID = tm.open_tokenizer(str(TOKENIZER_DIR)).identity.eos_id


def tiny_model(seed):
    torch.manual_seed(seed)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Qwen2Config(vocab_size=VOCAB, num_key_value_heads=2, **shape)
    return transformers.Qwen2ForCausalLM(config)


def trained(kind, data, folder, *, resume=None, **options):
    values = {"per_device_train_batch_size": 2, "logging_steps": 1, "learning_rate": 0.01, "save_steps": 3}
    values |= {"report_to": "none", "use_cpu": True, "disable_tqdm": True, "bf16": False}
    values |= {"gradient_checkpointing": False, **options}
    reference = {} if values.get("precompute_ref_log_probs") else {"ref_model": tiny_model(1)}
    trainer = kind(
        model=tiny_model(0),
        args=trl.DPOConfig(output_dir=str(folder), **values),
        train_dataset=data,
        processing_class=tokenizer(),
        **reference,
    )
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def own_dataset(run, *, reference=False):
    """Return the records in the order in which the run draws them, as TRL is given them."""
    order = [use.spans[0].document for step in range(STEPS) for use in run.plan().what(step)]
    names = ["prompt", "chosen", "rejected"] + (["ref_chosen_logps", "ref_rejected_logps"] if reference else [])
    return datasets.Dataset.from_list([{name: PAIRS[number][name] for name in names} for number in order])


def test_the_losses_are_those_of_trl_on_its_own_data(run, tmp_path):
    ours = trained(DPOTrainer, run, tmp_path / "ours", save_strategy="no")
    own = trained(
        OwnData,
        own_dataset(run),
        tmp_path / "own",
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        save_strategy="no",
    )
    assert len(ours) == STEPS
    assert len(set(ours)) == STEPS
    assert np.abs(np.array(ours) - np.array(own)).max() < 1e-5


def test_trl_is_given_no_pair_that_it_warns_of(run, tmp_path, caplog):
    # TRL warns, once, where the tokens of a prompt merge with those of an answer, as "a" and "b" do.
    MultiProcessAdapter.warning_once.cache_clear()
    args = trl.DPOConfig(output_dir=str(tmp_path), per_device_train_batch_size=2, use_cpu=True, bf16=False)
    options = {"ref_model": tiny_model(1), "processing_class": tokenizer()}
    with caplog.at_level("WARNING", logger="trl"):
        DPOTrainer(model=tiny_model(0), args=args, train_dataset=run, **options)
    assert [record.getMessage() for record in caplog.records if record.name.startswith("trl")] == []


def test_other_arguments_than_those_of_trl_are_named(run, tmp_path):
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(ConfigError, match=r"args: expected DPOConfig, got TrainingArguments"):
        DPOTrainer(model=tiny_model(0), args=args, train_dataset=run)


def test_what_a_reference_model_says_comes_from_the_store(run, tmp_path):
    class Own(OwnData):
        def _precompute_ref_logps(self, dataset, *_):
            return dataset  # has them already

    ours = trained(DPOTrainer, run, tmp_path / "ours", precompute_ref_log_probs=True, save_strategy="no")
    own = trained(
        Own,
        own_dataset(run, reference=True),
        tmp_path / "own",
        precompute_ref_log_probs=True,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        save_strategy="no",
    )
    assert np.abs(np.array(ours) - np.array(own)).max() < 1e-5
    assert ours != trained(DPOTrainer, run, tmp_path / "other", save_strategy="no")


def test_a_resumed_training_has_the_losses_of_one_that_never_stopped(run, tmp_path):
    straight = trained(DPOTrainer, run, tmp_path / "out")
    again = trained(DPOTrainer, run, tmp_path / "again", resume=tmp_path / "out" / "checkpoint-3")
    assert again == straight


def evaluated(kind, folder, *, precomputed=False, size=4, **data):
    """Return what a trainer says of its eval dataset."""
    values = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": size, "report_to": "none"}
    values |= {"use_cpu": True, "disable_tqdm": True, "bf16": False, "gradient_checkpointing": False}
    trainer = kind(
        model=tiny_model(0),
        args=trl.DPOConfig(output_dir=str(folder), precompute_ref_log_probs=precomputed, **values),
        processing_class=tokenizer(),
        **({} if precomputed else {"ref_model": tiny_model(1)}),
        **data,
    )
    return trainer.evaluate() | trainer.state.log_history[-1]


@pytest.mark.parametrize("precomputed", [False, True])
def test_an_eval_of_pairs_has_the_loss_of_trl_on_its_own_data(run, tmp_path, precomputed):
    class Own(trl.DPOTrainer):
        def _precompute_ref_logps(self, dataset, *_):
            return dataset  # has them already

    names = ["prompt", "chosen", "rejected"] + (["ref_chosen_logps", "ref_rejected_logps"] if precomputed else [])
    pairs = datasets.Dataset.from_list([{name: pair[name] for name in names} for pair in PAIRS])
    # TRL takes the mean of what it logs over batches: here there is one.
    given = {"precomputed": precomputed, "train_dataset": pairs, "eval_dataset": pairs}
    own = evaluated(Own, tmp_path, size=len(PAIRS), **given)
    data = {"precomputed": precomputed, "train_dataset": run, "eval_dataset": run.folder / "pairs"}
    found = evaluated(DPOTrainer, tmp_path, **data)
    assert found["eval_pairs"] == len(PAIRS)  # 30: the last batch of 4 has two
    assert abs(found["eval_loss"] - own["eval_loss"]) < 1e-5
    for name in ("rewards/accuracies", "rewards/chosen", "rewards/margins", "logps/rejected"):
        assert found[f"eval_{name}"] == pytest.approx(own[f"eval_{name}"], abs=1e-4)


def evaluated_by_rank(stores, out):
    return evaluated(DPOTrainer, out, size=7, train_dataset=run_in(stores), eval_dataset=stores / "pairs")


def test_an_eval_of_pairs_is_the_same_for_any_number_of_processes(run, tmp_path):
    """Of 30 pairs in batches of 7 on 2 ranks the last one is short on the one, and empty on the other."""
    alone = evaluated(DPOTrainer, tmp_path, train_dataset=run, eval_dataset=run.folder / "pairs")
    together, _ = call_ranks(2, evaluated_by_rank, run.folder, tmp_path, CUDA_VISIBLE_DEVICES="")
    assert together["eval_pairs"] == alone["eval_pairs"] == len(PAIRS)
    for name, value in alone.items():
        if name.startswith("eval_") and "token" not in name and "logits" not in name and name != "eval_runtime":
            assert together[name] == pytest.approx(value, abs=1e-5), name


@pytest.mark.parametrize("pad_to", ["row", "batch"])
def test_a_batch_has_the_chosen_sides_then_the_rejected_ones(run, pad_to):
    columns = ("ref_chosen_logps", "ref_rejected_logps")
    for batch in run.loader(micro_batch=4, pad_to=pad_to, columns=columns):
        pairs = to_preference(to_torch(batch))
        longest = max(batch["chosen_len"].max(), batch["rejected_len"].max())
        assert (
            pairs["input_ids"].shape
            == pairs["attention_mask"].shape
            == pairs["completion_mask"].shape
            == (8, longest)
        )
        for row, (side, number) in enumerate((side, n) for side in ("chosen", "rejected") for n in range(4)):
            length = batch[f"{side}_len"][number]
            assert pairs["input_ids"][row, :length].tolist() == batch[side][number, :length].tolist()
            assert pairs["attention_mask"][row].tolist() == [1] * length + [0] * (longest - length)
            mask = batch[f"{side}_mask"][number, :length].astype(int).tolist()
            assert pairs["completion_mask"][row].tolist() == mask + [0] * (longest - length)
        assert pairs["ref_chosen_logps"].dtype == torch.float32


def test_columns_are_those_of_the_records(run):
    numbers = [use.spans[0].document for use in run.plan().what(2)]
    batch = run.loader(columns=("ref_chosen_logps",), micro_batch=2)[2]
    assert batch["ref_chosen_logps"].tolist() == [PAIRS[number]["ref_chosen_logps"] for number in numbers]
    with pytest.raises(ConfigError, match=r"columns: .*pairs does not keep 'margin', only .*keep=\[.margin.\]"):
        run.loader(columns=("margin",))
    with pytest.raises(
        ConfigError, match=r"columns: expected a list of names, got 'margin'; say columns=\['margin'\]"
    ):
        run.loader(columns="margin")
    with pytest.raises(ConfigError, match=r"'chosen' is the name of an array of the batch; remove it"):
        run.loader(columns=("chosen",))
