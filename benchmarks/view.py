"""The viewer: time to open a huge run, and to draw a large step.

    python benchmarks/view.py [--documents 100000000] [--tiny] [--json]

A store of this many documents (offsets only; the tokens are a sparse file) and a run of a million steps with
batches of 512 rows of 8,192 tokens. Its row index is built before. Opening is measured in a fresh process each
time: until the plan is ready, as `tokenmill plan` needs it, and until the page of the first step is sent. Then
steps are requested one after another, each for the first time.

If chromium and playwright are installed, a browser is measured too, over a store of 200,000 documents that end
with EOS, so every end is marked: from the click on "later" until the new strips are drawn, and the CPU time of
the page and of the server, which says more on a busy machine. Figures are medians of wall clocks unless stated
otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from packing import make_huge

PROBE = """
import sys, time
from pathlib import Path
from starlette.testclient import TestClient
from tokenmill.view.server import make_app
from tokenmill.view.views import Opened

begin = time.perf_counter()
opened = Opened(path=Path(sys.argv[1]))
opened.run.plan()
planned = time.perf_counter() - begin
client = TestClient(make_app(opened, "w", ("testserver",)))
size = len(client.get("/w/step?step=0").raise_for_status().content)
first = time.perf_counter() - begin
steps = []
for step in range(1000, 1000 + 20 * int(sys.argv[2]), int(sys.argv[2])):
    begin = time.perf_counter()
    client.get(f"/w/step?step={step}").raise_for_status()
    steps.append(time.perf_counter() - begin)
begin = time.perf_counter()
client.get("/w/store").raise_for_status()
print(planned, first, sorted(steps)[len(steps) // 2], size, time.perf_counter() - begin)
"""


TURN = """title => new Promise(done => {
  const begin = performance.now();
  const drawn = () => done(performance.now() - begin);
  const look = () => requestAnimationFrame(
    document.querySelector("h1").innerText === title ? () => requestAnimationFrame(drawn) : look
  );
  document.body.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", bubbles: true }));
  look();
})"""
"""Presses a key, and returns the milliseconds until the frame after the one that shows the next step."""


def add_ends(run: Path) -> None:
    """Write tokens into the store of a run, each document ended by EOS."""
    from tokenmill.store import open_store
    from tokenmill.store.layout import manifest_bytes

    store = open_store(run.parent / "web")
    manifest = replace(store.manifest, tokenizer={"vocab_size": 50_000, "eos_id": 1, "add_eos": True})
    ends = store.offsets(store.axis("sequence"), 0, store.num_documents)[1:] - 1
    tokens = np.memmap(run.parent / "web" / "shard-00000" / "sequence.bin", "<u2", "r+")
    tokens[:] = np.random.default_rng(0).integers(2, 50_000, tokens.size, dtype=np.uint16)
    tokens[ends] = 1
    tokens.flush()
    (run.parent / "web" / "manifest.json").write_bytes(manifest_bytes(manifest))


def cpu_seconds(process: int) -> float:
    """Return the CPU time that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def in_browser(run: Path, rounds: int) -> dict[str, float] | None:
    """Return the milliseconds from a click until the next step is drawn; None without a browser."""
    chromium = next((path for path in map(shutil.which, ("chromium", "google-chrome")) if path), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    if chromium is None:
        return None
    command = [sys.executable, "-u", "-m", "tokenmill", "view", str(run)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        found = re.match(r"(http://\S+/)", server.stdout.readline())
        assert found is not None
        with sync_playwright() as started:
            browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
            page = browser.new_page(viewport={"width": 1200, "height": 800})
            tools = page.context.new_cdp_session(page)
            tools.send("Performance.enable", {"timeDomain": "threadTicks"})

            def used() -> tuple[float, float]:
                metrics = {each["name"]: each["value"] for each in tools.send("Performance.getMetrics")["metrics"]}
                return metrics["TaskDuration"], cpu_seconds(server.pid)

            page.goto(f"{found[1]}step?step=100")
            page.evaluate(TURN, "Step 101")
            before = used()
            times = [page.evaluate(TURN, f"Step {step:,}") for step in range(102, 102 + rounds)]
            page_cpu, server_cpu = (
                1000 * (end - begin) / rounds for begin, end in zip(before, used(), strict=True)
            )
            browser.close()
        return {"click_to_drawn_ms": median(times), "page_cpu_ms": page_cpu, "server_cpu_ms": server_cpu}
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=100_000_000)
    parser.add_argument("--tiny", action="store_true", help="see that it runs; the figures mean nothing")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tokenmill-bench-") as folder:
        run = make_huge(Path(folder) / "huge", 50_000 if options.tiny else options.documents)
        text = run.read_text().replace("global_batch_size = 64", "global_batch_size = 512")
        steps, seq_len = (200_000, 512) if options.tiny else (1_000_000, 8192)
        run.write_text(text.replace("seq_len = 2048", f"seq_len = {seq_len}").replace("1000000", str(steps)))
        rounds = 1 if options.tiny else 5
        results = []
        for _ in range(rounds + 1):  # the first builds the row index
            done = subprocess.run(
                [sys.executable, "-c", PROBE, str(run), "7"], capture_output=True, text=True, check=True
            )
            results.append([float(number) for number in done.stdout.split()])
        planned, first, step, size, store = (median(column) for column in zip(*results[1:], strict=True))
        found = {
            "documents": 50_000 if options.tiny else options.documents,
            "plan_s": round(planned, 3),
            "first_page_s": round(first, 3),
            "beyond_plan_s": round(first - planned, 3),
            "step_ms": round(1000 * step, 1),
            "page_kb": round(size / 1e3),
            "store_ms": round(1000 * store, 1),
        }
        small = make_huge(Path(folder) / "drawn", 2000 if options.tiny else 200_000)
        small.write_text(run.read_text().replace(f"steps = {steps}", "steps = 1000"))
        add_ends(small)
        drawn = None if options.tiny else in_browser(small, 2 * rounds)
        found |= {name: round(value, 1) for name, value in drawn.items()} if drawn else {"click_to_drawn_ms": None}
    sys.stdout.write(json.dumps(found, indent=None if options.json else 2) + "\n")


if __name__ == "__main__":
    main()
