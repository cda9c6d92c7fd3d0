"""How far a build is, for people and for a hook: a bar on a terminal, else a line on stderr now and then."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeAlias

_SECONDS_BETWEEN = 0.2
"""Two looks at how far a build has come."""
LINE_SECONDS = 30.0
"""How often a line says so, where no terminal shows a bar."""
SLOW_SECONDS = 2.0
"""How long the tokenizer is opened before a line says so."""
Show: TypeAlias = Callable[
    [str, int, Callable[[], tuple[int, int, int]]], AbstractContextManager[Callable[[], None]]
]
"""What shows how far a step of the build is: what it is, its bytes, and a look at those that are done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a build is."""

    what: str
    """`open the tokenizer`, `look for duplicates`, `prepare`, `note the inputs` or `upload`."""
    done_bytes: int
    """Of the input, as it is on disk; units that an earlier try had finished count at once."""
    total_bytes: int
    documents: int
    tokens: int
    seconds: float
    """Since this step began."""


def warn(message: str) -> None:
    """Print a warning on stderr, in bold where that is possible."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True).print(Text(f"warning: {message}", style="bold yellow"), soft_wrap=True)


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


@contextmanager
def shown_progress(
    what: str,
    total_bytes: int,
    look: Callable[[], tuple[int, int, int]],
    *,
    shown: bool | None,
    on_progress: Callable[[Progress], None] | None,
) -> Iterator[Callable[[], None]]:
    """Show how far a step of the build is: a bar on a terminal, else a line every 30 s; a hook is told as well.

    Gives a function that brings it up to date, if it has been a while: cheap enough to call at any time. `look`
    returns the bytes, documents and tokens that are done. A step without bytes has a line, if it is slow.
    """
    begin, last = time.monotonic(), 0.0
    with ExitStack() as stack:
        tell = (lambda _: None) if shown is False else stack.enter_context(_told(what, total_bytes, always=shown))

        def tick(seconds_between: float = _SECONDS_BETWEEN) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last < seconds_between:
                return
            last = now
            done_bytes, documents, tokens = look()
            progress = Progress(
                what=what,
                done_bytes=done_bytes,
                total_bytes=total_bytes,
                documents=documents,
                tokens=tokens,
                seconds=now - begin,
            )
            tell(progress)
            if on_progress is not None:
                on_progress(progress)

        tick()
        yield tick
        tick(0)


@contextmanager
def _told(what: str, total_bytes: int, *, always: bool | None) -> Iterator[Callable[[Progress], None]]:
    """Give what tells people on stderr how far a step is; a bar is shown on a terminal, or `always`."""
    if not total_bytes:
        line = threading.Timer(SLOW_SECONDS, _say, [f"{what}: this takes a while"])
        line.daemon = True
        line.start()
        try:
            yield lambda _: None
        finally:
            line.cancel()
        return
    if not (always or sys.stderr.isatty()):
        last = 0.0

        def tell(now: Progress) -> None:
            nonlocal last
            if now.seconds - last >= LINE_SECONDS:
                last = now.seconds
                done, total = now.done_bytes / 1e6, total_bytes / 1e6
                _say(
                    f"{what}: {done:,.0f} of {total:,.0f} MB, {done / total:.0%}; {now.documents:,} documents, "
                    f"{now.tokens:,} tokens, {done / now.seconds:,.1f} MB/s"
                )

        yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn(what),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[documents]:,} documents"),
        TextColumn("{task.fields[megabytes]:,.1f} MB/s"),
        TextColumn("{task.fields[tokens]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total_bytes, documents=0, megabytes=0.0, tokens=0.0)

        def show(now: Progress) -> None:
            seconds = max(now.seconds, 1e-3)
            bar.update(
                task,
                completed=now.done_bytes,
                documents=now.documents,
                megabytes=now.done_bytes / 1e6 / seconds,
                tokens=now.tokens / seconds,
            )

        yield show
