"""The render of a plain question and answer, in a process of its own that limits the template.

A build asks how a template ends turns and whether it writes BOS before its first unit. The template may be hostile,
and the process of the user has no limits, so another process renders the sample.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from tokenmill.encode import Refusal
from tokenmill.encode.chat import limits
from tokenmill.encode.chat.render import Rendered, render
from tokenmill.encode.chat.template import ChatTemplate
from tokenmill.errors import ConfigError

PROGRAM = "from tokenmill.encode.chat.sample import main; main()"
"""Program of the process that renders a sample."""
_PLACE = "of a sample"


class _Request(msgspec.Struct, frozen=True):
    template: dict[str, Any]
    options: dict[str, Any]


class _Answer(msgspec.Struct, frozen=True):
    sample: Rendered | None = None
    error: str | None = None


def sample_of(template: ChatTemplate, options: Mapping[str, Any]) -> Rendered | None:
    """Return a plain question and answer as the template renders it; None if it rejects them.

    A template that takes too much time or memory raises `ConfigError`.
    """
    if template.built_in or limits.is_enabled():
        return _render(template, options)
    return _sample(msgspec.json.encode(_Request(template=template.fields(), options=dict(options))))


@lru_cache(maxsize=256)
def _sample(request: bytes) -> Rendered | None:
    program = f"import sys; sys.path[:] = {sys.path!r}; {PROGRAM}"
    with TemporaryDirectory(prefix="tokenmill-") as folder:
        note = Path(folder) / "note"
        done = subprocess.run(
            [sys.executable, "-P", "-c", program, str(note)], input=request, stdout=subprocess.PIPE, check=False
        )
        error = limits.error_of(note)
    if done.returncode:
        raise error or ConfigError(
            f"chat template: the process that renders a sample ended with {done.returncode}; see its traceback"
        )
    answer = msgspec.json.decode(done.stdout, type=_Answer)
    if answer.error is not None:
        raise ConfigError(answer.error)
    return answer.sample


def _render(template: ChatTemplate, options: Mapping[str, Any]) -> Rendered | None:
    for content in ("a", [{"type": "text", "text": "a"}]):
        messages = [{"role": role, "content": content} for role in ("user", "assistant")]
        try:
            with limits.limited(template.where, _PLACE):
                return render(template, messages, kwargs=options)
        except Refusal:
            continue
    return None


def main() -> None:
    """Answer one request from standard input."""
    limits.enable(Path(sys.argv[1]))
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=_Request)
    try:
        template = msgspec.convert(request.template, ChatTemplate)
        answer = _Answer(sample=_render(template, request.options))
    except ConfigError as error:
        answer = _Answer(error=str(error))
    sys.stdout.buffer.write(msgspec.json.encode(answer))
