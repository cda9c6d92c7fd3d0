"""Dialogues that teach: arithmetic with results computed here, and words in other languages."""

from collections.abc import Callable, Iterator

from demo_corpus.counters import Turn
from demo_corpus.dice import Dice, items

PRAISE = items("""
Right.

Exactly.

Well done.

Yes. And how could you check it?|By doing it backwards.

Good. You see, you did not need the slate.

Correct, and quicker than I was.

Very good! 🙂

That's it.
""")


def addition(dice: Dice) -> Iterator[Turn]:
    """Add two numbers with a carry, sometimes forgotten at first."""
    a, b = dice.between(2, 7) * 10 + dice.between(5, 9), dice.between(1, 8) * 10 + dice.between(5, 9)
    units = a % 10 + b % 10
    tens = a // 10 + b // 10
    yield "A", f"What is {a} + {b}?"
    if dice.chance(0.4):
        yield "B", f"{tens * 10 + units % 10}?"
        yield "A", f"Look at the units: {a % 10} + {b % 10} is {units}. Where did the ten go?"
        yield "B", f"I forgot to carry it. Then it is {a + b}."
    else:
        first = f"{a % 10} + {b % 10} is {units}: I write {units % 10} and carry 1."
        yield "B", f"{first} {a // 10} + {b // 10} + 1 is {tens + 1}. That makes {a + b}."


