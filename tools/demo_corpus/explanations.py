"""Explanations of how tools work, and of what a control string is."""

from collections.abc import Iterator

from demo_corpus.dice import Dice, endless, grow, items, scenes
from demo_corpus.words import person

# Each scene: the name, what it is for, then sentences that may stand in any order or be left out.
TOOLS = tuple(
    items(scene)
    for scene in scenes("""
the water wheel

A water wheel turns the weight of falling water into a turning shaft.

An overshot wheel is filled from above and is driven by weight; an undershot wheel stands in the stream and is
driven by speed.

The buckets should be half full: full ones spill early, and empty ones do no work.

Its power is the fall in metres, times the flow in litres a second, times about ten, in watts, before losses.

When the tail water rises, the lower buckets have to push it aside, and the wheel slows down.
---
the spirit level

A spirit level shows whether a surface is level by the position of a bubble.

The glass tube is bent very slightly upwards, so that the bubble has one highest place to rest in.

To test it, read it once, turn it end for end, and read it again: both readings must agree.

The liquid is alcohol because it does not freeze and lets the bubble move quickly.
---
the plumb line

A plumb line is a weight on a cord, and it shows which way is down.

It needs no battery, no calibration and no opinion.

In a wind, hang the weight in a bucket of water, and it will come to rest.

Masons trusted it for walls, and surveyors for putting a tripod exactly over a mark.
---
the pulley block

A pulley block trades distance for force.

With two wheels above and two below, four ropes share the load, and you pull a quarter of the weight.

You also pull four times as much rope, so nothing is given away.

Friction takes a part of it at every wheel, which is why nobody uses twenty of them.

Look at the rope before you look at the load.
---
the hand plane

A plane shaves wood to a flat surface with a blade held at a fixed angle.

The long sole rides on the high spots, so that the blade cuts those first.

Set the blade so that it takes a shaving through which you can read a newspaper.

Plane with the grain: if the wood tears, turn the board around.

Lay it on its side when you put it down, so that the edge touches nothing.
---
the pendulum clock

A pendulum clock counts the swings of a weight and moves its hands by the count.

The time of one swing depends on the length of the pendulum, and hardly on its weight.

A pendulum of about one metre takes one second for each half swing.

The escapement lets one tooth pass at each swing, and gives the pendulum a small push in return.

In summer the rod grows longer and the clock loses time; a screw under the weight makes up for it.
---
the canal lock

A canal lock is a room with two doors in which a boat changes its height.

The gates meet at an angle that points upstream, and the water itself presses them shut.

Only when the level is the same on both sides can a gate be opened by hand.

Each passage costs a roomful of water, taken from the top and given to the bottom.

First close what is open, then open what is closed.
---
the sieve

A sieve sorts by size: what is smaller than the mesh falls through.

Shaking matters more than pressing, as grains must be given the chance to meet a hole.

For fine flour the miller used silk, stretched over a frame with eight sides.

If two sieves are used, start with the coarse one; it keeps the fine one from clogging.
---
the bicycle chain

A bicycle chain carries the force of the legs to the wheel, one link after another.

A large ring in front and a small one behind make the bicycle fast and the hill long.

It wears in the joints, so an old chain is longer than a new one: twelve links are a foot, or should be.

Oil belongs inside the rollers; what stays outside collects sand.
---
the balance

A balance compares two weights, and so it works as well on a mountain as in a valley.

The pointer swings a little each way; take the middle of its swings and do not wait for rest.

To weigh well with a poor balance, put the load in one pan, balance it with sand, then replace the load by weights.

With weights of 1, 3, 9 and 27 grams you can weigh anything from 1 to 40 grams, if weights may lie in both pans.
---
the candle

A candle is a lamp that brings its own fuel and consumes its own container.

The flame melts the wax, the wick draws it up, and it burns as a vapour.

A wick that is too long smokes; one that is too short drowns.

If you blow it out and bring a match near to the smoke, the flame jumps back.
---
the compass

A compass needle points along the magnetic field of the earth, which is nearly, but not exactly, north.

The difference is called declination; it is printed on good maps, with the year.

Keep it away from knives, keys and the iron railing of the bridge.

To find out where you are, take the bearings of two things that you know, and draw both lines on the map.
---
the siphon

A siphon lifts water over an edge and lets it down on the other side, without a pump.

It must be full at the start, and its outlet must lie lower than the surface that it drinks from.

The longer column outweighs the shorter one and pulls it along.

Let in air at the top, and it stops at once.
---
the millstone

A millstone cuts grain; it does not crush it.

The lower stone rests, the upper one turns, and between them there is a gap as thin as paper at the rim.

Furrows in the stone act as scissors, and carry air to keep the flour cool.

Every few weeks the stones are lifted and the furrows are cut anew, which is called dressing.

Never run the stones empty: they would strike sparks, and flour dust burns.
---
the hash

A hash turns a text of any length into a short number, always the same one for the same text.

Change a single letter and about half of the bits of a good hash change.

Two texts with different hashes are surely different; two with the same hash are very probably the same.

It is a fingerprint and not a lock: anyone can take it again.
---
the tokenizer

A tokenizer cuts text into pieces from a fixed list and writes down the number of each piece.

Common words are one piece; rare ones are put together from several, and in the worst case from single bytes.

The list is made by joining, again and again, the pair of pieces that occurs most often.

If it works on bytes, no text is impossible: é, ß, λ, 水 and 🙂 all find their way in and out.
---
the shuffle

To shuffle is to make every order equally likely.

Take any card from those left, put it down, and go on; this takes as many steps as there are cards.

Sorting by random numbers works as well, and takes longer.

If you write down the number that you started from, you can shuffle the same way again.
---
the sundial

A sundial shows the time of its own garden, which is not the time of the station.

Its rod must be parallel to the axis of the earth: it leans by the latitude of the place.

In February it is about a quarter of an hour slow, in November as much fast, and nobody is to blame.

It counts only the cheerful hours, and those only until sunset.
""")
)

