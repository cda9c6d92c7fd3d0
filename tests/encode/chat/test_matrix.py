"""Ids and masks of every stock template by truths of other code, from JSONL and Parquet; and the page of them."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.encode.chat.conftest import REAL
from tests.encode.chat.stock import STOCK

import tokenmill as tm

ROOT = Path(__file__).parents[3]
_SPEC = importlib.util.spec_from_file_location("chat_matrix", ROOT / "tools" / "chat_matrix.py")
assert _SPEC is not None
assert _SPEC.loader is not None
chat_matrix = sys.modules["chat_matrix"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(chat_matrix)

QUICK = ("qwen3_training",)


@pytest.fixture(scope="session")
def matrix():
    if not all((REAL / name).is_dir() for name in ("qwen3", "llama3_1", "deepseek_v3", "llama2")):
        pytest.skip("the tokenizers are not there: run tools/fetch_tokenizers.py")
    return chat_matrix.Matrix(REAL)


def page_rows() -> list[str]:
    page = chat_matrix.PAGE.read_text(encoding="utf-8")
    table = page.partition(chat_matrix.BEGIN)[2].partition(chat_matrix.END)[0]
    return table.strip().splitlines()[2:]


def test_the_page_tells_of_every_template_with_its_tokenizers():
    """[T1.a]"""
    wanted = [(name, tokenizer) for name in STOCK for tokenizer in chat_matrix.tokenizers_of(name)]
    wanted += [(name, name.removesuffix(" (its own)")) for name in chat_matrix.OWN]
    cells = [[cell.strip(" `") for cell in row.split("|")[1:-1]] for row in page_rows()]
    assert [(cell[0], cell[1]) for cell in cells[:-1]] == wanted
    stored, total = (sum(int(cell[2].split(" of ")[which]) for cell in cells[:-1]) for which in (0, 1))
    assert cells[-1][2] == f"{stored} of {total} ({100 * stored / total:.1f}%)"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.deep) for name in (*STOCK, *chat_matrix.OWN)],
)
def test_ids_are_those_of_transformers_and_masks_hold_by_two_truths(name, matrix):
    """[T1.a, T2.b]"""
    rows = list(chat_matrix.rows(matrix, [name]))
    for row in rows:
        assert row.wrong == []
        assert row.words == row.stored
        assert row.same_ids + sum(row.other_ids.values()) == row.stored
        assert row.stored + sum(row.refused.values()) == row.records
        if name in STOCK and "endgeneration" in STOCK[name].read_text(encoding="utf-8"):
            assert row.masks == row.same_ids
    assert chat_matrix.table(rows).splitlines()[2:-1] == [
        line for line in page_rows() if line.startswith(f"| `{name}` |")
    ]


@pytest.mark.parametrize(
    ("trained", "wrong"),
    [
        (["botword1, botword2.<|im_end|>"], None),
        (['{"town": "botword1"}}\n</tool_call><|im_end|>', "botword2"], None),
        (["botword1"], "botword2"),
        (["userword0 botword1 botword2"], "userword0"),
        (["botword2 botword1"], "too much or too little"),
        (["botword1 botword2.<|im_end|>\n<|im_start|>"], "behind the last word"),
        (["botword1 botword2.<|im_end|> and so on"], "behind the last word"),
        (["botword1 botword2.<|eot_id|><|start_header_id|>user<|end_header_id|>"], "behind the last word"),
    ],
)
def test_the_truth_by_words_sees_what_is_wrong(trained, wrong):
    found = chat_matrix.wrong_words("userword0 botword1 botword2", trained)
    assert (found is None) if wrong is None else (found is not None and wrong in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tokenizer", ["qwen3", *(pytest.param(name, marks=pytest.mark.deep) for name in ("qwen2_5", "deepseek_v3"))]
)
def test_parquet_gives_the_ids_and_masks_of_jsonl(tokenizer, tmp_path):
    """[T1.a]"""
    if not (REAL / tokenizer).is_dir():
        pytest.skip(f"the tokenizer {tokenizer} is not there: run tools/fetch_tokenizers.py")
    # A column of Arrow has one type: arguments that are texts go into a file of their own.
    kinds = [kind for kind in chat_matrix.KINDS if "text" not in kind]
    records = [chat_matrix.record(turns, kind) for kind in kinds for turns in range(1, chat_matrix.MAX_TURNS + 1)]
    records.append({"system": "systemword", **chat_matrix.record(2, "plain")})
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    columns = {"system": None, "tools": None}
    pq.write_table(pa.Table.from_pylist([columns | each for each in records]), tmp_path / "in.parquet")
    stores = []
    for suffix in ("jsonl", "parquet"):
        options = tm.PrepareOptions(on_error="skip")
        tm.prepare(
            tmp_path / f"in.{suffix}",
            out=tmp_path / suffix,
            tokenizer=str(REAL / tokenizer),
            recipe="chat",
            workers=1,
            progress=False,
            options=options,
        )
        stores.append(tm.open_store(tmp_path / suffix))
    first, second = stores
    assert first.num_documents == second.num_documents >= 30
    assert first.manifest.skipped.get("counts") == second.manifest.skipped.get("counts")
    for key in ("sequence", "loss_mask"):
        arrays = [store.fetch(0, store.num_tokens, key) for store in stores]
        assert np.array_equal(*arrays)
