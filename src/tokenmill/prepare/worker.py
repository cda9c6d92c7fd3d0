"""The worker process: tasks come in as lines of JSON, results go out as lines of JSON, until the input ends."""

from __future__ import annotations

import os
import sys
import traceback
from queue import SimpleQueue
from threading import Thread
from typing import Any

import orjson

from tokenmill.errors import TokenmillError
from tokenmill.prepare.bench import Bench, open_bench
from tokenmill.prepare.job import Job
from tokenmill.prepare.task import Task, run_task


def main() -> None:
    """Serve the process that started this one, and end with it."""
    # Results go through a descriptor of their own: what a library prints must not get between them.
    with os.fdopen(os.dup(1), "wb", buffering=0) as channel:
        os.dup2(2, 1)
        messages: SimpleQueue[dict[str, Any]] = SimpleQueue()
        Thread(target=_listen, args=(messages,), daemon=True).start()
        job = Job.from_json(messages.get())
        bench: Bench | None = None
        while True:
            task = Task.from_json(messages.get())
            try:
                bench = bench or open_bench(job)
                reply = orjson.dumps({"result": run_task(bench, task)})
            except TokenmillError as error:
                reply = orjson.dumps({"error": type(error).__name__, "message": str(error)})
            except Exception:  # a bug: the parent shows where
                reply = orjson.dumps({"error": "TokenmillError", "message": traceback.format_exc()})
            channel.write(reply + b"\n")


def _listen(messages: SimpleQueue[dict[str, Any]]) -> None:
    """Pass on what the parent sends; leave at once when it closes its end or dies, even amid a unit."""
    for line in sys.stdin.buffer:
        messages.put(orjson.loads(line))
    os._exit(0)
