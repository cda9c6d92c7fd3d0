"""Write the bundled demo corpus: prose.jsonl, code.jsonl and dialogue.jsonl, always the same bytes."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from demo_corpus import code, dialogue, prose
from demo_corpus.dice import Dice
from demo_corpus.words import VOCABULARY

SEED = "tokenmill demo corpus 1"
NUM_BYTES = 138_000
"""About how large each of the three files becomes."""

SHIPPED = Path(__file__).resolve().parent.parent / "src" / "tokenmill" / "demo" / "corpus"

Writer = Callable[[Dice, int], str]
KINDS: dict[str, tuple[Writer, tuple[str, ...]]] = {
    "prose": (prose.write, prose.FIXED),
    "code": (code.write, code.FIXED),
    "dialogue": (dialogue.write, dialogue.FIXED),
}


def documents(kind: str) -> list[str]:
    """Write one kind's documents until they fill its file; no text comes twice."""
    write, fixed = KINDS[kind]
    dice = Dice(f"{SEED} {kind}", VOCABULARY)
    # A dict keeps the order and refuses duplicates; the fixed texts get their places by the final shuffle.
    texts = dict.fromkeys(fixed)
    num_bytes = 0
    while num_bytes < NUM_BYTES:
        text = write(dice, dice.wanted_length())
        if text not in texts:
            texts[text] = None
            num_bytes += len(text.encode()) + len('{"id": "-0000", "text": ""}\n' + kind)
    return dice.shuffled(tuple(texts))


def write_corpus(folder: Path) -> None:
    """Write the three files into a folder, which is made if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        lines = [
            json.dumps({"id": f"{kind}-{number:04d}", "text": text}, ensure_ascii=False) + "\n"
            for number, text in enumerate(documents(kind), 1)
        ]
        (folder / f"{kind}.jsonl").write_bytes("".join(lines).encode())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=SHIPPED, help="default: where it ships")
    write_corpus(parser.parse_args().folder)
