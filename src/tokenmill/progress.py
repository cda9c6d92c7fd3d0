"""Progress of long work: a bar on a terminal, a line every 30 seconds elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

LINE_SECONDS = 30.0
"""Seconds between two lines where no terminal shows a bar."""


class Display(Protocol):
    """Shows how much of a piece of work is done."""

    def __call__(self, what: str, done: int, total: int | None, note: str = "", /) -> None:
        """Show `done` of `total` (None: not known), and a note behind it. Cheap enough to call at any time."""


def say_nothing(_what: str, _done: int, _total: int | None, _note: str = "", /) -> None:
    """Show nothing."""


@contextmanager
def display(
    amount: Callable[[int], str],
    print_line: Callable[[str], None],
    console: Console | None = None,
    *,
    is_transient: bool = True,
) -> Iterator[Display]:
    """Show progress, in amounts such as `12 MB`: a bar on a console, lines by `print_line` if there is none.

    A transient bar disappears at the end.
    """
    if console is None:
        yield _lines(amount, print_line)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=16),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[of]}", markup=False),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=is_transient) as bar:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int | None, note: str = "", /) -> None:
            of = note or _of(amount, done, total)
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total, of=of)
            bar.update(tasks[what], completed=done, total=total, of=of)

        yield show


def _lines(amount: Callable[[int], str], print_line: Callable[[str], None]) -> Display:
    last = time.monotonic()

    def show(what: str, done: int, total: int | None, note: str = "", /) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            share = f", {done / total:.0%}" if total else ""
            print_line(f"{what}: {_of(amount, done, total)}{share}{f'; {note}' if note else ''}")

    return show


@contextmanager
def lines_while_busy(what: str, print_line: Callable[[str], None]) -> Iterator[None]:
    """Print a line every 30 s while a `with` block does work whose end is not known."""
    done, begin = threading.Event(), time.monotonic()

    def run() -> None:
        while not done.wait(LINE_SECONDS):
            print_line(f"{what}: {time.monotonic() - begin:.0f} s so far")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _of(amount: Callable[[int], str], done: int, total: int | None) -> str:
    return f"{amount(done)} of {amount(total)}" if total else amount(done)
