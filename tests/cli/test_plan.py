from __future__ import annotations

import json
import re
from html import unescape
from xml.etree import ElementTree

import numpy as np
import pytest

from tokenmill.run.run import Run
from tokenmill.store import open_store


def test_json_is_the_report_of_the_compiler(tokenmill, run_toml):
    facts = tokenmill("plan", run_toml, "--json").json
    plan = Run.from_toml(run_toml).plan()
    assert facts["fingerprint"] == plan.fingerprint
    assert (facts["steps"], facts["rows"], facts["tokens"]) == (10, 6 * 8 + 4 * 4, (6 * 8 + 4 * 4) * 16)
    assert [(s["name"], s["start_step"], s["end_step"], s["global_batch_size"]) for s in facts["stages"]] == [
        ("base", 0, 6, 8),
        ("late", 6, 10, 4),
    ]
    assert [(s["stage"], s["source"], s["rows"]) for s in facts["shares"]] == [
        ("base", "books", 12),
        ("base", "web", 36),
        ("late", "books", 8),
        ("late", "web", 8),
    ]
    assert [(s["name"], s["drawn"]) for s in facts["sources"]] == [("web", 44), ("books", 20)]


def test_json_balances_the_fate_of_every_token(tokenmill, run_toml):
    """[P2.a, P2.b]"""
    facts = tokenmill("plan", run_toml, "--json").json
    run = Run.from_toml(run_toml)
    for source in facts["sources"]:
        fates = source["fates"]
        assert fates["tokens"] == run.stores[source["name"]].num_tokens
        assert fates["tokens"] == fates["trained"] + fates["masked"]
        assert fates["dropped"] == {}


TITLES = ["Stages", "Mixture", "Rows and labels", "Sources", "Fate of the tokens of an epoch", "Reading and memory"]


def test_a_plan_is_a_summary_and_full_has_all_tables(tokenmill, run_toml):
    short, done = tokenmill("plan", run_toml), tokenmill("plan", run_toml, "--full")
    assert (short.code, short.err, done.code, done.err) == (0, "", 0, "")
    assert [line for line in done.lines if line in TITLES] == TITLES
    assert re.search(r"plan [0-9a-f]{32}  10 steps, 64 rows, 1,024 tokens", done.out)
    assert [line for line in short.lines if line in TITLES] == []
    assert short.lines[0] == "run.toml: 10 steps, 64 rows, 1,024 tokens"
    assert len(short.lines) < len(done.lines)


def test_the_summary_has_steps_tokens_shares_epochs_and_padding_of_the_report(tokenmill, run_toml):
    facts = tokenmill("plan", run_toml, "--json").json
    lines = [line.split() for line in tokenmill("plan", run_toml).lines]
    assert [line for line in lines if line[:1] in (["base"], ["late"])] == [
        ["base", "0:6", "8", "16", "768", _padding(facts, "base"), "web", "75%,", "books", "25%"],
        ["late", "6:10", "4", "16", "256", _padding(facts, "late"), "books", "50%,", "web", "50%"],
    ]
    held = {
        source["name"]: sum(
            share["trained"] + share["unlabelled"] for share in facts["shares"] if share["source"] == source["name"]
        )
        for source in facts["sources"]
    }
    shown = {line[0]: line[1:] for line in lines if line[:1] in (["web"], ["books"])}
    for source in facts["sources"]:
        name, repeat = source["name"], source["first_repeat"]
        share = f"{held[name] / sum(held.values()):.1%}"
        at = ["–"] if repeat is None else ["step", str(repeat)]
        assert shown[name] == [str(source["drawn"]), f"{held[name]:,}", share, f"{source['epochs']:.2f}", *at]


def _padding(facts, stage):
    shares = [share for share in facts["shares"] if share["stage"] == stage]
    return f"{sum(share['padding'] for share in shares) / sum(share['tokens'] for share in shares):.1%}"


def test_a_summary_counts_what_it_does_not_list(tokenmill, run_toml):
    stages = "".join(
        f'[[stages]]\nname = "s{number}"\nstart_step = {number}\nweights = {{ web = 0.5, books = 0.5 }}\n\n'
        for number in range(9)
    )
    run_toml.write_text(run_toml.read_text().partition("[[stages]]")[0] + stages)
    done = tokenmill("plan", run_toml)
    assert [line.split()[0] for line in done.lines if re.match(r"s\d ", line)] == [f"s{n}" for n in range(6)]
    assert "3 more stages" in done.lines
    assert [n for n in range(9) if f"\ns{n} " not in tokenmill("plan", run_toml, "--full").out] == []


