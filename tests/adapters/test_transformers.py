"""A real Trainer on tiny models: the same batches and losses, straight and resumed, on any ranks."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
import torch
import transformers
from tests.adapters.ranks import call_ranks
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

import tokenmill.adapters.transformers as adapter
from tokenmill import Run
from tokenmill.adapters.torch import lr_scheduler, to_torch
from tokenmill.adapters.transformers import LoaderTrainer, TrainData, to_transformers
from tokenmill.errors import ConfigError, ResumeError, StoreMissingError
from tokenmill.live import LiveLoader, LiveOptions, open_live
from tokenmill.loader import LoaderOptions

# What transformers and accelerate say of themselves on a machine without an accelerator.
pytestmark = [pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")]

STEPS, BATCH, SEQ_LEN, VOCAB = 6, 4, 32, 60


@pytest.fixture
def make_run(run_over_web):
    """Make a run over a store of short documents, several in a row; `more` is added to its config."""

    def make(name="run", more="", **said):
        numbers = {"steps": STEPS, "batch": BATCH, "seq_len": SEQ_LEN, **said}
        return run_over_web(name, more, vocab_size=VOCAB, **numbers)

    return make


def tiny_model(**options):
    """Make the same small model every time; with dropout, so that a lost generator state shows."""
    torch.manual_seed(0)
    values = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    values |= {"num_attention_heads": 2, "num_key_value_heads": 2, "attention_dropout": 0.1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(values | options)))


def arguments(folder, **options):
    values = {"per_device_train_batch_size": 2, "save_steps": 1, "logging_steps": 1, "learning_rate": 0.01}
    values |= {"report_to": "none", "use_cpu": True, "disable_tqdm": True}
    return transformers.TrainingArguments(output_dir=str(folder), **(values | options))


class Recorder(LoaderTrainer):
    """Keeps what every training step was given and gave."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.seen = []

    def training_step(self, model, inputs, num_items_in_batch=None):
        batch = {name: tensor.numpy().tobytes() for name, tensor in inputs.items()}
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.seen.append((batch, int(num_items_in_batch), loss.item()))
        return loss


def trained(folder, data, *, resume=None, model=None, **options):
    trainer = Recorder(model=model or tiny_model(), args=arguments(folder, **options), train_dataset=data)
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return trainer


def weights(trainer):
    return {name: tensor.tolist() for name, tensor in trainer.model.state_dict().items()}


