"""How far a build has come, shown on the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_SECONDS_BETWEEN = 0.2


class ProgressBar:
    """A bar on stderr: documents, MB/s, tokens/s, time left by bytes of input; nothing if not `shown`."""

    def __init__(
        self,
        total_bytes: int,
        look: Callable[[], tuple[int, int, int]],
        *,
        shown: bool | None = None,
        what: str = "prepare",
    ) -> None:
        self._what = what
        self._total_bytes = total_bytes
        self._look = look
        self._shown = sys.stderr.isatty() if shown is None else shown
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._begin = self._last = time.monotonic()

    def __enter__(self) -> ProgressBar:
        if self._shown:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn(self._what),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}%"),
                TextColumn("{task.fields[documents]:,} documents"),
                TextColumn("{task.fields[megabytes]:,.1f} MB/s"),
                TextColumn("{task.fields[tokens]:,.0f} tokens/s"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task(
                "prepare", total=self._total_bytes, documents=0, megabytes=0.0, tokens=0.0
            )
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            if error is None:
                self._refresh()
            self._bar.stop()

    def tick(self) -> None:
        """Bring the bar up to date, if it has been a while: cheap enough to call at any time."""
        if self._bar is not None and time.monotonic() - self._last > _SECONDS_BETWEEN:
            self._refresh()

    def _refresh(self) -> None:
        assert self._bar is not None
        assert self._task is not None
        self._last = time.monotonic()
        done_bytes, documents, tokens = self._look()
        seconds = max(self._last - self._begin, 1e-3)
        self._bar.update(
            self._task,
            completed=done_bytes,
            documents=documents,
            megabytes=done_bytes / 1e6 / seconds,
            tokens=tokens / seconds,
        )


def say_loudly(message: str) -> None:
    """Print a warning on stderr, in bold where that is possible."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True).print(Text(f"warning: {message}", style="bold yellow"), soft_wrap=True)
