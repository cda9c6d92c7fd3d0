"""No secret is in anything that is written or said, and nothing that is said speaks to the terminal."""

from __future__ import annotations

import json
import logging
import sys
import threading
import unicodedata
import warnings

import pytest
from tests.object_server import ACCESS_KEY, SECRET_KEY

import tokenmill as tm
from tokenmill.cli import console as ui

RUN = """
[run]
steps = 4
global_batch_size = 4
seq_len = 16

[remote]
mirror = "mirror"

[[sources]]
name = "web"
store = "{store}"
"""
CANARY = "another-secret-that-must-not-be-seen-9Zt4"


def test_no_secret_is_in_a_toml_state_history_log_error_or_page(
    tokenmill, tmp_path, object_server, monkeypatch, caplog
):
    """[N2.b] With the right secret, and with a wrong one, which the server refuses."""
    (tmp_path / "web.jsonl").write_text("".join(json.dumps({"text": "words " * 9}) + "\n" for _ in range(40)))
    place = object_server.address(f"secrets/{tmp_path.name}")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN.format(store=place))
    commands = [
        ("prepare", "web.jsonl", "--out", place),
        ("verify", place),
        ("inspect", place, "--html", "store.html"),
        ("plan", "run.toml", "--html", "plan.html", "--svg", "plan.svg"),
        ("plan", "run.toml", "--json"),
        ("plan", "run.toml", "--to-native"),
        ("batches", "run.toml", "--json"),
        ("what", "run.toml", "--step", "1"),
        ("when", "run.toml", "--source", "web", "--document", "1"),
        ("prepare", "web.jsonl", "--out", place),
    ]
    texts = []
    for number, command in enumerate(commands):
        done = tokenmill(*command)
        assert (done.code == 0) == (number < len(commands) - 1), (command, done.err)  # the last finds a store
        texts += [done.out, done.err]
    loader = tm.Run.from_toml("run.toml").loader(micro_batch=2)
    next(iter(loader))
    texts.append(json.dumps(loader.state_dict()))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", CANARY)
    for command in (commands[1], commands[6], ("upload", ".tokenmill", place), ("prepare", place, "--out", "x")):
        done = tokenmill(*command)
        assert done.code != 0
        texts += [done.out, done.err]
    with pytest.raises(tm.StoreError) as refused:
        tm.open_store(place)
    texts += [str(refused.value), caplog.text]
    texts += [str(path) for path in tmp_path.rglob("*")]
    texts += [path.read_bytes().decode("latin-1") for path in tmp_path.rglob("*") if path.is_file()]
    assert len(texts) > 40
    for secret in (SECRET_KEY, CANARY, ACCESS_KEY):
        assert not [text for text in texts if secret in text]


HOSTILE = "a\x1b]0;t\x07\x9b31m[red]:100:\u202e.jsonl"


def assert_harmless(*texts):
    for text in texts:
        assert {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")} <= {"\n", "\t"}, text
        assert "\N{HUNDRED POINTS SYMBOL}" not in text


def test_nothing_that_is_printed_speaks_to_the_terminal(tokenmill, folder, monkeypatch):
    """Names of files, fields of recipes and reasons: in tables, errors, JSON and usage [S.j]."""
    monkeypatch.chdir(folder)
    names = (HOSTILE, HOSTILE.removesuffix(".jsonl"))
    (folder / HOSTILE).write_text('{"text": "one"}\n{"text": 1}\n{"other": "\\u009b"}\n')
    (folder / "recipe.json").write_text(json.dumps({"input": {HOSTILE: {"source": HOSTILE, "kind": HOSTILE}}}))
    (folder / "run.bad.toml").write_text((folder / "run.toml").read_text().replace('"web"', json.dumps(HOSTILE)))
    commands = [
        ("prepare", HOSTILE, "--out", names[1], "--on-error", "skip", "--keep", "other"),
        ("prepare", HOSTILE, "--out", "b"),
        ("prepare", "web.jsonl", "--out", "c", "--recipe", "recipe.json"),
        ("prepare", "web.jsonl", "--out", "c", "--text-field", HOSTILE),
        ("inspect", names[1]),
        ("inspect", names[1], "--json"),
        ("inspect", names[1], "--document", "0"),
        ("verify", names[1]),
        ("verify", names[1], "--json"),
        ("export", names[1], "--out", f"{HOSTILE}.out", "--format", "megatron"),
        ("plan", "run.bad.toml"),
        ("plan", "run.toml", "--svg", f"{HOSTILE}.svg"),
        ("what", "run.toml", "--step", "1"),
        *((command, HOSTILE) for command in ("prepare", "plan", "batches", "inspect", "verify", "import", "diff")),
        ("plan", "run.toml", HOSTILE),
        ("plan", "run.toml", f"--{HOSTILE}"),
        (HOSTILE,),
    ]
    said = ""
    for command in commands:
        done = tokenmill(*command)
        assert done.out or done.err, command
        assert_harmless(done.out, done.err)
        said += done.out + done.err
    assert "[red]:100:" in said  # neither read as markup nor as an emoji


def test_log_lines_warnings_and_tracebacks_are_harmless_too(tokenmill, capsys, monkeypatch):
    """As `main` leaves the process: what is logged or raised later is printed in one place [S.j]."""
    tokenmill("--version")
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    ui.take_over()
    logging.getLogger("tokenmill").warning("%s: s3://me:%s@bucket/x", HOSTILE, CANARY)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)  # as another test may have left it
        logging.captureWarnings(True)
        warnings.warn(HOSTILE, stacklevel=1)
        logging.captureWarnings(False)
    lost = OSError(f"{HOSTILE} https://me:{CANARY}@host/x")
    sys.excepthook(OSError, lost, None)
    threading.excepthook(threading.ExceptHookArgs((OSError, lost, None, None)))
    err = capsys.readouterr().err
    assert err.count("[red]:100:") == 4
    assert CANARY not in err
    assert_harmless(err)


