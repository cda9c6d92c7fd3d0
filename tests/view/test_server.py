"""The page answers as the Python calls do, to whom it should, and never runs what a document says."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser

import msgspec
import pytest

import tokenmill as tm
from tokenmill.build.status import build_status
from tokenmill.inspect.examples import inspect_document
from tokenmill.inspect.steps import ROW_ARRAYS, deal_step, inspect_packing, inspect_step, inspect_strip
from tokenmill.inspect.stores import tokenizer_of
from tokenmill.view.views import Opened

VIEWS = ["step", "strip", "arrays", "timeline", "packing", "store", "document", "diff?with=other.toml"]


def as_json(value):
    return json.loads(msgspec.json.encode(value, enc_hook=str))


class Tags(HTMLParser):
    """All tags of a page, and their attributes."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))


# What is shown


def test_a_step_is_what_python_says(site, folder):
    run = tm.Run.from_toml(folder / "run.toml")
    assert site.api("step?step=3")["contents"] == as_json(inspect_step(run, 3))


def test_a_strip_is_what_python_says(site, folder):
    run = tm.Run.from_toml(folder / "run.toml")
    source = inspect_step(run, 3).rows[2].source
    tokens = inspect_strip(run, 3, 2, tokenizer=tokenizer_of(run.stores[source]))
    assert site.api("strip?step=3&slot=2")["tokens"] == as_json(tokens)


def test_arrays_are_the_numbers_that_the_loader_delivers(site, folder):
    batch = tm.Run.from_toml(folder / "run.toml").loader(threads=0, arrays=ROW_ARRAYS)[3]
    shown = site.api("arrays?step=3&slot=2")["arrays"]
    assert shown == {name: batch[name][2].tolist() for name in ROW_ARRAYS}
    assert "As the loader delivers them" in site.page("arrays?step=3&slot=2")


def test_the_timeline_is_the_report_of_the_run(open_site, folder):
    site = open_site(folder / "run.toml")  # another test may have begun the run's history since
    shown, report = site.api("timeline")["report"], as_json(tm.Run.from_toml(folder / "run.toml").report())
    for found in (shown, report):
        found["costs"].pop("compile_seconds")
    assert shown == report


def test_the_timeline_names_evals(folder, open_site):
    (folder / "evals").mkdir(exist_ok=True)
    config = (folder / "run.toml").read_text(encoding="utf-8").replace('"stores/', '"../stores/')
    path = folder / "evals" / "run.toml"
    path.write_text(f'{config}\n[[evals]]\nname = "held"\nsource = "web"\ndocuments = [3, 4]\n', encoding="utf-8")
    site = open_site(path)
    assert [each["name"] for each in site.api("timeline")["report"]["evals"]] == ["held"]
    assert "<td>held</td>" in site.page("timeline")


def test_packing_is_what_python_says(site, folder):
    assert site.api("packing")["sources"] == as_json(inspect_packing(tm.Run.from_toml(folder / "run.toml")))


def test_a_document_is_what_python_says_with_its_steps(site, folder):
    run = tm.Run.from_toml(folder / "run.toml")
    store = run.stores["books"]
    shown = site.api("document?source=books&document=3")
    assert shown["contents"] == as_json(inspect_document(store, 3, tokenizer_of(store)))
    uses = run.plan().when("books", 3)
    assert [(use["step"], use["slot"], use["row"]) for use in shown["uses"]] == [
        (use.step, use.slot, use.row) for use in uses
    ]


def test_two_runs_are_compared_as_python_does(site, folder):
    run, other = (tm.Run.from_toml(folder / name) for name in ("run.toml", "other.toml"))
    shown = site.api("diff?with=other.toml")
    assert shown["difference"] == as_json(run.diff(other).to_json())
    step = shown["difference"]["first_step"]
    assert shown["sides"] == [as_json(inspect_step(each, step)) for each in (run, other)]
    for left, right in shown["equal"]:
        assert shown["sides"][0]["rows"][left]["strips"] == shown["sides"][1]["rows"][right]["strips"]


def test_rows_of_other_tokens_are_not_the_same_though_their_spans_are(tmp_path, open_site):
    for name in ("x", "y"):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": name * (5 + number)}) + "\n" for number in range(20)))
        tm.prepare(path, out=tmp_path / name, tokenizer="bytes", progress=False, workers=1)
        run = "[run]\nsteps = 3\nglobal_batch_size = 4\nseq_len = 16\n"
        (tmp_path / f"{name}.toml").write_text(f'{run}[[sources]]\nname = "web"\nstore = "{name}"\n')
    shown = open_site(tmp_path / "x.toml").api("diff?with=y.toml&step=0")
    assert shown["difference"]["differing_rows"] == shown["difference"]["total_rows"] == 12
    assert shown["sides"][0]["rows"] == shown["sides"][1]["rows"]
    assert shown["equal"] == []


def test_ranks_and_micro_batches_take_what_python_deals(site, folder):
    deal = deal_step(tm.Run.from_toml(folder / "run.toml"), 0, 2, 2)
    assert site.api("step?world_size=2&micro_batch=2")["deal"] == as_json(deal)
    assert "Who takes which rows, in order" in site.page("step?world_size=2&micro_batch=2")


