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
    assert page.locator("svg.strip").count() == 8
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
    playwright.expect(page.locator("svg.strip")).to_have_count(4)
    assert page.wrong == []


def test_a_span_says_what_it_is_and_leads_to_its_document(page, server):
    page.goto(f"{server.address}step?step=0")
    span = page.locator("svg.strip rect.t").first
    span.hover()
    page.wait_for_selector("#about.shown")
    said = re.match(r"document (\d+) of (\w+), tokens \d+ to \d+", page.locator("#about").inner_text())
    span.click()
    shows(page, f"Document {said[1]} of {said[2]}")
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
