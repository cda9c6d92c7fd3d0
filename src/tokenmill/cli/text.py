"""Tokens as text, where the tokenizer of a store can be found."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenmill.encode.tokenizer import Tokenizer
    from tokenmill.store import Store
    from tokenmill.types import Span

EXCERPT_TOKENS = 16


def tokenizer_of(store: Store) -> Tokenizer | None:
    """Open the tokenizer that made a store, if it is still where it was and still the same."""
    from tokenmill.encode.load import open_tokenizer
    from tokenmill.errors import TokenizerError

    identity = store.manifest.tokenizer
    try:
        tokenizer = open_tokenizer(
            str(store.manifest.recipe.get("tokenizer", "bytes")),
            add_bos=bool(identity["add_bos"]),
            add_eos=bool(identity["add_eos"]),
            engine=str(store.manifest.recipe.get("engine", "auto")).split()[0],
        )
    except TokenizerError:
        return None
    return tokenizer if tokenizer.identity.content == identity["content"] else None


def excerpt(store: Store, span: Span, tokenizer: Tokenizer | None) -> str | None:
    """Return the beginning of a span as one line of text."""
    if tokenizer is None:
        return None
    begin, _ = store.document_bounds(span.document)
    length = min(span.length, EXCERPT_TOKENS)
    ids = store.fetch(begin + span.start, begin + span.start + length, store.manifest.token_key)
    more = "…" if span.length > length else ""
    text = tokenizer.decode(ids).replace("\n", "⏎").replace("\t", "→")
    # Documents are not to be trusted with the terminal: no escape sequences, no bells, no reversed text.
    return "".join(character if character.isprintable() else "\ufffd" for character in text) + more