def losses(trainer):
    return [
        (entry["step"], entry["epoch"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry
    ]


def test_the_batches_are_those_of_the_run_in_order(make_run, tmp_path):
    run = make_run()
    trainer = trained(tmp_path / "out", run, save_strategy="no")
    expected = [to_transformers(to_torch(batch)) for batch in run.loader(micro_batch=2)]
    assert [seen for seen, _, _ in trainer.seen] == [
        {name: tensor.numpy().tobytes() for name, tensor in batch.items()} for batch in expected
    ]
    assert (trainer.state.global_step, trainer.args.gradient_accumulation_steps) == (STEPS, 2)
    whole = run.loader(micro_batch=BATCH, arrays=["labels"])
    counts = [int((whole[step]["labels"] >= 0).sum()) for step in range(STEPS)]
    assert [number for _, number, _ in trainer.seen] == [count for count in counts for _ in range(2)]


def test_every_checkpoint_resumes_with_the_same_batches_losses_and_weights(make_run, tmp_path, monkeypatch):
    """[R2.a] Nothing is skipped through: as many batches are made as are trained on."""
    run = make_run()
    straight = trained(tmp_path / "out", run)
    made = []
    monkeypatch.setattr(
        adapter, "to_transformers", lambda tensors, flat: made.append(1) or to_transformers(tensors, flat=flat)
    )
    for step in (1, 4):
        made.clear()
        resumed = trained(tmp_path / f"from{step}", run, resume=tmp_path / "out" / f"checkpoint-{step}")
        assert resumed.seen == straight.seen[2 * step :]
        assert len(made) == len(resumed.seen) == 2 * (STEPS - step)
        assert weights(resumed) == weights(straight)
        assert losses(resumed) == losses(straight)


def test_a_checkpoint_of_a_resumed_run_resumes_as_well(make_run, tmp_path):
    run = make_run()
    straight = trained(tmp_path / "out", run, save_steps=2)
    trained(tmp_path / "second", run, resume=tmp_path / "out" / "checkpoint-2", save_steps=2)
    third = trained(
        tmp_path / "third",
        run,
        resume=tmp_path / "second" / "checkpoint-4",
        restore_callback_states_from_checkpoint=True,
    )
    assert third.seen == straight.seen[8:]
    kept = json.loads((tmp_path / "third" / "checkpoint-6" / "trainer_state.json").read_text())
    state = kept["stateful_callbacks"]["TokenmillState"]["attributes"]["data"]
    assert state["step"] == STEPS
    assert len(json.dumps(state)) <= 200


def test_a_second_training_starts_from_the_start_again(make_run, tmp_path):
    trainer = trained(tmp_path / "out", make_run(), save_strategy="no")
    trainer.train()
    batches = [batch for batch, _, _ in trainer.seen]
    assert len(batches) == 4 * STEPS
    assert batches[: 2 * STEPS] == batches[2 * STEPS :]


def test_a_run_may_stop_early_and_be_prolonged(make_run, tmp_path):
    straight = trained(tmp_path / "all", make_run(), lr_scheduler_type="constant", save_steps=STEPS)
    short = trained(tmp_path / "short", make_run(), lr_scheduler_type="constant", max_steps=2, save_strategy="no")
    assert short.seen == straight.seen[:4]
    longer = make_run("longer", steps=STEPS + 2)
    rest = trained(
        tmp_path / "rest", longer, lr_scheduler_type="constant", resume=tmp_path / "all" / "checkpoint-6"
    )
    assert [batch["input_ids"] for batch, _, _ in rest.seen] == [
        longer.loader(micro_batch=2)[step]["input_ids"][half : half + 2].tobytes()
        for step in (6, 7)
        for half in (0, 2)
    ]


def test_a_loader_that_was_moved_is_gone_on_with(make_run, tmp_path):
    run = make_run()
    loader = run.loader(micro_batch=2)
    loader.seek(4)
    trainer = trained(tmp_path / "out", loader, save_strategy="no")
    assert trainer.state.global_step == 2
    assert [batch["input_ids"] for batch, _, _ in trainer.seen] == [
        run.loader(micro_batch=2)[step]["input_ids"][half : half + 2].tobytes()
        for step in (4, 5)
        for half in (0, 2)
    ]


def test_skipped_steps_are_no_steps_of_the_trainer(make_run, tmp_path):
    run = make_run(more='\n[[skip]]\nsteps = "2:4"\nreason = "a spike"\n')
    straight = trained(tmp_path / "out", run, save_steps=2)
    assert straight.state.global_step == STEPS - 2
    resumed = trained(tmp_path / "again", run, resume=tmp_path / "out" / "checkpoint-2")
    assert resumed.seen == straight.seen[4:]


def test_live_text_resumes_as_well(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "document {i} of the mill"}}\n' for i in range(300)))

    def loader():
        source = open_live(tmp_path / "a.jsonl", tokenizer="bytes", options=LiveOptions(seq_len=SEQ_LEN))
        return LiveLoader(source, steps=4, global_batch_size=BATCH, micro_batch=2, options=LoaderOptions(threads=0))

    straight = trained(tmp_path / "out", loader(), model=tiny_model(vocab_size=260), save_steps=3)
    resumed = trained(
        tmp_path / "again", loader(), resume=tmp_path / "out" / "checkpoint-3", model=tiny_model(vocab_size=260)
    )
    assert len(straight.seen) == 8
    assert resumed.seen == straight.seen[6:]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_loss_is_that_of_the_documents_one_by_one(make_run, tmp_path, attention):
    """Labels are used as they are, and no document sees another: not one label is lost or shifted twice."""
    run = make_run()
    model = tiny_model(attention_dropout=0.0, attn_implementation=attention)
    total, count = 0.0, 0
    batch = run.loader(micro_batch=BATCH)[0]
    for ids, labels, documents in zip(batch["input_ids"], batch["labels"], batch["doc_ids"], strict=True):
        edges = [0, *(np.flatnonzero(np.diff(documents)) + 1).tolist(), documents.size]
        for begin, end in pairwise(edges):
            logits = model(torch.from_numpy(ids[None, begin:end])).logits[0]
            targets = torch.from_numpy(labels[begin:end])
            total += torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum").item()
            count += int((targets >= 0).sum())
    trainer = trained(tmp_path / "out", run, model=model, max_steps=1, save_strategy="no")
    assert trainer.seen[0][1] == count
    assert sum(loss for _, _, loss in trainer.seen) == pytest.approx(total / count, rel=1e-5)


def test_rows_end_to_end_tell_flash_attention_the_same_documents(make_run, tmp_path):
    run = make_run()
    batch = run.loader(micro_batch=BATCH, arrays=["input_ids", "labels", "position_ids", "cu_seqlens"])[1]
    flat = to_transformers(to_torch(batch), flat=True)
    (edges, _), _ = prepare_fa_kwargs_from_position_ids(flat["position_ids"])
    assert edges.tolist() == batch["cu_seqlens"].tolist()
    model = tiny_model(attention_dropout=0.0)
    usual = model(**to_transformers(to_torch(batch)), use_cache=False).loss.item()
    assert model(**flat, use_cache=False).loss.item() == pytest.approx(usual, rel=1e-6)
    model.config._attn_implementation_internal = "flash_attention_2"
    for kind, shape in ((model, (1, 2 * SEQ_LEN)), (tiny_model(), (2, SEQ_LEN))):
        trainer = LoaderTrainer(model=kind, args=arguments(tmp_path / "out"), train_dataset=run)
        assert {tuple(t.shape) for t in next(iter(trainer.get_train_dataloader())).values()} == {shape}


def test_the_arguments_of_the_caller_are_left_as_they_are(make_run, tmp_path):
    args = arguments(tmp_path / "out")
    trainer = LoaderTrainer(model=tiny_model(), args=args, train_dataset=make_run())
    assert (args.max_steps, args.gradient_accumulation_steps, args.ignore_data_skip) == (-1, 1, False)
    told = trainer.args
    assert (told.max_steps, told.gradient_accumulation_steps, told.ignore_data_skip) == (STEPS, 2, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_accumulation_steps": 4}, r"gradient_accumulation_steps must be 2.*got 4; leave it out"),
        ({"max_steps": STEPS + 1}, rf"at most the {STEPS} steps.*got {STEPS + 1}; raise run.steps"),
        ({"label_smoothing_factor": 0.1}, r"label_smoothing_factor must be left out, got 0.1"),
        ({"use_cache": True}, r"config.use_cache must be False.*got True"),
        ({"auto_find_batch_size": True}, r"auto_find_batch_size must be left out, got True"),
        ({"per_device_train_batch_size": 3}, r"global_batch_size must be divisible by world_size \* micro_batch"),
    ],
)
def test_arguments_that_contradict_the_run_are_refused(make_run, tmp_path, options, message):
    """[A1.a]"""
    with pytest.raises(ConfigError, match=message):
        LoaderTrainer(model=tiny_model(), args=arguments(tmp_path, **options), train_dataset=make_run())


