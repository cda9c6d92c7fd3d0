from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from tokenmill.adapters.astrai import DatasetFactory, ResumableDistributedSampler, dpo_collate_fn, grpo_collate_fn


def pair(chosen, rejected):
    item = {"chosen": torch.tensor(chosen), "rejected": torch.tensor(rejected)}
    return item | {f"{key}_mask": torch.ones(len(values), dtype=torch.bool) for key, values in item.items()}


def test_pairs_are_padded_to_the_longest_of_both_sides():
    batch = dpo_collate_fn([pair([1, 2], [3]), pair([4], [5, 6, 7])])
    assert {key: values.tolist() for key, values in batch.items()} == {
        "chosen": [[1, 2, 0], [4, 0, 0]],
        "rejected": [[3, 0, 0], [5, 6, 7]],
        "chosen_mask": [[True, True, False], [True, False, False]],
        "rejected_mask": [[True, False, False], [True, True, True]],
    }
    assert [values.dtype for values in batch.values()] == [torch.int64] * 2 + [torch.bool] * 2


def group(prompt, *responses):
    return {
        "prompts": torch.tensor(prompt),
        "responses": [torch.tensor(response) for response in responses],
        "masks": [torch.ones(len(response), dtype=torch.bool) for response in responses],
        "rewards": torch.arange(1, len(responses) + 1, dtype=torch.float32) / 2,
    }


def test_prompts_are_padded_in_front_and_a_mask_says_where_they_are():
    """As AstrAI has it since its prompts and responses are joined for the policy."""
    batch = grpo_collate_fn([group([1, 2, 3], [9]), group([4], [9]), group([], [9])])
    assert batch["prompts"].tolist() == [[1, 2, 3], [0, 0, 4], [0, 0, 0]]
    assert batch["prompt_mask"].tolist() == [[True] * 3, [False, False, True], [False] * 3]


@pytest.mark.parametrize("turned", [False, True], ids=["smaller first", "larger first"])
def test_no_response_of_a_larger_group_is_lost(turned):
    """[P2.a] AstrAI takes the size of the first group of a batch."""
    items = [group([1], [2, 3]), group([4, 5], [6], [7, 8, 9])]
    expected = [
        ([0, 1], [False, True], [[2, 3, 0], [0, 0, 0]], [[True, True, False], [False] * 3], [0.5, 0.0]),
        ([4, 5], [True, True], [[6, 0, 0], [7, 8, 9]], [[True, False, False], [True] * 3], [0.5, 1.0]),
    ]
    order = [1, 0] if turned else [0, 1]
    batch = grpo_collate_fn([items[index] for index in order])
    assert list(zip(*(values.tolist() for values in batch.values()), strict=True)) == [expected[i] for i in order]
    assert [(key, values.dtype) for key, values in batch.items()] == [
        ("prompts", torch.int64),
        ("prompt_mask", torch.bool),
        ("responses", torch.int64),
        ("masks", torch.bool),
        ("rewards", torch.float32),
    ]


@pytest.mark.parametrize(("kind", "collate"), [("dpo", dpo_collate_fn), ("grpo", grpo_collate_fn)])
def test_records_go_through_a_plain_dataloader(ours, kind, collate):
    dataset = DatasetFactory.load(kind, ours[kind, "bin"], 64)
    sampler = ResumableDistributedSampler(dataset)
    order = [*ResumableDistributedSampler(dataset)]
    batches = list(DataLoader(dataset, batch_size=3, sampler=sampler, collate_fn=collate))
    expected = [collate([dataset[i] for i in order[begin : begin + 3]]) for begin in range(0, len(order), 3)]
    torch.testing.assert_close(batches, expected, rtol=0, atol=0)