def test_no_token_is_read(tokenmill, folder):
    """[A1.a]"""
    before = tokenmill("plan", folder / "run.toml", "--json").json
    for shard in folder.glob("stores/*/shard-*"):
        (shard / "sequence.bin").unlink()
    after = tokenmill("plan", folder / "run.toml", "--json").json
    for facts in (before, after):
        assert facts["costs"].pop("compile_seconds") > 0
    assert after == before


RECORDS = {
    "instruction": [{"prompt": f"{n} + {n} =", "response": f"{n + n}" * (n % 3 + 1)} for n in range(30)],
    "dpo": [{"prompt": f"{n}?", "chosen": f"{n}.", "rejected": "No." * (n % 3 + 1)} for n in range(30)],
    "grpo": [
        {"prompt": f"{n}?", "responses": ["a" * n, "b"][: n % 3], "rewards": [1, 0][: n % 3]} for n in range(30)
    ],
}


@pytest.mark.parametrize("recipe", RECORDS)
def test_what_is_said_of_a_stage_is_what_its_batches_hold(tokenmill, tmp_path, recipe):
    """[P2.a] Of stores with masks, of pairs and of groups."""
    lines = [json.dumps(record) + "\n" for record in RECORDS[recipe]]
    (tmp_path / "data.jsonl").write_text("".join(lines), encoding="utf-8")
    arguments = ["--out", tmp_path / "data", "--recipe", recipe, "--on-error", "skip", "--workers", 1]
    assert tokenmill("prepare", tmp_path / "data.jsonl", *arguments).code == 0
    (tmp_path / "run.toml").write_text(
        "[run]\nsteps = 9\nglobal_batch_size = 5\nseq_len = 200\n"
        '[[sources]]\nname = "data"\nstore = "data"\n'
        '[[stages]]\nname = "one"\nstart_step = 0\n[[stages]]\nname = "two"\nstart_step = 4\nseq_len = 220\n',
        encoding="utf-8",
    )
    totals = {"one": [0, 0], "two": [0, 0]}
    for line in tokenmill("batches", tmp_path / "run.toml").lines:
        _, stage, said = line.split("\t")
        for index, number in enumerate(re.findall(r"[0-9][0-9,]*(?= )", said)):
            totals[stage][index] += int(number.replace(",", ""))
    facts = tokenmill("plan", tmp_path / "run.toml", "--json").json
    assert {s["name"]: s["tokens"] for s in facts["stages"]} == {name: room for name, (room, _) in totals.items()}
    assert {s["stage"]: [s["tokens"], s["trained"]] for s in facts["shares"]} == totals
    assert all(s["tokens"] == s["trained"] + s["unlabelled"] + s["padding"] for s in facts["shares"])
    summary = tokenmill("plan", tmp_path / "run.toml").lines
    assert [line.split()[0] for line in summary[2:4]] == ["one", "two"]
    shown = tokenmill("plan", tmp_path / "run.toml", "--full").out
    for share in facts["shares"]:
        cells = [share["rows"], share["trained"], share["unlabelled"], share["padding"]]
        assert re.search(rf"{share['stage']} +data .*" + " +".join(f"{cell:,}" for cell in cells), shown)


def cuts_told(tokenmill, file):
    """Return the warnings about records that are cut."""
    return [told for told in tokenmill("plan", file, "--json").json["warnings"] if " records of " in told]


CHATS = 'packing = "best_fit"'
LOST = "what follows a cut is trained without what stood before"


@pytest.fixture
def chats(tokenmill, tmp_path):
    """Return the config of a run on 13 records with a mask, 2 of more than 129 tokens, and on their texts."""
    lengths = [121, 122, 123, *[10] * 10]  # beside BOS, a mark of 6 tokens and EOS
    (tmp_path / "recipe.json").write_text(
        '{"input": {"sections": [{"field": "mark", "action": "mask"}, {"field": "text", "action": "train"}]}}',
        encoding="utf-8",
    )
    lines = [json.dumps({"mark": "answer", "text": "a" * length}) + "\n" for length in lengths]
    (tmp_path / "data.jsonl").write_text("".join(lines), encoding="utf-8")
    for name, chosen in (("chat", tmp_path / "recipe.json"), ("web", "text")):
        arguments = ["--out", tmp_path / name, "--recipe", chosen, "--workers", 1]
        assert tokenmill("prepare", tmp_path / "data.jsonl", *arguments).code == 0
    (tmp_path / "run.toml").write_text(
        f"[run]\nsteps = 4\nglobal_batch_size = 2\nseq_len = 128\n{CHATS}\n"
        '[[sources]]\nname = "chat"\nstore = "chat"\n[[sources]]\nname = "web"\nstore = "web"\n'
        '[[stages]]\nname = "one"\nstart_step = 0\nweights = { chat = 1, web = 1 }\n'
        '[[stages]]\nname = "two"\nstart_step = 2\nseq_len = 130\nweights = { chat = 1 }\n',
        encoding="utf-8",
    )
    return tmp_path / "run.toml"


