"""What the command line tells of a run can be asked for in Python, and is the same."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

import tokenmill as tm
from tokenmill.config.run import to_toml
from tokenmill.inspect.audit import audit
from tokenmill.inspect.stores import inspect_store
from tokenmill.plan.report import PlanReport, report
from tokenmill.run.run import Run
from tokenmill.store import StoreSpec, StoreWriter, open_store

TABLES = {
    "run": {"seed": 3, "steps": 30, "global_batch_size": 6, "seq_len": 16},
    "sources": [{"name": "web", "store": "web"}, {"name": "chat", "store": "chat"}],
    "stages": [
        {"name": "base", "start_step": 0, "weights": {"web": 0.8, "chat": 0.2}},
        {"name": "late", "start_step": 20, "weights": {"web": 0.5, "chat": 0.5}},
    ],
    "skip": [{"steps": "12:14", "reason": "loss spike"}],
    "quarantine": [{"source": "web", "from_step": 15, "documents": [3, 4], "reason": "spam"}],
}


def test_a_batch_size_that_the_run_does_not_come_to_is_told(make_store, tmp_path):
    make_store("web", [40] * 30)
    warnings = []
    for over in (6, 30):
        ramp = {"from": 2, "to": 6, "step": 2, "over_steps": over}
        tables = {
            "run": {"steps": 20, "global_batch_size": ramp, "seq_len": 16, "packing": "concat"},
            "sources": [{"name": "web", "store": "web"}],
        }
        warnings.append(Run.from_tables(tables, folder=tmp_path).report().warnings)
    assert warnings[0] == ()
    assert warnings[1] == (
        "global_batch_size: must come to 6, got 4 at the last step: that would begin with step 30 of 20; shorten "
        "over_steps or over_tokens, or lower to",
    )


@pytest.fixture
def run(tmp_path, make_store, tokenizer_identity):
    """Write a store of texts, one of chats with a mask, and the config of a run over both."""
    rng = np.random.default_rng(3)
    make_store("web", rng.integers(3, 60, 70).tolist(), seed=1)
    spec = StoreSpec(
        keys={"sequence": "<u2", "loss_mask": "|u1"}, tokenizer=tokenizer_identity(50_000), recipe={}, kind="sft"
    )
    with StoreWriter(tmp_path / "chat", spec) as writer:
        offsets = np.cumsum([0, *[8] * 40])
        mask = np.tile(np.repeat(np.array([0, 1], "u1"), 4), 40)
        mask[:8] = 0
        writer.append({"sequence": rng.integers(2, 300, 320).astype("<u2"), "loss_mask": mask}, offsets)
        writer.commit()
    (tmp_path / "run.toml").write_text(to_toml(TABLES), encoding="utf-8")
    return Run.from_toml(tmp_path / "run.toml")


def test_what_is_said_in_tokens_is_told_in_steps_and_tokens(run, tmp_path):
    """A row has 16 tokens: 32 steps of 32 tokens, 16 of 64, then steps of 96."""
    tables = TABLES | {
        "run": {
            "tokens": "8K",
            "global_batch_size": {"from": 2, "to": 6, "step": 2, "over_tokens": "2K"},
            "seq_len": 16,
        },
        "stages": [
            {"name": "base", "start_step": 0, "weights": {"web": 1}},
            {"name": "late", "start_tokens": "4K", "ramp": "linear", "ramp_tokens": 960, "weights": {"chat": 1}},
        ],
        "skip": [{"tokens": "3K:3.3K"}],
        "quarantine": [{"source": "web", "from_tokens": "2.5K", "documents": [3]}],
    }
    changed = Run.from_tables(tables, folder=tmp_path)
    found = [(c.stage, c.step, c.tokens, c.what) for c in changed.report().changes]
    assert found == [
        ("base", 0, 0, "batch of 2"),
        ("base", 32, 1024, "batch of 4"),
        ("base", 48, 2048, "batch of 6"),
        ("base", 53, 2528, "quarantine of 'web'"),
        ("base", 58, 3008, "skipped until step 62: no reason given"),
        ("late", 79, 4064 + 960, "the ramp is over"),
    ]
    clock = changed.config.clock
    assert all(clock.tokens_at(step) == tokens for _, step, tokens, _ in found)
    assert [(c.step, c.what) for c in run.report().changes] == [
        (12, "skipped until step 14: loss spike"),
        (15, "quarantine of 'web'"),
    ]


def test_a_report_is_that_of_its_plan_and_what_stores_must_be_asked_for(run):
    found = run.report()
    counted = report(run.plan())
    assert isinstance(found, PlanReport)
    assert (found.fingerprint, found.shares, found.sources) == (
        counted.fingerprint,
        counted.shares,
        counted.sources,
    )
    lengths = np.diff(run.stores["web"].document_offsets(0, 70))
    (edit,) = found.quarantined
    assert (edit.source, edit.from_step, edit.documents, edit.tokens) == ("web", 15, 2, int(lengths[3:5].sum()))
    assert found.costs.compile_seconds == run.compile_seconds > 0
    token = {"web": np.dtype(run.stores["web"].manifest.keys["sequence"]).itemsize, "chat": 2 + 1}
    read = sum((share.held + share.rows) * token[share.source] for share in found.shares)
    assert found.costs.read_bytes == read
    with pytest.raises(FrozenInstanceError):
        found.rows = 1


def test_a_report_audits_the_sources_with_a_mask_and_reads_no_token(run, tmp_path):
    """[A1.a, T1.d]"""
    for shard in tmp_path.glob("*/shard-*"):
        (shard / "sequence.bin").unlink()
    found = run.report().supervision
    assert list(found) == ["chat"]
    (chat,) = found["chat"]
    assert (chat.key, chat.items, chat.supervised, chat.fully_masked) == ("sequence", 40, 39 * 4, 1)
    assert chat.without_eos is None
    assert chat.supervised_percent == 100 * 39 * 4 / 320


def test_the_audit_of_a_large_store_looks_at_blocks_from_its_beginning_to_its_end(make_store):
    store = open_store(make_store("large", [1] * 20_000)[0])
    (some,) = audit(store, max_items=1 << 13)
    assert (some.items, some.audited, some.tokens) == (20_000, 2 * 4096, 2 * 4096)


def test_a_report_and_what_is_in_a_store_are_json(run):
    found = run.report()
    told = json.loads(json.dumps(found.to_json()))
    assert list(told)[-4:] == ["costs", "warnings", "history", "supervision"]
    assert (told["rows"], told["stages"][1]["name"]) == (found.rows, "late")
    assert told["sources"][0]["fates"]["tokens"] == run.stores["web"].num_tokens
    store = json.loads(json.dumps(inspect_store(run.stores["chat"]).to_json()))
    assert (store["documents"], store["lengths"], store["audit"][0]["supervised"]) == (
        40,
        {"sequence": {"8 to 15": 40}},
        39 * 4,
    )


def test_two_runs_are_compared_and_one_is_forked_by_methods_of_a_run(run, tmp_path):
    """[O1.c]"""
    fork = run.fork(at=16, to=tmp_path / "ablation.toml", name="more-chat", weights={"chat": 1})
    assert (fork.stage, fork.step, fork.edited) == ("more-chat", 16, True)
    new = Run.from_toml(fork.config)
    found = run.diff(new)
    assert (found.first_step, found.stage, found.same, found.steps) == (16, "more-chat", False, 30)
    assert new.diff(run).differing == found.differing
    assert run.diff(Run.from_toml(tmp_path / "run.toml")).same
    compared = []
    assert run.diff(new, limit_rows=6, progress=compared.append).compared == compared[-1] == 6


def test_the_history_of_a_run_is_in_its_report(run):
    assert run.report().history == ()
    run.loader()
    (line,) = run.report().history
    assert line.endswith("… is the first on record")


def test_a_report_tells_what_ranks_wait_for_with_and_without_a_deal(run, tmp_path):
    assert run.report().imbalance == ()
    tables = {**TABLES, "run": {**TABLES["run"], "global_batch_size": 64, "balance": {"quadratic": 1}}}
    found = Run.from_tables(tables, folder=tmp_path).report().imbalance
    assert [(line.stage, line.ranks) for line in found] == [(s, r) for s in ("base", "late") for r in (2, 8, 32)]
    assert all(1 <= line.dealt <= line.in_order for line in found)
    assert found[0].dealt < found[0].in_order
    linear = {**tables, "run": {**tables["run"], "balance": {"linear": 1000, "quadratic": 1}}}
    less = Run.from_tables(linear, folder=tmp_path).report().imbalance
    assert all(one.in_order < other.in_order for one, other in zip(less, found, strict=True))


@pytest.mark.parametrize(
    ("recipe", "record", "advice"),
    [
        ("completion", {"prompt": "ab", "completion": "cd" * 8}, "a longer seq_len has less"),
        ("dpo", {"prompt": "ab", "chosen": "c", "rejected": "d"}, 'pad_to = "batch" pads a micro-batch'),
    ],
)
def test_padding_is_told_with_advice_that_cuts_no_record(tmp_path, recipe, record, advice):
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(record)}\n" * 6)
    tm.prepare(tmp_path / "a.jsonl", out=tmp_path / "a", recipe=recipe, progress=False)
    tables = {"run": {"epochs": 1, "global_batch_size": 2, "seq_len": 30}, "sources": [{"name": "a", "store": "a"}]}
    told = [each for each in Run.from_tables(tables, folder=tmp_path).report().warnings if "are padding" in each]
    assert [each.partition("'a'; ")[2][: len(advice)] for each in told] == [advice]