def test_the_timeline_goes_by_steps_or_by_tokens(site):
    edges = [re.search(r'data-edges="([^"]*)"', site.page(f"timeline?by={by}"))[1] for by in ("steps", "tokens")]
    # 6 of 10 steps, which have 6 * 8 of 6 * 8 + 4 * 4 rows.
    assert edges == ["0:64 6:611.2 10:976", "0:64 6:748 10:976"]


@pytest.mark.parametrize("view", VIEWS)
def test_every_view_is_a_page_whose_links_lead_to_pages(site, view):
    text = site.page(view)
    for tag, attributes in Tags(text).tags:
        address = attributes.get("href") if tag == "a" else None
        if address and not address.startswith("#"):
            site.page(address)


def test_the_first_page_of_a_run_is_a_step_and_of_a_store_the_store(site, folder, open_site):
    store = open_site(folder / "stores" / "web")
    assert site.client.get("/word/").headers["location"] == "/word/step"
    assert store.client.get("/word/").headers["location"] == "/word/store"
    assert "Store web" in store.page("store")
    assert [each["document"] for each in store.api("store?first=58")["documents"]] == [58, 59]


# What cannot be shown


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("step?step=10", r"step.*got 10"),
        ("step?step=-1", r"step: expected a number of at least 0, got '-1'"),
        ("step?step=1&world_size=3", r"global_batch_size must be divisible by world_size"),
        ("timeline?by=<b>", r"by: must be steps or tokens"),
        ("strip?step=0&slot=99", r"slot: must lie within 0:8, got 99"),
        ("document?source=web&document=4000", r"document.*4000"),
        ("store?source=nosuch", r"source: must be one that is open, got 'nosuch'"),
        ("diff?with=../../etc/passwd", r"with: must be a config beside run.toml"),
    ],
)
def test_an_error_is_our_text_with_its_way_out(site, address, message):
    assert re.search(message, site.api(address, 400)["error"])
    assert 'class="problem"' in site.page(address, 400)


def test_a_view_that_there_is_not_is_said(site):
    assert "unknown view" in site.page("nosuch", 404)
    assert "view: must be one that there is" in site.api("nosuch", 400)["error"]


def test_live_text_says_what_cannot_be_known(folder, open_site):
    live = 'live = true\ndocuments = ["web.jsonl"]\ntokenizer = "bytes"'
    config = f'[run]\nsteps = 4\nglobal_batch_size = 4\nseq_len = 16\n[[sources]]\nname = "web"\n{live}\n'
    (folder / "live").mkdir(exist_ok=True)
    (folder / "live" / "run.toml").write_text(config.replace("web.jsonl", "../web.jsonl"), encoding="utf-8")
    site = open_site(folder / "live" / "run.toml")
    assert "got live text of 'web'" in site.api("step", 400)["error"]
    site.page("timeline")


# Who may ask


@pytest.mark.parametrize(
    ("address", "headers", "status"),
    [
        ("/step", {}, 404),
        ("/wrong/step", {}, 404),
        ("/word/step", {"host": "evil.example"}, 403),
        ("/word/step", {"host": "127.0.0.1:9999"}, 403),
        ("/word/step", {"origin": "http://evil.example"}, 403),
        ("/word/step", {"origin": "null"}, 403),
        ("/word/step", {"origin": "http://127.0.0.1:8000"}, 200),
        ("/word/static/../server.py", {}, 404),
        ("/word/static/%2e%2e%2fserver.py", {}, 404),
    ],
)
def test_only_who_knows_the_address_is_answered(site, address, headers, status):
    assert site.client.get(address, headers=headers).status_code == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_written(site, method):
    assert site.client.request(method, "/word/step").status_code == 405


def test_every_answer_forbids_scripts_from_elsewhere(site):
    for address in ("/word/step", "/word/api/step", "/word/static/app.js", "/nowhere"):
        policy = site.client.get(address).headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "no-referrer" in site.client.get(address).headers["referrer-policy"]


def test_no_view_writes_a_file(site, folder):
    before = {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*")) if path.is_file()}
    for view in VIEWS:
        site.page(view)
    assert {path: path.stat().st_mtime_ns for path in sorted(folder.rglob("*")) if path.is_file()} == before


# Hostile documents, names and paths


def test_what_a_document_says_is_text_and_never_markup(site):
    for address in ("document?source=web&document=3", "store", "store?source=books", "strip?step=0&slot=0"):
        tags = Tags(site.page(address)).tags
        assert [attributes for tag, attributes in tags if tag == "script"] == [
            {"type": "module", "src": "static/app.js"}
        ]
        assert not [name for _, attributes in tags for name in attributes if name.startswith("on")]
        assert "img" not in [tag for tag, _ in tags]


def test_the_name_of_a_run_is_text(folder, open_site):
    path = folder / "<img src=x>.toml"
    path.write_text((folder / "run.toml").read_text(encoding="utf-8"), encoding="utf-8")
    try:
        site = open_site(path)
        for view in VIEWS:
            assert "img" not in [tag for tag, _ in Tags(site.page(view)).tags]
    finally:
        path.unlink()


# Bounded answers


def test_a_long_document_is_shown_a_part_at_a_time(tmp_path, open_site):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * 10_000}) + "\n", encoding="utf-8")
    tm.prepare(tmp_path / "a.jsonl", out=tmp_path / "store", tokenizer="bytes", progress=False, workers=1)
    site = open_site(tmp_path / "store")
    (part,) = site.api("document?document=0")["contents"]["parts"]
    assert (len(part["ids"]), part["length"], part["trained"][:2]) == (4096, 10_002, [False, True])
    (rest,) = site.api("document?document=0&first=8192")["contents"]["parts"]
    assert (len(rest["ids"]), all(rest["trained"])) == (10_002 - 8192, True)
    assert "8,192 to 10,001 of 10,002" in site.page("document?document=0&first=8192")


