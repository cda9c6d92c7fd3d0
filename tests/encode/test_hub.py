"""Tokenizers of the hub by name: from its cache, and from a server that answers as the hub does."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import tokenmill as tm
from tokenmill.encode import hub
from tokenmill.encode.chat.template import load_template
from tokenmill.encode.files import copy_of
from tokenmill.errors import StoreExistsError, TokenizerError, without_secrets
from tokenmill.inspect.stores import tokenizer_of
from tokenmill.store.layout import TOKENIZER_FOLDER

DEMO = Path(tm.__file__).parent / "demo" / "tokenizer"
OLD, NEW = "a" * 40, "b" * 40
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Make a cache as the hub's library does, of which it takes the place without a network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "_snapshots", {})
    return tmp_path / "hub"


def add(cache, name, commit, *, changes=None, leave_out=()):
    """Add a commit to a repository of the cache, as its `main`."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    files = {path.name: path.read_text() for path in DEMO.iterdir()} | {"chat_template.jinja": TEMPLATE}
    (repository / "blobs").mkdir(exist_ok=True)
    for file, text in (files | (changes or {})).items():
        if file in leave_out:
            continue
        blob = repository / "blobs" / hashlib.sha256(text.encode()).hexdigest()
        blob.write_text(text)
        (snapshot / file).symlink_to(os.path.relpath(blob, snapshot))
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    hub._snapshots.clear()  # as a new process begins
    return snapshot


def other_content():
    """Return a `tokenizer.json` with the ids of the demo's and one more token."""
    value = json.loads((DEMO / "tokenizer.json").read_text())
    size = max(*value["model"]["vocab"].values(), *(t["id"] for t in value["added_tokens"])) + 1
    value["added_tokens"].append(value["added_tokens"][0] | {"id": size, "content": "<|more|>"})
    return {"tokenizer.json": json.dumps(value)}


def write_texts(folder, *numbers):
    for number in numbers:
        (folder / f"{number}.jsonl").write_text(f'{{"text": "the mill {number} grinds"}}\n')
    return [str(folder / f"{number}.jsonl") for number in numbers]


def test_a_name_in_the_cache_is_the_tokenizer_of_its_folder(cache):
    add(cache, "org/name", OLD)
    for spec in ("hf:org/name", "hf:org/name@main", f"hf:org/name@{OLD}"):
        assert tm.open_tokenizer(spec).identity == tm.open_tokenizer(DEMO).identity
        assert copy_of(spec) == copy_of(str(DEMO))
        assert load_template("tokenizer", tokenizer=spec).source == TEMPLATE


def test_a_store_holds_the_commit_and_opens_without_the_cache(cache, tmp_path):
    add(cache, "org/name", OLD)
    tm.prepare(write_texts(tmp_path, 1), out=tmp_path / "store", tokenizer="hf:org/name", workers=1)
    store = tm.open_store(tmp_path / "store")
    assert store.manifest.recipe["tokenizer"] == f"hf:org/name@{OLD}"
    assert dict(store.manifest.tokenizer) == tm.open_tokenizer(DEMO).identity.to_json()
    shutil.rmtree(cache)
    assert tokenizer_of(store).identity.content == tm.open_tokenizer(DEMO).identity.content


def test_a_manifest_alone_causes_no_download(cache, tmp_path, monkeypatch):
    add(cache, "org/name", OLD)
    tm.prepare(write_texts(tmp_path, 1), out=tmp_path / "store", tokenizer="hf:org/name", workers=1)
    shutil.rmtree(cache)
    shutil.rmtree(tmp_path / "store" / TOKENIZER_FOLDER)
    hub._snapshots.clear()
    monkeypatch.setattr(hub, "_snapshot", lambda *_: pytest.fail("a download was tried"))
    store = tm.open_store(tmp_path / "store")
    assert tokenizer_of(store) is None