def test_fewer_steps_than_the_run_has_stop_the_training_early(make_run, tmp_path):
    run = make_run()
    short = trained(tmp_path / "short", run, max_steps=2, save_strategy="no")
    whole = trained(tmp_path / "whole", run, save_strategy="no")
    assert [batch for batch, _, _ in short.seen] == [batch for batch, _, _ in whole.seen[:4]]


NO_EVAL = r"eval_dataset: expected an eval of a run, a store, the path of one or a dataset, got "


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"eval_dataset": 5}, NO_EVAL + r"5; pass run.evals\[...\]"),
        ({"eval_dataset": {"a": 1.5}}, NO_EVAL + r"1.5"),
        ({"eval_dataset": len}, NO_EVAL + r"<built-in function len>"),
        ({"eval_dataset": b"web"}, NO_EVAL + r"b'web'"),
        ({"eval_dataset": {1, 2}}, NO_EVAL + r"\{1, 2\}"),
        ({"eval_dataset": ["web", "books"]}, r"several evals must have names, got a list; pass a dict"),
        ({"args": {"output_dir": "out"}}, r"args: expected TrainingArguments, got dict; pass one with output_dir"),
        ({"train_dataset": "run.toml"}, r"must be a Run or a loader of one, got 'run.toml'"),
        (
            {"lr_schedule": "cosine"},
            r"lr_schedule: expected a schedule of a run, got 'cosine'; pass run.lr_schedule",
        ),
        ({"model": 5}, r"model: expected a model, got 5"),
    ],
)
def test_a_wrong_type_is_named_when_the_trainer_is_made(make_run, tmp_path, wrong, message):
    given = {"model": tiny_model(), "args": arguments(tmp_path), "train_dataset": make_run()} | wrong
    with pytest.raises(ConfigError, match=message):
        LoaderTrainer(**given)


