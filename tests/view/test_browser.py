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

import pytest

import tokenmill as tm
from tokenmill.run.inspect import tokenizer_of
from tokenmill.run.step import inspect_step, inspect_strip

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


def test_pairs_stand_side_by_side_with_what_is_trained(page, tmp_path):
    records = [{"prompt": f"p{n} ", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(8)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    tm.prepare(path, out=tmp_path / "pairs", tokenizer="bytes", recipe="dpo", progress=False, workers=1)
    started = Server(tmp_path / "pairs")
    try:
        page.goto(f"{started.address}document?document=2")
        sections = page.locator("section")
        tops = [sections.nth(place).bounding_box()["y"] for place in range(2)]
        assert tops[0] == tops[1]
        trained = [
            "".join(sections.nth(place).locator("pre .k.t").all_inner_texts()).removesuffix("<|eos|>")
            for place in range(2)
        ]
        assert trained == ["good 2", "bad 2"]
    finally:
        started.stop()
    assert page.wrong == []


def test_the_pictures_of_the_guide_can_be_taken(tmp_path):
    script = Path(__file__).parents[2] / "tools" / "view_pictures.py"
    done = subprocess.run([sys.executable, script, "--out", tmp_path], capture_output=True, text=True, check=True)
    taken = sorted(path.name for path in tmp_path.glob("*.png"))
    assert sorted(Path(line).name for line in done.stdout.splitlines()) == taken
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "view.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"pictures/(view-\w+\.png)", guide)) == taken