# Object storage


def test_a_store_in_object_storage_is_opened_by_its_address(folder, open_site):
    site = open_site(f"file://{folder}/stores/web")
    assert site.api("store")["documents"] == open_site(folder / "stores" / "web").api("store")["documents"]


# Builds


def test_a_build_is_shown_as_python_says(tmp_path, open_site):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a"}) + "\n", encoding="utf-8")
    tm.prepare(tmp_path / "a.jsonl", out=tmp_path / "store", tokenizer="bytes", progress=False, workers=1)
    site = open_site(tmp_path / "store")
    assert site.api("build") == as_json(build_status(tmp_path / "store"))
    assert "finished" in site.page("build")
    (tmp_path / "store" / "manifest.json").unlink()
    begun = open_site(tmp_path / "store")
    assert begun.client.get("/word/").headers["location"] == "/word/build"
    begun.page("build")


# Chats and groups


def chat(number):
    turns = [("user", f"question {number}"), ("assistant", f"answer {number}")]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


GROUP = {"prompt": "p", "responses": ["good", "bad"], "rewards": [1.0, 0.0]}


@pytest.mark.parametrize(
    ("recipe", "records", "options", "trained"),
    [
        ("chat", [chat(n) for n in range(12)], {"chat_template": "chatml"}, "answer 2<|im_end|>"),
        ("grpo", [GROUP] * 12, {}, "good"),
    ],
)
def test_chats_and_groups_have_every_view(tmp_path, open_site, recipe, records, options, trained):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    prepare = tm.PrepareOptions(**options)
    tm.prepare(
        path, out=tmp_path / "a", tokenizer="bytes", recipe=recipe, progress=False, workers=1, options=prepare
    )
    tables = '[run]\nsteps = 2\nglobal_batch_size = 4\nseq_len = 128\n[[sources]]\nname = "a"\nstore = "a"\n'
    (tmp_path / "run.toml").write_text(tables, encoding="utf-8")
    site = open_site(tmp_path / "run.toml")
    for view in ("step", "strip", "arrays", "timeline", "packing", "store", "document?document=2"):
        site.page(view)
    parts = site.api("document?document=2")["contents"]["parts"]
    spelled = ["".join(s for s, t in zip(p["strings"], p["trained"], strict=True) if t) for p in parts]
    assert trained in [text.removesuffix("<|eos|>") for text in spelled]


def test_characters_of_several_tokens_are_whole_in_every_view(tmp_path, open_site):
    text = "中文字符 🎉 👩‍👧 ☰"
    path = tmp_path / "a.jsonl"
    path.write_text((json.dumps({"text": text}) + "\n") * 12, encoding="utf-8")
    tm.prepare(path, out=tmp_path / "a", tokenizer="bytes", progress=False, workers=1)
    tables = '[run]\nsteps = 2\nglobal_batch_size = 4\nseq_len = 64\n[[sources]]\nname = "a"\nstore = "a"\n'
    (tmp_path / "run.toml").write_text(tables, encoding="utf-8")
    site = open_site(tmp_path / "run.toml")
    for view in ("strip", "store", "document?document=2"):
        assert "\ufffd" not in site.page(view)
    page = site.page("document?document=2")
    first, rest = re.escape("中"), 'title="part of the character before, id {}, position {}, trained"></span>'
    assert re.search(rf'title="id 228, position 1, trained">{first}</span>', page)
    for place, byte in enumerate("中".encode()[1:], 2):
        assert rest.format(byte, place) in page
    assert page.count('class="k t j"') == len(text.encode()) - len(text)
    assert site.page("strip").count(' j"') == sum(
        token["continues"] for token in site.api("strip")["tokens"]["tokens"]
    )


def test_a_store_is_offered_once_its_build_has_finished(folder, tmp_path):
    """The pages of a running build ask again; the store appears without a restart of the viewer."""
    (tmp_path / "st" / ".prepare").mkdir(parents=True)
    opened = Opened(path=tmp_path / "st")
    assert (opened.views, opened.first_view) == (("build",), "build")
    shutil.copytree(folder / "stores" / "web", tmp_path / "st", dirs_exist_ok=True)
    assert opened.views == ("store", "build")
    assert opened.stores["st"].num_documents > 0