def test_a_wrong_type_is_named_when_a_trainer_evaluates(make_run, tmp_path):
    run = make_run()
    trainer = LoaderTrainer(model=tiny_model(), args=arguments(tmp_path), train_dataset=run)
    with pytest.raises(ConfigError, match=NO_EVAL + "5"):
        trainer.evaluate(5)
    with pytest.raises(ConfigError, match=r"eval_dataset: must be an eval of a run or a store, got a loader; pass"):
        trainer.evaluate(run.loader(micro_batch=2))
    with pytest.raises(ConfigError, match=r"lr_schedule: expected a schedule of a run, got 5"):
        lr_scheduler(trainer.create_optimizer(), 5)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"rank": 1, "world_size": 2, "micro_batch": 2}, r"must be that of rank 0 of 1, got rank 1 of 2"),
        ({"micro_batch": 4}, r"micro_batch must be that of the arguments, 2, got 4; say per_device"),
    ],
)
def test_a_loader_of_another_rank_or_size_is_refused(make_run, tmp_path, part, message):
    """[A1.a]"""
    with pytest.raises(ConfigError, match=message):
        LoaderTrainer(model=tiny_model(), args=arguments(tmp_path), train_dataset=make_run().loader(**part))


def test_a_run_whose_batch_grows_is_refused(make_run):
    stages = (
        '[[stages]]\nname = "a"\nstart_step = 0\n[[stages]]\nname = "b"\nstart_step = 3\nglobal_batch_size = 8\n'
    )
    with pytest.raises(ConfigError, match=r"one for all stages.*got 4 in stage 'a' and 8 in stage 'b'"):
        TrainData(make_run(more=stages).loader(micro_batch=2))


def test_a_loader_in_the_middle_of_a_step_is_refused(make_run):
    loader = make_run().loader(micro_batch=2)
    next(iter(loader))
    with pytest.raises(ConfigError, match=r"between two steps, got the middle of step 0"):
        TrainData(loader)


def test_a_model_that_does_not_know_documents_is_refused_unless_they_may_see_one_another(make_run, tmp_path):
    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=VOCAB, hidden_size=8, num_hidden_layers=1, state_size=4)
    model = transformers.MambaForCausalLM(config)
    with pytest.raises(ConfigError, match=r"must take position_ids.*got MambaForCausalLM; if they may"):
        LoaderTrainer(model=model, args=arguments(tmp_path), train_dataset=make_run())
    loader = make_run().loader(micro_batch=2, arrays=["input_ids", "labels"])
    trainer = LoaderTrainer(model=model, args=arguments(tmp_path), train_dataset=loader)
    assert list(next(iter(trainer.get_train_dataloader()))) == ["input_ids", "labels", "shift_labels"]


