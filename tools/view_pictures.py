"""Take the pictures of docs/guides/view.md: the demo's run, in a real browser.

    python tools/view_pictures.py [--out docs/pictures]

Needs playwright and a chromium that the system has.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

SHOTS = {
    "view-step": ("step?step=45&world_size=2", 1100, 620),
    "view-strip": ("strip?step=0&slot=1", 1100, 420),
    "view-timeline": ("timeline", 1100, 620),
    "view-document": ("document?source=prose&document=3", 1100, 620),
}
"""Name of a picture -> what it shows, its width and height."""


def main() -> None:
    """Take all pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "pictures")
    args = parser.parse_args()
    chromium = next((path for path in map(shutil.which, ("chromium", "google-chrome")) if path), None)
    if chromium is None:
        sys.exit("tools/view_pictures.py: needs chromium (Debian: apt-get install chromium)")
    with tempfile.TemporaryDirectory() as folder:
        demo = [sys.executable, "-m", "tokenmill", "demo", "--out", f"{folder}/demo"]
        subprocess.run(demo, check=True, stdout=subprocess.DEVNULL)
        command = [sys.executable, "-u", "-m", "tokenmill", "view", f"{folder}/demo/run.toml"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        found = re.match(r"(http://\S+/)", server.stdout.readline())
        assert found is not None, "the server must print its address"
        take(found[1], chromium, args.out)
        server.send_signal(signal.SIGINT)
        server.wait(20)


def take(address: str, chromium: str, out: Path) -> None:
    """Take the pictures of a server."""
    out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for name, (view, width, height) in SHOTS.items():
            page = browser.new_page(viewport={"width": width, "height": height})
            page.goto(address + view)
            page.screenshot(path=out / f"{name}.png")
            sys.stdout.write(f"{out / name}.png\n")
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
