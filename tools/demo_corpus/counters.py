"""Dialogues across a counter, with prices, times and change that add up."""

from collections.abc import Iterator

from demo_corpus.dice import Dice, items

Turn = tuple[str, str]

GOODS = (
    # one, many, price in cents
    ("a loaf of rye bread", "loaves of rye bread", 340),
    ("a pound of plums", "pounds of plums", 180),
    ("a lantern", "lanterns", 1250),
    ("a ball of string", "balls of string", 95),
    ("a bag of nails", "bags of nails", 260),
    ("a jar of honey", "jars of honey", 675),
    ("a bar of soap", "bars of soap", 145),
    ("a notebook", "notebooks", 220),
    ("a pair of laces", "pairs of laces", 130),
    ("a wooden spoon", "wooden spoons", 175),
    ("a sack of oats", "sacks of oats", 1480),
    ("a lemon", "lemons", 45),
    ("a tin of sardines", "tins of sardines", 235),
    ("a box of matches", "boxes of matches", 30),
    ("a packet of seeds", "packets of seeds", 110),
    ("a bottle of ink", "bottles of ink", 390),
    ("a pear tart", "pear tarts", 285),
    ("a candle", "candles", 80),
)

COUNTS = ("no", "one", "two", "three", "four", "five", "six")

FIRST_ASKS = items("""
Good morning. I should like {goods}, please.

Hello! Do you have {goods}?

I was told that you sell the best. I need {goods}.

Good evening. Are you still open? {Goods}, if I may.

Bonjour! Let me see: {goods}.

It's me again. This time I want {goods}.
""")

ASKS = items("""
Then {goods}.

I'll take {goods} too, if there are any left.

And {goods}, please.

Could you also wrap up {goods}?

My list says {goods}, though I can hardly read it.
""")

SERVES = items("""
Certainly. That makes {price}.

Here you are. {price}.

The last on the shelf! {price}, please.

With pleasure. {price} for that.

They came in this morning. {price}.
""")

CHATS = items("""
Is the road to {place} open again?|Since {weekday}, but bring boots.

You have painted the door.|Yes, {colour}. My brother says it looks like {food}.

What is that smell?|Either {smell} or my cat, who has been in the {grain} again.

Has the ferry been repaired?|They are waiting for a part made of {material}. It may be a while.

I heard you sold the scales.|Only the old ones. They were always in favour of the customer.

Do you know a word for someone who forgets his list?|A regular.

Your clock is fast.|It is the only thing here that is.
""")

DESTINATIONS = (
    # name, minutes, fare in cents
    ("Alder Ford", 18, 260),
    ("Mühlbach", 35, 480),
    ("Saint-Orens", 52, 710),
    ("Großenried", 74, 990),
    ("Thornlock", 96, 1240),
    ("Pebble Quay", 127, 1560),
    ("Étang-le-Vieux", 143, 1830),
    ("Kalamós", 205, 2650),
)

TRAINS = items("""
When is the next train to {town}?|At {leaves}, from the first platform.

How do I get to {town}?|With the stopping train at {leaves}.

{town}, please. What is there today?|There is one at {leaves}, across the footbridge.

I must be in {town} today.|Then you must be on the {leaves}.

Does anything go to {town}?|Twice a day. The next one leaves at {leaves}.
""")

ARRIVALS = items("""
And when does it arrive?|At {arrives}. It takes {takes}.

How long does it take?|{takes}. You are there at {arrives}.

Is it a long journey?|It takes {takes}, so you get in at {arrives}.
""")

GOODBYES = ("Mind the step!", "Until next time!", "Merci, au revoir!", "Danke schön!", "Give my regards at home.")

STATION_ENDS = items("""
Thank you. Is there time for a coffee?|There is always time for a coffee. It is the coffee that takes long.

And if I miss it?|Then you will get to know the waiting room, which has its admirers.

Does the window open?|One of them. You will recognise it by the people sitting there.

May I take a bicycle?|In the last carriage. It needs a ticket, but no seat.

Is it ever late?|On this line we say that it is thorough.
""")


def money(cents: int) -> str:
    """Write an amount as it is spoken of in these shops: 3.40 or 12.00."""
    return f"{cents // 100}.{cents % 100:02d}"


def clock(minutes: int) -> str:
    """Write minutes since midnight as a time of day."""
    return f"{minutes // 60 % 24:02d}:{minutes % 60:02d}"


def _takes(minutes: int) -> str:
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest} min" if hours else f"{minutes} minutes"


def shop(dice: Dice) -> Iterator[Turn]:
    """Yield a purchase of a few things, then the bill and the change: A buys, B sells."""
    total = 0
    for one, many, price in dice.some(GOODS, dice.between(1, 4)):
        count = dice.between(1, 6)
        goods = one if count == 1 else f"{COUNTS[count]} {many}"
        yield "A", dice.fill(dice.draw(FIRST_ASKS if total == 0 else ASKS), {"goods": goods})
        total += count * price
        each = f" That is {money(price)} each." if count > 1 and dice.chance(0.4) else ""
        yield "B", dice.fill(dice.draw(SERVES), {"price": money(count * price)}) + each
        if dice.chance(0.35):
            question, answer = dice.fill(dice.draw(CHATS)).split("|")
            yield "A", question
            yield "B", answer
    yield "A", dice.draw(("That is all. What do I owe you?", "And the bill, please.", "Nothing else, thank you."))
    paid = next(note for note in (500, 1000, 2000, 5000, 10_000, 20_000) if note > total)
    yield "B", f"{money(total)} in all."
    yield "A", f"Here is {money(paid)}."
    yield "B", f"And {money(paid - total)} back. {dice.draw(GOODBYES)}"


def station(dice: Dice) -> Iterator[Turn]:
    """Yield a question about a train and the sale of tickets: A travels, B sells."""
    place, minutes, fare = dice.draw(DESTINATIONS)
    leaves = dice.between(300, 1200)
    people = dice.between(1, 5)
    bound = {"town": place, "leaves": clock(leaves), "arrives": clock(leaves + minutes), "takes": _takes(minutes)}
    for exchange in (TRAINS, ARRIVALS):
        question, answer = dice.fill(dice.draw(exchange), bound).split("|")
        yield "A", question
        yield "B", answer
    if people == 1:
        yield "A", "One ticket, please."
        yield "B", f"{money(fare)}."
    else:
        yield "A", f"We are {COUNTS[people]}. What does that cost?"
        yield "B", f"{COUNTS[people].capitalize()} times {money(fare)} is {money(people * fare)}."
    question, answer = dice.draw(STATION_ENDS).split("|")
    yield "A", question
    yield "B", answer