def test_checkpoints_of_another_plan_or_of_no_plan_are_refused(make_run, tmp_path):
    run = make_run()
    trained(tmp_path / "out", run, max_steps=2, save_steps=2)
    checkpoint = tmp_path / "out" / "checkpoint-2"
    with pytest.raises(ResumeError, match=r"stages\[0\].seed 3 -> 4"):
        trained(tmp_path / "other", make_run("other", seed=4), resume=checkpoint)
    file = checkpoint / "trainer_state.json"
    kept = json.loads(file.read_text())
    del kept["stateful_callbacks"]["TokenmillState"]
    file.write_text(json.dumps(kept))
    with pytest.raises(ResumeError, match=r"where the data stood at step 2, got nothing; resume from one of"):
        trained(tmp_path / "again", run, resume=checkpoint)


def test_arguments_must_be_given(make_run):
    with pytest.raises(ConfigError, match="args: expected TrainingArguments, got None"):
        LoaderTrainer(model=tiny_model(), train_dataset=make_run())


def trained_by_rank(folder):
    """Train as one rank, from the start and from checkpoints; return what each training saw."""
    run, out = Run.from_toml(folder / "run.toml"), {}

    def train(name, data, resume=None):
        args = arguments(folder / name, per_device_train_batch_size=1)
        data = data(args) if callable(data) else data
        trainer = Recorder(model=tiny_model(attention_dropout=0.0, vocab_size=260), args=args, train_dataset=data)
        trainer.train(resume_from_checkpoint=resume and str(folder / resume))
        seen = [[list(batch["input_ids"]), number] for batch, number, _ in trainer.seen]
        out[name] = {"seen": seen, "losses": losses(trainer), "rank": args.process_index, "size": args.world_size}

    def live(args):
        source = open_live(folder / "a.jsonl", tokenizer="bytes", options=LiveOptions(seq_len=SEQ_LEN))
        place = {"rank": args.process_index, "world_size": args.world_size}
        return LiveLoader(
            source, steps=3, global_batch_size=BATCH, micro_batch=1, options=LoaderOptions(threads=0), **place
        )

    train("two", run)
    train("two-again", run, resume="two/checkpoint-3")
    train("two-from-one", run, resume="one/checkpoint-3")
    train("live", live)
    train("live-again", live, resume="live/checkpoint-2")
    torch.distributed.destroy_process_group()
    return out


@pytest.mark.deep
def test_two_ranks_train_on_the_batches_of_one_and_resume_one_another(make_run, tmp_path):
    """Accelerate neither shards nor dispatches our batches again, whatever world size a checkpoint was made at."""
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "document {i} of the mill"}}\n' for i in range(300)))
    run = make_run()

    def alone(name, resume=None):
        model = tiny_model(attention_dropout=0.0, vocab_size=260)
        return trained(tmp_path / name, run, model=model, resume=resume, per_device_train_batch_size=1)

    one = alone("one")
    ranks = call_ranks(2, trained_by_rank, tmp_path, ACCELERATE_USE_CPU="true")
    assert [(rank["two"]["rank"], rank["two"]["size"]) for rank in ranks] == [(0, 2), (1, 2)]
    expected = [list(batch["input_ids"]) for batch, _, _ in one.seen]
    for name, first in (("two", 0), ("two-again", 3), ("two-from-one", 3)):
        together = [
            ids
            for step in range(STEPS - first)
            for rank in ranks
            for ids, _ in rank[name]["seen"][2 * step : 2 * step + 2]
        ]
        assert together == expected[BATCH * first :]
        for rank in ranks:
            assert [number for _, number in rank[name]["seen"]] == [
                number for _, number, _ in one.seen[BATCH * first :: 2]
            ]
            assert [loss for _, _, loss in rank[name]["losses"]] == pytest.approx(
                [x for *_, x in losses(one)], rel=1e-4
            )
    assert [rank["two-again"]["losses"] for rank in ranks] == [rank["two"]["losses"] for rank in ranks]
    for rank in ranks:
        assert len(rank["live"]["seen"]) == 6
        assert rank["live-again"]["seen"] == rank["live"]["seen"][4:]
    back = alone("back", resume=tmp_path / "two" / "checkpoint-4")
    assert [list(batch["input_ids"]) for batch, _, _ in back.seen] == expected[BATCH * 4 :]


# How long a training is.


