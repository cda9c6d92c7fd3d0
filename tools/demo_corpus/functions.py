"""Small Python functions as templates: `<item>` is a word, `<small>` a number, `>>>` an example to run."""

from demo_corpus.dice import scenes

NUMBER_FUNCTIONS = scenes('''
def mean_<measure>(<measure>s):
    """<Give> the mean <measure> of some <item>s.

    >>> mean_<measure>([<small>, <small>, <medium>, <medium>])
    """
    if not <measure>s:
        raise ValueError("no <item>s, no mean")
    return sum(<measure>s) / len(<measure>s)
---
def median_<measure>(<measure>s):
    """<Give> the middle <measure>; of an even number of <item>s, the mean of the two in the middle.

    >>> median_<measure>([<small>, <medium>, <small>])
    >>> median_<measure>([<small>, <medium>, <small>, <medium>])
    """
    ordered = sorted(<measure>s)
    half = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[half]
    return (ordered[half - 1] + ordered[half]) / 2
---
def clamp_<measure>(value, low=<small>, high=<medium>):
    """Keep the <measure> of a <item> between two bounds, both inclusive.

    >>> clamp_<measure>(-<small>), clamp_<measure>(<large>)
    """
    return max(low, min(high, value))
---
def greatest_common_divisor(a, b):
    """<Give> the largest number that divides both, by Euclid's method.

    >>> greatest_common_divisor(<large>, <medium>)
    """
    while b:
        a, b = b, a % b
    return a
---
def primes_below(limit):
    """<Give> all primes below a limit with the sieve of Eratosthenes.

    >>> primes_below(<medium>)
    """
    is_prime = [True] * limit
    is_prime[:2] = [False] * min(2, limit)
    for n in range(2, int(limit**0.5) + 1):
        if is_prime[n]:
            for multiple in range(n * n, limit, n):
                is_prime[multiple] = False
    return [n for n, prime in enumerate(is_prime) if prime]
---
def fibonacci(count):
    """<Give> the first numbers of the sequence in which each is the sum of the two before.

    >>> fibonacci(<small>)
    """
    numbers = []
    a, b = 0, 1
    for _ in range(count):
        numbers.append(a)
        a, b = b, a + b
    return numbers
---
def find_<item>(<item>s, wanted):
    """<Give> the index of a <item> in a sorted list, or None, by halving the range.

    >>> find_<item>([<small>, <medium>, <large>], <small>)
    >>> find_<item>(list(range(0, <large>, <small>)), 12)
    """
    low, high = 0, len(<item>s)
    while low < high:
        middle = (low + high) // 2
        if <item>s[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low if low < len(<item>s) and <item>s[low] == wanted else None
---
def merge(left, right):
    """Join two sorted lists of <item>s into one; equal ones from the left come first.

    >>> merge([<small>, <medium>], [<small>, <large>])
    """
    merged = []
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            merged.append(left[i])
            i += 1
        else:
            merged.append(right[j])
            j += 1
    return merged + left[i:] + right[j:]
---
def insertion_sort(<item>s):
    """Sort a copy of the list: slow for many <item>s, quick for a few or for nearly sorted ones.

    >>> insertion_sort([<medium>, <small>, <large>, <small>])
    """
    ordered = list(<item>s)
    for i in range(1, len(ordered)):
        current = ordered[i]
        j = i
        while j > 0 and ordered[j - 1] > current:
            ordered[j] = ordered[j - 1]
            j -= 1
        ordered[j] = current
    return ordered
---
def running_<measure>(<measure>s):
    """Yield the total <measure> after each <item>.

    >>> list(running_<measure>([<small>, <small>, <small>, <medium>]))
    """
    total = 0
    for <measure> in <measure>s:
        total += <measure>
        yield total
---
def in_groups(<item>s, size):
    """Cut a list into groups; the last one may be shorter.

    >>> in_groups(list("<item><thing>"), <small>)
    """
    return [<item>s[i : i + size] for i in range(0, len(<item>s), size)]
---
def flatten(nested):
    """Collect everything inside lists of lists, in order.

    >>> flatten([<small>, [<small>, [<medium>]], [], <large>])
    """
    flat = []
    for part in nested:
        if isinstance(part, list):
            flat.extend(flatten(part))
        else:
            flat.append(part)
    return flat
---
def transpose(rows):
    """Turn rows into columns.

    >>> transpose([[<small>, <small>], [<medium>, <medium>]])
    """
    return [list(column) for column in zip(*rows)]
---
def change(amount, coins=(200, 100, 50, 20, 10, 5, 2, 1)):
    """<Give> the coins for an amount in cents, largest first.

    >>> change(<large>)
    """
    given = []
    for coin in coins:
        while amount >= coin:
            given.append(coin)
            amount -= coin
    return given
---
def moving_average(<measure>s, window=<small>):
    """Smooth a series: each value becomes the mean of itself and those just before it.

    >>> moving_average([<small>, <medium>, <small>, <medium>], 2)
    """
    smooth = []
    for end in range(1, len(<measure>s) + 1):
        part = <measure>s[max(0, end - window) : end]
        smooth.append(sum(part) / len(part))
    return smooth
---
from collections import deque


def fewest_crossings(bridges, start, goal):
    """<Give> the shortest way between two villages as a list, or None if there is no way.

    >>> fewest_crossings({"<place>": ["Weir"], "Weir": ["Lock", "Hill"], "Hill": ["Quay"]}, "<place>", "Quay")
    """
    ways = deque([[start]])
    seen = {start}
    while ways:
        way = ways.popleft()
        if way[-1] == goal:
            return way
        for village in bridges.get(way[-1], []):
            if village not in seen:
                seen.add(village)
                ways.append([*way, village])
    return None
---
def in_order(chores):
    """Sort chores so that each comes after those it needs; `chores` maps a chore to its needs.

    >>> in_order({"sell <item>s": ["make <item>s"], "make <item>s": ["buy <material>"], "buy <material>": []})
    """
    done = []

    def visit(chore):
        for need in chores[chore]:
            visit(need)
        if chore not in done:
            done.append(chore)

    for chore in chores:
        visit(chore)
    return done
---
def square_root(x, steps=<small>):
    """Approach the square root by Newton's method.

    >>> round(square_root(<medium>, 20), 6)
    """
    guess = x
    for _ in range(steps):
        guess = (guess + x / guess) / 2
    return guess
---
def is_leap(year):
    """Tell whether a year has a 29th of February.

    >>> [year for year in range(<year>, <year> + 12) if is_leap(year)]
    >>> is_leap(1900), is_leap(2000)
    """
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
---
def pack(lengths, capacity):
    """Put pieces into bins, longest first, each into the first bin with room for it.

    >>> pack([<small>, <small>, <small>, <small>, <small>, <small>], 12)
    """
    bins = []
    for length in sorted(lengths, reverse=True):
        for content in bins:
            if sum(content) + length <= capacity:
                content.append(length)
                break
        else:
            bins.append([length])
    return bins
---
def interpolate(points, x):
    """Read a value off a line drawn through points, which must be sorted by x.

    >>> interpolate([(0, <small>), (10, <medium>), (20, <large>)], <small>)
    """
    for (x0, y0), (x1, y1) in zip(points, points[1:]):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    raise ValueError(f"{x} is outside {points[0][0]} to {points[-1][0]}")
---
def best_load(<item>s, capacity):
    """<Give> the highest value that fits into a cart; each <item> is a pair of weight and value.

    >>> best_load([(<small>, <medium>), (<small>, <medium>), (<small>, <medium>)], <medium>)
    """
    best = [0] * (capacity + 1)
    for weight, value in <item>s:
        for room in range(capacity, weight - 1, -1):
            best[room] = max(best[room], best[room - weight] + value)
    return best[capacity]
---
def permuted(n, key=<medium>):
    """<Give> a fixed but irregular order of range(n): the multiplier shares no factor with n.

    >>> permuted(<small>), sorted(permuted(<small>, 1))
    """
    step = next(s for s in range(key, key + n + 1) if all(s % d or n % d for d in range(2, n + 1)))
    return [(i * step + key) % n for i in range(n)]
''')