@pytest.mark.parametrize("address", ["https://me:KEY@host/x", "s3://me:KEY@bucket/x", "s3://ME:KE/Y@bucket/x?a=b"])
def test_a_user_and_a_password_in_an_address_are_said_and_written_nowhere(
    tokenmill, folder, monkeypatch, caplog, address
):
    """Of any argument and any field of a config [N2.b]."""
    monkeypatch.chdir(folder)
    secret = address.replace("KEY", CANARY).replace("KE/Y", f"{CANARY}/{CANARY}")
    run = (folder / "run.toml").read_text()
    for number, (old, new) in enumerate(
        (
            ('store = "stores/web"', f'store = "{secret}"'),
            ('store = "stores/web"', f'documents = ["{secret}"]\ntokenizer = "bytes"'),
            ('store = "stores/web"', f'documents = ["web.jsonl"]\nlive = true\ntokenizer = "{secret}"'),
            ("[run]", f'[remote]\nmirror = "m"\nendpoint = "{secret}"\n[run]'),
        )
    ):
        (folder / f"{number}.toml").write_text(run.replace(old, new))
    (folder / "kf.toml").write_text(f'[data]\ndataset_path = "{secret}"\n[train]\nseed = 1\n')
    commands = [
        ("prepare", secret, "--out", "x"),
        ("prepare", f"hf:{secret}", "--out", "x"),
        ("prepare", "web.jsonl", "--out", secret),
        *(("prepare", "web.jsonl", "--out", "x", option, secret) for option in ("--tokenizer", "--recipe")),
        ("prepare", "web.jsonl", "--out", "x", "--recipe", "chat", "--chat-template", secret),
        *((command, secret) for command in ("inspect", "verify", "plan", "batches", "view")),
        ("import", secret, "--out", "y"),
        ("export", "stores/web", "--out", secret, "--format", "megatron"),
        ("upload", "stores/web", secret),
        ("what", secret, "--step", "1"),
        ("diff", "run.toml", secret),
        ("fork", "run.toml", "--at", "5", "--out", secret),
        ("plan", "run.toml", "--svg", secret),
        ("plan", "run.toml", secret),
        *(("plan", f"{number}.toml") for number in range(4)),
        *(("plan", f"{number}.toml", "--json") for number in range(4)),
        ("plan", "kf.toml", "--to-native", "--world-size", "1"),
    ]
    kept = {path for path in folder.rglob("*") if path.suffix == ".toml"}
    for command in commands:
        done = tokenmill(*command)
        assert done.code != 0 or command[1] in ("3.toml", "kf.toml"), command
        assert CANARY not in done.out + done.err + caplog.text, command
    with pytest.raises(tm.TokenmillError) as refused:
        tm.export_store("stores/web", out=secret, format="megatron")
    assert CANARY not in str(refused.value)
    for path in set(folder.rglob("*")) - kept:
        assert CANARY not in str(path)
        assert path.is_dir() or CANARY.encode() not in path.read_bytes(), path


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("prepare {} --out o", 2),
        ("import {} --out o", 2),
        ("inspect {}", 2),
        ("verify {}", 2),
        ("prepare a.jsonl --tokenizer {} --out o", 2),
    ],
)
@pytest.mark.parametrize("secret", ["SECRET", "SEC/RET"])
def test_a_dataset_that_is_written_like_an_address_is_named_without_its_secret(
    tokenmill, tmp_path, monkeypatch, command, code, secret
):
    """[N2.b]"""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    done = tokenmill(*command.format(f"hf:user:{secret}@data").split())
    assert done.code == code
    assert "RET" not in done.out + done.err
    assert "hf:data" in done.err
