"""Short stories of small repairs: something goes wrong near the water, someone looks closely, it is mended."""

from collections.abc import Iterator

from demo_corpus.dice import Dice, grow, items, scenes
from demo_corpus.words import person

# Each scene: what went wrong, what was tried, the cause, the cure, how it ended.
TROUBLES = tuple(
    items(scene)
    for scene in scenes("""
The great wheel at {place} had begun to turn so slowly that {name} could count the buckets aloud.

{They} greased the bearing, which made it quieter but no faster.

A mat of {tree} branches had wedged itself under the sluice, and half of {river} was running round the mill instead
of through it.

With a long hook and {someone} to hold {their} belt, {they} pulled the branches out one by one.

By supper the wheel was splashing merrily again, and nobody could count anything.
---
On {weekday} the flour came out of the spout warm, and it smelled faintly of toast.

{Name} slowed the feed, then stopped it, then put {their} palm flat on the upper stone and took it away quickly.

The stones stood too close: last week's {grain} had been soft, and no one had opened the gap again for the
dry {grain}.

{They} raised the runner by the thickness of a sheet of paper, and then by one sheet more.

The next sack was cool as a cellar, and the baker asked for {number} like it.
---
The leather belt between the wheel and the sack hoist slipped whenever a full load hung on it.

{Name} tightened it, dusted it with rosin, and at last spoke to it sternly.

The pulley had been painted for the summer fair, and paint, as {someone} pointed out, is a kind of grease with
manners.

{They} scraped the rim back to bare metal and kept the nice {colour} for the spokes.

The hoist lifted {few} sacks in a row, and the painter was only a little offended.
---
There was mould on the sacks in the north corner, and a stain on the floor the shape of a pear.

{Name} moved the sacks, and the stain moved after them at the next rain.

One slate had slid down by the width of a thumb, so that {weather} outside became a slow drip inside.

{They} climbed up {daytime} with a hammer, a copper nail and a slate of exactly the right grey.

The floor dried within a week; the pear is still there, and guests are told it was painted on purpose.
---
The clock over the market hall at {place} lost a quarter of an hour every day, and the trains did not wait for it.

{Name} set it right each morning, until {they} grew tired of being the most punctual part of the mechanism.

A pigeon had built a nest on the counterweight, and a clock that lifts a pigeon is a clock that works too hard.

{They} waited until the young birds had flown, then hung a net of {thread} across the opening.

Since then the clock has been wrong only twice, both times during a thunderstorm.
---
The bread would not rise, although {name} had followed the same {adjective} recipe for eleven years.

{They} blamed the yeast, the oven, and a certain {weekday} in that order.

The new water pipe ran along the outer wall, and in {season} the dough was being mixed with water as cold as a key.

{They} let the jug stand by the stove for an hour, and wrote "WARM THE WATER" on the beam in {colour} chalk.

The loaves rose so well that two of them stuck to the shelf above.
---
The ferry at {place} let in water, not much, but always exactly as much as had been baled out.

{Name} searched the planks with a candle and found nothing except {thing}.

The leak was not in the hull at all: the wet mooring rope lay coiled in the bow and emptied itself there all night.

{They} nailed a rack of {tree} laths to the gunwale and hung the rope over it to drip outside.

The passengers kept their feet dry, and the ferryman kept his bucket for plums.
---
The bell of {place} had lost its voice, and rang with {sound} that made the dogs look up.

{Name} feared a crack and went over the rim with a fingernail, listening.

It was only the clapper, which had worn flat on one side after a hundred years of funerals, weddings and fires.

{They} turned it a quarter of the way round, so that a fresh cheek met the metal.

That evening the note went out over {river} as clear as ever, and the dogs lay down again.
---
According to the map the path to {place} went along the bank, but the bank had gone elsewhere.

{Name} walked back and forth between {number} willows, comparing each with its picture.

The map had been drawn in {season}, when {river} was low; now it was wide, brown and sure of itself.

{They} climbed to the drove road, counted the milestones, and drew a second path in pencil with the date beside it.

The next walker found the pencil line and added a bench to it.
---
The pump in the yard gave {sound} and then nothing, just when the washing was in the tub.

{Name} worked the handle until {their} shoulders ached, and the pump went on swallowing air.

The leather of the valve had dried out in the long sunshine and curled like a leaf in {month}.

{They} soaked it overnight in tallow and warm water, and poured a jug down the pipe to give it courage.

On the third stroke the water came, first rusty, then {colour}, then clear.
---
Three of the five pots had cracked in the kiln, each along the same line below the rim.

{Name} laid the pieces on the bench in the order of their misfortune.

The pots had been dried beside the window, and the side that faced the wind was a day older than the other.

{They} built a shelf in the middle of the room and turned every pot by a quarter at each cup of tea.

The next firing gave {number} whole jugs and a bowl that leans a little, out of habit.
---
The warp on {name}'s loom kept breaking at the left edge, always after {number} rows.

{They} changed the thread, the tension and the chair.

A burr on the reed, no bigger than a poppy seed, was cutting one strand a little at every beat.

{They} drew a strip of fine emery through the gap, twice, and then a ribbon to see whether it caught.

The cloth grew by an arm's length before dark, {colour} with a border of {colour}.
---
A swarm had settled in the hopper of the mill, and nobody wanted to be the one to explain this to it.

{Name} covered the window on the dark side and left the bright one open, as {someone} advised.

The bees had followed the scent of {smell} and the promise of a dry box, which was fair enough.

{They} set an empty basket rubbed with balm above the hopper, and waited without a word {daytime}.

By nightfall the bees had moved upstairs, and the mill had honey every summer from then on.
---
A letter reached {place} with no name on it, only a drawing of a house with {number} windows.

{Name} carried it from door to door and counted windows until the light failed.

Nobody had thought of the mill, because its windows are on the river side and only {bird} can see them.

{They} borrowed the skiff, counted from the water, and knocked with the oar.

Inside was a recipe for {food}, and a request to answer in pictures.
---
The bridge at {place} hummed in the wind, a single note that soured the milk, or so people said.

{Name} walked across it at all hours with {thing} and a forked stick.

One of the stay wires hung a little slacker than its sisters, and the wind was bowing it like a fiddle.

{They} gave the turnbuckle a half turn, listened, and gave it half of that again.

The bridge is silent now, and some miss it; on {weekday}s {name} loosens it for an hour.
---
The ladder was too short for the top of the old pear tree, by exactly the part where the best fruit hung.

{Name} tried a chair on a table, and then, wisely, did not try it.

The height of a tree can be read from its shadow, and {their} own shadow was a ruler that {they} always had about
{them}.

{They} paced out both, did the division in the dust, and cut a picking pole to match.

The pole reached the last pear with a hand's breadth to spare.
""")
)

