"""Prose: stories, weather notes, postcards, recipes, explanations and single sentences."""

from demo_corpus.dice import Dice
from demo_corpus.explanations import CONTROL_STRINGS, explanation
from demo_corpus.notes import postcard, recipe, saying
from demo_corpus.stories import story
from demo_corpus.weather import weather

FIXED = CONTROL_STRINGS
"""Documents that stand in the corpus word for word."""

# What makes sense at a length: a story needs its five sentences, and no saying is a page long.
LINE = (saying, saying, saying, weather)
NOTE = (saying, weather, weather, postcard, explanation)
PAGE = (story, weather, postcard, recipe, explanation, story)
CHAPTERS = (story, story, weather, postcard, recipe, explanation)
# Only these have enough to say for ten thousand characters without repeating themselves.
BOOK = (story, weather, explanation)


def write(dice: Dice, length: int) -> str:
    """Write a document of about this many characters."""
    limits = ((90, LINE), (250, NOTE), (1_500, PAGE), (4_000, CHAPTERS))
    forms = next((forms for limit, forms in limits if length < limit), BOOK)
    return dice.draw(forms)(dice, length)