def test_cut_records_with_a_mask_are_told_by_stage_and_source(tokenmill, chats):
    """[T1.d] A record of seq_len + 1 tokens is one row, as its last token is only a label."""
    lengths = np.diff(open_store(chats.parent / "chat").document_offsets(0, 13)).tolist()
    assert lengths[:4] == [129, 130, 131, 18]
    found = cuts_told(tokenmill, chats)
    way_out = 'on_long = "drop" leaves them out, "stop" refuses them (docs/reference/config.md)'
    assert found == [
        f"stage 'one': 2 of 13 records of 'chat' are longer than a row of 128 tokens and are cut: {LOST}; {way_out}"
    ]
    shown = tokenmill("plan", chats)
    assert (shown.code, shown.err) == (0, "")
    assert f"warning: {found[0]}" in " ".join(shown.out.split())


@pytest.mark.parametrize(
    ("packing", "fate", "lost"),
    [
        ('packing = "best_fit"\non_long = "truncate_end"', "lose their end", 1 + 2),
        ('packing = "best_fit"\non_long = "truncate_start"', "lose their beginning", 0),  # BOS and mark go first
        ('packing = "padded"\non_long = "truncate_end"', "lose their end", 1 + 2),
        ('packing = "best_fit"\non_long = "drop"', "are dropped", 123 + 124),
        ('packing = "padded"\non_long = "drop"', "are dropped", 123 + 124),
    ],
)
def test_what_records_longer_than_a_row_lose_is_counted(tokenmill, chats, packing, fate, lost):
    chats.write_text(chats.read_text(encoding="utf-8").replace(CHATS, packing), encoding="utf-8")
    start = "stage 'one': 2 of 13 records of 'chat' are longer than a row of 128 tokens and"
    (found,) = [one for one in cuts_told(tokenmill, chats) if one.startswith("stage 'one'")]
    assert found.startswith(f"{start} {fate}, {lost} trained tokens with them; ")
    fates = Run.from_toml(chats).plan().stages[0].rows["chat"].fates()
    whole = int(
        open_store(chats.parent / "chat").fetch(0, 13 * 8 + sum([121, 122, 123, *[10] * 10]), "loss_mask").sum()
    )
    assert fates.trained == whole - lost
    assert fates.tokens == fates.trained + fates.masked + sum(fates.dropped.values())


def test_nothing_is_told_of_records_that_a_crop_discards(tokenmill, chats):
    text = chats.read_text(encoding="utf-8").replace(CHATS, 'packing = "bos_best_fit"\ncrop = "discard"')
    chats.write_text(text, encoding="utf-8")
    assert cuts_told(tokenmill, chats) == []