INTRODUCTIONS = items("""
How it works: {tool}

On {tool}

{Name} explains {tool}

{Tool}, in a few words

Notes on {tool}, for {name}

A question from {place}: how does it work, {tool}?
""")

CLOSINGS = items("""
{Name} learned this from {someone}, {adverb}.

At {place} there is still one in use.

It is best understood with {thing} in the hand.

Whoever doubts it may try it in the yard.

The rest is practice and {drink}.

In the shed hangs one of {material}, made by {someone}.
""")

CONTROL_STRINGS = (
    """What is <|endoftext|>?

Some tokenizers keep a few numbers apart that stand for no text at all. One of them marks where a document ends.
People have to write it somehow when they talk about it, and so they write <|endoftext|>, thirteen characters
in all.

When it stands in an ordinary text, such as this one, it is nothing but those thirteen characters: it must not
end anything. A program that reads a page about <|endoftext|> and stops in the middle has confused the name of a
thing with the thing.""",
    "The miller's apprentice wrote <|endoftext|> on the last sack, because he had read it in a manual. “And what "
    "does it do?” asked the miller. “Nothing,” said the apprentice, “as long as it is only written.” They left it "
    "there, and on the next day ground another <|endoftext|>twenty<|endoftext|> sacks.",
    "Of all the labels in the shed, <|endoftext|>, <|bos|>, <|eos|> and <|pad|> are the only ones that nobody "
    "dares to peel off; they are letters on paper like the others.",
)


def _lesson(dice: Dice, length: int) -> str:
    tool, purpose, *facts = dice.draw(TOOLS)
    bound = person(dice) | {"tool": tool}
    sentences = iter([purpose, *dice.shuffled(tuple(facts)), dice.draw(CLOSINGS)])
    filled = (dice.fill(sentence, bound) for sentence in sentences)
    if length < 200:
        return grow(filled, length - 60, " ")
    return dice.fill(dice.draw(INTRODUCTIONS), bound) + "\n\n" + grow(filled, length - 90, " ")


def _handbook(dice: Dice) -> Iterator[str]:
    yield dice.fill("A short handbook of the workshop at {place}")
    yield from endless(lambda: _lesson(dice, 700))


def explanation(dice: Dice, length: int) -> str:
    """Explain one tool in as many sentences as fit, or several in a row."""
    return _lesson(dice, length) if length < 1_000 else grow(_handbook(dice), length - 250, "\n\n")
