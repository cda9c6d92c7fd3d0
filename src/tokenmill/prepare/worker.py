"""The worker process: units come in as lines of JSON, results go out as lines of JSON, until the input ends."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import asdict
from queue import SimpleQueue
from threading import Thread
from typing import Any

import orjson

from tokenmill.errors import TokenmillError
from tokenmill.prepare.options import Job
from tokenmill.prepare.work import run_unit, unit_from_json


def main() -> None:
    """Serve the process that started this one, and end with it."""
    # Results go through a descriptor of their own: what a library prints must not get between them.
    with os.fdopen(os.dup(1), "wb", buffering=0) as channel:
        os.dup2(2, 1)
        messages: SimpleQueue[dict[str, Any]] = SimpleQueue()
        Thread(target=_listen, args=(messages,), daemon=True).start()
        job = Job.from_json(messages.get())
        tokenizer = None
        while True:
            unit = unit_from_json(messages.get())
            try:
                tokenizer = tokenizer or job.open_tokenizer()
                reply = orjson.dumps({"result": asdict(run_unit(job, tokenizer, unit))})
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