def test_a_loader_logs_what_becomes_of_long_records(chats, caplog):
    Run.from_toml(chats).loader(micro_batch=2)
    (logged,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert logged.startswith(
        "stage 'one': 2 of 13 records of 'chat' are longer than a row of 128 tokens and are cut"
    )
    caplog.clear()
    Run.from_toml(chats).loader(rank=1, world_size=2)
    assert not caplog.records


def test_a_record_longer_than_a_row_stops_a_run_that_says_so(tokenmill, chats):
    text = chats.read_text(encoding="utf-8")
    chats.write_text(text.replace(CHATS, 'on_long = "stop"'), encoding="utf-8")
    assert re.search(
        r"a document must have at most 129 tokens, got 130 in document 1; raise", tokenmill("plan", chats).err
    )
    chats.write_text(text.replace(CHATS, 'on_long = "stop"\nsplit = "truncate_end"'), encoding="utf-8")
    assert (
        "on_long replaces, got 'truncate_end' with on_long = 'stop'; remove split" in tokenmill("plan", chats).err
    )
    chats.write_text(text.replace(CHATS, 'on_long = "drop"\npacking = "concat"'), encoding="utf-8")
    assert "cannot be combined with packing = " in tokenmill("plan", chats).err


@pytest.mark.parametrize("seq_len", [1, 7, 40, 128, 380])
def test_concat_counts_the_records_that_have_labels_in_several_rows(tokenmill, chats, seq_len):
    text = chats.read_text(encoding="utf-8").replace(CHATS, 'packing = "concat"')
    chats.write_text(text.replace("seq_len = 128", f"seq_len = {seq_len}"), encoding="utf-8")
    rows = Run.from_toml(chats).plan().stages[0].rows["chat"]
    spans = rows.spans(np.arange(rows.num_rows))
    cut = int((np.bincount(spans.document[spans.length > 1]) > 1).sum())
    assert (cut > 0) == (seq_len < 380)  # of the only row, the rest of the last record is dropped
    found = [one for one in cuts_told(tokenmill, chats) if one.startswith("stage 'one'")]
    where = f"cut where a row of {seq_len} tokens ends"
    wanted = f"stage 'one': {cut} of 13 records of 'chat' are {where}: {LOST}; packing = \"best_fit\" cuts only"
    assert [one[: len(wanted)] for one in found] == [wanted][:cut]


def test_bos_best_fit_cuts_to_fill_a_row_and_says_so(tokenmill, chats):
    text = chats.read_text(encoding="utf-8").replace(CHATS, 'packing = "bos_best_fit"')
    chats.write_text(text, encoding="utf-8")
    one, two = cuts_told(tokenmill, chats)
    assert one.startswith(
        "stage 'one': 2 of 13 records of 'chat' are longer than a row of 128 tokens and are cut, and others where "
        f"that fills a row: {LOST}; "
    )
    assert two.startswith("stage 'two': 0 of 13 records")


def test_a_folder_is_no_run(tokenmill, folder):
    done = tokenmill("plan", folder / "stores" / "web")
    assert (done.code, done.out) == (2, "")
    path = re.escape(str(folder / "stores" / "web"))
    assert re.fullmatch(
        rf"error: {path}: must be the \.toml of a run, got a folder; `tokenmill inspect {path}` shows a store\n",
        done.err,
    )


def test_a_folder_with_a_run_in_it_is_answered_with_its_config(tokenmill, folder):
    assert tokenmill("plan", folder).err.endswith(f"got a folder; did you mean {folder / 'run.toml'}?\n")


def test_a_folder_of_several_stores_is_no_source(tokenmill, folder):
    text = (folder / "run.toml").read_text(encoding="utf-8")
    (folder / "run.toml").write_text(text.replace('"stores/web"', '"stores"'), encoding="utf-8")
    done = tokenmill("plan", folder / "run.toml")
    assert (done.code, done.out) == (1, "")
    stores = re.escape(str(folder.resolve() / "stores"))
    assert re.fullmatch(
        rf"error: {stores}: must be one store, got the stores books, web in it; "
        rf"name one of them, such as {stores}/books\n",
        done.err,
    )


@pytest.mark.parametrize("columns", [60, 80, 100, 140, 300])
def test_no_number_or_header_is_cut_on_a_narrow_terminal(tokenmill, folder, monkeypatch, columns):
    text = (folder / "run.toml").read_text(encoding="utf-8").replace("steps = 10", "steps = 3_000_000")
    for name in ("web", "books"):
        long = f"{name}-with-a-name-that-is-long"
        text = text.replace(f"{name} = ", f"{long} = ").replace(f'name = "{name}"', f'name = "{long}"')
    text = text.replace("start_step = 6", "start_step = 1_000_000")
    (folder / "long.toml").write_text(text, encoding="utf-8")
    facts = tokenmill("plan", folder / "long.toml", "--json").json
    monkeypatch.setenv("COLUMNS", str(columns))
    done = tokenmill("plan", folder / "long.toml", "--full")
    assert (done.code, done.err) == (0, "")
    assert max(map(len, done.lines)) <= columns
    words = done.out.split()
    numbers = [n for s in facts["stages"] for n in (s["rows"], s["tokens"], s["end_step"])]
    numbers += [n for s in facts["shares"] for n in (s["rows"], s["trained"], s["unlabelled"], s["padding"])]
    numbers += [n for s in facts["sources"] for n in (s["rows"], s["drawn"], s["fates"]["tokens"])]
    if columns < 80:
        assert "not shown at this width:" in done.out
        return
    assert [n for n in numbers if f"{n:,}" not in words] == []
    headers = "first end step batch seq_len asked got rows labels no label padding epochs drawn repeat trained why"
    assert [word for word in headers.split() if word not in words] == []


ILLEGAL = {
    "unknown key": ("seed = 7", "sed = 7", r"run: unknown key: 'sed'; did you mean 'seed'\?"),
    "unknown table": (
        '[[stages]]\nname = "base"',
        '[[stags]]\nname = "base"',
        r".*: unknown key: 'stags'; did you mean .*",
    ),
    "missing key": (
        "steps = 10\n",
        "",
        r"run: no length; set steps or epochs, for example .*",
    ),
    "wrong type": (
        "steps = 10",
        'steps = "10"',
        r"run\.steps: expected a whole number, got '10'; leave out the quotes",
    ),
    "bad toml": ("[run]", "[run", r".*run\.toml: expected TOML, got .*; fix that line"),
    "zero batch": (
        "global_batch_size = 8",
        "global_batch_size = 0",
        r"run: global_batch_size must be .*, got 0; .*",
    ),
    "negative weight": (
        "web = 0.75",
        "web = -0.75",
        r"stage 'base': weights must be positive, got \{'web': -0\.75\}; .*",
    ),
    "zero weight": ("web = 0.75", "web = 0", r"stage 'base': weights must be positive, got \{'web': 0\}; leave .*"),
    "nan weight": (
        "web = 0.75",
        "web = nan",
        r"stage 'base': weights must be positive, got \{'web': nan\}; leave .*",
    ),
    "unknown source": (
        "{ web = 0.75",
        "{ wbe = 0.75",
        r"stage 'base': weights must name sources, got 'wbe'; did .* 'web'\?",
    ),
    "stages out of order": (
        "start_step = 6",
        "start_step = 0",
        r"stage 'late': start_step must be above 0 .*, got 0; order .*",
    ),
    "first stage late": (
        "start_step = 0",
        "start_step = 1",
        r"stage 'base': the first stage must start at .*, got 1; .*",
    ),
    "stage after the end": (
        "start_step = 6",
        "start_step = 10",
        r"stage 'late': start_step must be below .*, got 10; .*",
    ),
    "missing store": (
        '"stores/books"',
        '"stores/boks"',
        r".*no store at this path: .*stores/boks \(the folder does not exist\); .*",
    ),
    "too many epochs": (
        'store = "stores/books"',
        'store = "stores/books"\nmax_epochs = 0.1',
        r"source 'books': max_epochs must not be passed, got .* tokens\) too many; lower its weight.*",
    ),
    "source twice": ('name = "books"', 'name = "web"', r"sources: names must differ, got 'web' twice; rename one"),
    "unknown packing": (
        "seed = 7",
        'packing = "cocnat"',
        r"run: packing must be one of .*, got 'cocnat'; did .* 'concat'\?",
    ),
    "unknown shuffle": ("seed = 7", 'shuffle = "ful"', r".*shuffle.* must be .*, got 'ful'; did you mean 'full'\?"),
}


@pytest.mark.parametrize("case", ILLEGAL)
@pytest.mark.parametrize(
    "command", [["plan"], ["batches", "--digest"], ["what", "--step", "0"]], ids=lambda c: c[0]
)
def test_an_illegal_config_is_refused_by_every_command_with_the_way_out(tokenmill, folder, case, command):
    """[A1.a]"""
    old, new, message = ILLEGAL[case]
    text = (folder / "run.toml").read_text(encoding="utf-8")
    assert old in text
    (folder / "run.toml").write_text(text.replace(old, new, 1), encoding="utf-8")
    # Nothing of this needs a token.
    for shard in folder.glob("stores/*/shard-*"):
        (shard / "sequence.bin").unlink()
    done = tokenmill(command[0], folder / "run.toml", *command[1:])
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(f"error: {message}\n", done.err)


def test_sources_of_two_tokenizers_are_refused_with_the_first_difference(tokenmill, folder):
    """[T2.a]"""
    arguments = ["--out", folder / "stores" / "books", "--rebuild", "--no-bos", "--workers", 1]
    assert tokenmill("prepare", folder / "books.jsonl", *arguments).code == 0
    done = tokenmill("plan", folder / "run.toml")
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(
        r"error: sources: all must be prepared with one tokenizer, got 'web' with bytes, 259 ids, "
        r"digest \w{8} and 'books' with bytes, 259 ids, digest \w{8} that differ in "
        r"add_bos: True and False; prepare one of them again\n",
        done.err,
    )


EDITS = """
[[skip]]
steps = "2:4"
reason = "loss spike"
[[quarantine]]
source = "web"
from_step = 3
documents = [5, 6]
reason = "<leak>"
[[quarantine]]
source = "web"
from_step = 5
documents = [6, 7]
"""


@pytest.fixture
def edited(folder):
    text = (folder / "run.toml").read_text(encoding="utf-8").replace("seq_len = 16", "seq_len = 160")
    (folder / "run.toml").write_text(text + EDITS, encoding="utf-8")
    return folder / "run.toml"


def test_skipped_steps_and_what_is_put_aside_are_told_apart(tokenmill, edited):
    """[O1.c] A document that two quarantines name is put aside once."""
    facts = tokenmill("plan", edited, "--json").json
    assert (facts["steps"], facts["skipped_steps"], facts["skipped_rows"]) == (10, 2, 16)
    assert facts["rows"] == 6 * 8 + 4 * 4 - 16
    assert sum(source["drawn"] for source in facts["sources"]) == facts["rows"] + facts["skipped_rows"]
    lengths = np.diff(open_store(edited.parent / "stores" / "web").document_offsets(0, 60)).tolist()
    assert [(q["from_step"], q["documents"], q["tokens"], q["reason"]) for q in facts["quarantined"]] == [
        (3, 2, lengths[5] + lengths[6], "<leak>"),
        (5, 1, lengths[7], ""),
    ]
    shown = tokenmill("plan", edited, "--full")
    assert (shown.code, shown.err) == (0, "")
    assert "Quarantined" in shown.out
    assert re.search(r"10 steps, 48 rows, 7,680 tokens, 2 steps skipped, compiled in \d+\.\d\d s", shown.out)


def test_tokens_of_records_that_are_put_aside_are_those_of_all_their_arrays(tokenmill, tmp_path):
    """[O1.c]"""
    for recipe in ("dpo", "grpo"):
        lines = [json.dumps(record) + "\n" for record in RECORDS[recipe]]
        (tmp_path / "data.jsonl").write_text("".join(lines), encoding="utf-8")
        arguments = ["--out", tmp_path / recipe, "--recipe", recipe, "--on-error", "skip", "--workers", 1]
        assert tokenmill("prepare", tmp_path / "data.jsonl", *arguments).code == 0
        (tmp_path / "run.toml").write_text(
            "[run]\nsteps = 30\nglobal_batch_size = 5\nseq_len = 200\n"
            f'[[sources]]\nname = "data"\nstore = "{recipe}"\n'
            '[[quarantine]]\nsource = "data"\nfrom_step = 4\ndocuments = [1, 7, 8]\n',
            encoding="utf-8",
        )
        facts = tokenmill("plan", tmp_path / "run.toml", "--json").json
        (aside,) = facts["quarantined"]
        assert aside["tokens"] == facts["sources"][0]["fates"]["dropped"]["quarantined"] > 0


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        ("from_step = 9\ndocuments = [0]", ["what it names"]),
        ("from_step = 0\ndocuments = [0]", []),
        ("from_step = 6", ["the source"]),
        ("from_step = 5", []),
    ],
)
def test_a_quarantine_that_changes_nothing_is_told(tokenmill, folder, edit, told):
    """[O1.c] Of a source that no step after 5 draws from."""
    text = (folder / "run.toml").read_text(encoding="utf-8").replace("web = 0.5, books = 0.5", "web = 1")
    quarantine = f'[[quarantine]]\nsource = "books"\n{edit}\n'
    (folder / "run.toml").write_text(text + quarantine, encoding="utf-8")
    found = tokenmill("plan", folder / "run.toml", "--json").json["warnings"]
    step = edit[len("from_step = ")]
    assert [one for one in found if one.startswith("quarantine")] == [
        f"quarantine of 'books': {what} would not be seen from step {step} on anyway; "
        "check from_step and the documents, or leave it out"
        for what in told
    ]


