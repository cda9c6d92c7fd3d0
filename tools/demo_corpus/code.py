"""Code: Python functions, classes and modules whose examples were run; shell, SQL, make; single lines."""

import contextlib
import io
import re
from collections.abc import Iterator

from demo_corpus.classes import CLASSES, CONVERSION, TESTS, UNITS
from demo_corpus.dice import Dice, grow, words
from demo_corpus.functions import NUMBER_FUNCTIONS
from demo_corpus.scripts import CONTROL_STRINGS, MAKE, PYTHON_LINES, SHELL, SHELL_LINES, SQL, SQL_LINES
from demo_corpus.text_functions import TEXT_FUNCTIONS
from demo_corpus.words import MEN, WOMEN

FIXED = CONTROL_STRINGS
"""Documents that stand in the corpus word for word."""

FUNCTIONS = NUMBER_FUNCTIONS + TEXT_FUNCTIONS

SLOT = re.compile(r"<(\w+)>")

WORDS = {
    "give": words("return, give, compute, find, work out"),
    "item": words("""sack, barrel, plank, crate, basket, lantern, barge, ticket, parcel, gear, plot, coin, book,
        bell, hive, letter, wheel, ladle, brick, needle, spindle, bucket, kettle, saddle, feather, candle, button,
        ribbon"""),
    "measure": words("weight, length, price, width, depth, age, height, volume, score, area, speed, angle"),
    "thing": words("""hammer, chisel, ledger, sluice, pulley, anchor, compass, shovel, stove, chimney, harbour,
        orchard, granary, almanac, bellows, tripod, hinge, rudder"""),
    "colour": words("green, grey, ochre, red, blue, yellow, white, copper, black, violet, türkis, café au lait"),
    "material": words("oak, brass, leather, iron, hemp, linen, copper, slate, beeswax, felt, horn, clay, tin"),
    "place": words("""Alder Ford, Mühlbach, Saint-Orens, Brackwater, Großenried, Kalamós, Stony Ferry, Quince Hill,
        Teasel Bridge, Étang-le-Vieux, Thornlock, Pebble Quay, Harrow Down, Ναύπλιο, 水車村"""),
    "name": WOMEN + MEN,
    "year": tuple(str(year) for year in range(1851, 2094, 11)),
    "letter": words("A, B, G, K, M, Q, S, T"),
}
# A word stays the same throughout a document; a number is drawn anew at every mention, unless it is `<..._kept>`.
NUMBERS = {"digit": (1, 3), "small": (2, 9), "day": (10, 28), "medium": (10, 99), "large": (100, 999)}

DOCSTRINGS = (
    '"""Tools for counting <item>s."""',
    '"""What the mill at <place> computes about its <item>s.\n\nWritten by <name>.\n"""',
    '"""Helpers for the <thing>, none longer than a page."""',
    '"""From a list of <item>s to their <measure>, step by step."""',
)


def _plug(dice: Dice, template: str, bound: dict[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        slot = match[1]
        if slot in NUMBERS:
            return str(dice.between(*NUMBERS[slot]))
        name = slot.lower()
        if name not in bound:
            kept = NUMBERS.get(name.removesuffix("_kept"))
            bound[name] = str(dice.between(*kept)) if kept else dice.draw(WORDS[name])
        return bound[name] if slot == name else bound[name].capitalize()

    return SLOT.sub(value, template)


def _with_results(source: str) -> str:
    """Run the source and write under each `>>>` example what Python says, so that no example can be wrong."""
    names: dict[str, object] = {"__name__": "demo"}
    exec(source, names)
    lines: list[str] = []
    statement = ""
    for line in [*source.split("\n"), ""]:
        mark, text = line.strip()[:4], line.strip()[4:]
        if statement and mark != "... ":
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                exec(compile(statement, "<example>", "single"), names)
            lines += ["    " + result for result in said.getvalue().splitlines()]
            statement = ""
        if mark in (">>> ", "... "):
            statement += text + "\n"
        lines.append(line)
    return "\n".join(lines[:-1])


def _conversion(dice: Dice, bound: dict[str, str]) -> str:
    source, target, factor = dice.draw(UNITS)
    given = {"from": source, "to": target, "factor": str(factor)}
    spoken = {"source": source.replace("_", " "), "target": target.replace("_", " ")}
    return _plug(dice, CONVERSION, bound | given | spoken)


def _part(dice: Dice, bound: dict[str, str], classes: float) -> str:
    if dice.chance(0.08):
        return _with_results(_conversion(dice, bound))
    return _with_results(_plug(dice, dice.draw(CLASSES if dice.chance(classes) else FUNCTIONS), bound))


def _tabbed(source: str) -> str:
    """Indent by tabs, as some people do."""
    return re.sub(r"^(    )+", lambda spaces: "\t" * (len(spaces[0]) // 4), source, flags=re.MULTILINE)


def _module(dice: Dice, length: int) -> str:
    """Gather functions and classes under one docstring, with all imports at the top."""
    bound: dict[str, str] = {}
    imports: dict[str, None] = {}
    bodies: dict[str, None] = {}
    while len(bodies) < 2 or sum(map(len, bodies)) < length - 200:
        lines = _part(dice, bound, 0.25).split("\n")
        imports |= dict.fromkeys(line for line in lines if line.startswith(("import ", "from ")))
        body = "\n".join(line for line in lines if line not in imports).strip("\n")
        title = body.split("(")[0].split(":")[0]
        if not any(title == other.split("(")[0].split(":")[0] for other in bodies):
            bodies[body] = None
    head = _plug(dice, dice.draw(DOCSTRINGS), bound)
    return "\n\n\n".join(["\n".join([head, *([""] if imports else []), *sorted(imports)]), *bodies])


def _python(dice: Dice, length: int) -> str:
    source = _module(dice, length) if length > 1_000 else _part(dice, {}, 0.1 if length < 450 else 0.6)
    return _tabbed(source) if dice.chance(0.12) else source


def _script(dice: Dice, length: int) -> str:
    def blocks() -> Iterator[str]:
        while True:
            yield _plug(dice, dice.draw(SQL), {})

    if length > 1_000:
        return grow(blocks(), length - 150, "\n\n")
    return _plug(dice, dice.draw(dice.draw((SHELL, SQL, MAKE))), {})


def _program(dice: Dice, length: int) -> str:
    return _plug(dice, dice.draw(TESTS), {}) if length < 1_000 else _module(dice, length)


def _line(dice: Dice, length: int) -> str:
    language = dice.draw((PYTHON_LINES, PYTHON_LINES, SHELL_LINES, SQL_LINES))
    return "\n".join(_plug(dice, dice.draw(language), {}) for _ in range(1 + length // 80))


LINE = (_line,)
SNIPPET = (_line, _line, _script, _python, _script)
PAGE = (_python, _python, _python, _python, _script, _program)


def write(dice: Dice, length: int) -> str:
    """Write a document of about this many characters."""
    forms = LINE if length < 90 else SNIPPET if length < 200 else PAGE
    return dice.draw(forms)(dice, length)
