"""Records to the arrays of one training type: texts through the tokenizer, conversations through the chat template.

A batch is read record by record (`extract`), encoded in one call of the tokenizer, laid end to end and cut to the
longest length; records that were refused on the way are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tokenmill.encode import Refusal
from tokenmill.encode.chat.conversation import Conversation, Message
from tokenmill.encode.recipe import extract
from tokenmill.encode.recipe.recipe import DTYPES, HISTORY, OPTIONS, SYSTEM, SYSTEM_PROMPT, Recipe
from tokenmill.encode.tokenizer import (
    Tokenizer,
    TokenizerIdentity,
    frame,
    offsets_of,
    place,
    token_dtype,
    with_second_bos,
)
from tokenmill.errors import ConfigError, TokenizerError
from tokenmill.fields import field_of, surrogate_in
from tokenmill.types import (
    STORED_ARRAYS,
    AnyArray,
    BoolArray,
    Encoded,
    Int64Array,
    Records,
    Refused,
    Uint8Array,
    Uint32Array,
    UnsignedArray,
    token_arrays,
)

if TYPE_CHECKING:
    from tokenmill.encode.chat.template import ChatTemplate
    from tokenmill.encode.chat.tokens import ChatEncoder

# Items of many records end to end.


@dataclass(frozen=True, kw_only=True, slots=True)
class Ragged:
    """Items end to end."""

    ids: UnsignedArray
    mask: Uint8Array
    """1 where a token is trained."""
    offsets: Int64Array
    """Where each item starts, and the end of the last."""
    owners: Int64Array
    """Which record each item belongs to; never less than the item before it."""

    @classmethod
    def empty(cls) -> Ragged:
        """Return no items."""
        no_ids, no_items = np.empty(0, np.uint32), np.zeros(1, np.int64)
        return cls(ids=no_ids, mask=np.empty(0, np.uint8), offsets=no_items, owners=no_items[:0])

    @property
    def lengths(self) -> Int64Array:
        """Tokens of each item."""
        return np.diff(self.offsets)

    @property
    def trained(self) -> BoolArray:
        """Whether any token of each item is trained; unlike `num_trained` this takes no memory for each token."""
        trained = np.zeros(self.owners.size, np.bool_)
        filled = np.flatnonzero(self.lengths)  # reduceat takes an empty run for its first neighbour
        if filled.size:
            trained[filled] = np.maximum.reduceat(self.mask, self.offsets[filled]) > 0
        return trained

    @property
    def num_trained(self) -> Int64Array:
        """How many tokens of each item are trained."""
        ends = np.zeros(self.mask.size + 1, np.int64)
        np.cumsum(self.mask, out=ends[1:])
        return np.diff(ends[self.offsets])

    @property
    def positions(self) -> Uint32Array:
        """Position of each token in its item."""
        return (np.arange(self.ids.size) - np.repeat(self.offsets[:-1], self.lengths)).astype("<u4")

    def taken(self, items: Int64Array) -> Ragged:
        """Return these items, in this order."""
        if items.size == self.owners.size and np.array_equal(items, np.arange(items.size)):
            return self
        return self.sliced(items, self.offsets[items], self.offsets[items + 1])

    def sliced(self, items: Int64Array, starts: Int64Array, ends: Int64Array) -> Ragged:
        """Return a run of tokens of each of these items."""
        offsets = offsets_of(ends - starts)
        index = np.repeat(starts - offsets[:-1], ends - starts) + np.arange(int(offsets[-1]))
        return Ragged(ids=self.ids[index], mask=self.mask[index], offsets=offsets, owners=self.owners[items])

    def merged(self, other: Ragged) -> Ragged:
        """Return the items of both, in the order of their records."""
        if not other.owners.size:
            return self
        if not self.owners.size:
            return other
        both = Ragged(
            ids=np.concatenate([self.ids, other.ids]),
            mask=np.concatenate([self.mask, other.mask]),
            offsets=np.concatenate([self.offsets, other.offsets[1:] + self.offsets[-1]]),
            owners=np.concatenate([self.owners, other.owners]),
        )
        return both.taken(np.argsort(both.owners, kind="stable"))

    def shortened(self, most: int, *, keep_end: bool, bos_id: int | None) -> Ragged:
        """Cut every item to `most` tokens; one that began with BOS still does."""
        long = self.lengths > most
        if not long.any():
            return self
        starts, ends = self.offsets[:-1], self.offsets[1:]
        if not keep_end:
            return self.sliced(np.arange(long.size), starts, np.minimum(ends, starts + most))
        cut = self.sliced(np.arange(long.size), np.maximum(starts, ends - most), ends)
        if bos_id is not None:
            began = long & (self.ids[np.minimum(starts, self.ids.size - 1)] == bos_id)
            cut.ids[cut.offsets[:-1][began]] = bos_id
            cut.mask[cut.offsets[:-1][began]] = 0
        return cut

    def trained_run(self) -> tuple[Int64Array, Int64Array]:
        """Return where the first trained token of each item is, and where the last ends; each must have one."""
        trained = np.flatnonzero(self.mask)
        first = trained[np.searchsorted(trained, self.offsets[:-1])]
        last = trained[np.searchsorted(trained, self.offsets[1:]) - 1]
        return first, last + 1

    def same_as_first(self) -> BoolArray:
        """Return whether each item has the same tokens as the first item of its record."""
        _, first_items, record = np.unique(self.owners, return_index=True, return_inverse=True)
        first = first_items[record.reshape(-1)]
        same: BoolArray = np.equal(self.lengths, self.lengths[first])
        candidates = np.flatnonzero(same)
        items, firsts = self.taken(candidates), self.taken(first[candidates])
        num_different = np.zeros(items.ids.size + 1, np.int64)
        np.cumsum(items.ids != firsts.ids, out=num_different[1:])
        same[candidates] = np.diff(num_different[items.offsets]) == 0
        return same


def lay_out(encoded: Encoded, items: extract.PlainItems, identity: TokenizerIdentity, *, close: bool) -> Ragged:
    """Lay the texts of every item end to end, with BOS before each text that begins anew and EOS where one ends.

    EOS is trained if the text before it is; BOS is never trained. No token spans two texts, as each was encoded on
    its own. Without `close` there is no EOS at the end, as something else follows.
    """
    last = np.cumsum(np.array(items.counts, np.int64)) - 1
    anew = np.array(items.anew, np.bool_)
    ends = np.zeros(anew.size, np.bool_)
    ends[:-1] = anew[1:]
    ends[last] = True
    needs_bos = anew & identity.add_bos
    placed = place(encoded, needs_bos, ends & (identity.add_eos and close), identity)
    mask = np.repeat(np.array(items.trained, np.uint8), np.diff(placed.offsets))
    mask[placed.offsets[:-1][needs_bos]] = 0
    return Ragged(
        ids=placed.ids,
        mask=mask,
        offsets=np.concatenate([placed.offsets[:1], placed.offsets[last + 1]]),
        owners=np.array(items.owners, np.int64),
    )


# Records to items, and to arrays.

ANSWERS_CUT = "answers_cut"
"""Note of records that lost something trained to max_seq_len."""
TOO_LONG = "too_many_tokens"
"""Reason of a record with more than max_seq_len tokens that is not cut."""
_STAND_IN = "answer"
"""Placeholder answer after a prompt without one, to find the end of the prompt."""
ANSWERS = "answers"
"""Conversations of a group, each a prompt and one of its responses; they are cut into those two."""


def record_keys(recipe: Recipe, vocab_size: int) -> dict[str, str]:
    """Return the arrays that records become, and their dtypes; one that is too narrow raises `ConfigError`."""
    least = token_dtype(vocab_size)
    keys: dict[str, str] = {}
    for key in recipe.arrays:
        wanted = recipe.output.dtypes.get(key)
        dtype = least if wanted is None else np.dtype(DTYPES[wanted])
        stored = STORED_ARRAYS[key].dtype
        if stored is None and dtype.itemsize < least.itemsize:
            raise ConfigError(
                f"recipe {recipe.name!r}: the dtype of {key} must hold {vocab_size} ids, got {wanted!r}; "
                f"write {least.name!r} or leave it out"
            )
        keys[key] = stored or dtype.str
    return keys


def open_encoder(
    recipe: Recipe,
    tokenizer: Tokenizer,
    *,
    tokenizer_spec: str,
    add_bos: bool | None = None,
    template: ChatTemplate | str | None = None,
) -> RecordEncoder:
    """Return the encoder of a recipe.

    `tokenizer_spec` names the tokenizer, whose folder may hold a chat template. Where it holds none and only some
    records need one, just those are refused, one by one. `add_bos` says whether BOS is put before conversations
    whose template writes none; None: as transformers does, only before the built-in template. `template` is the one
    that another process read for the same recipe, or why it read none: then no file is read.
    """
    chat, no_template = None, template if isinstance(template, str) else None
    if recipe.chat_template is not None and no_template is None:
        try:
            chat = _open_chat(recipe, tokenizer, template or tokenizer_spec, add_bos)
        except ConfigError as error:
            if recipe.chat_template != "tokenizer" or all(variant.template for variant in recipe.variants):
                raise
            no_template = _no_template(tokenizer_spec, error)
    return RecordEncoder(
        recipe=recipe,
        keys=record_keys(recipe, tokenizer.identity.vocab_size),
        readers=tuple(extract.VariantReader.of(recipe, variant) for variant in recipe.variants),
        tokenizer=tokenizer,
        chat=chat,
        no_template=no_template,
    )


def _open_chat(
    recipe: Recipe, tokenizer: Tokenizer, template: ChatTemplate | str, add_bos: bool | None
) -> ChatEncoder:
    """Return the encoder of conversations; `template` is one, or names the tokenizer that has it."""
    from tokenmill.encode.chat.template import load_template  # late: jinja2 takes time to load
    from tokenmill.encode.chat.tokens import ChatEncoder

    assert recipe.chat_template is not None
    group = recipe.kind == "grpo"
    return ChatEncoder(
        template=load_template(recipe.chat_template, tokenizer=template) if isinstance(template, str) else template,
        tokenizer=tokenizer,
        # The response of a group is what the model said last, whatever its prompt holds. Where all of a
        # conversation is trained the table of roles may be empty.
        train_on=("assistant",) if group else recipe.trained_roles or ("assistant",),
        last_only=group or recipe.train_turns == "last",
        kwargs=dict(recipe.chat_template_kwargs),
        add_bos=add_bos if recipe.framing.chat_bos is None else recipe.framing.chat_bos,
    )


def _no_template(tokenizer_spec: str, error: ConfigError) -> str:
    """Return why there is no chat template."""
    from tokenmill.encode.chat.template import has_template

    try:
        has_one = has_template(tokenizer_spec)
    except ConfigError:
        has_one = True  # and cannot be read, which is what the error says
    return str(error) if has_one else f"none beside the tokenizer {tokenizer_spec!r}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A record, and the variant of the recipe that reads it, or why none does."""

    record: extract.Record
    reader: extract.VariantReader | Refusal

    @property
    def content(self) -> str | None:
        """The texts of the fields that are used, a line each.

        None for a record that will be refused, as its fields are not those of the recipe or hold no text to train
        on. A record with a text may be refused as well, for what only `encode` finds out.
        """
        return None if isinstance(self.reader, Refusal) else self.reader.content(self.record)


