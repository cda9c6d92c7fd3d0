"""Records of every training type: tokens, masks, boundaries, refusals."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.encode.engines import open_tokenizer
from tokenmill.encode.recipe import load_recipe, open_encoder, record_keys
from tokenmill.encode.recipe.encoder import Ragged
from tokenmill.encode.tokenizer import frame, offsets_of
from tokenmill.errors import ConfigError, TokenizerError
from tokenmill.reasons import REASONS
from tokenmill.types import TRAINING_TYPES

PLAIN = {"sections": [{"field": "prompt", "action": "mask"}, {"field": "response", "action": "train"}]}
PAIRS = {
    "sources": {
        name: {"sections": [{"field": "prompt", "action": "mask"}, {"field": name, "action": "train"}]}
        for name in ("chosen", "rejected")
    }
}
GROUPS = {
    "sources": {
        "prompts": {"sections": [{"field": "prompt", "action": "mask"}]},
        "responses": {"sections": [{"field": "responses", "action": "train"}]},
        "rewards": {"sections": [{"field": "rewards", "action": "value"}]},
    }
}


def reasons(records):
    return [(refused.index, refused.reason) for refused in records.refused]


def sections(*actions, **more):
    return {"input": {"sections": [{"field": f"f{i}", "action": each} for i, each in enumerate(actions)]}, **more}


def record_of(*texts):
    return {f"f{index}": text for index, text in enumerate(texts)}


def test_a_prompt_is_masked_and_an_answer_trained_with_its_eos(encoder, shown):
    done = encoder({"input": PLAIN}).encode(
        [{"prompt": "2+2=", "response": "4"}, {"response": "no", "prompt": "Is it?", "more": 1}]
    )
    assert shown(done, "sequence", "loss_mask", "documents") == ["^2+2=[4$]", "^Is it?[no$]"]
    assert done.values["position_ids"].tolist() == [*range(7), *range(10)]
    assert done.kept.tolist() == [0, 1]
    assert (done.refused, done.truncated) == ((), 0)
    assert {key: values.dtype.str for key, values in done.values.items()} == {
        "sequence": "<u2",
        "loss_mask": "|u1",
        "position_ids": "<u4",
    }


def test_text_of_which_all_is_trained_has_no_mask(encoder, shown):
    done = encoder(sections("train", "train")).encode([record_of("ab", "c"), record_of("", "d")])
    assert list(done.values) == ["sequence"]
    assert shown(done, "sequence", axis="documents") == ["^abc$", "^d$"]


def test_eos_shares_the_fate_of_the_text_before_it(encoder, shown):
    done = encoder(sections("train", "mask")).encode([record_of("ab", "c")])
    assert shown(done, "sequence", "loss_mask", "documents") == ["^[ab]c$"]


@pytest.mark.parametrize(
    ("framing", "text"),
    [
        ({}, "^a[b$]"),
        ({"add_bos": False}, "a[b$]"),
        ({"add_eos": False}, "^a[b]"),
        ({"add_bos": False, "add_eos": False}, "a[b]"),
    ],
)
def test_bos_and_eos_are_there_as_the_tokenizer_has_them(encoder, shown, framing, text):
    """[T2.b]"""
    done = encoder(sections("mask", "train"), **framing).encode([record_of("a", "b")])
    assert shown(done, "sequence", "loss_mask", "documents") == [text]


@pytest.mark.parametrize(
    ("anew", "text"),
    [
        ((None, None, None), "^a[b]c$"),
        ((True, None, None), "^a[b]c$"),
        ((False, None, None), "a[b]c$"),
        ((None, True, None), "^a$^[b]c$"),
        ((None, None, True), "^a[b$]^c$"),
        ((False, True, True), "a$^[b$]^c$"),
    ],
)
def test_a_section_with_special_tokens_begins_anew_and_never_with_two_bos(encoder, shown, anew, text):
    """[T2.b]"""
    recipe = sections("mask", "train", "mask")
    for section, value in zip(recipe["input"]["sections"], anew, strict=True):
        section["add_special_tokens"] = value
    done = encoder(recipe).encode([record_of("a", "b", "c")])
    assert shown(done, "sequence", "loss_mask", "documents") == [text]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ROWS = st.lists(st.tuples(TEXTS, TEXTS, TEXTS), max_size=8)
ACTIONS = st.tuples(*[st.sampled_from(["train", "mask"])] * 3).filter(lambda each: "train" in each)


@given(ROWS, ACTIONS)
def test_the_trained_tokens_are_those_of_the_trained_texts_and_no_others(tiny_tokenizer, rows, actions):
    """[T1.a]"""
    tokenizer = tiny_tokenizer
    encoder = open_encoder(load_recipe(sections(*actions, kind="sft")), tokenizer, tokenizer_spec="tiny")
    done = encoder.encode([record_of(*row) for row in rows])
    identity = tokenizer.identity
    wanted, kept = [], []
    for index, row in enumerate(rows):
        trained = [text for text, action in zip(row, actions, strict=True) if action == "train"]
        if not "".join(trained):
            continue
        kept.append(index)
        pieces = [tokenizer.encode([text]).ids.tolist() for text in row]
        ids = [identity.bos_id, *pieces[0], *pieces[1], *pieces[2], identity.eos_id]
        mask = [0]
        for piece, action in zip(pieces, actions, strict=True):
            mask += [int(action == "train")] * len(piece)
        wanted.append((ids, [*mask, int(actions[-1] == "train")]))
    cuts = list(pairwise(done.offsets["documents"].tolist()))
    ids, mask = done.values["sequence"], done.values["loss_mask"]
    assert [(ids[a:b].tolist(), mask[a:b].tolist()) for a, b in cuts] == wanted
    assert done.kept.tolist() == kept
    assert done.values["position_ids"].tolist() == [place for a, b in cuts for place in range(b - a)]


@pytest.fixture(scope="module")
def tiny_tokenizer(specs):
    return open_tokenizer(specs["tiny"])


def test_a_token_never_straddles_a_masked_and_a_trained_text(tiny_tokenizer):
    """[T1.a] " the" is one token; cut before "the" it is two, as at inference."""
    whole = tiny_tokenizer.encode(["ground the grain"]).ids.size
    encoder = open_encoder(load_recipe(sections("mask", "train")), tiny_tokenizer, tokenizer_spec="tiny")
    done = encoder.encode([record_of("ground th", "e grain")])
    ids, mask = done.values["sequence"], done.values["loss_mask"]
    assert tiny_tokenizer.decode(ids[mask == 1]) == "e grain</s>"
    assert tiny_tokenizer.decode(ids[mask == 0]) == "<s>ground th"
    assert ids.size - 2 > whole


def test_one_text_is_encoded_as_the_text_recipe_does(tiny_tokenizer):
    texts = ["Once upon a time", "<s>", "a miller\n\nground 1234 bags", "中文 👍🏽"]
    recipe = load_recipe({"preset": "text", "preprocessing": {"max_seq_len": 10**6}})
    done = open_encoder(recipe, tiny_tokenizer, tokenizer_spec="tiny").encode([{"text": text} for text in texts])
    framed = frame(tiny_tokenizer.encode(texts), tiny_tokenizer.identity)
    assert done.values["sequence"].tolist() == framed.ids.tolist()
    assert done.offsets["documents"].tolist() == framed.offsets.tolist()
    assert done.values["sequence"].dtype == framed.ids.dtype


def test_control_strings_in_a_record_are_ordinary_text(tiny_tokenizer):
    """[S.i, T2.b]"""
    controls = list(tiny_tokenizer.special_ids)
    encoder = open_encoder(load_recipe(sections("mask", "train")), tiny_tokenizer, tokenizer_spec="tiny")
    done = encoder.encode([record_of(name, f"a{name}b") for name in controls])
    special = list(tiny_tokenizer.special_ids.values())
    for begin, end in pairwise(done.offsets["documents"].tolist()):
        assert not np.isin(done.values["sequence"][begin + 1 : end - 1], special).any()
    assert done.kept.size == len(controls)


class Counted:
    """A real tokenizer that counts how often it is called."""

    def __init__(self, tokenizer):
        self._tokenizer, self.calls = tokenizer, 0
        self.identity, self.engine, self.special_ids = tokenizer.identity, tokenizer.engine, tokenizer.special_ids

    def encode(self, texts):
        self.calls += 1
        return self._tokenizer.encode(texts)

    def decode(self, ids):
        return self._tokenizer.decode(ids)


@pytest.mark.parametrize("source", [PLAIN, PAIRS, GROUPS])
def test_a_batch_is_one_call_of_the_tokenizer(source):
    tokenizer = Counted(open_tokenizer("bytes"))
    record = {
        "prompt": "p",
        "response": "r",
        "chosen": "c",
        "rejected": "d",
        "responses": ["a", "b"],
        "rewards": [0, 1],
    }
    encoder = open_encoder(load_recipe({"input": source}), tokenizer, tokenizer_spec="bytes")
    assert encoder.encode([record] * 7).kept.size == 7
    assert tokenizer.calls == 1


def test_a_batch_of_conversations_is_one_call_of_the_tokenizer():
    tokenizer = Counted(open_tokenizer("bytes"))
    recipe = load_recipe({"preset": "chat", "chat_template": "chatml"})
    encoder = open_encoder(recipe, tokenizer, tokenizer_spec="bytes")
    messages = [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "Yes"}]
    assert encoder.encode([{"messages": messages}] * 7).kept.size == 7
    assert tokenizer.calls == 1


def test_what_was_read_is_encoded_as_the_record_itself(encoder, shown):
    opened = encoder("instruction")
    records = [{"prompt": "q", "response": "a"}, {"text": "x"}, {"question": "q", "answer": "b"}, {"prompt": 3}]
    read, whole = opened.encode([opened.read(record) for record in records]), opened.encode(records)
    assert shown(read, "sequence", "loss_mask", "documents") == shown(whole, "sequence", "loss_mask", "documents")
    assert (read.kept.tolist(), read.refused) == ([0, 2], whole.refused)


@given(st.lists(st.integers(0, 5), max_size=12), st.data())
@pytest.mark.parametrize("source", [PLAIN, PAIRS, GROUPS], ids=["sft", "dpo", "grpo"])
def test_cutting_batches_elsewhere_changes_nothing(source, choices, data):
    answers = {"response": "yes", "chosen": "good", "rejected": "", "responses": ["a", "bc"], "rewards": [0.5, 1]}
    shapes = [
        {"prompt": "Is it?", **answers, "rejected": "bad"},
        {"prompt": "", **answers, "rejected": "worse"},
        {"prompt": "No answer", **answers, "response": "", "rewards": [1]},
        {"prompt": 7, **answers},
        {"prompt": "\ud800", **answers, "rejected": "x"},
        {},
    ]
    records = [shapes[choice] for choice in choices]
    cut = data.draw(st.integers(0, len(records)))
    encoder = open_encoder(load_recipe({"input": source}), open_tokenizer("bytes"), tokenizer_spec="bytes")
    whole, left, right = encoder.encode(records), encoder.encode(records[:cut]), encoder.encode(records[cut:])
    for key in whole.values:
        assert whole.values[key].tolist() == [*left.values[key].tolist(), *right.values[key].tolist()]
    for axis in whole.offsets:
        assert np.diff(whole.offsets[axis]).tolist() == [
            *np.diff(left.offsets[axis]).tolist(),
            *np.diff(right.offsets[axis]).tolist(),
        ]
    assert whole.kept.tolist() == [*left.kept.tolist(), *(right.kept + cut).tolist()]
    assert reasons(whole) == [*reasons(left), *((index + cut, reason) for index, reason in reasons(right))]
    assert sorted([*whole.kept.tolist(), *(index for index, _ in reasons(whole))]) == list(range(len(records)))


def test_records_that_cannot_be_encoded_are_refused_with_their_reason(encoder, shown):
    """[T1.b]"""
    done = encoder({"input": PLAIN}).encode(
        [
            {"prompt": "a"},
            {"prompt": None, "response": "b"},
            {"prompt": "a", "response": ["b"]},
            {"prompt": "a", "response": "b"},
            {"prompt": "a", "response": ""},
            {"prompt": "a", "response": "x\ud800"},
            {"prompt": 3, "response": "b"},
        ]
    )
    assert [(each.index, each.reason, each.detail) for each in done.refused] == [
        (0, "missing_field", "no field 'response', or null"),
        (1, "missing_field", "no field 'prompt', or null"),
        (2, "not_text", "field 'response' is a list"),
        (4, "no_supervision", "the text that is trained is empty"),
        (5, "utf8", "a lone surrogate in 'x\\ud800'"),
        (6, "not_text", "field 'prompt' is a number"),
    ]
    assert {each.reason for each in done.refused} <= set(REASONS)
    assert done.kept.tolist() == [3]
    assert shown(done, "sequence", "loss_mask", "documents") == ["^a[b$]"]


@pytest.mark.parametrize("source", [PLAIN, PAIRS, GROUPS], ids=["sft", "dpo", "grpo"])
@pytest.mark.parametrize("records", [[], [{}], [{}, {"prompt": 1}]])
def test_a_batch_of_nothing_has_every_array_and_axis(encoder, source, records):
    opened = encoder({"input": source})
    done = opened.encode(records)
    assert {key: (values.dtype.str, values.size) for key, values in done.values.items()} == {
        key: (dtype, 0) for key, dtype in opened.keys.items()
    }
    kind = load_recipe({"input": source}).kind
    assert {axis: offsets.tolist() for axis, offsets in done.offsets.items()} == {
        axis: [0] for axis in dict.fromkeys(array.axis for array in TRAINING_TYPES[kind].values())
    }
    assert [each.index for each in done.refused] == list(range(len(records)))


def test_fields_may_lie_deeper(encoder, shown):
    recipe = {"input": {"sections": [{"field": "a.b", "action": "mask"}, {"field": "a.c.d", "action": "train"}]}}
    records = [{"a": {"b": "x", "c": {"d": "y"}}}, {"a": {"b": "x", "c": 1}}, {"a": "x"}]
    done = encoder(recipe).encode(records)
    assert shown(done, "sequence", "loss_mask", "documents") == ["^x[y$]"]
    assert reasons(done) == [(1, "missing_field"), (2, "missing_field")]


def test_a_text_section_may_have_a_role_that_decides(encoder, shown):
    recipe = {
        "input": {
            "sections": [
                {"field": "q", "action": "$role", "role": "user", "prefix": "Q: ", "suffix": " A: "},
                {"field": "a", "action": "$role", "role": "assistant", "suffix": "."},
            ]
        },
        "mask": {"assistant": "train"},
    }
    record = {"q": "Is it?", "a": "Yes"}
    opened = encoder(recipe)
    assert shown(opened.encode([record]), "sequence", "loss_mask", "documents") == ["^Q: Is it? A: [Yes.$]"]
    assert opened.read(record).content == "Is it?\nYes"
    other = encoder({**recipe, "mask": {"assistant": "mask"}, "mask_default": "train"})
    assert shown(other.encode([record]), "sequence", "loss_mask", "documents") == ["^[Q: Is it? A: ]Yes.$"]


@pytest.mark.parametrize(
    ("mode", "texts"),
    [
        ("keep_start", ["^abc[d]", "^[vwxy]", "^a[b$]"]),
        ("keep_end", ["^[efg$]", "^[xyz$]", "^a[b$]"]),
    ],
)
def test_a_record_that_is_too_long_is_cut_and_still_begins_with_bos(encoder, shown, mode, texts):
    limits = {"max_seq_len": 5, "truncation_mode": mode}
    done = encoder({"input": PLAIN, "preprocessing": limits}).encode(
        [
            {"prompt": "abc", "response": "defg"},
            {"prompt": "", "response": "vwxyz"},
            {"prompt": "a", "response": "b"},
        ]
    )
    assert shown(done, "sequence", "loss_mask", "documents") == texts
    assert done.truncated == 2
    assert done.values["position_ids"].tolist() == [*range(5), *range(5), *range(4)]


def test_a_cut_that_leaves_nothing_to_train_on_refuses_the_record(encoder):
    """[T1.b]"""
    done = encoder({"input": PLAIN, "preprocessing": {"max_seq_len": 4}}).encode(
        [{"prompt": "abcdef", "response": "g"}, {"prompt": "ab", "response": "cd"}]
    )
    assert [(each.index, each.reason, each.detail) for each in done.refused] == [
        (0, "no_supervision", "9 tokens, none of them trained, max_seq_len is 4")
    ]
    assert done.truncated == 1


def test_positions_are_given_listed_or_left_out_as_the_mode_says(encoder):
    made = {}
    for mode in ("none", "doc_reset", "continuous"):
        opened = encoder({"input": PLAIN, "output": {"position_ids_mode": mode}})
        done = opened.encode([{"prompt": "a", "response": "b"}] * 2)
        made[mode] = (opened.keys.get("position_ids"), done.values.get("position_ids"))
    assert made["none"] == (None, None)
    assert made["continuous"] == ("<u4", None)
    assert made["doc_reset"][0] == "<u4"
    assert made["doc_reset"][1].tolist() == [0, 1, 2, 3] * 2


def test_a_wider_dtype_is_taken_and_a_narrower_one_refused(encoder):
    """[T2.a]"""
    wide = encoder({"input": PLAIN, "output": {"dtype": {"sequence": "int32", "loss_mask": "bool"}}})
    assert wide.keys == {"sequence": "<u4", "loss_mask": "|u1", "position_ids": "<u4"}
    assert wide.encode([{"prompt": "a", "response": "b"}]).values["sequence"].tolist() == [256, 97, 98, 257]
    with pytest.raises(ConfigError, match=r"must hold 259 ids, got 'uint8'; write 'uint16'"):
        encoder({"input": PLAIN, "output": {"dtypes": {"sequence": "uint8"}}})


@pytest.mark.parametrize(("vocab_size", "dtype"), [(256, "|u1"), (257, "<u2"), (65536, "<u2"), (65537, "<u4")])
def test_token_arrays_have_the_smallest_dtype_that_holds_the_vocabulary(vocab_size, dtype):
    assert record_keys(load_recipe({"input": GROUPS}), vocab_size) == {
        "prompts": dtype,
        "responses": dtype,
        "masks": "|u1",
        "rewards": "<f4",
    }


def test_pairs_keep_their_boundaries_and_mask_the_prompt(encoder, shown):
    done = encoder({"input": PAIRS}).encode(
        [
            {"prompt": "Is it? ", "chosen": "Yes", "rejected": "No!"},
            {"prompt": "p", "chosen": "c"},
            {"prompt": "p", "chosen": "c", "rejected": ""},
            {"prompt": "", "chosen": "a", "rejected": "bcd"},
        ]
    )
    assert shown(done, "chosen", "chosen_mask") == ["^Is it? [Yes$]", "^[a$]"]
    assert shown(done, "rejected", "rejected_mask") == ["^Is it? [No!$]", "^[bcd$]"]
    assert reasons(done) == [(1, "missing_field"), (2, "no_supervision")]
    assert done.kept.tolist() == [0, 3]


def test_a_pair_is_cut_on_both_sides_and_counted_once(encoder, shown):
    done = encoder({"input": PAIRS, "preprocessing": {"max_seq_len": 4}}).encode(
        [{"prompt": "p", "chosen": "abcd", "rejected": "efgh"}, {"prompt": "p", "chosen": "a", "rejected": "b"}]
    )
    assert shown(done, "chosen", "chosen_mask") == ["^p[ab]", "^p[a$]"]
    assert shown(done, "rejected", "rejected_mask") == ["^p[ef]", "^p[b$]"]
    assert done.truncated == 1


def test_groups_keep_the_boundaries_of_responses_and_of_records(encoder, shown):
    done = encoder({"input": GROUPS}).encode(
        [
            {"prompt": "2+2?", "responses": ["4", "Five", ""], "rewards": [1, 0.25, -1]},
            {"prompt": "p", "responses": ["a", "b"], "rewards": [1.0]},
            {"prompt": "q", "responses": ["x"], "rewards": [0.5]},
        ]
    )
    assert shown(done, "prompts") == ["^2+2?", "^q"]
    assert shown(done, "responses", "masks") == ["[4$]", "[Five$]", "[$]", "[x$]"]
    assert done.values["rewards"].tolist() == [1.0, 0.25, -1.0, 0.5]
    assert done.values["rewards"].dtype.str == "<f4"
    assert done.offsets["groups"].tolist() == [0, 3, 4]
    assert [(each.index, each.reason, each.detail) for each in done.refused] == [
        (1, "lengths_differ", "2 responses and 1 rewards")
    ]


def test_groups_that_cannot_be_right_are_refused(encoder):
    good = {"prompt": "p", "responses": ["a"], "rewards": [1]}
    done = encoder({"input": GROUPS}).encode(
        [
            {**good, "responses": []},
            {**good, "responses": "a"},
            {**good, "responses": ["a", 3]},
            {**good, "rewards": ["1"]},
            {**good, "rewards": [True]},
            {**good, "rewards": [float("nan")]},
            {**good, "rewards": [-1e39]},
            {**good, "rewards": [10**400]},
            {**good, "rewards": None},
            {**good, "prompt": ["p"]},
            good,
        ]
    )
    assert reasons(done) == [
        (0, "empty_group"),
        (1, "not_text"),
        (2, "not_text"),
        (3, "not_number"),
        (4, "not_number"),
        (5, "not_number"),
        (6, "not_number"),
        (7, "not_number"),
        (8, "missing_field"),
        (9, "not_text"),
    ]
    assert done.kept.tolist() == [10]
    assert {each.reason for each in done.refused} <= set(REASONS)


def test_an_empty_response_without_eos_gives_nothing_to_train_on(encoder):
    """[T1.b]"""
    record = {"prompt": "p", "responses": ["a", ""], "rewards": [1, 0]}
    assert reasons(encoder({"input": GROUPS}, add_eos=False).encode([record])) == [(0, "no_supervision")]


def test_long_responses_are_cut_and_long_prompts_refused(encoder, shown):
    done = encoder({"input": GROUPS, "preprocessing": {"max_seq_len": 4}}).encode(
        [
            {"prompt": "abc", "responses": ["defgh", "i"], "rewards": [0, 1]},
            {"prompt": "abcd", "responses": ["e"], "rewards": [0]},
        ]
    )
    assert shown(done, "prompts") == ["^abc"]
    assert shown(done, "responses", "masks") == ["[defg]", "[i$]"]
    assert done.truncated == 1
    assert [(each.index, each.detail) for each in done.refused] == [(1, "5 tokens, max_seq_len is 4")]


def test_the_content_is_every_text_once(encoder):
    record = {"prompt": "p", "chosen": "c", "rejected": "r", "responses": ["a", "b"], "rewards": [0, 1]}
    assert encoder({"input": PAIRS}).read(record).content == "p\nc\nr"
    assert encoder({"input": GROUPS}).read(record).content == "p\na\nb"
    assert encoder({"input": PAIRS}).read({"prompt": 3}).content is None


@pytest.mark.parametrize(
    "framing", [{}, {"add_bos": False}, {"add_eos": False}, {"add_bos": False, "add_eos": False}]
)
def test_an_empty_text_is_a_document_where_nothing_is_masked(encoder, framing):
    """It is what the text recipe makes of it where no encoder is needed."""
    opened = encoder({"preset": "text", "preprocessing": {"max_seq_len": 9}}, **framing)
    done = opened.encode([{"text": text} for text in ("", "ab", "")])
    tokenizer = open_tokenizer("bytes", **framing)
    framed = frame(tokenizer.encode(["", "ab", ""]), tokenizer.identity)
    assert (done.refused, done.kept.tolist()) == ((), [0, 1, 2])
    assert done.values["sequence"].tolist() == framed.ids.tolist()
    assert done.offsets["documents"].tolist() == framed.offsets.tolist()


def test_a_text_of_which_a_cut_leaves_bos_alone_is_refused(encoder):
    """[T1.b]"""
    recipe = sections("train", "train", preprocessing={"max_seq_len": 2})
    recipe["input"]["sections"][1]["add_special_tokens"] = True
    done = encoder(recipe, add_eos=False).encode([record_of("", "ab"), record_of("", "")])
    assert reasons(done) == [(0, "no_supervision")]
    assert done.values["sequence"].tolist() == [256, 256], "nothing was cut"


@pytest.mark.parametrize(
    ("recipe", "record", "content"),
    [
        ("text", {"text": ""}, ""),
        ("text", {"text": "a"}, "a"),
        ("text", {"text": None}, None),
        ("text", {"text": 3}, None),
        ("text", {}, None),
        (sections("train", kind="sft"), record_of(""), None),
        (sections("train", kind="sft"), record_of("a"), "a"),
        (
            {"input": {"sections": [{"field": "f0", "action": "train", "prefix": "A: "}]}, "kind": "sft"},
            record_of(""),
            "",
        ),
        ({"input": PAIRS}, {"prompt": "p", "chosen": "c"}, None),
        ({"input": GROUPS}, {"prompt": "p", "responses": "a", "rewards": [1]}, None),
    ],
)
def test_a_record_without_content_is_refused_and_one_whose_content_is_empty_is_not(
    encoder, recipe, record, content
):
    opened = encoder(recipe)
    assert opened.read(record).content == content
    assert opened.encode([record]).kept.size == (content is not None)


def test_an_id_outside_the_vocabulary_is_an_error():
    """[T2.a]"""
    tokenizer = open_tokenizer("bytes")

    class Overflowing(Counted):
        def encode(self, texts):
            encoded = super().encode(texts)
            return type(encoded)(ids=encoded.ids.astype(np.uint32) + 200, offsets=encoded.offsets)

    encoder = open_encoder(load_recipe({"input": PLAIN}), Overflowing(tokenizer), tokenizer_spec="bytes")
    with pytest.raises(TokenizerError, match="below the vocabulary size 259, got"):
        encoder.encode([{"prompt": "a", "response": "b"}])


def test_the_json_of_an_encoder_is_that_of_its_recipe_where_there_is_no_template(encoder):
    """[T1.c]"""
    assert encoder({"input": PLAIN}).to_json() == load_recipe({"input": PLAIN}).to_json()


# Items end to end, against the same done item by item.

BOS = 9
ITEMS = st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1)), max_size=6), max_size=8)


def ragged(items, owners=None):
    tokens = [pair for item in items for pair in item]
    return Ragged(
        ids=np.array([token for token, _ in tokens], np.uint16),
        mask=np.array([trained for _, trained in tokens], np.uint8),
        offsets=offsets_of(map(len, items)),
        owners=np.array(range(len(items)) if owners is None else owners, np.int64),
    )


def items_of(value):
    pairs = list(zip(value.ids.tolist(), value.mask.tolist(), strict=True))
    return [pairs[a:b] for a, b in zip(value.offsets[:-1].tolist(), value.offsets[1:].tolist(), strict=True)]


@given(ITEMS)
def test_lengths_positions_and_supervision_are_those_of_the_items(items):
    value = ragged(items)
    assert value.lengths.tolist() == [len(item) for item in items]
    assert value.positions.tolist() == [place for item in items for place in range(len(item))]
    assert value.num_trained.tolist() == [sum(trained for _, trained in item) for item in items]
    assert value.trained.tolist() == [any(trained for _, trained in item) for item in items]


@given(ITEMS, st.data())
def test_items_are_taken_in_any_order(items, data):
    chosen = data.draw(st.lists(st.integers(0, len(items) - 1), max_size=8)) if items else []
    value = ragged(items).taken(np.array(chosen, np.int64))
    assert items_of(value) == [items[index] for index in chosen]
    assert value.owners.tolist() == chosen


@given(ITEMS, st.data())
def test_two_are_merged_in_the_order_of_their_records(items, data):
    sides = data.draw(st.lists(st.booleans(), min_size=len(items), max_size=len(items)))
    halves = []
    for wanted in (False, True):
        owners = [index for index, side in enumerate(sides) if side == wanted]
        halves.append(ragged([items[index] for index in owners], owners))
    value = halves[0].merged(halves[1])
    assert items_of(value) == items
    assert value.owners.tolist() == list(range(len(items)))


@given(ITEMS, st.integers(1, 6), st.booleans())
def test_items_are_cut_at_the_wanted_end_and_keep_their_bos(items, most, keep_end):
    def cut(item):
        if len(item) <= most:
            return item
        if not keep_end:
            return item[:most]
        return [(BOS, 0), *item[len(item) - most + 1 :]] if item[0][0] == BOS else item[-most:]

    before = ragged(items)
    assert items_of(before.shortened(most, keep_end=keep_end, bos_id=BOS)) == [cut(item) for item in items]
    assert items_of(before) == items


@given(ITEMS)
def test_the_trained_run_reaches_from_the_first_trained_token_to_the_last(items):
    items = [item for item in items if any(trained for _, trained in item)]
    value = ragged(items)
    cut = value.sliced(np.arange(len(items)), *value.trained_run())

    def run(item):
        places = [place for place, (_, trained) in enumerate(item) if trained]
        return item[places[0] : places[-1] + 1]

    assert items_of(cut) == [run(item) for item in items]


@given(st.lists(st.lists(st.sampled_from(["", "a", "b", "ab", "ba"]), min_size=1, max_size=4), max_size=5))
def test_items_are_compared_with_the_first_of_their_record(groups):
    words = [(owner, word, group[0]) for owner, group in enumerate(groups) for word in group]
    value = ragged([[(ord(letter) - 97, 0) for letter in word] for _, word, _ in words])
    value = replace(value, owners=np.array([owner for owner, _, _ in words], np.int64))
    assert value.same_as_first().tolist() == [word == first for _, word, first in words]