def subtraction(dice: Dice) -> Iterator[Turn]:
    """Subtract by counting up to the next ten and on from there."""
    small = dice.between(1, 6) * 10 + dice.between(1, 9)
    large = small + dice.between(12, 60)
    ten = (small // 10 + 1) * 10
    yield "A", f"How far is it from {small} to {large}?"
    yield "B", f"From {small} to {ten} it is {ten - small}, and from {ten} to {large} it is {large - ten}."
    yield "A", "And together?"
    yield "B", f"{ten - small} + {large - ten} = {large - small}. So {large} - {small} = {large - small}."


def multiplication(dice: Dice) -> Iterator[Turn]:
    """Multiply by splitting off the tens."""
    a, b = dice.between(1, 9) * 10 + dice.between(2, 9), dice.between(3, 9)
    tens, units = a // 10 * 10, a % 10
    yield "A", f"{a} times {b}: how would you begin?"
    yield "B", f"{tens} times {b} is {tens * b}, and {units} times {b} is {units * b}."
    yield "A", "And then?"
    yield "B", f"{tens * b} + {units * b} = {a * b}."


def division(dice: Dice) -> Iterator[Turn]:
    """Share things out, with a remainder or without."""
    people, things = dice.between(3, 9), dice.between(25, 150)
    share, rest = divmod(things, people)
    goods = dice.draw(("apples", "chestnuts", "nails", "beans", "marbles", "coins", "buttons"))
    yield "A", f"{things} {goods} for {people} people. How many does each of them get?"
    yield "B", f"{people} times {share} is {people * share}."
    yield "A", "And what is left?"
    left = f"{rest} of them." if rest > 1 else "One. I would keep it."
    yield "B", left if rest else "Nothing. It comes out even!"


def percent(dice: Dice) -> Iterator[Turn]:
    """Find 5, 15 or 25 percent by way of ten."""
    whole, share = dice.between(2, 40) * 20, dice.draw((5, 15, 25))
    ten, five = whole // 10, whole // 20
    yield "A", f"What is {share} % of {whole}?"
    yield "B", f"10 % is {ten}, so 5 % is half of it, {five}."
    if share > 5:
        yield "A", f"Now put together the {share} %."
        parts = " + ".join([str(ten)] * (share // 10) + [str(five)])
        yield "B", f"{parts} = {whole * share // 100}."


def fractions(dice: Dice) -> Iterator[Turn]:
    """Add two unit fractions."""
    a = dice.between(2, 5)
    b = a + dice.between(1, 2)
    yield "A", f"Can you add 1/{a} and 1/{b}?"
    yield "B", f"Not like that, they are different pieces. I cut both into pieces of 1/{a * b}."
    yield "A", "How many of those do you have?"
    yield "B", f"{b} from the first and {a} from the second: together {a + b}/{a * b}."


def triangle(dice: Dice) -> Iterator[Turn]:
    """Add the numbers from one to an even number in pairs."""
    n = dice.between(3, 30) * 2
    yield "A", f"Add all the numbers from 1 to {n}."
    yield "B", "All of them? One after another?"
    yield "A", f"Try pairs: 1 and {n}, 2 and {n - 1}, and so on."
    yield "B", f"Each pair is {n + 1}, and there are {n // 2} pairs. {n // 2} × {n + 1} = {n * (n + 1) // 2}. Oh!"


def floor(dice: Dice) -> Iterator[Turn]:
    """Count tiles on a floor."""
    wide, long, price = dice.between(3, 9), dice.between(4, 12), dice.between(2, 9)
    yield "A", f"The floor is {wide} m wide and {long} m long. How many tiles of one square metre does it take?"
    yield "B", f"{wide} × {long} = {wide * long}."
    yield "A", f"One tile costs {price}. What do they cost in all?"
    yield "B", f"{wide * long} × {price} = {wide * long * price}."


def journey(dice: Dice) -> Iterator[Turn]:
    """Reckon a distance from speed and time."""
    speed, hours = dice.between(2, 12) * 2, dice.between(1, 5)
    place = dice.fill("{place}")
    yield "A", f"A barge makes {speed} km an hour. How far does it get in {hours} and a half hours?"
    whole, half = hours * speed, speed // 2
    yield "B", f"{hours} × {speed} = {whole}, and half an hour is {half}. That makes {whole + half} km."
    yield "A", f"{place} is {hours * speed + speed} km away. When will it be there?"
    yield "B", f"Half an hour later, after {hours + 1} hours."


EXERCISES: tuple[Callable[[Dice], Iterator[Turn]], ...] = (
    addition,
    subtraction,
    multiplication,
    division,
    percent,
    fractions,
    triangle,
    floor,
    journey,
)

LANGUAGES = ("French", "German", "Greek", "Japanese")
DICTIONARY = (
    ("water", "eau", "Wasser", "νερό", "水"),
    ("bread", "pain", "Brot", "ψωμί", "パン"),
    ("river", "rivière", "Fluss", "ποτάμι", "川"),
    ("mountain", "montagne", "Berg", "βουνό", "山"),
    ("fish", "poisson", "Fisch", "ψάρι", "魚"),
    ("tree", "arbre", "Baum", "δέντρο", "木"),
    ("street", "rue", "Straße", "δρόμος", "道"),
    ("summer", "été", "Sommer", "καλοκαίρι", "夏"),
    ("tea", "thé", "Tee", "τσάι", "お茶"),
    ("bridge", "pont", "Brücke", "γέφυρα", "橋"),
    ("bird", "oiseau", "Vogel", "πουλί", "鳥"),
    ("snow", "neige", "Schnee", "χιόνι", "雪"),
    ("book", "livre", "Buch", "βιβλίο", "本"),
    ("star", "étoile", "Stern", "αστέρι", "星"),
    ("key", "clé", "Schlüssel", "κλειδί", "鍵"),
    ("flour", "farine", "Mehl", "αλεύρι", "小麦粉"),
)

QUESTIONS = items("""
What is “{english}” in {language}?

How do they say “{english}” in {language}?

Do you know the {language} word for “{english}”?

I need “{english}” for a letter, in {language}.
""")

ANSWERS = items("""
{word}.

{word}, as far as I know.

{word}. My aunt says it all day.

That would be {word}.

I learned it on a boat: {word}.
""")

AFTERWORDS = items("""
It sounds like something falling into a well.

I shall have forgotten it by supper.

Say it again, slowly.|{word}. And again: {word}.

How do you write that?|Just so: {word}. Mind the middle.

I like it better than ours.

And the plural?|One thing at a time.
""")


def arithmetic(dice: Dice) -> Iterator[Turn]:
    """Yield one exercise and a word of praise: A teaches, B learns."""
    yield from dice.draw(EXERCISES)(dice)
    praise, *answer = dice.draw(PRAISE).split("|")
    yield "A", praise
    if answer:
        yield "B", answer[0]


def language(dice: Dice) -> Iterator[Turn]:
    """Yield a word in another language: A asks, B answers."""
    english, *others = dice.draw(DICTIONARY)
    column = dice.draw((0, 1, 2, 3))
    word = others[column]
    bound = {"english": english, "language": LANGUAGES[column], "word": f"“{word}”"}
    yield "A", dice.fill(dice.draw(QUESTIONS), bound)
    yield "B", dice.fill(dice.draw(ANSWERS), bound)
    remark, *answer = dice.fill(dice.draw(AFTERWORDS), bound).split("|")
    yield "A", remark
    if answer:
        yield "B", answer[0]
