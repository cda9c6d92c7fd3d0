"""The texts of a batch through the tokenizer, and its conversations through the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.encode.frame import frame, with_second_bos
from tokenmill.encode.recipe.extract import Pieces, Problem, Talks
from tokenmill.encode.recipe.ragged import Ragged, lay_out, shortened
from tokenmill.encode.recipe.recipe import Recipe
from tokenmill.encode.tokenizer import Tokenizer
from tokenmill.errors import ConfigError, TokenizerError
from tokenmill.types import Encoded

if TYPE_CHECKING:
    from tokenmill.encode.chat.tokens import ChatEncoder


@dataclass(frozen=True, kw_only=True, slots=True)
class Texts:
    """A tokenizer and, where the recipe has conversations, its chat template."""

    recipe: Recipe
    tokenizer: Tokenizer
    chat: ChatEncoder | None
    lacking: str | None
    """Why there is no chat template although some records may need one."""

    def chat_problem(self) -> Problem | None:
        """Say why conversations cannot be encoded; None: they can."""
        return None if self.lacking is None else Problem(reason="no_template", detail=self.lacking)

    def template_json(self) -> object:
        """Return what the chat template says, not where it is; None where there is none."""
        return None if self.chat is None else self.chat.template.to_json()

    def spelled(self) -> tuple[str, ...]:
        """Return what ends the turns of conversations although it is no control string of the tokenizer."""
        return () if self.chat is None else self.chat.spelled

    def encode(self, pieces: Mapping[str, Pieces], problems: dict[int, Problem]) -> dict[str, Ragged]:
        """Encode the pieces of all sources in one call, and lay out their items."""
        texts = [text for each in pieces.values() for text in each.texts]
        encoded = self._encoded(texts, pieces, problems)
        identity = self.tokenizer.identity
        bos_id = identity.bos_id if identity.add_bos else None
        eos_id = identity.eos_id if identity.add_eos else None
        made: dict[str, Ragged] = {}
        first = 0
        for name, each in pieces.items():
            offsets = encoded.offsets[first : first + len(each.texts) + 1]
            part = Encoded(ids=encoded.ids[offsets[0] : offsets[-1]], offsets=offsets - offsets[0])
            first += len(each.texts)
            # A response goes on where its prompt ends: nothing closes the one, nothing opens the other.
            made[name] = lay_out(part, each, bos_id=bos_id, eos_id=None if name == "prompts" else eos_id)
            spelled = self.recipe.control_strings == "encode"
            for item in with_second_bos(made[name].ids, made[name].offsets, identity) if spelled else ():
                problems.setdefault(each.owners[item], Problem(reason="second_bos", detail="two"))
            # Where nothing is masked an empty text is a document as any other, if a short one.
            if name not in ("prompts", "responses") and self.recipe.kind != "seq":
                _refuse_nothing_said(part, each, problems)
        return made

    def _encoded(self, texts: list[str], pieces: Mapping[str, Pieces], problems: dict[int, Problem]) -> Encoded:
        # Only checks that ids are in the vocabulary, and casts; where BOS and EOS stand is for the pieces to say.
        bare = replace(self.tokenizer.identity, add_bos=False, add_eos=False)
        try:
            return frame(self.tokenizer.encode(texts), bare)
        except TokenizerError:
            owners = [owner for each in pieces.values() for owner in _piece_owners(each)]
            bad = [index for index, text in enumerate(texts) if not _is_unicode(text)]
            if not bad:
                raise
            for index in bad:
                detail = f"a lone surrogate in {texts[index][:40]!r}"
                problems.setdefault(owners[index], Problem(reason="utf8", detail=detail))
                texts[index] = ""
            return frame(self.tokenizer.encode(texts), bare)

    def encode_talks(
        self, talks: Mapping[str, Talks], problems: dict[int, Problem], notes: dict[str, set[int]]
    ) -> dict[str, Ragged]:
        """Encode the conversations of all sources in one call; each keeps those that could be.

        What the template did not write of a record is noted: name -> records.
        """
        empty = Ragged(
            ids=np.empty(0, np.uint32),
            mask=np.empty(0, np.uint8),
            offsets=np.zeros(1, np.int64),
            owners=np.empty(0, np.int64),
        )
        owners = np.array([owner for each in talks.values() for owner in each.owners], np.int64)
        if self.chat is None or not owners.size:
            return dict.fromkeys(talks, empty)
        from tokenmill.encode.chat.tokens import Conversation

        done = self.chat.encode(
            [
                Conversation(messages=messages, tools=tools, kwargs={})
                for each in talks.values()
                for messages, tools in zip(each.messages, each.tools, strict=True)
            ]
        )
        for refused in done.refused:
            problem = Problem(reason=refused.reason, detail=refused.detail)
            problems.setdefault(int(owners[refused.index]), problem)
        for owner, names in zip(owners[done.kept].tolist(), done.lost, strict=True):
            for name in names:
                notes.setdefault(name, set()).add(owner)
        bare = replace(self.tokenizer.identity, add_bos=False, add_eos=False)
        encoded = frame(done.encoded, bare)
        made: dict[str, Ragged] = {}
        begin = 0
        for name, each in talks.items():
            first, last = np.searchsorted(done.kept, [begin, begin + len(each.owners)])
            begin += len(each.owners)
            offsets = encoded.offsets[first : last + 1]
            made[name] = self._whole(
                Ragged(
                    ids=encoded.ids[offsets[0] : offsets[-1]],
                    mask=done.masks[offsets[0] : offsets[-1]],
                    offsets=offsets - offsets[0],
                    owners=owners[done.kept[first:last]],
                )
            )
        return made

    def _whole(self, ragged: Ragged) -> Ragged:
        """Train on all of a conversation but its BOS, where that is what the recipe says."""
        sections = [section for variant in self.recipe.variants for section, _ in variant.sections()]
        if self.recipe.kind == "grpo" or not any(s.template and s.action == "train" for s in sections):
            return ragged
        mask = np.ones(ragged.ids.size, np.uint8)
        starts = ragged.offsets[:-1]
        mask[starts[ragged.ids[starts] == self.tokenizer.identity.bos_id]] = 0
        return replace(ragged, mask=mask)

    def shortened(self, ragged: Ragged, problems: dict[int, Problem]) -> tuple[Ragged, set[int]]:
        """Cut items to max_seq_len; return which records were cut. One left with nothing to train on is refused."""
        limits = self.recipe.preprocessing
        cut: set[int] = set()
        made = ragged
        if limits.max_seq_len is not None:
            cut = set(ragged.owners[ragged.lengths > limits.max_seq_len].tolist())
            made = shortened(
                ragged,
                limits.max_seq_len,
                keep_end=limits.truncation_mode == "keep_end",
                bos_id=self.tokenizer.identity.bos_id,
            )
        for item in np.flatnonzero(~made.trained).tolist():
            owner = int(ragged.owners[item])
            if self.recipe.kind == "seq" and owner not in cut:
                continue  # an empty text, and no EOS behind it
            limit = f", max_seq_len is {limits.max_seq_len}" if owner in cut else ""
            detail = f"{int(ragged.lengths[item])} tokens, none of them trained{limit}"
            problems.setdefault(owner, Problem(reason="no_supervision", detail=detail))
        return made, cut


def open_texts(recipe: Recipe, tokenizer: Tokenizer, tokenizer_spec: str) -> Texts:
    """Open the chat template of a recipe, if it has one.

    Where the tokenizer has none, and some records may do without, only those that cannot are refused, one by one.
    """
    chat, lacking = None, None
    if recipe.chat_template is not None:
        try:
            chat = _open_chat(recipe, tokenizer, tokenizer_spec)
        except ConfigError as error:
            if recipe.chat_template != "tokenizer" or all(variant.template for variant in recipe.variants):
                raise
            lacking = _lacking(tokenizer_spec, error)
    return Texts(recipe=recipe, tokenizer=tokenizer, chat=chat, lacking=lacking)


def _lacking(tokenizer_spec: str, error: ConfigError) -> str:
    from tokenmill.encode.chat.template import NAME_ONE, has_template

    try:
        there = has_template(tokenizer_spec)
    except ConfigError:
        there = True  # and cannot be read, which is what the error says
    return str(error) if there else f"none beside the tokenizer {tokenizer_spec!r}; {NAME_ONE}"


def _open_chat(recipe: Recipe, tokenizer: Tokenizer, tokenizer_spec: str) -> ChatEncoder:
    from tokenmill.encode.chat.template import load_template
    from tokenmill.encode.chat.tokens import ChatEncoder

    assert recipe.chat_template is not None
    group = recipe.kind == "grpo"
    return ChatEncoder(
        template=load_template(recipe.chat_template, tokenizer=tokenizer_spec),
        tokenizer=tokenizer,
        # The response of a group is what the model said last, whatever its prompt holds. Where all of a
        # conversation is trained the table of roles may be empty.
        train_on=("assistant",) if group else recipe.trained_roles or ("assistant",),
        last_only=group or recipe.train_turns == "last",
        kwargs=dict(recipe.chat_template_kwargs),
    )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _piece_owners(pieces: Pieces) -> list[int]:
    return [owner for owner, count in zip(pieces.owners, pieces.counts, strict=True) for _ in range(count)]


def _refuse_nothing_said(encoded: Encoded, pieces: Pieces, problems: dict[int, Problem]) -> None:
    """Refuse items whose trained texts are all empty: an EOS alone is no answer."""
    if not pieces.counts:
        return
    counts = np.array(pieces.counts, np.int64)
    trained = np.diff(encoded.offsets) * np.array(pieces.trained, np.int64)
    for item in np.flatnonzero(np.add.reduceat(trained, np.cumsum(counts) - counts) == 0).tolist():
        problem = Problem(reason="no_supervision", detail="the text that is trained is empty")
        problems.setdefault(pieces.owners[item], problem)