def test_epochs_of_the_arguments_are_those_of_a_run_that_says_no_length(make_run, tmp_path):
    run = make_run()
    trainer = trained(tmp_path / "out", run.lasting(), num_train_epochs=2, save_strategy="no")
    counted = run.lasting(epochs=2)
    assert trainer.state.global_step == counted.plan().steps
    assert [seen for seen, _, _ in trainer.seen] == [
        {name: tensor.numpy().tobytes() for name, tensor in to_transformers(to_torch(batch)).items()}
        for batch in counted.loader(micro_batch=2)
    ]
    assert trainer.state.epoch == 2
    assert trained(tmp_path / "out", run.lasting(), max_steps=3, save_strategy="no").state.global_step == 3


def test_epochs_of_the_arguments_that_would_not_be_gone_by_are_refused(make_run, tmp_path):
    run = make_run()
    for data, got in (
        (run, "a run of 6 steps"),
        (run.lasting(epochs=3), "a run of 3 epochs"),
        (run.loader(micro_batch=2), "a loader, which has its length"),
    ):
        with pytest.raises(
            ConfigError, match=rf"num_train_epochs must be left out .*, got 2 and {got}; leave out one"
        ):
            Recorder(model=tiny_model(), args=arguments(tmp_path, num_train_epochs=2), train_dataset=data)
    Recorder(model=tiny_model(), args=arguments(tmp_path, num_train_epochs=2), train_dataset=run.lasting(epochs=2))


# Evaluation.


def loss_by_hand(model, run, name="val"):
    """Return the mean loss over all labels of an eval, document by document, each alone."""
    total, count = 0.0, 0
    model.eval()
    for batch in run.evals[name].loader():
        for ids, labels, documents in zip(batch["input_ids"], batch["labels"], batch["doc_ids"], strict=True):
            for number in range(documents.max() + 1):
                own = documents == number
                with torch.no_grad():
                    logits = model(torch.from_numpy(ids[own])[None]).logits[0]
                wanted = torch.from_numpy(labels[own])
                total += torch.nn.functional.cross_entropy(
                    logits, wanted, ignore_index=-100, reduction="sum"
                ).item()
                count += int((wanted >= 0).sum())
    return total / count, count


VAL = """
[[evals]]
name = "val"
source = "web"
documents = "0:13"

[[evals]]
name = "more"
source = "web"
documents = "20:31"
"""


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_the_loss_of_an_eval_is_that_of_a_hand_computation_for_any_batch(make_run, tmp_path, batch):
    run, model = make_run(more=VAL), tiny_model(attention_dropout=0.0)
    args = arguments(tmp_path, per_device_eval_batch_size=batch)
    trainer = Recorder(model=model, args=args, train_dataset=run, eval_dataset=run.evals["val"])
    metrics = trainer.evaluate()
    wanted, labels = loss_by_hand(tiny_model(attention_dropout=0.0), run)
    assert metrics["eval_labels"] == labels
    assert metrics["eval_loss"] == pytest.approx(wanted, abs=1e-5)
    both = trainer.evaluate(dict(run.evals))
    assert both["eval_val_loss"] == pytest.approx(wanted, abs=1e-5)
    more, _ = loss_by_hand(tiny_model(attention_dropout=0.0), run, "more")
    assert both["eval_more_loss"] == pytest.approx(more, abs=1e-5)


def evaluated_by_rank(folder):
    """Evaluate as one rank; return how often it went through the model, and what the trainer says."""
    run, model, passes = Run.from_toml(folder / "run.toml"), tiny_model(attention_dropout=0.0), []
    args = arguments(folder / "out", per_device_train_batch_size=1, per_device_eval_batch_size=1)
    trainer = Recorder(model=model, args=args, train_dataset=run, eval_dataset=run.evals["more"])
    model.register_forward_hook(lambda *_: passes.append(1))
    metrics = trainer.evaluate()
    torch.distributed.destroy_process_group()
    return len(passes), metrics


