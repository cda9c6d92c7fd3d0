"""The page in a real browser: it works, loads nothing from elsewhere, and runs nothing that a document says."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest

import tokenmill as tm
from tokenmill.inspect.steps import inspect_step, inspect_strip
from tokenmill.inspect.stores import tokenizer_of

CHROMIUM = next(
    (path for path in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if path), None
)
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
pytestmark = pytest.mark.slow

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
if CHROMIUM is None:
    pytest.skip("no chromium is installed (Debian: apt-get install chromium)", allow_module_level=True)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield opened
        opened.close()


class Server:
    """`tokenmill view` in a process of its own."""

    def __init__(self, path, *options):
        command = [sys.executable, "-m", "tokenmill", "view", str(path), *options]
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        self.address = re.match(r"(http://\S+/)", self.process.stdout.readline()).group(1)

    def stop(self):
        self.process.send_signal(signal.SIGINT)
        self.process.wait(20)
        self.process.stdout.close()


@pytest.fixture(scope="module")
def server(folder):
    started = Server(folder / "run.toml")
    yield started
    started.stop()


@pytest.fixture
def page(browser):
    """Return a page that remembers everything that must not happen."""
    opened = browser.new_page(viewport={"width": 1200, "height": 800})
    opened.wrong = []
    opened.on("console", lambda message: opened.wrong.append(message.text))
    opened.on("pageerror", lambda error: opened.wrong.append(str(error)))
    opened.on("dialog", lambda dialog: (opened.wrong.append(dialog.message), dialog.dismiss()))
    opened.on(
        "request",
        lambda request: None if request.url.startswith("http://127.0.0.1:") else opened.wrong.append(request.url),
    )
    yield opened
    opened.close()


def shows(page, title):
    """Wait until a page is there; the policy of the page forbids the script by which most waits look."""
    playwright.expect(page.locator("h1")).to_have_text(title)


def test_each_view_is_drawn_without_an_error_or_a_request_elsewhere(page, server):
    page.goto(server.address)
    shows(page, "Step 0")
    assert page.locator("ol.strips li").count() == 8
    for name, title in [("Timeline", "Timeline"), ("Packing", "Packing"), ("Store", "Store web"), ("Diff", "Diff")]:
        page.get_by_role("link", name=name, exact=True).click()
        shows(page, title)
    page.get_by_role("link", name="other.toml").click()
    shows(page, "run and other")
    assert page.wrong == []


def test_keys_links_and_the_back_button_move_through_steps(page, server):
    page.goto(f"{server.address}step?step=3")
    page.keyboard.press("ArrowRight")
    shows(page, "Step 4")
    page.keyboard.press("ArrowLeft")
    shows(page, "Step 3")
    assert page.url.endswith("step?step=3")
    page.go_back()
    shows(page, "Step 4")
    page.locator("input[name=step]").fill("7")
    page.keyboard.press("Enter")
    shows(page, "Step 7")
    playwright.expect(page.locator("ol.strips li")).to_have_count(4)
    assert page.wrong == []


COLOURS = """areas => {
  const canvas = document.querySelector("ol.strips canvas");
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const pixels = new Uint32Array(data.buffer);
  return areas.map(([left, top, size]) => {
    const lines = [...Array(size).keys()].map(line => (top + line) * canvas.width + left);
    return [...new Set(lines.flatMap(begin => [...pixels.slice(begin, begin + size)]))];
  });
}"""
"""The colours of squares (left, top, size) of what is drawn."""


def test_a_strip_is_drawn_says_its_tokens_and_leads_to_documents(page, server, folder):
    run = tm.Run.from_toml(folder / "run.toml")
    step, row = next(
        (step, row)
        for step in range(6)
        for row in inspect_step(run, step).rows
        if row.strips[0].bos and row.strips[0].eos
    )
    page.goto(f"{server.address}step?step={step}")
    about = page.locator("#about")
    box = page.locator("ol.strips canvas").bounding_box()
    high = box["height"] / 8
    (strip,) = row.strips
    tokens = inspect_strip(run, step, row.slot, tokenizer=tokenizer_of(run.stores[row.source])).tokens
    for ordinal in (0, 1, len(tokens) // 2, len(tokens) - 1):
        token = tokens[ordinal]
        x, y = (ordinal + 0.5) * box["width"] / strip.room, (row.slot + 0.5) * high
        page.mouse.move(box["x"] + x, box["y"] + y)
        state = "trained" if token.trained else "not trained"
        where = f"document {token.document} of {row.source}, position {token.position}"
        playwright.expect(about).to_have_text(f"{json.dumps(token.text)}, id {token.id}, {where}, {state}")
    # Trained is of one colour; what is not trained is dotted; BOS and EOS are flags above and below.
    wide, top = box["width"] / strip.room, round(row.slot * high)
    squares = [
        (round(column * wide) + left, top + down, size)
        for column, left, down, size in (
            (0, 6, 6, 8),
            (1, 6, 6, 8),
            (strip.bos[0], 1, 3, 1),
            (strip.eos[0] + 1, -2, round(high) - 3, 1),
        )
    ]
    masked, trained, bos, eos = page.evaluate(COLOURS, squares)
    assert (len(masked) > 1, len(trained), bos, eos) == (True, 1, [0xFF241F1C], [0xFF241F1C])
    page.mouse.click(box["x"] + 2, box["y"] + (row.slot + 0.5) * high)
    shows(page, f"Document {tokens[0].document} of {row.source}")
    assert page.wrong == []


def test_a_click_on_the_timeline_goes_to_its_step(page, server):
    page.goto(f"{server.address}timeline")
    drawn = page.locator("figure.timeline svg")
    box = drawn.bounding_box()
    left, right, wide = 64, 976, 1000
    page.mouse.click(box["x"] + box["width"] * (left + (right - left) * 0.55) / wide, box["y"] + box["height"] / 2)
    shows(page, "Step 5")
    assert page.wrong == []


def test_hostile_documents_are_shown_and_not_run(page, server):
    page.goto(f"{server.address}document?source=web&document=3")
    assert "<script>alert(1)</script>" in page.locator("pre.tokens").inner_text()
    page.goto(f"{server.address}store?source=web")
    assert page.wrong == []


def test_it_is_readable_on_a_narrow_screen_and_in_the_dark(page, server):
    page.set_viewport_size({"width": 400, "height": 800})
    page.emulate_media(color_scheme="dark")
    for view in ("step", "timeline", "packing", "store", "document?source=web&document=3"):
        page.goto(server.address + view)
        assert page.evaluate("document.documentElement.scrollWidth") <= 400, view
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 24, 29)"
    assert page.wrong == []


def test_a_server_that_is_gone_is_said(page, folder):
    started = Server(folder / "stores" / "web")
    page.goto(started.address)
    started.process.kill()
    started.process.wait()
    started.process.stdout.close()
    page.get_by_role("link", name="Store", exact=True).click()
    page.wait_for_selector("#about.lost")
    assert "start `tokenmill view` again" in page.locator("#about").inner_text()


NASTY = "<img src=x onerror=alert(3)>"
KINDS = {
    "chat": [
        {
            "messages": [
                {"role": "user", "content": f"question {n}"},
                {"role": "assistant", "content": f"answer {n}"},
            ]
        }
        for n in range(8)
    ],
    "dpo": [{"prompt": f"p{n} ", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(8)],
    "grpo": [{"prompt": f"p{n} ", "responses": ["good", "bad"], "rewards": [1.0, -0.5]} for n in range(8)],
}


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """Return a server of a run of each kind of store; the others are beside the first."""
    folder = tmp_path_factory.mktemp("kinds")
    lines = "[run]\nsteps = 2\nglobal_batch_size = 4\nseq_len = 128\n[[sources]]\n"
    for kind, records in KINDS.items():
        path = folder / f"{kind}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        template = tm.PrepareOptions(chat_template="chatml" if kind == "chat" else None)
        place = f"{kind} {NASTY}"
        tm.prepare(
            path, out=folder / place, tokenizer="bytes", recipe=kind, progress=False, workers=1, options=template
        )
        (folder / f"{kind}.toml").write_text(f'{lines}name = "{kind}"\nstore = "{place}"\n', encoding="utf-8")
    live = 'name = "web"\nlive = true\ndocuments = ["chat.jsonl"]\ntext_field = "messages"\ntokenizer = "bytes"\n'
    (folder / f"live {NASTY}.toml").write_text(lines + live, encoding="utf-8")
    started = Server(folder / "chat.toml")
    yield started
    started.stop()


def test_a_chat_shows_what_is_trained(page, kinds):
    page.goto(f"{kinds.address}document?document=2")
    assert "question 2" in page.locator("section pre").inner_text()
    assert "".join(page.locator("section pre .k.t").all_inner_texts()) == "answer 2<|im_end|>"
    assert page.wrong == []


def test_pairs_and_groups_are_drawn_and_stand_side_by_side(page, kinds):
    page.goto(f"{kinds.address}with/dpo.toml/step")
    labels = page.locator("ol.strips li").all_inner_texts()
    assert [label.split()[2] for label in labels] == ["chosen", "rejected"] * 4
    masked, trained = page.evaluate(COLOURS, [(20, 6, 8), (60, 6, 8)])
    assert (len(masked) > 1, len(trained)) == (True, 1)
    page.goto(f"{kinds.address}with/dpo.toml/document?document=2")
    sections = page.locator("section")
    assert sections.nth(0).bounding_box()["y"] == sections.nth(1).bounding_box()["y"]
    trained = ["".join(sections.nth(place).locator("pre .k.t").all_inner_texts()) for place in range(2)]
    assert trained == ["good 2<|eos|>", "bad 2<|eos|>"]
    page.goto(f"{kinds.address}with/grpo.toml/step?step=1")
    labels = page.locator("ol.strips li").all_inner_texts()
    assert [label.split(" ", 2)[2] for label in labels] == ["prompts", "reward 1", "reward -0.5"] * 4
    page.locator("ol.strips li a").nth(1).press("Enter")
    playwright.expect(page.locator("h1")).to_contain_text("grpo, responses")
    page.goto(f"{kinds.address}with/grpo.toml/document?document=2")
    assert [text.split(":")[0] for text in page.locator("section h2").all_inner_texts()] == [
        *("prompts", "responses, reward 1", "responses, reward -0.5")
    ]
    assert page.wrong == []


def test_live_text_and_hostile_names_are_shown_as_what_they_are(page, kinds):
    page.goto(f"{kinds.address}diff")
    page.get_by_role("link", name="live").click()
    playwright.expect(page.locator("p.empty").last).to_contain_text("got live text of 'web'")
    page.goto(f"{kinds.address}with/{quote(f'live {NASTY}.toml')}/step")
    playwright.expect(page.locator(".problem")).to_contain_text("leave out live = true")
    page.get_by_role("link", name="Timeline", exact=True).click()
    shows(page, "Timeline")
    assert page.locator("figure.timeline svg").count() == 1
    assert [message for message in page.wrong if "400 (Bad Request)" not in message] == []


def test_the_pictures_of_the_guide_can_be_taken(tmp_path):
    script = Path(__file__).parents[2] / "tools" / "view_pictures.py"
    done = subprocess.run([sys.executable, script, "--out", tmp_path], capture_output=True, text=True, check=True)
    taken = sorted(path.name for path in tmp_path.glob("*.png"))
    assert sorted(Path(line).name for line in done.stdout.splitlines()) == taken
    pages = [Path(__file__).parents[2] / name for name in ("README.md", "docs/how-to/view.md")]
    shown = {name for page in pages for name in re.findall(r"pictures/(view-[\w-]+\.png)", page.read_text("utf-8"))}
    assert sorted(shown) == taken