def test_rows_that_are_not_equally_full_suggest_to_weigh_by_tokens(tokenmill, folder):
    """[M1.a]"""
    prepare = ["prepare", folder / "short.jsonl", "--out", folder / "stores" / "books", "--rebuild", "--workers", 1]
    (folder / "short.jsonl").write_text('{"text": "a"}\n' * 99, encoding="utf-8")
    assert tokenmill(*prepare).code == 0
    text = (folder / "run.toml").read_text(encoding="utf-8")
    text = text.replace("seed = 7", 'seed = 7\npacking = "padded"\non_long = "truncate_end"')
    (folder / "run.toml").write_text(text, encoding="utf-8")

    def told():
        found = tokenmill("plan", folder / "run.toml", "--json").json
        return [one for one in found["warnings"] if "weigh_by" in one], found["shares"]

    warned, shares = told()
    assert [one.split(":")[0] for one in warned] == ["stage 'base'", "stage 'late'"]
    assert all(abs(share["realised"] - share["asked"]) < 0.05 for share in shares)
    (folder / "run.toml").write_text(text.replace("seed = 7", 'seed = 7\nweigh_by = "tokens"'), encoding="utf-8")
    warned, shares = told()
    assert warned == []
    assert [round(share["asked_tokens"], 9) for share in shares] == [0.25, 0.75, 0.5, 0.5]
    assert all(abs(share["realised_tokens"] - share["asked_tokens"]) < 0.1 for share in shares)