@dataclass(kw_only=True, slots=True)
class _Batch:
    """The records of a batch while they are read: what they gave, and why some are refused."""

    size: int
    places: Sequence[str]
    texts: dict[str, extract.PlainItems]
    """Source -> its plain texts."""
    conversations: dict[str, list[tuple[int, Conversation]]]
    """Source -> its conversations, each with the record that it belongs to."""
    rewards: dict[int, list[float]] = field(default_factory=dict)
    refused: dict[int, Refusal] = field(default_factory=dict)
    cut: set[int] = field(default_factory=set)
    """Records of which something was cut off."""
    unanswered: set[int] = field(default_factory=set)
    """Records that are a prompt alone; their answer is `_STAND_IN`."""
    notes: dict[str, set[int]] = field(default_factory=dict)
    """Name -> the records that it is true of."""

    def refuse(self, owners: Iterable[int], reason: str, detail: str) -> None:
        """Refuse records, unless they are already."""
        for owner in owners:
            self.refused.setdefault(owner, Refusal(reason, detail))

    def kept(self) -> Int64Array:
        """Return the records that are not refused, in order."""
        return np.setdiff1d(np.arange(self.size), list(self.refused))

    def kept_items(self, ragged: Ragged) -> Ragged:
        """Leave out the items of refused records."""
        return ragged.taken(np.flatnonzero(~np.isin(ragged.owners, list(self.refused))))


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderFacts:
    """Facts of an encoder for which its chat template renders a sample."""

    identity: Mapping[str, Any]
    """Everything that the arrays depend on, except the tokenizer."""
    lacks_bos: bool
    """Whether texts start with BOS and conversations do not."""
    warnings: tuple[str, ...]
    """Reasons why a model may not learn to end its turns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordEncoder:
    """Turns records into the arrays of one training type."""

    recipe: Recipe
    keys: Mapping[str, str]
    """Array -> dtype as numpy writes it; `position_ids` that count through a shard are made by the caller."""
    readers: tuple[extract.VariantReader, ...]
    tokenizer: Tokenizer
    chat: ChatEncoder | None
    """Where the recipe has conversations."""
    no_template: str | None
    """Why there is no chat template although some records may need one."""

    def to_json(self) -> dict[str, object]:
        """Return what the arrays depend on in addition to the tokenizer: the recipe and its chat template."""
        if self.chat is None:
            return {**self.recipe.to_json(), "chat_template": None}
        # Without this key conversations start with BOS if texts do, as in stores from before there was one.
        only_chats = all(variant.template for variant in self.recipe.variants)
        adds_bos = only_chats and self.chat.adds_own_bos
        bos = {"bos": "none"} if self.chat.lacks_bos else {"bos": "added"} if adds_bos else {}
        return {**self.recipe.to_json(), "chat_template": {**self.chat.template.to_json(), **bos}}

    @property
    def lacks_bos(self) -> bool:
        """Whether texts start with BOS and conversations do not, as the chat template writes none."""
        return self.chat is not None and self.chat.lacks_bos

    def describe(self) -> EncoderFacts:
        """Return facts for which the chat template renders a sample; call it in a worker, which limits renders."""
        warnings = () if self.chat is None else self.chat.warnings
        return EncoderFacts(identity=self.to_json(), lacks_bos=self.lacks_bos, warnings=warnings)

    def read(self, record: extract.Record) -> Reading:
        """Choose the variant of the recipe that reads a record."""
        record = self.recipe.names.renamed(record)
        try:
            return Reading(record=record, reader=extract.choose(self.readers, record))
        except Refusal as refusal:
            return Reading(record=record, reader=refusal)

    def encode(self, records: Sequence[extract.Record | Reading], places: Sequence[str] = ()) -> Records:
        """Encode records, or the results of `read`; records that cannot be encoded are rejected with a reason.

        `places` names each record, for a template that exceeds a limit.
        """
        names = list(token_arrays(self.recipe.kind))
        batch = _Batch(
            size=len(records),
            places=places,
            texts={name: extract.PlainItems() for name in names},
            conversations={name: [] for name in (*names, ANSWERS)},
        )
        for index, record in enumerate(records):
            try:
                self._add(batch, index, record if isinstance(record, Reading) else self.read(record))
            except Refusal as refusal:
                batch.refused[index] = refusal
        items = self._encoded(batch)
        if self.recipe.preprocessing.on_long != "cut":
            for name in names:
                for owner, detail in self._long_items(items[name]):
                    batch.refuse([owner], TOO_LONG, detail)
        for name in names:
            if name == "prompts":
                for owner, detail in self._long_items(items[name]):
                    batch.refuse([owner], "prompt_too_long", detail)
            else:
                items[name] = self._shortened(batch, items[name])
        if self.recipe.kind == "dpo":
            batch.notes["equal_pair"] = _equal_pairs(items["chosen"], items["rejected"])
        return self._records(batch, items)

    def _records(self, batch: _Batch, items: Mapping[str, Ragged]) -> Records:
        """Lay out what is left as arrays."""
        kept = batch.kept()
        values: dict[str, AnyArray] = {}
        offsets: dict[str, Int64Array] = {}
        for name, mask_key in token_arrays(self.recipe.kind).items():
            ragged = batch.kept_items(items[name])
            offsets[STORED_ARRAYS[name].axis] = ragged.offsets
            values[name] = ragged.ids.astype(self.keys[name], copy=False)
            if mask_key is not None:
                values[mask_key] = ragged.mask
            if "position_ids" in self.keys and self.recipe.output.position_ids_mode == "doc_reset":
                values["position_ids"] = ragged.positions
        if self.recipe.kind == "grpo":
            groups = [batch.rewards[index] for index in kept.tolist()]
            values["rewards"] = np.array([reward for group in groups for reward in group], dtype="<f4")
            offsets["groups"] = offsets_of(map(len, groups))
            assert int(offsets["groups"][-1]) == offsets["responses"].size - 1
        noted = {name: sorted(owners - batch.refused.keys()) for name, owners in sorted(batch.notes.items())}
        noted = {name: owners for name, owners in noted.items() if owners}
        return Records(
            values=values,
            offsets=offsets,
            kept=kept,
            refused=tuple(
                Refused(index=index, reason=refusal.reason, detail=refusal.detail)
                for index, refusal in sorted(batch.refused.items())
            ),
            truncated=len(batch.cut - batch.refused.keys()),
            notes={name: len(owners) for name, owners in noted.items()},
            noted={name: int(np.searchsorted(kept, owners[0])) for name, owners in noted.items()},
        )

    # One record.

    def _add(self, batch: _Batch, index: int, reading: Reading) -> None:
        """Add what a record gives for each source."""
        record, reader = reading.record, reading.reader
        if isinstance(reader, Refusal):
            raise reader
        if not reader.template:
            reader.refuse_turns(record)
        if self.recipe.kind == "grpo":
            self._add_group(batch, index, record, reader)
            return
        for name, source in reader.sources.items():
            if reader.template:
                messages = self._with_system(batch, index, source.messages(record), record, reader)
                batch.conversations[name].append((index, self._conversation(messages, record)))
            else:
                source.add_texts(batch.texts[name], index, record)

    def _add_group(self, batch: _Batch, index: int, record: extract.Record, reader: extract.VariantReader) -> None:
        """Add a prompt and its responses."""
        if "responses" not in reader.sources:
            self._add_prompt(batch, index, record, reader)
            return
        prompts, responses = reader.sources["prompts"], reader.sources["responses"]
        rewards = reader.sources["rewards"].numbers(record)
        if reader.template:
            if responses.sections[0].field == prompts.sections[0].field:
                asked, answers = prompts.parted(record)
            else:
                asked, answers = prompts.messages(record), responses.answers(record)
            prompt = self._with_system(batch, index, asked, record, reader)
            batch.conversations[ANSWERS] += [
                (index, self._conversation([*prompt, *answer], record)) for answer in answers
            ]
            num_responses = len(answers)
        else:
            prompts.add_texts(batch.texts["prompts"], index, record)
            num_responses = responses.add_listed_texts(batch.texts["responses"], index, record)
        if num_responses != len(rewards):
            raise Refusal("lengths_differ", f"{num_responses} responses and {len(rewards)} rewards")
        batch.rewards[index] = rewards

    def _add_prompt(self, batch: _Batch, index: int, record: extract.Record, reader: extract.VariantReader) -> None:
        """Add a prompt without responses; an answer that is not kept shows where the prompt ends."""
        prompts = reader.sources["prompts"]
        if reader.template:
            prompt = self._with_system(batch, index, prompts.messages(record), record, reader)
            answered = [*prompt, {"role": "assistant", "content": _STAND_IN}]
            batch.conversations[ANSWERS].append((index, self._conversation(answered, record)))
            batch.unanswered.add(index)
        else:
            prompts.add_texts(batch.texts["prompts"], index, record)
        batch.rewards[index] = []

    def _with_system(
        self,
        batch: _Batch,
        index: int,
        messages: list[Message],
        record: extract.Record,
        reader: extract.VariantReader,
    ) -> list[Message]:
        """Put the turns of the field `history` before messages, and a system: of the record, else of the recipe."""
        if reader.leaves_system_prompt and record.get(SYSTEM_PROMPT):
            batch.notes.setdefault("system_prompt_not_read", set()).add(index)
        if reader.has_history(record):
            messages = extract.with_history(messages, record[HISTORY])
        if reader.reads_system:
            num_messages = len(messages)
            messages = extract.with_system(messages, record.get(SYSTEM))
            if len(messages) > num_messages:
                batch.notes.setdefault("system_field", set()).add(index)
        if self.recipe.system is not None and messages[0]["role"] not in ("system", "developer"):
            messages = extract.with_system(messages, self.recipe.system)
        return messages

    def _conversation(self, messages: list[Message], record: extract.Record) -> Conversation:
        """Return messages with the tools and options of their record; refuse them if there is no chat template."""
        name = self.recipe.tools_field
        tools = None if name is None else extract.tools_of(field_of(record, name), name)
        if self.no_template is not None:
            raise Refusal("no_template", self.no_template)
        options = extract.options_of(record.get(OPTIONS))
        return Conversation(messages=messages, tools=tools, options=options)

    # All records of a batch.

    def _encoded(self, batch: _Batch) -> dict[str, Ragged]:
        """Encode the texts and the conversations of all sources, those of a group cut into prompt and response."""
        items = self._encode_texts(batch)
        chats = self._encode_conversations(batch)
        answers = chats.pop(ANSWERS)
        if answers.owners.size:
            chats["prompts"], answers = _split(batch, batch.kept_items(answers))
            chats["responses"] = answers.taken(np.flatnonzero(~np.isin(answers.owners, list(batch.unanswered))))
        return {name: ragged.merged(chats[name]) for name, ragged in items.items()}

    def _encode_texts(self, batch: _Batch) -> dict[str, Ragged]:
        """Encode the plain texts of all sources in one call, and lay out their items."""
        texts = [text for plain in batch.texts.values() for text in plain.texts]
        if not texts:
            return dict.fromkeys(batch.texts, Ragged.empty())
        encoded = self._encode_checked(batch, texts)
        identity = self.tokenizer.identity
        items: dict[str, Ragged] = {}
        first = 0
        for name, plain in batch.texts.items():
            offsets = encoded.offsets[first : first + len(plain.texts) + 1]
            part = Encoded(ids=encoded.ids[offsets[0] : offsets[-1]], offsets=offsets - offsets[0])
            first += len(plain.texts)
            # A response goes on where its prompt ends, so the prompt is not closed.
            items[name] = lay_out(part, plain, identity, close=name != "prompts")
            if self.recipe.control_strings == "encode":
                twice = with_second_bos(items[name].ids, items[name].offsets, identity)
                batch.refuse((plain.owners[item] for item in twice), "second_bos", "two")
            # Where nothing is masked an empty text is a document like any other.
            if name not in ("prompts", "responses") and self.recipe.kind != "seq":
                _refuse_empty(batch, part, plain)
        return items

    def _encode_checked(self, batch: _Batch, texts: list[str]) -> Encoded:
        """Encode texts, but refuse the records of those that are not valid Unicode."""
        try:
            return self._cast(self.tokenizer.encode(texts))
        except TokenizerError:
            bad = [index for index, text in enumerate(texts) if surrogate_in(text) is not None]
            if not bad:
                raise
        owners = np.concatenate([np.repeat(plain.owners, plain.counts) for plain in batch.texts.values()])
        for index in bad:
            batch.refuse([int(owners[index])], "utf8", f"a lone surrogate in {texts[index][:40]!r}")
            texts[index] = ""
        return self._cast(self.tokenizer.encode(texts))

    def _cast(self, encoded: Encoded) -> Encoded:
        """Check that ids are in the vocabulary, and cast them; BOS and EOS are placed elsewhere."""
        return frame(encoded, replace(self.tokenizer.identity, add_bos=False, add_eos=False))

    def _encode_conversations(self, batch: _Batch) -> dict[str, Ragged]:
        """Encode the conversations of all sources in one call; refuse the records of those that cannot be.

        What the template did not write of a record is noted.
        """
        pairs = [pair for source_pairs in batch.conversations.values() for pair in source_pairs]
        if self.chat is None or not pairs:
            return dict.fromkeys(batch.conversations, Ragged.empty())
        owners = np.array([owner for owner, _ in pairs], np.int64)
        places = [batch.places[owner] for owner, _ in pairs] if batch.places else []
        chats = self.chat.encode([conversation for _, conversation in pairs], places)
        for refused in chats.refused:
            batch.refuse([int(owners[refused.index])], refused.reason, refused.detail)
        for owner, names in zip(owners[chats.kept].tolist(), chats.notes, strict=True):
            for name in names:
                batch.notes.setdefault(name, set()).add(owner)
        encoded = self._cast(chats.encoded)
        ragged = Ragged(ids=encoded.ids, mask=chats.masks, offsets=encoded.offsets, owners=owners[chats.kept])
        ragged = self._all_trained(ragged)
        items: dict[str, Ragged] = {}
        begin = 0
        for name, source_pairs in batch.conversations.items():
            first, last = np.searchsorted(chats.kept, [begin, begin + len(source_pairs)])
            begin += len(source_pairs)
            items[name] = ragged.taken(np.arange(first, last))
        return items

    def _all_trained(self, ragged: Ragged) -> Ragged:
        """Train on all of a conversation but its BOS, where that is what the recipe says."""
        train_all = any(section.template and section.action == "train" for section in self.recipe.sections)
        if self.recipe.kind == "grpo" or not train_all:
            return ragged
        mask = np.ones(ragged.ids.size, np.uint8)
        starts = ragged.offsets[:-1]
        mask[starts[ragged.ids[starts] == self.tokenizer.identity.bos_id]] = 0
        return replace(ragged, mask=mask)

    def _shortened(self, batch: _Batch, ragged: Ragged) -> Ragged:
        """Cut items to max_seq_len; a record that is left with nothing to train on is refused."""
        limits = self.recipe.preprocessing
        most = limits.max_seq_len
        cut = ragged
        if most is not None:
            batch.cut |= set(ragged.owners[ragged.lengths > most].tolist())
            keep_end = limits.truncation_mode == "keep_end"
            cut = ragged.shortened(most, keep_end=keep_end, bos_id=self.tokenizer.identity.bos_id)
            if self.recipe.kind != "seq":
                lost = cut.num_trained < ragged.num_trained
                batch.notes.setdefault(ANSWERS_CUT, set()).update(ragged.owners[lost].tolist())
        for item in np.flatnonzero(~cut.trained).tolist():
            owner, length = int(ragged.owners[item]), int(ragged.lengths[item])
            is_cut = most is not None and length > most
            if self.recipe.kind == "seq" and not is_cut:
                continue  # an empty text, and no EOS behind it
            limit = f", max_seq_len is {most}" if is_cut else ""
            batch.refuse([owner], "no_supervision", f"{length} tokens, none of them trained{limit}")
        return cut

    def _long_items(self, ragged: Ragged) -> Iterator[tuple[int, str]]:
        """Yield the record of each item with more than max_seq_len tokens, and how many it has, in words."""
        most = self.recipe.preprocessing.max_seq_len
        if most is None:
            return
        for item in np.flatnonzero(ragged.lengths > most).tolist():
            yield int(ragged.owners[item]), f"{int(ragged.lengths[item])} tokens, max_seq_len is {most}"


def _equal_pairs(chosen: Ragged, rejected: Ragged) -> set[int]:
    """Return the records whose chosen and rejected items have the same tokens."""
    both, first, second = np.intersect1d(chosen.owners, rejected.owners, return_indices=True)
    alike = np.flatnonzero(chosen.lengths[first] == rejected.lengths[second])
    pairs = [(first[at], second[at]) for at in alike.tolist()]
    runs = [
        (
            chosen.ids[slice(*chosen.offsets[one : one + 2])],
            rejected.ids[slice(*rejected.offsets[other : other + 2])],
        )
        for one, other in pairs
    ]
    return {int(both[at]) for at, run in zip(alike.tolist(), runs, strict=True) if np.array_equal(*run)}


def _split(batch: _Batch, answers: Ragged) -> tuple[Ragged, Ragged]:
    """Cut conversations before the answer: the prompt of each record once, and all answers."""
    first, last = answers.trained_run()
    items = np.arange(answers.owners.size)
    prompts = answers.sliced(items, answers.offsets[:-1], first)
    detail = "the template writes something else before the answer than before the first one"
    batch.refuse(answers.owners[~prompts.same_as_first()].tolist(), "prompts_differ", detail)
    _, once = np.unique(prompts.owners, return_index=True)
    return prompts.taken(once), answers.sliced(items, first, last)


def _refuse_empty(batch: _Batch, encoded: Encoded, items: extract.PlainItems) -> None:
    """Refuse items whose trained texts are all empty: an EOS alone is no answer."""
    if not items.counts:
        return
    counts = np.array(items.counts, np.int64)
    trained = np.diff(encoded.offsets) * np.array(items.trained, np.int64)
    empty = np.flatnonzero(np.add.reduceat(trained, np.cumsum(counts) - counts) == 0).tolist()
    batch.refuse((items.owners[item] for item in empty), "no_supervision", "the text that is trained is empty")
