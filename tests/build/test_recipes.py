"""Every recipe through a whole build: what goes in as records comes out as the arrays of its training type."""

import json
import resource

import msgspec
import pyarrow as pa
import pytest

from tokenmill.build import PrepareOptions, counts, prepare
from tokenmill.encode.engines import open_tokenizer
from tokenmill.errors import ConfigError, DocumentError
from tokenmill.store import open_store, verify

TOKENIZER = open_tokenizer("bytes")
CHATS = [
    {"messages": [{"role": "user", "content": f"What is {i}?"}, {"role": "assistant", "content": f"It is {i}."}]}
    for i in range(40)
]


def build(records, tmp_path, *, workers=1, recipe="text", **options):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    prepare(
        path,
        out=tmp_path / "out",
        recipe=recipe,
        workers=workers,
        progress=False,
        options=PrepareOptions(**options),
    )
    return tmp_path / "out"


def trained(store, index, ids="sequence", mask="loss_mask"):
    record = store.fetch_record(index, [ids, mask])
    return TOKENIZER.decode(record[ids][record[mask] == 1])


@pytest.mark.parametrize("storage_format", ["bin", "h5"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_chat_trains_on_what_the_assistant_said_and_nothing_else(tmp_path, workers, storage_format):
    """[T1.a]"""
    out = build(
        CHATS,
        tmp_path,
        recipe="chat",
        chat_template="chatml",
        workers=workers,
        chunk_bytes=1000,
        storage_format=storage_format,
    )
    store = open_store(out)
    assert (store.manifest.kind, store.manifest.storage, verify(out).documents) == ("sft", storage_format, 40)
    assert [trained(store, i) for i in range(40)] == [f"It is {i}.<|im_end|>" for i in range(40)]
    assert store.fetch_record(7, "position_ids").tolist() == list(range(store.fetch_record(7, "sequence").size))


@pytest.mark.parametrize(
    ("recipe", "way_out"),
    [
        ("text", r"name the field of the text with text_field=\.\.\., or the recipe with recipe=\.\.\."),
        ("chat", r"name the fields in a recipe, or take the preset that has them with recipe=\.\.\."),
        ("dpo", r"name the fields in a recipe, or take the preset"),
    ],
)
def test_a_record_without_its_fields_names_the_way_out_of_its_recipe(tmp_path, recipe, way_out):
    """`text_field` is for the recipe `text` alone."""
    with pytest.raises(DocumentError, match=rf'in\.jsonl:1: .*; {way_out}.*, or skip .* on_error="skip"$'):
        build([{"dialog": "a"}], tmp_path, recipe=recipe, chat_template=None if recipe == "text" else "chatml")


def test_a_system_prompt_that_nothing_reads_is_counted_and_has_an_example(tmp_path):
    """[T1.d]"""
    told = {**CHATS[0], "system_prompt": "Be brief."}
    out = build([CHATS[1], told, told], tmp_path, recipe="chat", chat_template="chatml")
    assert open_store(out).manifest.skipped["noted"] == {"system_prompt_not_read": 1}


def test_templates_are_rendered_in_a_worker_however_small_the_build(tmp_path):
    """[S.c] Only there may the system limit a process."""

    def cpu_of_children():
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    (tmp_path / "texts").mkdir()
    before = cpu_of_children()
    build([{"text": "a"}], tmp_path / "texts")
    assert cpu_of_children() == before
    build(CHATS, tmp_path, recipe="chat", chat_template="chatml")
    assert cpu_of_children() > before


def test_of_each_note_the_first_document_is_kept_over_units_and_builds(tmp_path):
    """[T1.d]"""
    silent = {"messages": [CHATS[0]["messages"][0], {"role": "assistant", "content": ""}]}
    flagged = {"messages": [CHATS[0]["messages"][0], {"role": "assistant", "content": "x", "train": True}]}
    options = {"recipe": "chat", "chat_template": "chatml", "chunk_bytes": 1000}
    out = build([*CHATS[:25], silent, *CHATS[25:], silent], tmp_path, **options)
    assert open_store(out).manifest.skipped["noted"] == {"empty_answers": 25}
    (tmp_path / "more.jsonl").write_bytes(
        b"".join(msgspec.json.encode(each) + b"\n" for each in (*CHATS, flagged, silent))
    )
    options = PrepareOptions(chat_template="chatml", chunk_bytes=1000)
    inputs = [tmp_path / "in.jsonl", tmp_path / "more.jsonl"]
    prepare(inputs, out=out, recipe="chat", workers=1, progress=False, options=options)
    store = open_store(out)
    assert store.manifest.skipped["noted"] == {"empty_answers": 25, "flags_of_training": 82}
    assert [trained(store, document) for document in (25, 82)] == ["<|im_end|>", "x<|im_end|>"]


def test_every_reason_has_an_example_however_many_records_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(counts, "MAX_LISTED", 3)
    records = [*({"messages": 1} for _ in range(5)), {"messages": CHATS[0]["messages"][:1]}, CHATS[0]]
    out = build(records, tmp_path, recipe="chat", chat_template="chatml", on_error="skip")
    skipped = open_store(out).manifest.skipped
    assert skipped["counts"] == {"no_trained_message": 1, "not_messages": 5}
    assert [(each["reason"], each["line"]) for each in skipped["first"]] == [
        *(("not_messages", line) for line in (1, 2, 3)),
        ("no_trained_message", 6),
    ]


def test_options_say_the_system_the_turns_and_the_roles_over_a_recipe(tmp_path):
    turns = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "Two."}]
    chats = [{"messages": [*turns, {"role": "user", "content": "3?"}, {"role": "assistant", "content": "Three."}]}]
    options = {"chat_template": "chatml", "system": "Be short.", "train_turns": "last"}
    store = open_store(build(chats, tmp_path, recipe="chat", **options))
    assert "<|im_start|>system\nBe short.<|im_end|>" in TOKENIZER.decode(store.fetch_record(0, "sequence"))
    assert trained(store, 0) == "Three.<|im_end|>"
    said = store.manifest.recipe["recipe"]
    assert (said["system"], said["train_turns"]) == ("Be short.", "last")
    (tmp_path / "again").mkdir()
    mask = {"user": "train", "assistant": "mask"}
    store = open_store(build(chats, tmp_path / "again", recipe="chat", chat_template="chatml", mask=mask))
    assert trained(store, 0) == "2?<|im_end|>3?<|im_end|>"
    assert store.manifest.recipe["recipe"]["mask"] == {"assistant": "mask", "system": "mask", "user": "train"}
    with pytest.raises(ConfigError, match="mask must name roles, got 'asistant'; did you mean 'assistant'"):
        build(chats, tmp_path / "again", recipe="chat", chat_template="chatml", mask={"asistant": "train"})


