"""Keys that cannot be combined: the table has one message, and each rule is reached."""

from __future__ import annotations

import pytest

from tokenmill.config import parse_config
from tokenmill.config.combine import RULES, check_combinations
from tokenmill.errors import ConfigError

STORE = {"name": "web", "store": "web"}
LIVE = {"name": "web", "documents": ["a.jsonl"], "tokenizer": "bytes", "live": True}
CROSSING = {"cross_document_labels": True, "packing": "concat"}
STAGE = {"name": "late", "start_step": 2}
CASES = [
    (
        "horizon",
        "cross_document_labels",
        {"horizon": 2, "cross_document_labels": True, "packing": "concat"},
        STORE,
        {},
    ),
    ("horizon", "stores of dpo", {"horizon": 2}, STORE, {}),
    ("cross_document_labels", "packing = 'best_fit'", {"cross_document_labels": True}, STORE, {}),
    ("packing", "stores of dpo", {"packing": "concat"}, STORE, {}),
    ("balance", "live text in 'web'", {"balance": "attention"}, LIVE, {}),
    ("balance", "stores of dpo", {"balance": "attention"}, STORE, {}),
    ("segment_multiple", "stores of dpo", {"segment_multiple": 8}, STORE, {}),
    ("segment_multiple", "packing = 'concat'", {"segment_multiple": 8, "packing": "concat"}, STORE, {}),
    ("segment_multiple", "live text in 'web'", {"segment_multiple": 8}, LIVE, {}),
    ('pad_to = "batch"', "segment_multiple = 8", {"pad_to": "batch", "segment_multiple": 8}, STORE, {}),
    ('pad_to = "batch"', "live text in 'web'", {"pad_to": "batch"}, LIVE, {}),
    ('pad_to = "batch"', "packing = 'best_fit'", {"pad_to": "batch"}, STORE, {}),
    ("a length in tokens", "stores of dpo", {"tokens": "1K"}, STORE, {}),
    ("num_loss_tokens", "live text in 'web'", {"arrays": ["labels", "num_loss_tokens"]}, LIVE, {}),
    ("weights by size", "live text in 'web'", {"weights": "tokens"}, LIVE, {}),
    ('weigh_by = "tokens"', "live text in 'web'", {"weigh_by": "tokens"}, LIVE, {}),
    ("seed of a stage", "live text in 'web'", {}, LIVE, {"seed": 9}),
    ("shuffle of a stage", "live text in 'web'", {}, LIVE, {"shuffle": "none"}),
]


@pytest.mark.parametrize(("key", "other", "run", "source", "stage"), CASES)
def test_every_rule_names_both_sides_and_a_way_out(key, other, run, source, stage):
    length = {} if "tokens" in run else {"steps": 9}
    tables = {"run": {"global_batch_size": 2, "seq_len": 16} | length | run, "sources": [source]}
    if stage:
        tables["stages"] = [{"name": "main", "start_step": 0}, STAGE | stage]
    config, records = parse_config(tables), "dpo" if other == "stores of dpo" else None
    message = f"stage {'late' if stage else 'main'!r}: {key} cannot be combined with {other}; "
    assert error_of(config, records) in {f"{message}{rule.way_out}" for rule in RULES if rule.key == key}


def error_of(config, records):
    with pytest.raises(ConfigError) as error:
        check_combinations(config, is_open=True, records=records)
    return str(error.value)


def test_every_rule_has_a_case():
    assert [key for key, *_ in CASES] == [rule.key for rule in RULES]


def test_padding_to_the_batch_waits_until_the_kind_of_the_stores_is_known():
    run = {"steps": 9, "global_batch_size": 2, "seq_len": 16, "pad_to": "batch"}
    config = parse_config({"run": run, "sources": [STORE]})
    check_combinations(config)
    check_combinations(config, is_open=True, records="dpo")
