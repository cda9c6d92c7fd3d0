"""Small complete Python classes, tests and programs, in the same template language as `functions`."""

from demo_corpus.dice import scenes

CLASSES = scenes('''
from dataclasses import dataclass


@dataclass(frozen=True)
class <Item>:
    """A <item> made of <material>, with its <measure>.

    >>> <Item>("<colour>", <medium>).label()
    """

    colour: str
    <measure>: int

    def label(self):
        """Describe the <item> for the shelf."""
        return f"{self.colour} <item>, <measure> {self.<measure>}"

    def exceeds(self, other):
        """Compare by <measure> alone."""
        return self.<measure> > other.<measure>
---
class Pile:
    """A pile of <item>s: the last one put on is the first one taken off.

    >>> pile = Pile()
    >>> pile.put("<colour> <item>")
    >>> pile.put("<material> <item>")
    >>> pile.take()
    >>> len(pile)
    """

    def __init__(self):
        self._things = []

    def put(self, thing):
        """Lay a thing on top."""
        self._things.append(thing)

    def take(self):
        """Take the top thing off."""
        if not self._things:
            raise IndexError("the pile is empty")
        return self._things.pop()

    def __len__(self):
        return len(self._things)
---
class Ring:
    """The last few <measure>s of a <item>; older ones are overwritten.

    >>> ring = Ring(3)
    >>> for <measure> in [<small>, <medium>, <small>, <large>]:
    ...     ring.add(<measure>)
    >>> ring.oldest_first()
    """

    def __init__(self, size):
        self._slots = [None] * size
        self._count = 0

    def add(self, value):
        """Put a value in the place of the oldest one."""
        self._slots[self._count % len(self._slots)] = value
        self._count += 1

    def oldest_first(self):
        """List what is held, in the order in which it came."""
        if self._count <= len(self._slots):
            return self._slots[: self._count]
        cut = self._count % len(self._slots)
        return self._slots[cut:] + self._slots[:cut]
---
class Account:
    """What <name> owes the mill, in cents.

    >>> account = Account("<name>")
    >>> account.charge(<large>, "<medium> <item>s")
    >>> account.pay(<medium>)
    >>> account.balance
    """

    def __init__(self, owner):
        self.owner = owner
        self.entries = []

    @property
    def balance(self):
        """The sum of all entries; positive means that something is owed."""
        return sum(amount for amount, _ in self.entries)

    def charge(self, amount, reason):
        """Add a debt."""
        if amount <= 0:
            raise ValueError(f"charge must be positive, got {amount}")
        self.entries.append((amount, reason))

    def pay(self, amount):
        """Take a payment."""
        self.entries.append((-amount, "payment"))
---
class <Item>Store:
    """Counts <item>s by place.

    >>> store = <Item>Store()
    >>> store.deliver("<place>", <medium>)
    >>> store.take("<place>", <small>)
    >>> store.count("<place>"), store.count("elsewhere")
    """

    def __init__(self):
        self._counts = {}

    def deliver(self, place, number):
        """Add <item>s at a place."""
        self._counts[place] = self.count(place) + number

    def take(self, place, number):
        """Remove <item>s, which must be there."""
        if number > self.count(place):
            raise ValueError(f"{place}: only {self.count(place)} <item>s, wanted {number}")
        self._counts[place] -= number

    def count(self, place):
        """<Give> how many <item>s a place has."""
        return self._counts.get(place, 0)
---
class Gate:
    """A sluice gate that is raised by notches.

    >>> gate = Gate()
    >>> gate.turn(<small>)
    >>> gate.opening, gate.is_open
    """

    HIGHEST = <medium>

    def __init__(self):
        self.opening = 0

    @property
    def is_open(self):
        """True if any water can pass."""
        return self.opening > 0

    def turn(self, notches):
        """Raise the gate, or lower it by negative notches, within its frame."""
        self.opening = max(0, min(self.HIGHEST, self.opening + notches))
---
class Countdown:
    """Iterate from a number down to one.

    >>> list(Countdown(<small>))
    """

    def __init__(self, start):
        self.start = start

    def __iter__(self):
        current = self.start
        while current > 0:
            yield current
            current -= 1
---
class Fraction:
    """A fraction in lowest terms.

    >>> str(Fraction(<medium>, <medium>))
    >>> str(Fraction(1, <small>) + Fraction(1, <small>))
    """

    def __init__(self, top, bottom):
        a, b = top, bottom
        while b:
            a, b = b, a % b
        self.top, self.bottom = top // a, bottom // a

    def __add__(self, other):
        return Fraction(self.top * other.bottom + other.top * self.bottom, self.bottom * other.bottom)

    def __str__(self):
        return f"{self.top}/{self.bottom}"
---
from contextlib import contextmanager


@contextmanager
def borrowed(shed, tool):
    """Take a tool from the shed and put it back whatever happens.

    >>> shed = {"<thing>", "<item>"}
    >>> with borrowed(shed, "<thing>"):
    ...     print(sorted(shed))
    """
    shed.remove(tool)
    try:
        yield tool
    finally:
        shed.add(tool)
''')

TESTS = scenes('''
def total(<measure>s):
    return sum(<measure>s)


def test_total_of_nothing_is_zero():
    assert total([]) == 0


def test_total_does_not_depend_on_the_order():
    <measure>s = [<small>, <medium>, <large>]
    assert total(<measure>s) == total(<measure>s[::-1])
---
def split_even(<item>s, people):
    """Share <item>s: the first people get one more if it does not come out even."""
    share, rest = divmod(<item>s, people)
    return [share + (person < rest) for person in range(people)]


def test_nothing_is_lost():
    assert sum(split_even(<large_kept>, <small>)) == <large_kept>


def test_shares_differ_by_one_at_most():
    shares = split_even(<medium>, <small>)
    assert max(shares) - min(shares) <= 1
---
"""Print the <measure> of every <item> in a file with two columns."""

import argparse
import csv
import sys


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", help="CSV with the columns <item> and <measure>")
    parser.add_argument("--least", type=float, default=<small>, help="leave out what is below")
    args = parser.parse_args()
    with open(args.file, newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            if float(row["<measure>"]) >= args.least:
                sys.stdout.write(f"{row['<item>']}\\t{row['<measure>']}\\n")


if __name__ == "__main__":
    main()
---
"""Read <item>s from a JSON file, one object a line, and skip what cannot be read."""

import json
import logging


def read_<item>s(path):
    """Yield (line number, <item>) for every good line."""
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                logging.warning("%s:%d: not JSON: %s", path, number, error.msg)
''')

# Factors are exact by definition, so that the examples are too.
UNITS = (
    ("inches", "millimetres", 25.4),
    ("feet", "metres", 0.3048),
    ("miles", "metres", 1609.344),
    ("pounds", "grams", 453.59237),
    ("nautical_miles", "metres", 1852),
    ("hours", "seconds", 3600),
    ("days", "minutes", 1440),
    ("dozens", "pieces", 12),
    ("gross", "pieces", 144),
    ("fathoms", "feet", 6),
    ("furlongs", "yards", 220),
    ("acres", "square_yards", 4840),
    ("ounces", "grams", 28.349523125),
    ("carats", "milligrams", 200),
    ("knots", "kilometres_per_hour", 1.852),
)

CONVERSION = '''
def <from>_to_<to>(<from>):
    """Convert <source> to <target>.

    >>> round(<from>_to_<to>(<small>), 3), round(<from>_to_<to>(<medium>), 3)
    """
    return <from> * <factor>
'''.strip("\n")