def test_what_is_read_and_kept_is_told_in_bytes(tokenmill, folder):
    """[D1.a]"""
    text = (folder / "run.toml").read_text(encoding="utf-8").replace("seed = 7", 'seed = 7\npacking = "concat"')
    (folder / "run.toml").write_text(text, encoding="utf-8")
    costs = tokenmill("plan", folder / "run.toml", "--json").json["costs"]
    width = np.dtype(open_store(folder / "stores" / "web").manifest.keys["sequence"]).itemsize
    assert costs["read_bytes_exact"]
    assert costs["read_bytes"] == (6 * 8 + 4 * 4) * 17 * width
    assert costs["read_bytes_a_step"] == {"base": 8 * 17 * width, "late": 4 * 17 * width}
    assert costs["index_bytes"] == 0
    batch = next(iter(Run.from_toml(folder / "run.toml").loader(micro_batch=1)))
    assert costs["loader_bytes"] == 9 * sum(array.nbytes for array in batch.values())


def test_the_page_holds_the_picture_the_tables_and_the_warnings(tokenmill, edited, tmp_path):
    page, picture = tmp_path / "plan.html", tmp_path / "plan.svg"
    done = tokenmill("plan", edited, "--html", page, "--svg", picture)
    assert (done.code, done.err) == (0, "")
    assert done.lines[-2:] == [f"wrote {page}", f"wrote {picture}"]
    text, svg = page.read_text(encoding="utf-8"), picture.read_text(encoding="utf-8")
    assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg"
    assert svg in text
    assert re.findall("<caption>(.*?)</caption>", text) == [
        *("Stages", "Changes within stages", "Mixture", "Rows and labels", "Sources", "Quarantined"),
        "Fate of the tokens of an epoch",
        "Reading and memory",
    ]
    assert "&lt;leak&gt;" in text
    assert "<leak>" not in text
    lines = unescape(re.sub("<[^>]*>", "", text)).splitlines()
    for warning in tokenmill("plan", edited, "--json").json["warnings"]:
        assert f"warning: {warning}" in lines
    assert not re.search(r"<script|<link|<img|https?:(?!//www.w3.org/2000/svg)|src=|onerror", text)


