"""Records to arrays: one encoder for sequences, one for pairs, one for groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from tokenmill.encode.frame import token_dtype
from tokenmill.encode.recipe.extract import (
    Pieces,
    Problem,
    Talks,
    Way,
    add_answers,
    add_listed_texts,
    add_talk,
    add_texts,
    choose,
    numbers_of,
    suits,
    text_of,
)
from tokenmill.encode.recipe.ragged import Ragged, ends_of, merged, same_as_first, sliced, taken, trained_run
from tokenmill.encode.recipe.recipe import DTYPES, MASK_KEYS, Recipe
from tokenmill.encode.recipe.texts import Texts, open_texts
from tokenmill.errors import ConfigError
from tokenmill.types import STORED_ARRAYS, Records, Refused

if TYPE_CHECKING:
    from tokenmill.encode.tokenizer import Tokenizer


class RecordEncoder(Protocol):
    """Turns records into the arrays of one training type."""

    @property
    def keys(self) -> Mapping[str, str]:
        """Array -> dtype as numpy writes it. `position_ids` that go on through a shard are left to the caller."""

    def content(self, record: Mapping[str, Any]) -> str | None:
        """Return the text of a record that is used, fields a line each.

        None for a record that will be refused, as its fields are not those of the recipe or hold no text to train
        on. A record that has a text may be refused as well, for what `encode` alone can see.
        """

    def encode(self, records: Sequence[Mapping[str, Any]]) -> Records:
        """Encode records; those that cannot be are refused, each with its reason."""

    def to_json(self) -> dict[str, object]:
        """Return what the arrays depend on beside the tokenizer: the recipe, and what its chat template says."""

    def spelled(self) -> tuple[str, ...]:
        """Return what ends turns in the chat template but is ordinary text to the tokenizer: worth a warning."""


def record_keys(recipe: Recipe, vocab_size: int) -> dict[str, str]:
    """Return the arrays that records become, and their dtypes; one that is too narrow raises `ConfigError`."""
    least = token_dtype(vocab_size)
    keys: dict[str, str] = {}
    for key in recipe.arrays:
        stored = STORED_ARRAYS[key].dtype
        if stored is None:
            said = recipe.output.dtypes.get(key)
            dtype = least if said is None else np.dtype(DTYPES[said])
            if dtype.itemsize < least.itemsize:
                raise ConfigError(
                    f"recipe {recipe.name!r}: the dtype of {key} must hold {vocab_size} ids, got {said!r}; "
                    f"write {least.name!r} or leave it out"
                )
            keys[key] = dtype.str
        else:
            keys[key] = stored
    return keys


def open_encoder(recipe: Recipe, tokenizer: Tokenizer, *, tokenizer_spec: str) -> RecordEncoder:
    """Return the encoder of a recipe.

    `tokenizer_spec` is what names the tokenizer, whose folder may hold a chat template.
    """
    texts = open_texts(recipe, tokenizer, tokenizer_spec)
    keys = record_keys(recipe, tokenizer.identity.vocab_size)
    ways = tuple(Way.of(recipe, variant) for variant in recipe.variants)
    kinds: Mapping[str, type[SequenceEncoder | PairEncoder | GroupEncoder]] = {
        "seq": SequenceEncoder,
        "sft": SequenceEncoder,
        "dpo": PairEncoder,
        "grpo": GroupEncoder,
    }
    return kinds[recipe.kind](recipe=recipe, keys=keys, ways=ways, texts=texts)


@dataclass(kw_only=True, slots=True)
class _Batch:
    """The records of a batch while they are read: what they gave, and what was wrong."""

    size: int
    pieces: dict[str, Pieces] = field(default_factory=dict)
    talks: dict[str, Talks] = field(default_factory=dict)
    problems: dict[int, Problem] = field(default_factory=dict)
    notes: dict[str, set[int]] = field(default_factory=dict)
    """Name -> the records that it is true of."""

    def kept(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the records that have no problem, in order."""
        good = np.ones(self.size, np.bool_)
        good[list(self.problems)] = False
        return np.flatnonzero(good)

    def refused(self) -> tuple[Refused, ...]:
        """Return the others, in order."""
        return tuple(
            Refused(index=index, reason=problem.reason, detail=problem.detail)
            for index, problem in sorted(self.problems.items())
        )

    def counted(self) -> dict[str, int]:
        """Return of each note how many records it is true of, those that have a problem aside."""
        counts = {name: len(owners - self.problems.keys()) for name, owners in sorted(self.notes.items())}
        return {name: count for name, count in counts.items() if count}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Encoder:
    """What the encoders share: the recipe, opened."""

    recipe: Recipe
    keys: Mapping[str, str]
    ways: tuple[Way, ...]
    texts: Texts

    def content(self, record: Mapping[str, Any]) -> str | None:
        """Return the text of a record that is used, fields a line each; None if the record will be refused."""
        way = choose(self.ways, record)
        if isinstance(way, Problem) or not suits(way, record):
            return None
        text = text_of(record, way)
        # An empty conversation is for the chat template to refuse, which may write something even so.
        nothing = not text and self.recipe.kind != "seq" and not way.template and not way.adds_text
        return None if nothing else text

    def to_json(self) -> dict[str, object]:
        """Return what the arrays depend on beside the tokenizer."""
        return {**self.recipe.to_json(), "chat_template": self.texts.template_json()}

    def spelled(self) -> tuple[str, ...]:
        """Return what ends turns in the chat template but is ordinary text to the tokenizer."""
        return self.texts.spelled()

    def _add_item(
        self, batch: _Batch, name: str, index: int, record: Mapping[str, Any], way: Way
    ) -> Problem | None:
        """Add what a record gives for one source."""
        if not way.template:
            return add_texts(batch.pieces[name], index, record, way.parts[name])
        problem = add_talk(batch.talks[name], index, record, way.parts[name], self.recipe.tools_field)
        return problem or self.texts.chat_problem()

    def _good(self, batch: _Batch, ragged: Ragged) -> Ragged:
        """Leave out the items of refused records."""
        bad = np.zeros(batch.size, np.bool_)
        bad[list(batch.problems)] = True
        return taken(ragged, np.flatnonzero(~bad[ragged.owners]))

    def _values(self, name: str, ragged: Ragged) -> dict[str, np.ndarray[Any, Any]]:
        """Return the arrays of one source: its tokens, and its mask if it has one."""
        mask_key = MASK_KEYS[name]
        values: dict[str, np.ndarray[Any, Any]] = {name: ragged.ids.astype(self.keys[name], copy=False)}
        if mask_key is not None and mask_key in self.keys:
            values[mask_key] = ragged.mask
        return values


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceEncoder(_Encoder):
    """A record is one sequence: `seq`, and with a mask `sft`."""

    def encode(self, records: Sequence[Mapping[str, Any]]) -> Records:
        """Encode records; those that cannot be are refused, each with its reason."""
        batch = _Batch(size=len(records), pieces={"sequence": Pieces()}, talks={"sequence": Talks()})
        for index, record in enumerate(records):
            way = choose(self.ways, record)
            problem = way if isinstance(way, Problem) else self._add_item(batch, "sequence", index, record, way)
            if problem is not None:
                batch.problems[index] = problem
        plain = self.texts.encode(batch.pieces, batch.problems)["sequence"]
        chats = self.texts.encode_talks(batch.talks, batch.problems, batch.notes)["sequence"]
        ragged, cut = self.texts.shortened(merged(plain, chats), batch.problems)
        ragged = self._good(batch, ragged)
        values = self._values("sequence", ragged)
        if "position_ids" in self.keys and self.recipe.output.position_ids_mode == "doc_reset":
            values["position_ids"] = ragged.positions
        return Records(
            values=values,
            offsets={"documents": ragged.offsets},
            kept=batch.kept(),
            refused=batch.refused(),
            truncated=len(cut - batch.problems.keys()),
            notes=batch.counted(),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PairEncoder(_Encoder):
    """A record is an answer that was chosen and one that was rejected: `dpo`."""

    def encode(self, records: Sequence[Mapping[str, Any]]) -> Records:
        """Encode records; those that cannot be are refused, each with its reason."""
        names = ("chosen", "rejected")
        batch = _Batch(
            size=len(records),
            pieces={name: Pieces() for name in names},
            talks={name: Talks() for name in names},
        )
        for index, record in enumerate(records):
            way = choose(self.ways, record)
            for name in names:
                problem = way if isinstance(way, Problem) else self._add_item(batch, name, index, record, way)
                if problem is not None:
                    batch.problems.setdefault(index, problem)
        plain = self.texts.encode(batch.pieces, batch.problems)
        chats = self.texts.encode_talks(batch.talks, batch.problems, batch.notes)
        made: dict[str, Ragged] = {}
        cut: set[int] = set()
        for name in names:
            made[name], more = self.texts.shortened(merged(plain[name], chats[name]), batch.problems)
            cut |= more
        values: dict[str, np.ndarray[Any, Any]] = {}
        offsets = {}
        for name in names:
            ragged = self._good(batch, made[name])
            values |= self._values(name, ragged)
            offsets[name] = ragged.offsets
        return Records(
            values=values,
            offsets=offsets,
            kept=batch.kept(),
            refused=batch.refused(),
            truncated=len(cut - batch.problems.keys()),
            notes=batch.counted(),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupEncoder(_Encoder):
    """A record is a prompt, several responses to it and a reward for each: `grpo`."""

    def encode(self, records: Sequence[Mapping[str, Any]]) -> Records:
        """Encode records; those that cannot be are refused, each with its reason."""
        batch = _Batch(
            size=len(records),
            pieces={"prompts": Pieces(), "responses": Pieces()},
            talks={"answers": Talks()},
        )
        rewards: list[Sequence[float]] = []
        for index, record in enumerate(records):
            found = self._add(batch, index, record)
            if isinstance(found, Problem):
                batch.problems[index] = found
            rewards.append(() if isinstance(found, Problem) else found)
        plain = self.texts.encode(batch.pieces, batch.problems)
        chats = self.texts.encode_talks(batch.talks, batch.problems, batch.notes)["answers"]
        chat_prompts, chat_responses = _split(self._good(batch, chats), batch.problems)
        prompts = merged(plain["prompts"], chat_prompts)
        self._refuse_long(prompts, batch.problems)
        responses, cut = self.texts.shortened(merged(plain["responses"], chat_responses), batch.problems)
        prompts, responses = self._good(batch, prompts), self._good(batch, responses)
        kept = batch.kept()
        scores = [rewards[index] for index in kept.tolist()]
        values = {
            **self._values("prompts", prompts),
            **self._values("responses", responses),
            "rewards": np.array([score for group in scores for score in group], dtype="<f4"),
        }
        groups = ends_of(np.array([len(group) for group in scores], np.int64))
        assert int(groups[-1]) == responses.owners.size
        return Records(
            values=values,
            offsets={"prompts": prompts.offsets, "responses": responses.offsets, "groups": groups},
            kept=kept,
            refused=batch.refused(),
            truncated=len(cut - batch.problems.keys()),
            notes=batch.counted(),
        )

    def _add(self, batch: _Batch, index: int, record: Mapping[str, Any]) -> Problem | list[float]:
        way = choose(self.ways, record)
        if isinstance(way, Problem):
            return way
        rewards = numbers_of(record, way.parts["rewards"].sections[0])
        if isinstance(rewards, Problem):
            return rewards
        prompt, answers = way.parts["prompts"], way.parts["responses"]
        if way.template:
            added = add_answers(batch.talks["answers"], index, record, prompt, answers, self.recipe.tools_field)
            added = added if isinstance(added, Problem) else self.texts.chat_problem() or added
        else:
            added = add_texts(batch.pieces["prompts"], index, record, prompt) or add_listed_texts(
                batch.pieces["responses"], index, record, answers
            )
        if isinstance(added, Problem):
            return added
        if added != len(rewards):
            detail = f"{added} responses and {len(rewards)} rewards"
            return Problem(reason="lengths_differ", detail=detail)
        return rewards

    def _refuse_long(self, prompts: Ragged, problems: dict[int, Problem]) -> None:
        most = self.recipe.preprocessing.max_seq_len
        if most is None:
            return
        for item in np.flatnonzero(prompts.lengths > most).tolist():
            detail = f"{int(prompts.lengths[item])} tokens, max_seq_len is {most}"
            problems.setdefault(int(prompts.owners[item]), Problem(reason="prompt_too_long", detail=detail))


def _split(chats: Ragged, problems: dict[int, Problem]) -> tuple[Ragged, Ragged]:
    """Cut conversations before the answer: the prompt of each record once, and all answers."""
    first, last = trained_run(chats)
    items = np.arange(chats.owners.size)
    prompts = sliced(chats, items, chats.offsets[:-1], first)
    for item in np.flatnonzero(~same_as_first(prompts)).tolist():
        detail = "the template writes something else before the answer than before the first one"
        problems.setdefault(int(chats.owners[item]), Problem(reason="prompts_differ", detail=detail))
    _, once = np.unique(prompts.owners, return_index=True)
    return taken(prompts, once), sliced(chats, items, first, last)