def test_all_ranks_go_through_the_model_as_often_in_an_eval_that_does_not_divide(make_run, tmp_path):
    """Where parameters are sharded, a rank that has no row left must not let the others wait."""
    run = make_run(more=VAL + "rows = 5\n")
    num_rows = len(list(run.evals["more"].loader()))
    assert num_rows % 2, "the last row has no partner"
    (first, metrics), (second, others) = call_ranks(2, evaluated_by_rank, tmp_path, ACCELERATE_USE_CPU="true")
    assert first == second == (num_rows + 1) // 2
    wanted, labels = loss_by_hand(tiny_model(attention_dropout=0.0), run, "more")
    assert metrics["eval_loss"] == others["eval_loss"] == pytest.approx(wanted, abs=1e-5)
    assert metrics["eval_labels"] == others["eval_labels"] == labels


def test_evaluation_amid_training_changes_no_batch_of_it_and_is_logged(make_run, tmp_path):
    run = make_run(more=VAL)
    straight = trained(tmp_path / "a", run, save_strategy="no")
    trainer = Recorder(
        model=tiny_model(),
        args=arguments(tmp_path / "b", save_strategy="no", eval_strategy="steps", eval_steps=2),
        train_dataset=run,
        eval_dataset=run.evals["val"],
    )
    trainer.train()
    assert [seen for seen, _, _ in trainer.seen] == [seen for seen, _, _ in straight.seen]
    logged = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(logged) == STEPS // 2


def test_a_store_is_evaluated_on_whole(make_run, tmp_path):
    run = make_run()
    store = run.stores["web"]
    trainer = Recorder(model=tiny_model(), args=arguments(tmp_path), train_dataset=run, eval_dataset=store)
    metrics = trainer.evaluate()
    assert (
        metrics["eval_labels"]
        == sum(
            store.document_offsets(0, store.num_documents)[1:] - store.document_offsets(0, store.num_documents)[:-1]
        )
        - store.num_documents
    )
    assert trainer.evaluate(str(store.path))["eval_loss"] == metrics["eval_loss"]
    with pytest.raises(ConfigError, match="a store must go with a run as train_dataset"):
        Recorder(
            model=tiny_model(),
            args=arguments(tmp_path),
            train_dataset=run.loader(micro_batch=2),
            eval_dataset=store,
        )


def test_an_eval_that_cannot_be_evaluated_on_is_refused_before_the_training(make_run, tmp_path):
    run = make_run(more='[[evals]]\nname = "val"\nstore = "web"\n')
    for data, error, message in (
        (tmp_path / "nope", StoreMissingError, "no store at this path: .*nope"),
        (run, ConfigError, "eval_dataset: must be an eval of a run or a store, got a run"),
        ([run.evals["val"]], ConfigError, "eval_dataset: several evals must have names, got a list"),
    ):
        with pytest.raises(error, match=message):
            LoaderTrainer(model=tiny_model(), args=arguments(tmp_path), train_dataset=run, eval_dataset=data)


def test_every_of_an_eval_says_when_unless_the_arguments_do(make_run, tmp_path):
    run = make_run(more='[[evals]]\nname = "held"\nsource = "web"\ndocuments = "0:12"\nevery = 2\n')
    trainer = LoaderTrainer(
        model=tiny_model(),
        args=arguments(tmp_path / "out", save_strategy="no"),
        train_dataset=run,
        eval_dataset=run.evals["held"],
    )
    trainer.train()
    assert [e["step"] for e in trainer.state.log_history if "eval_loss" in e] == [2, 4, 6]


def test_a_learning_rate_in_tokens_is_that_of_the_run_and_tokens_are_counted(make_run, tmp_path):
    run = make_run(more='[[skip]]\nsteps = "2:3"\n')
    schedule = run.lr_schedule(warmup_tokens=2 * BATCH * SEQ_LEN, final=0.5)
    trainer = LoaderTrainer(
        model=tiny_model(),
        args=arguments(tmp_path / "out", save_strategy="no"),
        train_dataset=run,
        lr_schedule=schedule,
    )
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert rates == pytest.approx([0.01 * schedule(step) for step in range(STEPS) if step != 2])
    assert trainer.state.num_input_tokens_seen == (STEPS - 1) * BATCH * SEQ_LEN
