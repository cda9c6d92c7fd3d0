"""Entries of a weather book, with skies and temperatures that suit the month."""

from collections.abc import Iterator

from demo_corpus.dice import Dice, grow, items, words
from demo_corpus.words import person

COMPASS = ("N", "NE", "E", "SE", "S", "SW", "W", "NW")

COLD = words("low fog, bright frost, sleet, soft snow, a dry east wind, freezing mist, grey cloud, still cold")
MILD = words("a thin drizzle, broken cloud, a gusty wind, low fog, heavy dew, showers, a pale sun, steady rain")
WARM = words("long sunshine, a warm haze, warm rain, high white cloud, distant thunder, a light breeze, great heat")

MONTHS = (
    # name, coldest and warmest noon in °C, skies
    ("January", -11, 4, COLD),
    ("February", -9, 7, COLD),
    ("March", -1, 13, MILD),
    ("April", 3, 17, MILD),
    ("May", 9, 23, MILD),
    ("June", 14, 28, WARM),
    ("July", 16, 33, WARM),
    ("August", 15, 31, WARM),
    ("September", 11, 24, MILD),
    ("October", 5, 17, MILD),
    ("November", -1, 10, MILD),
    ("December", -8, 5, COLD),
)
MONTH_STARTS = tuple(range(0, 360, 30))

SKIES = items("""
{Sky} until noon, then {later}.

Began with {sky}; ended with {later} and an evening of {colour}.

{Sky} all day, and nobody complained.

{Sky} at dawn, {later} by four.

After {sky} in the night, a {colour} morning.

{Sky}. Towards evening {later}, and a {colour} edge to the hills.

Nothing but {sky}.
""")

REMARKS = items("""
The pond stands {number} fingers below the board.

{Bird} came down to the weir {daytime}.

The {tree} by the sluice is turning {leaf}.

Ground {few} sacks of {grain} for {someone}.

Smoke from {place} went straight up.

Washing brought in twice.

{Someone} says it will change; {name} says it always does.

The stove drew badly, and the hall smelled of {smell}.

{Tree} leaves on the grating.

Swept the leat as far as the second bend.

Heard {sound} in the upper gears; it stopped when looked at.

Roads soft. The carter left half his load at {place}.

Supper: {food}.

Barometer falling, and with it the conversation.

Stars very near.
""")

WINTER = items("""
Ice along the edges, none in the race.

Broke the ice at the sluice with the long bar.

The lantern oil was stiff and so were we.

Boots by the stove, socks on the beam.

Tracks of a fox from the hen house to the hedge, and, I am glad to say, no others.
""")


def _entry(dice: Dice, day: int, remarks: int) -> str:
    """Describe one day; days count from 0, thirty of them to a month, because nobody checks the 31st."""
    month, coldest, warmest, skies = MONTHS[day // 30 % 12]
    bound = person(dice) | {"sky": dice.draw(skies), "later": dice.draw(skies)}
    facts = f"{dice.between(coldest, warmest)} °C, wind {dice.draw(COMPASS)} {dice.between(1, 7)}."
    told = [dice.draw(SKIES)] + [dice.draw(REMARKS) for _ in range(remarks)]
    if skies == COLD and dice.chance(0.6):
        told.append(dice.draw(WINTER))
    return f"{day % 30 + 1} {month}. {facts} " + " ".join(dice.fill(sentence, bound) for sentence in told)


def _days(dice: Dice) -> Iterator[str]:
    day = dice.below(360)
    while True:
        # February ends on its 28th; the book is not written every day anyway.
        day += dice.between(1, 6) if day % 360 not in range(51, 60) else 9
        yield _entry(dice, day, dice.between(0, 4))


def weather(dice: Dice, length: int) -> str:
    """Return one entry of the mill's weather book, or a page of them."""
    if length < 300:
        return _entry(dice, dice.draw(MONTH_STARTS) + dice.below(28), length // 80)
    head = dice.fill("Weather book of the mill at {place}") + "\n\n"
    return head + grow(_days(dice), length - len(head) - 100, "\n")
