"""The errors that people meet most often, word by word: what is wrong with its value, then the way out."""

from __future__ import annotations

import json
import re
import shutil

import pytest

RUN = '[run]\nsteps = 10\nglobal_batch_size = 8\nseq_len = 64\n[[sources]]\nname = "demo"\nstore = "stores/demo"\n'

COMMON = [
    # Paths that do not exist.
    (2, "plan nope.toml", "config not found: nope.toml; fix the path"),
    (2, "prepare nope.jsonl -o out", "no such file or folder: nope.jsonl; fix the path \\(working directory: .*"),
    (2, "prepare none/*.parquet -o out", r"no such file or folder: none/\*\.parquet; fix the path .*"),
    (
        2,
        "verify nope",
        "no store at this path: nope (the folder does not exist); run `tokenmill prepare`, or fix .*",
    ),
    (2, "verify nope.npy", "no store or token file at this path: nope.npy; fix the path"),
    (2, "inspect nope", "no store at this path: nope (the folder does not exist); run `tokenmill prepare`, or .*"),
    (2, "quarantine run.toml --file nope.txt", "file not found: nope.txt; fix the path"),
    (2, "plan run.toml --html no/report.html", "--html: folder not found: no; create it first"),
    (2, "plan run.toml --svg stores", "--svg: expected a file, got the folder stores; name a file in it, .*"),
    (2, "prepare corpus/prose.jsonl -o out -t gpt2", "tokenizer not found: 'gpt2'; pass 'bytes', .*'hf:gpt2'.*"),
    (2, "prepare corpus/prose.jsonl -o out --recipe nope", "--recipe: expected one of .*, got 'nope'; .*"),
    # Wrong usage.
    (2, "plna", "no such command 'plna'; did you mean 'plan'?"),
    (2, "prepare", None),
    (2, "prepare -o out", "prepare: no input files; name them before --out"),
    (2, "prepare corpus/prose.jsonl", "missing option '--out' / '-o'; see tokenmill prepare --help"),
    (
        2,
        "prepare corpus/prose.jsonl -o out --tokeniser bytes",
        "no such option: --tokeniser; did you mean --tokenizer?",
    ),
    (2, "prepare corpus/prose.jsonl -o out -j two", "invalid value for '--workers' / '-j': .*; see tokenmill .*"),
    (
        2,
        "prepare corpus/prose.jsonl -o out --on-error skipp",
        "--on-error: expected one of stop, skip, got 'skipp'; .*",
    ),
    (2, "prepare corpus/prose.jsonl -o out --format jsnl", ".*'jsnl'.*did you mean 'jsonl'?"),
    (2, "plan stores/demo", "stores/demo: .* got a folder; `tokenmill inspect stores/demo` shows a store"),
    (2, "export stores/demo -o out", "missing option '--format'; see tokenmill export --help"),
    (2, "export stores/demo -o out --format npz", "--format: expected one of .*, got 'npz'; did you mean 'npy'?"),
    (2, "init", None),
    (2, "init stores/demo", "file exists: run.toml; choose another name with --out, or remove it"),
    (2, "init stores/demo -o new.json", "--out: a config must end in .toml, got 'new.json'; rename it"),
    (2, "check run.toml", "check: expected --record or --against, got both or neither; pass one of them"),
    (2, "inspect run.toml --document 1", "--document: .*; name the store of a source"),
    (2, "inspect stores/demo --find url", "--find: expected FIELD=VALUE, got 'url'; for example .*"),
    (2, "inspect stores/demo --find url=x", ".*unknown field 'url'; it keeps no fields; prepare it again with .*"),
    # Steps, ranks and batches.
    (2, "what run.toml 10", "step: .*0:10, got 10; raise run.steps to continue"),
    (2, "what run.toml -- -1", "step: .*0:10, got -1; count from 0"),
    (2, "batches run.toml --steps 0:11", "--steps: .*0:10, got 0:11; shorten it"),
    (2, "batches run.toml --rank 2 --world-size 2", "rank: .* got rank 2 of 2; .*"),
    (
        2,
        "batches run.toml --world-size 3",
        "stage 'main': global_batch_size must be divisible by .*; use global_batch_.*",
    ),
    (
        2,
        "batches run.toml --micro-batch 3",
        "stage 'main': global_batch_size must be divisible by .*micro_batch 2 or 4",
    ),
    (2, "fork run.toml --at 99 -o new.toml", "fork: step .*0:10, got 99; choose one that the run has"),
    (2, "when run.toml --source dmeo --document 1", "unknown source: 'dmeo'; did you mean 'demo'?"),
    (2, "when run.toml --source demo --document 999", ".*999.*"),
    # A store that exists, with other options.
    (1, "prepare corpus/prose.jsonl -o stores/demo --min-chars 5", "stores/demo: .*min_chars 0 -> 5; .*"),
    # Records that cannot be read.
    (1, "prepare bad.jsonl -o out", r".*bad\.jsonl:2: .*; .*"),
    (1, "prepare corpus/prose.jsonl -o out --text-field body", ".*'body'.*; .*"),
]
CONFIGS = [
    ("steps = 10", "steps = '10'", "run.steps: expected a whole number, got '10'; leave out the quotes"),
    ("steps = 10", "steps = 1.5", "run.steps: expected a whole number, got 1.5; change its type"),
    ("steps = 10", "steps = 0", "run: steps must be at least 1, got 0; raise it"),
    ("steps = 10", "step = 10", "run: unknown key: 'step'; did you mean 'steps'?"),
    ("steps = 10\n", "", "run: no length; set steps or epochs, for example .*"),
    ("seq_len = 64\n", "", "run: missing key: seq_len; add seq_len = ..."),
    (
        "seq_len = 64",
        "seq_len = 64\npacking = 'bestfit'",
        "run: packing must be one of .*; did you mean 'best_fit'?",
    ),
    ("seq_len = 64", "seq_len = 64\nshuffle = 'ful'", ".*shuffle must be .*; did you mean 'full'?"),
    (
        "seq_len = 64",
        "seq_len = 64\nseed = -1",
        "run: seed must lie within 0 and 2^63, got -1; choose a smaller one",
    ),
    ("seq_len = 64", "seq_len = 64\nweights = { dmeo = 1 }", ".*weights.*'dmeo'; did you mean 'demo'?"),
    ("[[sources]]", "[sources]", r"sources: expected a list of tables, got dict; write \[\[sources\]\]"),
    ('name = "demo"', 'name = "a/b"', r"sources.name: must be letters, digits, - _ \. only, got 'a/b'; rename it"),
    ('store = "stores/demo"', "", "source 'demo': .*; for example store = .*"),
    ('"stores/demo"', '"stores/nope"', "no store at this path: .*stores/nope (the folder does not exist); run .*"),
    ("[run]", "[rnu]", ".*"),
    ("[run]", "[run", r".*run\.toml: expected TOML, got .*; fix that line"),
]


