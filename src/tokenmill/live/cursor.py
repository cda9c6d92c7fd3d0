"""Where the next row of a lane is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenmill.live.rows import Drawn


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """A window, and how many of its rows were delivered."""

    epoch: int = 0
    turn: int = 0
    """Among the windows of the lane in that epoch."""
    drawn: tuple[Drawn, ...] = ()
    """Nothing at the start of a window; several where a stage changed in its midst how rows are made."""
    check: str = ""
    """Digest of what the window held when rows of it were drawn."""
