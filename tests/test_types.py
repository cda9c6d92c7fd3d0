"""One table says what a store of each training type holds."""

from __future__ import annotations

import pytest

from tokenmill.types import MASK_KEYS, RECORD_TYPES, STORED_ARRAYS, TOKEN_KEYS, TRAINING_TYPES, token_arrays


def test_other_tables_are_read_off_the_table_of_training_types():
    assert TOKEN_KEYS == ("sequence", "chosen", "rejected", "prompts", "responses")
    assert MASK_KEYS == ("loss_mask", "chosen_mask", "rejected_mask", "masks")
    assert {"dpo", "grpo"} == RECORD_TYPES
    assert token_arrays("dpo") == {"chosen": "chosen_mask", "rejected": "rejected_mask"}
    assert {name: array.dtype for name, array in STORED_ARRAYS.items() if array.holds != "ids"} == {
        "loss_mask": "|u1",
        "position_ids": "<u4",
        "chosen_mask": "|u1",
        "rejected_mask": "|u1",
        "masks": "|u1",
        "rewards": "<f4",
    }


@pytest.mark.parametrize("kind", TRAINING_TYPES)
def test_a_mask_is_cut_where_its_tokens_are(kind):
    arrays = TRAINING_TYPES[kind]
    for name, mask in token_arrays(kind).items():
        assert mask is None or (arrays[mask].holds, arrays[mask].axis) == ("mask", arrays[name].axis)


def test_an_array_of_several_training_types_is_the_same_in_each():
    for arrays in TRAINING_TYPES.values():
        for name, array in arrays.items():
            assert (array.axis, array.holds) == (STORED_ARRAYS[name].axis, STORED_ARRAYS[name].holds)
