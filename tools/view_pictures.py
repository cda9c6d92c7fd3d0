"""Take the pictures of docs/how-to/view.md: the demo run in a real browser.

    python tools/view_pictures.py [--out docs/pictures]

Needs playwright and an installed chromium.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

import tokenmill as tm
from tokenmill.cli.demo import KINDS, RUN_TOML
from tokenmill.demo import CORPUS_DIR, TOKENIZER_DIR

SHOTS = {
    "view-step": ("step?step=45", 1100, 450, "light"),
    "view-step-dark": ("step?step=45", 1100, 450, "dark"),
    "view-strip": ("strip?step=0&slot=1", 1100, 420, "light"),
    "view-timeline": ("timeline", 1100, 620, "light"),
    "view-document": ("document?source=prose&document=3", 1100, 560, "light"),
    "view-chat": ("with/chat.toml/document?document=1", 1100, 560, "dark"),
    "view-narrow": ("step?step=41", 400, 760, "dark"),
}
"""Name of a picture -> its view, width, height, and light or dark."""
CHATS = [
    [
        ("system", "Answer in one sentence."),
        ("user", "Why is the sky blue?"),
        ("assistant", "Air scatters blue most."),
    ],
    [
        *(("system", "You are a patient teacher."), ("user", "What is 7 times 8?"), ("assistant", "It is 56.")),
        *(("user", "Are you sure?"), ("assistant", "Yes: 7 times 8 is 70 less 14.")),
    ],
]


def main() -> None:
    """Take all pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs" / "pictures")
    args = parser.parse_args()
    chromium = next((path for path in map(shutil.which, ("chromium", "google-chrome")) if path), None)
    if chromium is None:
        sys.exit("tools/view_pictures.py: needs chromium (Debian: apt-get install chromium)")
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        command = [sys.executable, "-u", "-m", "tokenmill", "view", f"{folder}/run.toml"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        found = re.match(r"(http://\S+/)", server.stdout.readline())
        assert found is not None, "the server must print its address"
        take(found[1], chromium, args.out)
        server.send_signal(signal.SIGINT)
        server.wait(20)


def make(folder: Path) -> None:
    """Prepare the demo run, and a run over some chats."""
    for kind in KINDS:
        out, tokenizer = folder / "stores" / kind, str(TOKENIZER_DIR)
        tm.prepare(CORPUS_DIR / f"{kind}.jsonl", out=out, tokenizer=tokenizer, workers=1, progress=False)
    (folder / "run.toml").write_text(RUN_TOML, encoding="utf-8")
    records = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in CHATS]
    path = folder / "chat.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    options = tm.PrepareOptions(chat_template="chatml")
    tm.prepare(
        path,
        out=folder / "stores" / "chat",
        tokenizer="bytes",
        recipe="chat",
        workers=1,
        progress=False,
        options=options,
    )
    run = "[run]\nsteps = 4\nglobal_batch_size = 2\nseq_len = 256\n"
    source = '[[sources]]\nname = "chat"\nstore = "stores/chat"\n'
    (folder / "chat.toml").write_text(run + source, encoding="utf-8")


def take(address: str, chromium: str, out: Path) -> None:
    """Take the pictures of a server."""
    out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for name, (view, width, height, scheme) in SHOTS.items():
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto(address + view)
            page.screenshot(path=out / f"{name}.png")
            sys.stdout.write(f"{out / name}.png\n")
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
