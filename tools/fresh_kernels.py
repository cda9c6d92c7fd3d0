"""Remove compiled kernels that an edit has made stale.

Numba keeps a compiled kernel as long as its own file is unchanged, even if a kernel that it calls, in another
file, has changed. Installed copies change all files at once; a working tree does not.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "src" / "tokenmill"
NOTE = ROOT / "__pycache__" / "kernels.sha256"


def main() -> None:
    """Compare the sources with those that the kernels were compiled from."""
    state = hashlib.sha256()
    for file in sorted(ROOT.rglob("*.py")):
        text = file.read_bytes()
        if b"numba" in text:
            state.update(str(file.relative_to(ROOT)).encode() + b"\0" + text)
    if NOTE.exists() and NOTE.read_text() == state.hexdigest():
        return
    for pattern in ("*.nbi", "*.nbc"):
        for file in ROOT.rglob(pattern):
            file.unlink()
    NOTE.parent.mkdir(exist_ok=True)
    NOTE.write_text(state.hexdigest())


if __name__ == "__main__":
    main()
