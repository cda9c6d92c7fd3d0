"""Look at the built site in a browser: screens in light, in dark and at 400 px, and answers of the search.

python tools/site_screens.py            # after `make docs`; writes build/screens and prints what is wrong

It needs playwright and Chromium. It fails if a page is wider than the screen, loads anything from another host, or
misses a file, and if a question below leads to another section.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from shutil import which

from playwright.sync_api import Browser, Page, Response, sync_playwright

ROOT = Path(__file__).parents[1]
PAGES = (
    "index.html",
    "start/quick-start.html",
    "start/look-inside.html",
    "how-to/mix.html",
    "reference/config.html",
    "reference/python.html",
    "explanation/comparison.html",
    "explanation/benchmarks.html",
)
SCREENS = (("light", 1280), ("dark", 1280), ("light", 400), ("dark", 400))
ANSWERS = {
    "change the mixture at a step": "how-to/mix.html#change-the-mixture-at-a-step",
    "resume on fewer": "how-to/resume.html#on-fewer-or-more-gpus",
    "on_long": "reference/config.html#run.on_long",
    "quarantine a document": "how-to/edit.html#quarantine-documents",
}
"""Questions of a new reader, and the section that one search must find among the first five."""
FOUND = """() => {
  const found = []
  const walk = root => {
    for (const element of root.querySelectorAll("*")) {
      if (element.href && root !== document) found.push(element.href)
      if (element.shadowRoot) walk(element.shadowRoot)
    }
  }
  walk(document)
  return found
}"""


class Quiet(SimpleHTTPRequestHandler):
    """A server of files without a log."""

    def log_message(self, *_: object) -> None:
        """Log nothing."""


def open_page(browser: Browser, home: str, scheme: str, width: int, problems: list[str]) -> Page:
    """Open a window that notes requests that fail or lead to another host."""
    page = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900}).new_page()

    def check(response: Response) -> None:
        if response.status >= 400 or not response.url.startswith(home):
            problems.append(f"{page.url}: {response.url}: status {response.status}")

    page.on("response", check)
    page.on("requestfailed", lambda request: problems.append(f"{page.url}: {request.url}: failed"))
    return page


def screens(browser: Browser, home: str, folder: Path) -> Iterator[str]:
    """Take a picture of every page on every screen, and yield problems."""
    for scheme, width in SCREENS:
        problems: list[str] = []
        page = open_page(browser, home, scheme, width, problems)
        for path in PAGES:
            page.goto(home + path, wait_until="networkidle")
            wide = page.evaluate("document.documentElement.scrollWidth")
            if wide > width:
                problems.append(f"{path}: {wide} px wide on a screen of {width}")
            page.screenshot(path=folder / f"{path.replace('/', '-').removesuffix('.html')}-{scheme}-{width}.png")
        yield from problems


def answers(browser: Browser, home: str) -> Iterator[str]:
    """Ask the search every question, and yield those that it does not answer."""
    problems: list[str] = []
    page = open_page(browser, home, "light", 1280, problems)
    for question, section in ANSWERS.items():
        page.goto(home + "index.html", wait_until="networkidle")
        page.keyboard.press("Control+k")
        page.wait_for_timeout(500)
        page.keyboard.type(question)
        page.wait_for_timeout(3000)
        path, anchor = section.split("#")
        found = [link for link in page.evaluate(FOUND)[:5] if f"/{path}" in link and link.endswith(f"#{anchor}")]
        if not found:
            problems.append(f"search for {question!r}: {section} is not among the first five")
    yield from problems


def main() -> int:
    """Look at the site in build/site; return 1 if anything is wrong."""
    folder = ROOT / "build" / "screens"
    folder.mkdir(parents=True, exist_ok=True)
    handler = partial(Quiet, directory=str(ROOT / "build" / "site"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, sync_playwright() as playwright:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        home = f"http://127.0.0.1:{server.server_port}/"
        browser = playwright.chromium.launch(
            executable_path=which("chromium") or which("google-chrome"), args=["--no-sandbox"]
        )
        problems = [*screens(browser, home, folder), *answers(browser, home)]
        browser.close()
        server.shutdown()
    sys.stdout.writelines(f"{problem}\n" for problem in problems)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
