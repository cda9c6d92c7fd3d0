from __future__ import annotations

import re

import pytest

from tokenmill.run import Run


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


def test_text_shows_stages_mixture_and_sources(tokenmill, run_toml):
    done = tokenmill("plan", run_toml)
    assert (done.code, done.err) == (0, "")
    assert [word for word in re.findall(r"^(\w+)\s*$", done.out, re.MULTILINE) if word.istitle()] == [
        "Stages",
        "Mixture",
        "Sources",
    ]
    assert "Fate of the tokens of an epoch" in done.out
    assert re.search(r"plan [0-9a-f]{32}  10 steps, 64 rows, 1,024 tokens", done.out)


def test_no_token_is_read(tokenmill, folder):
    """[A1.a]"""
    before = tokenmill("plan", folder / "run.toml", "--json").json
    for shard in folder.glob("stores/*/shard-*"):
        (shard / "sequence.bin").unlink()
    assert tokenmill("plan", folder / "run.toml", "--json").json == before


ILLEGAL = {
    "unknown key": ("seed = 7", "sed = 7", r"run: keys must be known, got 'sed'; did you mean 'seed'\?"),
    "unknown table": (
        '[[stages]]\nname = "base"',
        '[[stags]]\nname = "base"',
        r".*: .*got 'stags'; did you mean .*",
    ),
    "missing key": ("steps = 10\n", "", r"run: steps must be given, got nothing; add steps = \.\.\."),
    "wrong type": ("steps = 10", 'steps = "10"', r"run\.steps: must be a whole number, got '10'; change its type"),
    "bad toml": ("[run]", "[run", r".*run\.toml: must be TOML, got .*; fix that line"),
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
        r".*stores/boks: a store must be .*, got nothing there; .*",
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
    assert (done.code, done.out) == (1, "")
    assert re.fullmatch(f"error: {message}\n", done.err)


def test_sources_of_two_tokenizers_are_refused_with_the_first_difference(tokenmill, folder):
    """[T2.a]"""
    arguments = ["--out", folder / "stores" / "books", "--rebuild", "--no-bos", "--workers", 1]
    assert tokenmill("prepare", folder / "books.jsonl", *arguments).code == 0
    done = tokenmill("plan", folder / "run.toml")
    assert (done.code, done.out) == (1, "")
    assert re.fullmatch(
        r"error: sources: all must be prepared with one tokenizer, got 'web' and 'books' that differ in "
        r"add_bos: True and False; prepare one of them again\n",
        done.err,
    )
