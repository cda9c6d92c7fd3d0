"""Recipes: how the fields of a record become tokens and masks.

1. In: what names a recipe (a preset, a JSON or TOML file, a table); records, as mappings of fields.
2. Does: reads and checks the recipe (`recipe`), takes the texts and messages of each record (`extract`), encodes a
   batch in one call of the tokenizer and lays tokens and masks end to end (`encoder`).
3. Out: `Records` of one training type, with the records that were refused and why; and the recipe as
   canonical JSON, which says when two stores were made alike.
"""

from tokenmill.encode.recipe.encoder import Reading, RecordEncoder, open_encoder, record_keys
from tokenmill.encode.recipe.recipe import PRESETS, Recipe, load_recipe

__all__ = [
    "PRESETS",
    "Reading",
    "Recipe",
    "RecordEncoder",
    "load_recipe",
    "open_encoder",
    "record_keys",
]