LONG = [{"prompt": "Say it.", "response": "x" * size} for size in (5, 30, 6, 40)]


def test_records_that_lose_an_answer_to_max_seq_len_are_counted_and_told(tmp_path, capsys):
    """A prompt has 40 tokens with its headings and BOS."""
    store = open_store(build(LONG, tmp_path, recipe="instruction", max_seq_len=70))
    assert (store.num_documents, store.manifest.skipped["truncated"]) == (4, 2)
    assert store.manifest.skipped["notes"] == {"answers_cut": 2}
    told = " ".join(capsys.readouterr().err.split())
    assert (
        "warning: 2 of 4 records lost trained tokens at their end to max_seq_len = 70; raise it, on_long=" in told
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_records_that_are_too_long_are_dropped_and_counted(tmp_path, workers):
    out = build(
        LONG, tmp_path, recipe="instruction", max_seq_len=70, on_long="drop", workers=workers, chunk_bytes=60
    )
    store = open_store(out)
    assert [trained(store, number) for number in range(2)] == ["xxxxx<|eos|>", "xxxxxx<|eos|>"]
    assert (store.num_documents, store.manifest.skipped["counts"]) == (2, {"too_many_tokens": 2})
    assert [str(store.origin(number)) for number in range(2)] == ["in.jsonl:1", "in.jsonl:3"]


@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_record_that_is_too_long_stops_a_build_that_says_so(tmp_path, on_error):
    with pytest.raises(
        DocumentError, match=r"in.jsonl:2: a record must not be longer than max_seq_len, got 72 tokens"
    ):
        build(LONG, tmp_path, recipe="instruction", max_seq_len=70, on_long="stop", on_error=on_error)
    with pytest.raises(
        ConfigError, match=r"on_long is for records with more than max_seq_len tokens, got 'drop' and"
    ):
        build(LONG, tmp_path, recipe="instruction", on_long="drop")


def test_positions_may_go_on_through_the_shard(tmp_path):
    recipe = {"preset": "chat", "chat_template": "chatml", "output": {"position_ids_mode": "continuous"}}
    store = open_store(build(CHATS, tmp_path, recipe=recipe))
    assert store.fetch(0, store.num_tokens, "position_ids").tolist() == list(range(store.num_tokens))


def test_a_chat_without_a_template_says_how_to_name_one(tmp_path):
    with pytest.raises(ConfigError, match="template"):
        build(CHATS, tmp_path, recipe="chat")


def test_a_refusal_of_the_chat_template_says_rule_and_cause(tmp_path):
    """[T1.b]"""
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    records = [*CHATS[:2], {"messages": [CHATS[0]["messages"][0], call]}]
    with pytest.raises(DocumentError) as caught:
        build(records, tmp_path, recipe="chat", chat_template="chatml")
    place, _, told = str(caught.value).partition(": ")
    assert place.endswith("in.jsonl:3")
    assert told.startswith(
        "every message that is trained on must be written by the chat template, got the template writes no tool "
        "calls, and message 2 of 2 (assistant, with tool calls) has nothing else; "
    )


@pytest.mark.parametrize(
    "options", [{}, {"max_seq_len": 20}, {"domain_key": "kind"}], ids=["fast", "cut", "domain"]
)
def test_an_empty_text_that_is_kept_is_a_document_whatever_else_is_asked_for(tmp_path, options):
    records = [{"text": text, "kind": "web"} for text in ("one", "", "two")]
    out = build(records, tmp_path, keep_empty=True, **options)
    store = open_store(out / "web" if "domain_key" in options else out)
    assert [TOKENIZER.decode(store.fetch_record(i, "sequence")) for i in range(3)] == [
        "<|bos|>one<|eos|>",
        "<|bos|><|eos|>",
        "<|bos|>two<|eos|>",
    ]


def test_pairs_keep_their_ends(tmp_path):
    records = [
        {"prompt": f"Say {i}: ", "chosen": "yes " * i + "!", "rejected": "no " * (40 - i) + "!"} for i in range(40)
    ]
    store = open_store(build(records, tmp_path, recipe="dpo", max_tokens_per_shard=700))
    assert store.manifest.kind == "dpo"
    assert store.num_shards > 3
    for i, record in enumerate(records):
        assert trained(store, i, "chosen", "chosen_mask") == record["chosen"] + "<|eos|>"
        assert trained(store, i, "rejected", "rejected_mask") == record["rejected"] + "<|eos|>"
        whole = TOKENIZER.decode(store.fetch_record(i, "chosen"))
        assert whole == f"<|bos|>{record['prompt']}{record['chosen']}<|eos|>"


def test_groups_keep_their_responses_and_rewards(tmp_path):
    records = [
        {
            "prompt": f"Say {i}",
            "responses": [f"{i}-{j}" for j in range(i % 4 + 1)],
            "rewards": [j / 2 for j in range(i % 4 + 1)],
        }
        for i in range(30)
    ]
    store = open_store(build(records, tmp_path, recipe="grpo", max_tokens_per_shard=100))
    for i, record in enumerate(records):
        found = store.fetch_record(i)
        assert TOKENIZER.decode(found["prompts"]) == f"<|bos|>{record['prompt']}"
        assert [TOKENIZER.decode(ids) for ids in found["responses"]] == [f"{r}<|eos|>" for r in record["responses"]]
        assert [mask.tolist() for mask in found["masks"]] == [[1] * len(ids) for ids in found["responses"]]
        assert found["rewards"].tolist() == record["rewards"]


def test_a_record_that_cannot_be_encoded_stops_with_its_line_and_reason(tmp_path):
    """[T1.b]"""
    records = [*CHATS[:10], {"messages": [{"role": "user", "content": "nobody answers"}]}, *CHATS]
    with pytest.raises(DocumentError, match=r"in\.jsonl:11: .*on_error="):
        build(records, tmp_path, recipe="chat", chat_template="chatml", chunk_bytes=300)


def test_skipped_records_are_counted_by_reason_and_listed_by_line(tmp_path):
    """[T1.b]"""
    lonely = {"messages": [{"role": "user", "content": "nobody answers"}]}
    records = [*CHATS[:10], lonely, *CHATS[10:20], {"text": "no messages"}, lonely]
    out = build(records, tmp_path, recipe="chat", chat_template="chatml", on_error="skip", chunk_bytes=500)
    skipped = open_store(out).manifest.skipped
    assert [one["line"] for one in skipped["first"]] == [11, 22, 23]
    assert sum(skipped["counts"].values()) == 3
    assert [one["reason"] for one in skipped["first"]].count("missing_field") == 1
    assert open_store(out).num_documents == 20


def test_records_that_were_cut_are_counted(tmp_path):
    out = build([{"text": "x" * size} for size in (5, 50, 500)], tmp_path, max_seq_len=20)
    store = open_store(out)
    assert [store.fetch_record(i, "sequence").size for i in range(3)] == [7, 20, 20]
    assert store.manifest.skipped["truncated"] == 2


def test_another_chat_template_is_refused_with_the_difference(tmp_path):
    """[T1.c, T2.c] The content of a template is part of what a store is, wherever its file stands."""
    from tokenmill.errors import StoreExistsError

    template = tmp_path / "mine.jinja"
    head = "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'user' %}{{ m.content }}{% else %}"
    tail = "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}"
    template.write_text(head + tail)
    build(CHATS, tmp_path, recipe="chat", chat_template=str(template), eos_token="<|eos|>")
    template.write_text(head + "\n" + tail)
    with pytest.raises(StoreExistsError, match=r"chat_template"):
        build(CHATS, tmp_path, recipe="chat", chat_template=str(template), eos_token="<|eos|>")


@pytest.mark.parametrize(("policy", "found"), [(None, []), ("text", []), ("encode", [257]), ("drop", [])])
def test_control_strings_in_raw_text_are_what_the_recipe_says(tmp_path, policy, found):
    """[T2.b, S.i]"""
    store = open_store(build([{"text": "one <|eos|> two"}], tmp_path, control_strings=policy))
    ids = store.fetch_record(0, "sequence")[1:-1]
    assert [i for i in ids.tolist() if i > 255] == found
    assert TOKENIZER.decode(ids) == ("one  two" if policy == "drop" else "one <|eos|> two")


@pytest.mark.parametrize("recipe", ["text", "instruction"])
def test_a_text_that_spells_bos_twice_is_a_bad_record(tmp_path, recipe):
    """[T2.b]"""
    texts = ["one", "see <|bos|><|bos|> here", "two", "a <|bos|> b", "<|bos|>c", "three"]
    records = [{"text": text} if recipe == "text" else {"prompt": text, "response": "r"} for text in texts]
    options = {"control_strings": "encode", "add_bos": True}
    rule = r"in\.jsonl:2: special tokens in a text must not make BOS twice in a row, got two; leave BOS out"
    with pytest.raises(DocumentError, match=rule):
        build(records, tmp_path, recipe=recipe, **options)
    store = open_store(build(records, tmp_path, recipe=recipe, on_error="skip", **options))
    assert store.manifest.skipped["counts"] == {"second_bos": 1}
    bos = TOKENIZER.special_ids["<|bos|>"]
    found = [store.fetch_record(index, "sequence").tolist() for index in range(store.num_documents)]
    spelled = [0, 0, 1, 0 if recipe == "text" else 1, 0]  # a text that starts with BOS is given no other
    assert [(ids[0], ids.count(bos) - 1) for ids in found] == [(bos, count) for count in spelled]
    for ids, text in zip(found, [texts[0], *texts[2:]], strict=True):
        assert text.removeprefix("<|bos|>") in TOKENIZER.decode(ids)


def test_messages_cannot_be_given_control_ids(tmp_path):
    """[S.i]"""
    with pytest.raises(ConfigError, match="control_strings must be text where messages go through a chat template"):
        build(CHATS, tmp_path, recipe="chat", chat_template="chatml", control_strings="encode")


def test_ends_of_turns_that_anyone_can_spell_are_told_loudly(tmp_path, capsys):
    """[S.i]"""
    build(CHATS, tmp_path, recipe="chat", chat_template="chatml")
    assert "ends turns with '<|im_end|>', which the tokenizer has no special token for" in capsys.readouterr().err


def tool_records(count):
    """Conversations with tools whose definitions and arguments differ from record to record."""
    records = []
    for number in range(count):
        name, argument = f"tool_{number % 5}", f"argument_{number % 7}"
        values = (number, f"value {number}", [number, number + 1], {"deep": number}, True)
        call = {"type": "function", "function": {"name": name, "arguments": {argument: values[number % 5]}}}
        kinds = {argument: {"type": "string", **({"enum": ["a"]} if number % 3 else {})}}
        parameters = {"type": "object", "properties": kinds}
        messages = [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": f"result {number}", **({"name": name} if number % 2 else {})},
            {"role": "assistant", "content": f"answer {number}"},
        ]
        function = {"name": name, "parameters": parameters}
        records.append({"messages": messages, "tools": [{"type": "function", "function": function}]})
    return records


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
@pytest.mark.parametrize("as_json", [False, True])
def test_tools_are_written_the_same_from_columns_as_from_lines(tmp_path, ending, as_json):
    """Structs give null to what a record does not have; datasets keeps mixed types as JSON."""
    datasets = pytest.importorskip("datasets")
    from tests.encode.chat.stock import STOCK

    records = tool_records(50)
    if not as_json:  # a column has one type
        for record in records:
            arguments = record["messages"][1]["tool_calls"][0]["function"]["arguments"]
            arguments.update({name: str(value) for name, value in arguments.items()})
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    table = datasets.Dataset.from_list(records, on_mixed_types="use_json" if as_json else None)
    if ending == "parquet":
        table.to_parquet(tmp_path / "a.parquet")
    else:
        rows = table.data.table
        with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, rows.schema) as writer:
            writer.write_table(rows)
    options = PrepareOptions(chat_template=str(STOCK["qwen3"]))
    stores = []
    for name in ("a.jsonl", f"a.{ending}"):
        out = tmp_path / f"store-{name}"
        prepare(tmp_path / name, out=out, tokenizer="bytes", recipe="chat", options=options, progress=False)
        store = open_store(out)
        stores.append([{key: value.tolist() for key, value in store.fetch_record(i).items()} for i in range(50)])
    assert stores[0] == stores[1]