@pytest.mark.parametrize("option", ["--html", "--svg"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_read(tokenmill, folder, option):
    """[A1.a]"""
    done = tokenmill("plan", folder / "none.toml", option, folder / "no" / "out")
    assert re.fullmatch(rf"error: {option}: folder not found: .*no; create it first\n", done.err)
    done = tokenmill("plan", folder / "none.toml", option, folder)
    assert re.fullmatch(rf"error: {option}: expected a file, got the folder .*; name a file in it, .*\n", done.err)


KEMPNERFORGE = """
[model]
vocab_size = 500
[train]
batch_size = 2
seq_len = 16
max_steps = 8
seed = 3
[data]
dataset_path = "tokens"
"""


@pytest.fixture
def foreign(folder):
    (folder / "tokens").mkdir()
    np.save(folder / "tokens" / "part0.npy", np.random.default_rng(0).integers(0, 500, 3000).astype(np.uint16))
    (folder / "forge.toml").write_text(KEMPNERFORGE, encoding="utf-8")
    return folder / "forge.toml"


def test_a_config_of_another_project_is_told_and_read_for_so_many_ranks(tokenmill, foreign):
    """[A3.a]"""
    done = tokenmill("plan", foreign, "--json", "--world-size", 4)
    assert done.json["stages"][0]["global_batch_size"] == 8
    assert done.err.startswith("taken as a KempnerForge config:\n")
    alone = tokenmill("plan", foreign, "--json")
    assert alone.json["stages"][0]["global_batch_size"] == 2
    digests = tokenmill("batches", foreign, "--world-size", 4, "--digest")
    assert (digests.code, len(digests.lines)) == (0, 8)
    rows = tokenmill("what", foreign, "--step", 1, "--world-size", 4, "--json").json["rows"]
    uses = [{**row, **span} for row in rows for span in row["spans"]]
    assert sorted({use["slot"] for use in uses}) == list(range(8))
    seen = tokenmill("when", foreign, "--source", uses[0]["source"], "--document", uses[0]["document"], "--json")
    wider = tokenmill(
        "when",
        foreign,
        "--source",
        uses[0]["source"],
        "--document",
        uses[0]["document"],
        "--json",
        "--world-size",
        4,
    )
    assert 1 in [use["step"] for use in wider.json["uses"]]
    assert seen.json["uses"] != wider.json["uses"]


def test_the_native_equivalent_makes_the_same_plan(tokenmill, foreign):
    """[A3.a]"""
    done = tokenmill("plan", foreign, "--to-native", "--world-size", 4)
    assert (done.code, done.err) == (0, "")
    (foreign.parent / "native.toml").write_text(done.out, encoding="utf-8")
    wanted = tokenmill("plan", foreign, "--json", "--world-size", 4).json["fingerprint"]
    assert tokenmill("plan", foreign.parent / "native.toml", "--json").json["fingerprint"] == wanted


def test_the_history_of_a_run_is_told(tokenmill, edited):
    """[O1.c]"""
    assert tokenmill("plan", edited, "--json").json["history"] == []
    plan = Run.from_toml(edited).loader(micro_batch=4).plan
    (line,) = tokenmill("plan", edited, "--json").json["history"]
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d plan {plan.fingerprint[:8]}… is the first on record", line)
    assert f"history: {line}" in tokenmill("plan", edited, "--full").lines


def test_plan_tells_what_object_storage_would_take(tokenmill, run_toml):
    """Of local stores, so that it can be asked before an upload."""
    assert "remote" not in tokenmill("plan", run_toml, "--json").json
    options = ("--nodes", "2", "--latency", "100", "--request-price", "1000", "--gb-price", "0")
    told = tokenmill("plan", run_toml, "--remote", *options, "--json").json["remote"]
    assert (told["link"]["nodes"], told["link"]["latency_ms"]) == (2, 100.0)
    assert [(line["stage"], line["source"], line["shuffle"]) for line in told["readings"]] == [
        (stage, source, shuffle)
        for stage in ("base", "late")
        for source in ("books", "web")
        for shuffle in ("full", "window")
    ]
    assert all(line["dollars"] == line["requests"] > 0 for line in told["readings"])
    text = tokenmill("plan", run_toml, "--full", "--remote").out
    assert "Object storage, per stage" in text
    assert "Object storage, per epoch" in text
    assert "defaults: S3 Standard, read within its region" in text


def test_evals_are_shown_with_what_of_them_is_trained_on(tokenmill, run_toml):
    more = '\n[[evals]]\nname = "held"\nsource = "web"\ndocuments = "0:3"\nevery = 5\n'
    more += '\n[[evals]]\nname = "seen"\nsource = "books"\ndocuments = [0]\nevery_tokens = "1K"\n'
    run_toml.write_text(run_toml.read_text() + more)
    facts = tokenmill("plan", run_toml, "--json").json["evals"]
    assert [(item["name"], item["documents"], item["every"], item["every_tokens"]) for item in facts] == [
        ("held", 3, 5, None),
        ("seen", 1, None, 1000),
    ]
    text = " ".join(tokenmill("plan", run_toml, "--full").out.split())
    assert "eval documents held out rows seq_len labels every trained on" in text
    assert "1,000 tokens" in text


def test_tokens_in_place_of_steps_are_told_in_both(tokenmill, run_toml):
    text = run_toml.read_text()
    run_toml.write_text(text.replace("start_step = 6", "start_tokens = 700"))
    stages = tokenmill("plan", run_toml, "--json").json["stages"]
    assert [(stage["start_step"], stage["start_tokens"]) for stage in stages] == [(0, 0), (6, 768)]
    assert "tokens before" in " ".join(tokenmill("plan", run_toml, "--full").out.split())


def test_plan_tells_of_labels_segments_and_ranks(tokenmill, run_toml):
    """What is not asked for has no column."""
    plain = tokenmill("plan", run_toml, "--full").out
    assert not any(
        words in plain for words in ("labels per input", "segments padded to", "Step time with waiting ranks")
    )
    keys = 'horizon = 3\nsegment_multiple = 4\nbalance = "attention"\n'
    run_toml.write_text(run_toml.read_text().replace("seq_len = 16\n", f"seq_len = 16\n{keys}"))
    told = tokenmill("plan", run_toml, "--full")
    assert all(
        words in told.out for words in ("labels per input", "segments padded to", "Step time with waiting ranks")
    )
    found = tokenmill("plan", run_toml, "--json").json
    assert (found["horizon"], found["segment_multiple"], found["fim"]) == (3, 4, {})
    assert [(line["stage"], line["ranks"]) for line in found["imbalance"]] == [
        ("base", 2),
        ("base", 8),
        ("late", 2),
    ]
    what = tokenmill(
        "what", run_toml, "--step", 0, "--rank", 1, "--world-size", 2, "--micro-batch", 2, "--json"
    ).json
    slots = Run.from_toml(run_toml).loader(rank=1, world_size=2, micro_batch=2).slots(0).tolist()
    assert [row["slot"] for row in what["rows"]] == slots
