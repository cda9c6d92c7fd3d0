"""No secret of object storage is in anything that the command line writes or says."""

from __future__ import annotations

import json

import pytest
from tests.object_server import ACCESS_KEY, SECRET_KEY

import tokenmill as tm

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
