"""Draw the bar chart of loaders from the results of `loader.py --peers --json`.

    python benchmarks/loader.py --peers --json > docs/pictures/loaders.json
    python benchmarks/chart.py docs/pictures/loaders.json --out docs/pictures

Writes `loaders.svg` and `loaders-dark.svg`. A loader that was measured in several ways is drawn at its best.
"""

from __future__ import annotations

import argparse
import json
import re
from html import escape
from pathlib import Path

BATCH = 32
WIDTH, LABELS, BAR, GAP = 760, 270, 20, 8
THEMES = {
    "loaders": {"text": "#1f2328", "ours": "#0b6bcb", "theirs": "#9aa4ae"},
    "loaders-dark": {"text": "#e6edf3", "ours": "#4c9df0", "theirs": "#6e7681"},
}


def best_of(results: list[dict]) -> list[tuple[str, float]]:
    """Return the best share of each project at one batch size, highest first.

    >>> best_of([{"loader": "a 1", "batch": 32, "share_of_limit": 0.1}, {"loader": "b", "batch": 8, "error": "?"}])
    [('a 1', 0.1)]
    """
    best: dict[str, tuple[str, float]] = {}
    for result in results:
        if result["batch"] != BATCH or "error" in result or "with position_ids" in result["loader"]:
            continue
        project = re.match(r"[\w-]+", result["loader"])[0]
        share = result["share_of_limit"]
        if project not in best or share > best[project][1]:
            best[project] = (result["loader"].replace("+cpu", ""), share)
    return sorted(best.values(), key=lambda bar: -bar[1])


def draw(bars: list[tuple[str, float]], *, text: str, ours: str, theirs: str) -> str:
    """Return the chart as SVG; the axis ends at the limit, 100%."""
    height = len(bars) * (BAR + GAP) + 44
    scale = (WIDTH - LABELS - 50) / max(share for _, share in bars)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" font-family="system-ui, sans-serif" font-size="13" fill="{text}">',
        "<title>Tokens delivered per CPU-second, as a share of one compiled copying loop</title>",
        '<text x="0" y="16" font-weight="600">Tokens delivered per CPU-second, as a share of the limit</text>',
    ]
    for index, (name, share) in enumerate(bars):
        top = 30 + index * (BAR + GAP)
        is_ours = name.startswith("tokenmill")
        lines += [
            f'<text x="{LABELS - 10}" y="{top + 15}" text-anchor="end"'
            f"{' font-weight=' + chr(34) + '600' + chr(34) if is_ours else ''}>{escape(name)}</text>",
            f'<rect x="{LABELS}" y="{top}" width="{max(share * scale, 1):.1f}" height="{BAR}" rx="2" '
            f'fill="{ours if is_ours else theirs}"/>',
            f'<text x="{LABELS + share * scale + 6:.1f}" y="{top + 15}">{share:.0%}</text>',
        ]
    return "\n".join([*lines, "</svg>\n"])


def main() -> None:
    """Write both pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    args = parser.parse_args()
    bars = best_of(json.loads(args.results.read_text(encoding="utf-8")))
    if len(bars) < 2:
        parser.error(f"{args.results}: needs results of tokenmill and of a peer with batch {BATCH}")
    for name, colours in THEMES.items():
        (args.out / f"{name}.svg").write_text(draw(bars, **colours), encoding="utf-8")


if __name__ == "__main__":
    main()