OPENINGS = items("""
It was {season}, and {weather} lay over {river}.

{Name} had come to {place} for a week and stayed for {number} years.

Nobody at {place} remembered who had built the mill, but everyone knew who was late with the rent.

The yard still smelled of {smell} when {name} unlocked the long door {daytime}.

The road to {place} is {adjective}, and people who arrive there are usually ready to sit down.

{Name} kept {thing} in one pocket and {thing} in the other, and {they} was seldom without a use for both.

In {month} the days at the mill begin with {sound} and end with {food}.

There are {few} ways to cross {river}, and in that year {name} had tried them all.

{Someone} had warned {name} about the mill: it would never be finished, and it would never be dull.

Above the door at {place} someone had carved a {tree} leaf and the words "look twice".
""")

ASIDES = items("""
{Bird} watched from the rail and offered no opinion.

Somewhere behind the wall {sound} came and went.

They stopped once for {drink} and a slice of something left over from {weekday}.

The air smelled of {smell} and, more faintly, of {smell}.

{Someone} came by, looked, nodded, and borrowed {thing}.

Outside, {weather} gave way to {weather}.

{Name} whistled the only tune {they} knew, {adverb}.

The cat slept on the {grain} through all of it.

"Measure first," said {someone}, who had never been seen to measure anything.

The light on the wall turned {colour}, then {colour}.

A child asked why, and then why again, and the second answer was the better one.

{Name} wrote it down with a pencil tied to the beam by a piece of {thread}.
""")

ENDINGS = items("""
In the mill book, under that day, there are just two words: "looked twice".

{Name} hung the hammer back on its nail and went in to eat.

It was not a great repair, but it held.

Later {they} told the story to {someone}, and left out the part that had gone wrong.

The bill came to {number} eggs, and was paid on the spot.

Nothing else happened that day, which was how {name} liked a day to end.

"Well," said {someone}, "now we know where to look next time."

They drank {drink} on the steps until {bird} had gone to roost.

{Name} kept the broken piece in a drawer, with a label.

And {river} went by, as it does, taking no credit.
""")

CHAPTERS = items("""
A day of small things

The morning after

What {someone} said

A question of water

Rain and its uses

The long way round

Inventory

A visit from {place}

What was under the floor

The second lantern

An argument about {grain}

Market day

Small hours

The {adjective} door

Something borrowed

The level of the pond

Home by {place}
""")


def _episode(dice: Dice, bound: dict[str, str], length: int) -> str:
    trouble, attempt, cause, cure, outcome = dice.draw(TROUBLES)
    told = [trouble, attempt, cause, cure, outcome]
    if length > 550:
        told.insert(0, dice.draw(OPENINGS))
        told.insert(3, dice.draw(ASIDES))
        told.append(dice.draw(ENDINGS))
    if length > 800:
        told.insert(5, dice.draw(ASIDES))
    sentences = [dice.fill(sentence, bound) for sentence in told]
    if length <= 550:
        return " ".join(sentences)
    half = len(sentences) // 2
    return " ".join(sentences[:half]) + "\n\n" + " ".join(sentences[half:])


def _chapters(dice: Dice, bound: dict[str, str]) -> Iterator[str]:
    number = 0
    while True:
        number += 1
        here = bound | {"place": dice.fill("{place}"), "river": dice.fill("{river}")}
        yield f"{number}. {dice.fill(dice.draw(CHAPTERS), here)}\n\n{_episode(dice, here, 900)}"


def story(dice: Dice, length: int) -> str:
    """Tell of one repair, or of as many as the length asks for, in numbered chapters."""
    bound = person(dice) | {"place": dice.fill("{place}"), "river": dice.fill("{river}")}
    if length < 1_500:
        return _episode(dice, bound, length)
    title = dice.fill("{name} and the mill at {place}", bound)
    return title + "\n\n" + grow(_chapters(dice, bound), length - 500, "\n\n")
