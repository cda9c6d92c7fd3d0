"""Small Python functions about text, in the same template language as `functions`."""

from demo_corpus.dice import scenes

TEXT_FUNCTIONS = scenes('''
from collections import Counter


def common_words(text, count=<small>):
    """<Give> the most frequent words of a text, ties in the order of the text.

    >>> common_words("the <item> by the <thing> and the <item>", 2)
    """
    return Counter(text.lower().split()).most_common(count)
---
from collections import defaultdict


def by_first_letter(names):
    """Group names by their first letter, upper case, keeping their order.

    >>> by_first_letter(["<item>", "<thing>", "<name>"])
    """
    groups = defaultdict(list)
    for name in names:
        groups[name[0].upper()].append(name)
    return dict(groups)
---
def rotate_letters(text, by=<small>):
    """Replace each small letter by the one some places later, going round from z to a.

    >>> rotate_letters("<item> at the <thing>")
    """
    shifted = []
    for letter in text:
        if "a" <= letter <= "z":
            letter = chr((ord(letter) - ord("a") + by) % 26 + ord("a"))
        shifted.append(letter)
    return "".join(shifted)
---
ROMAN = ((1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL"),
         (10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I"))


def roman(number):
    """Write a number from 1 to 3999 as the stonemasons did.

    >>> roman(<large>), roman(<medium>)
    """
    letters = ""
    for value, letter in ROMAN:
        letters += letter * (number // value)
        number %= value
    return letters
---
def parse_settings(line):
    """Read "key=value; key=value" into a dict; later keys win.

    >>> parse_settings("<item>s=<medium>; <measure>=<small>; place=<place>")
    """
    settings = {}
    for part in line.split(";"):
        key, _, value = part.partition("=")
        settings[key.strip()] = value.strip()
    return settings
---
def duration(seconds):
    """Write seconds as hours, minutes and seconds.

    >>> duration(<large>), duration(<large> * <medium>)
    """
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
---
def table(rows):
    """Lay out rows of text in columns as wide as their widest cell.

    >>> table([["<item>", "<measure>"], ["<thing>", "<medium>"]]).splitlines()
    """
    widths = [max(len(cell) for cell in column) for column in zip(*rows)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths)) for row in rows)
    return "\\n".join(line.rstrip() for line in lines)
---
def edit_distance(a, b):
    """Count the letters to insert, delete or replace in order to turn a into b.

    >>> edit_distance("<item>", "<thing>"), edit_distance("<measure>", "<measure>s")
    """
    previous = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        current = [i]
        for j, other in enumerate(b, 1):
            cost = 0 if letter == other else 1
            current.append(min(previous[j] + 1, current[-1] + 1, previous[j - 1] + cost))
        previous = current
    return previous[-1]
---
def is_palindrome(text):
    """Tell whether a text reads the same from both ends; only letters count.

    >>> is_palindrome("Never odd or even"), is_palindrome("<item>")
    """
    letters = [letter.lower() for letter in text if letter.isalpha()]
    return letters == letters[::-1]
---
def bars(counts):
    """Draw a bar of # for every name.

    >>> bars({"<item>": <small>, "<thing>": <small>})
    """
    width = max(map(len, counts))
    return [f"{name:>{width}} {'#' * count}" for name, count in counts.items()]
---
import unicodedata


def slug(title):
    """Turn a title into a file name of plain letters: é becomes e, and ü becomes u.

    >>> slug("<Name>'s <Item> at <place>"), slug("Crêpes für Müßige")
    """
    plain = unicodedata.normalize("NFKD", title.lower().replace("ß", "ss")).encode("ascii", "ignore").decode()
    return "-".join("".join(c if c.isalnum() else " " for c in plain).split())
---
def vocabulary(text):
    """Number the different words of a text in the order in which they appear.

    >>> vocabulary("a <item> is a <item> is a <thing>")
    """
    numbers = {}
    for word in text.split():
        numbers.setdefault(word, len(numbers))
    return numbers
---
def balanced(text, pairs={"(": ")", "[": "]", "{": "}"}):
    """Tell whether every bracket is closed by its partner, in the right order.

    >>> balanced("<item>(<small>, [<small>])"), balanced("<thing>[<small>)")
    """
    expected = []
    for letter in text:
        if letter in pairs:
            expected.append(pairs[letter])
        elif letter in pairs.values() and (not expected or expected.pop() != letter):
            return False
    return not expected
''')
