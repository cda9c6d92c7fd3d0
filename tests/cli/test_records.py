import json

import numpy as np
import pytest

from tokenmill.store import StoreSpec, StoreWriter

RUN = """
[run]
steps = 6
global_batch_size = 4
seq_len = 8

[[sources]]
name = "pairs"
store = "pairs"
"""


@pytest.fixture
def pairs(tmp_path, tokenizer_identity):
    """Write a store of nine pairs and a run over it; return the run's config."""
    keys = {"chosen": "<u2", "rejected": "<u2", "chosen_mask": "|u1", "rejected_mask": "|u1"}
    spec = StoreSpec(kind="dpo", keys=keys, tokenizer=tokenizer_identity(300), recipe={})
    with StoreWriter(tmp_path / "pairs", spec) as writer:
        values = {key: np.ones(45, dtype) for key, dtype in keys.items()}
        values["chosen"] = np.arange(45, dtype="<u2")
        writer.append(values, {axis: np.arange(0, 46, 5) for axis in ("chosen", "rejected")})
        writer.commit()
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path / "run.toml"


def test_digests_of_pairs_do_not_depend_on_ranks(tokenmill, pairs):
    """[E1.a]"""
    whole = tokenmill("batches", pairs, "--digest")
    assert (whole.code, whole.err) == (0, "")
    assert len({line.split("\t")[2] for line in whole.out.splitlines()}) == 6
    for world_size in (2, 4):
        assert tokenmill("batches", pairs, "--digest", "--world-size", world_size).out == whole.out


def test_tokens_of_pairs_are_counted(tokenmill, pairs):
    lines = tokenmill("batches", pairs).out.splitlines()
    assert lines[0] == "0\tmain\t64 tokens, 32 trained"


def test_what_and_when_name_the_record(tokenmill, pairs):
    """[O1.b]"""
    for use in json.loads(tokenmill("what", pairs, "--step", 3, "--no-text", "--json").out)["rows"]:
        document = use["spans"][0]["document"]
        when = json.loads(tokenmill("when", pairs, "--source", "pairs", "--document", document, "--json").out)
        assert (3, use["slot"]) in [(other["step"], other["slot"]) for other in when["uses"]]
