"""Dialogue: shops, stations, lessons, workshops, and short exchanges between two people."""

from collections.abc import Callable, Iterator

from demo_corpus.chats import CHATS, CONTROL_STRINGS, QUIPS
from demo_corpus.counters import Turn, shop, station
from demo_corpus.dice import Dice, items
from demo_corpus.lessons import arithmetic, language
from demo_corpus.words import MEN, WOMEN

FIXED = CONTROL_STRINGS
"""Documents that stand in the corpus word for word."""

PLACES = items("""
(At the mill, {daytime}.)

(On the towpath. {Weather}.)

(In the kitchen, which smells of {smell}.)

(Later, at {place}.)

(The same two, {daytime}.)

(They walk on as far as the {tree}.)

(A week later. {Bird} on the roof.)

(In the waiting room at {place}.)

(By {river}.)
""")


def _written(dice: Dice, scene: str) -> Iterator[Turn]:
    # Who talks twice about the same dish means the same dish.
    for line in dice.fill(scene, {"food": dice.fill("{food}")}).split("\n"):
        speaker, said = line.split(": ", 1)
        yield speaker, said


def _chat(dice: Dice) -> Iterator[Turn]:
    return _written(dice, dice.draw(CHATS))


def _quip(dice: Dice) -> Iterator[Turn]:
    return _written(dice, dice.draw(QUIPS))


def _spoken(turns: Iterator[Turn], names: dict[str, str]) -> str:
    return "\n".join(f"{names[speaker]}: {said}" for speaker, said in turns)


def _pair(dice: Dice) -> dict[str, str]:
    first, second = dice.draw(WOMEN), dice.draw(MEN)
    return {"A": first, "B": second} if dice.chance(0.5) else {"A": second, "B": first}


Scene = Callable[[Dice], Iterator[Turn]]
SHORT: tuple[Scene, ...] = (_quip, _quip, language)
MIDDLE: tuple[Scene, ...] = (_chat, language, arithmetic, _chat)
LONG: tuple[Scene, ...] = (_chat, arithmetic, shop, station)
COURSE: tuple[Scene, ...] = (arithmetic, language, arithmetic, _chat)
SCENERY: dict[Scene, tuple[str, ...]] = {
    shop: (
        "(In the shop at {place}.)",
        "(At the market of {place}.)",
        "(The general store, which smells of {smell}.)",
    ),
    station: ("(At the station. {Weather}.)", "(The ticket window at {place}.)"),
    arithmetic: ("(In the schoolroom.)", "(At the kitchen table, {daytime}.)", "(The slate lies on the {grain}.)"),
}


def _day(dice: Dice, length: int, forms: tuple[Scene, ...]) -> str:
    """Follow two people from scene to scene, with an empty line and a stage direction between."""
    names = _pair(dice)
    text = ""
    while len(text) < length - 150:
        form = dice.draw(forms)
        place = dice.fill(dice.draw(SCENERY.get(form, PLACES)))
        text += f"{place}\n{_spoken(form(dice), names)}\n\n"
    return text.rstrip("\n")


def _several(dice: Dice, length: int, form: Scene) -> str:
    """Go on with the same kind of scene, as a lesson or an evening does."""
    names = _pair(dice)
    text = _spoken(form(dice), names)
    while len(text) < length - 150:
        text += "\n\n" + _spoken(form(dice), names)
    return text


def write(dice: Dice, length: int) -> str:
    """Write a document of about this many characters."""
    if length < 130:
        return _spoken(dice.draw(SHORT)(dice), _pair(dice))
    if length < 300:
        return _spoken(dice.draw(MIDDLE)(dice), _pair(dice))
    if length < 700:
        form = dice.draw(LONG)
        # One purchase is long enough; of the shorter scenes it takes a few.
        return _spoken(form(dice), _pair(dice)) if form in (shop, station) else _several(dice, length, form)
    return _day(dice, length, dice.draw((LONG, COURSE)))
