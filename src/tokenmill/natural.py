"""An order of file names that any machine and any person agree on."""

from __future__ import annotations

import re
from pathlib import PurePath


def natural_key(path: str) -> tuple[object, ...]:
    """Return a sort key that compares digits as numbers, folder by folder.

    >>> sorted(["b/1", "a10", "a9", "a09"], key=natural_key)
    ['a09', 'a9', 'a10', 'b/1']
    """
    parts = tuple(
        tuple(int(piece) if odd % 2 else piece for odd, piece in enumerate(re.split(r"([0-9]+)", part)))
        for part in PurePath(path).parts
    )
    return (parts, path)  # the path itself decides between a09 and a9