@pytest.mark.parametrize("spec", ["hf:org/name", "hf:org/name@main", f"hf:org/name@{OLD}"])
def test_a_moved_revision_is_kept_or_rejected(cache, tmp_path, capsys, spec):
    texts = write_texts(tmp_path, 1, 2)
    add(cache, "org/name", OLD)
    tm.prepare(texts[:1], out=tmp_path / "store", tokenizer=spec, workers=1)
    add(cache, "org/name", NEW, changes=other_content())
    if spec.endswith("@main"):
        with pytest.raises(StoreExistsError, match=r"tokenizer\.content '\w+' -> '\w+'"):
            tm.prepare(texts, out=tmp_path / "store", tokenizer=spec, workers=1)
        shown = f"'{spec}' is now the commit {NEW}; the store was begun with {OLD}"
        assert shown in " ".join(capsys.readouterr().err.split())
    else:
        tm.prepare(texts, out=tmp_path / "store", tokenizer=spec, workers=1)
        store = tm.open_store(tmp_path / "store")
        assert (store.num_documents, store.manifest.recipe["tokenizer"]) == (2, f"hf:org/name@{OLD}")
    tm.prepare(texts, out=tmp_path / "store", tokenizer="hf:org/name", rebuild=True, workers=1)
    assert tm.open_store(tmp_path / "store").manifest.recipe["tokenizer"] == f"hf:org/name@{NEW}"


def test_an_interrupted_build_continues_with_the_commit_that_it_began_with(cache, tmp_path):
    texts = write_texts(tmp_path, 1, 2)
    (tmp_path / "2.jsonl").write_text("no JSON\n")
    add(cache, "org/name", OLD)
    with pytest.raises(ValueError, match="JSON"):
        tm.prepare(texts, out=tmp_path / "store", tokenizer="hf:org/name", workers=1)
    add(cache, "org/name", NEW, changes=other_content())
    write_texts(tmp_path, 2)
    tm.prepare(texts, out=tmp_path / "store", tokenizer="hf:org/name", workers=1)
    assert tm.open_store(tmp_path / "store").manifest.recipe["tokenizer"] == f"hf:org/name@{OLD}"


def test_a_run_takes_hub_names(cache, tmp_path):
    add(cache, "org/name", OLD)
    write_texts(tmp_path, *range(40))
    batches = {}
    for name, spec in (("hub", "hf:org/name"), ("folder", str(DEMO))):
        for live in (False, True):
            config = tmp_path / f"{name}-{live}" / "run.toml"
            config.parent.mkdir()
            config.write_text(
                "[run]\nseq_len = 16\nglobal_batch_size = 2\nsteps = 3\n[[sources]]\nname = 'web'\n"
                f"documents = ['../*.jsonl']\ntokenizer = '{spec}'\n" + ("live = true\n" if live else "")
            )
            loader = tm.Run.from_toml(config).loader(rank=0, world_size=1)
            batches[name, live] = [batch["input_ids"].tolist() for batch in loader]
    assert batches["hub", False] == batches["folder", False]
    assert batches["hub", True] == batches["folder", True]
    add(cache, "org/name", NEW, changes=other_content())  # the store is finished: nothing is looked up again
    again = tm.Run.from_toml(tmp_path / "hub-False" / "run.toml").loader(rank=0, world_size=1)
    assert [batch["input_ids"].tolist() for batch in again] == batches["hub", False]


def test_a_repository_with_a_rank_file_alone_is_a_rank_file(cache):
    ranks = "".join(f"{_base64(bytes([byte]))} {byte}\n" for byte in range(256))
    tokenizer_files = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    add(cache, "org/ranks", OLD, changes={"r50k_base.tiktoken": ranks}, leave_out=tokenizer_files)
    assert tm.open_tokenizer("hf:org/ranks").identity.kind == "tiktoken"


def _base64(data):
    import base64

    return base64.b64encode(data).decode()


def test_an_error_names_the_way_to_save_a_tokenizer(cache):
    add(cache, "org/weights", OLD, changes={"config.json": "{}"}, leave_out=("tokenizer.json",))
    with pytest.raises(TokenizerError, match=r"no tokenizer.json, tokenizer.model or .tiktoken file, got chat"):
        tm.open_tokenizer("hf:org/weights")
    text = (
        "tokenizer 'hf:org/name': not in the hub's cache, and the hub cannot be reached (OfflineModeIsEnabled); on "
        "a machine with access, save it with AutoTokenizer.from_pretrained('org/name').save_pretrained('FOLDER') "
        "and pass FOLDER as the tokenizer"
    )
    with pytest.raises(TokenizerError) as error:
        tm.open_tokenizer("hf:org/name")
    assert str(error.value) == text