@pytest.fixture
def folder(demo_folder, tmp_path, monkeypatch):
    shutil.copytree(demo_folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "bad.jsonl").write_text(json.dumps({"text": "one"}) + '\n{"text": \n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(done, code, message):
    assert (done.code, done.err.count("Traceback")) == (code, 0)
    if message is None:  # a command without arguments shows its help
        assert "Usage:" in done.out
        return
    line = done.err.removeprefix("error: ").rstrip("\n")
    pattern = (
        message.replace("(the", r"\(the").replace("exist)", r"exist\)").replace("?", r"\?").replace("^", r"\^")
    )
    assert done.err.startswith("error: ")
    assert re.fullmatch(pattern, line, re.DOTALL), line
    assert not re.search(r"\bgot (none|it|both|neither|nothing|another|one)\b(?! or neither)", line)


@pytest.mark.parametrize(("code", "command", "message"), COMMON, ids=[command for _, command, _ in COMMON])
@pytest.mark.usefixtures("folder")
def test_a_common_error_says_what_is_wrong_and_the_way_out(tokenmill, code, command, message):
    check(tokenmill(*command.split()), code, message)


@pytest.mark.parametrize(("old", "new", "message"), CONFIGS, ids=[new for _, new, _ in CONFIGS])
def test_a_common_error_of_a_config_names_the_key_and_the_way_out(tokenmill, folder, old, new, message):
    (folder / "run.toml").write_text(RUN.replace(old, new))
    check(tokenmill("plan", "run.toml"), 2, message)


def test_sixty_errors_are_listed():
    assert len(COMMON) + len(CONFIGS) >= 57