def test_a_missing_library_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(TokenizerError, match=r"pip install 'tokenmill\[hub\]'"):
        tm.open_tokenizer("hf:org/other")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"hf:gpt2@{OLD}: gone", f"hf:gpt2@{OLD}: gone"),
        ("'hf:org/name@refs/pr/1'", "'hf:org/name@refs/pr/1'"),
        ("hf:u:SECRET@main", "hf:main"),
        ("hf:hf_SECRET@data", "hf:data"),
        ("hf:hf_SEC/RET@data", "hf:data"),
        ("hf:SEC/RET@main@host", "hf:host"),
        ("hf:SEC/RET@host:80/x", "hf:host:80/x"),
        ("hf:SECRET?@host", "hf:host"),
    ],
)
def test_what_may_be_a_secret_is_not_shown(text, shown):
    assert without_secrets(text) == shown


# A server that answers as the hub does.


class Hub(BaseHTTPRequestHandler):
    """What `snapshot_download` asks for; the class holds commits, the branch and the paths that were read."""

    commits: dict[str, dict[str, bytes]]
    main: str
    paths: list[str]

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        path = self.path.partition("?")[0]
        parts = path.strip("/").split("/")
        headers, body, code = {"Content-Type": "application/json"}, b"{}", 404
        if parts[:2] == ["api", "models"] and parts[4:5] == ["revision"]:
            commit = self.main if parts[5] == "main" else parts[5]
            if commit in self.commits:
                siblings = [{"rfilename": name} for name in self.commits[commit]]
                body, code = json.dumps({"id": "org/name", "sha": commit, "siblings": siblings}).encode(), 200
            else:
                headers["X-Error-Code"] = "RevisionNotFound"
        elif parts[:2] == ["api", "models"] and parts[4:5] == ["tree"]:
            files = self.commits[parts[5]].items()
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in files
            ]
            body, code = json.dumps(tree).encode(), 200
        elif parts[:3] == ["org", "name", "resolve"]:
            body, code = self.commits[parts[3]][parts[4]], 200
            headers = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": parts[3]}
            self.paths.append(parts[4])
        else:
            headers["X-Error-Code"] = "RepoNotFound"
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


SCRIPT = """
import sys
import tokenmill as tm
from tokenmill.encode import hub

print(tm.open_tokenizer("hf:org/name").identity.content)
print(hub.pinned("hf:org/name"), hub.pinned("hf:org/name@main"))
for spec in ("hf:org/name@v9", "hf:org/missing"):
    try:
        tm.open_tokenizer(spec)
    except ValueError as error:
        print(str(error).partition(";")[0])
"""


def test_a_name_is_downloaded_once_and_only_its_tokenizer(tmp_path):
    files = {path.name: path.read_bytes() for path in DEMO.iterdir()}
    files |= {"model.safetensors": b"weights", "tokenization_own.py": b"raise SystemExit(9)"}
    handler = type("Handler", (Hub,), {"commits": {OLD: files}, "main": OLD, "paths": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path / "home")}

    def run():
        command = [sys.executable, "-c", SCRIPT]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done.stdout.splitlines(), done.stderr

    content = tm.open_tokenizer(DEMO).identity.content
    pins = f"hf:org/name@{OLD} hf:org/name@{OLD}"
    try:
        shown, errors = run()
        assert shown[:2] == [content, pins], errors
        assert shown[2] == "tokenizer 'hf:org/name@v9': the repository has no revision 'v9'"
        assert shown[3].startswith("tokenizer 'hf:org/missing': the hub has no such repository")
        assert sorted(set(handler.paths)) == sorted(path.name for path in DEMO.iterdir())
    finally:
        server.shutdown()
        server.server_close()
    shown, errors = run()  # nobody listens any more
    assert shown[:2] == [content, pins], errors
    assert "the hub cannot be reached" in shown[3]
