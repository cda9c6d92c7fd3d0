"""Records to the arrays of one training type: texts through the tokenizer, conversations through the chat template.

A batch is read record by record (`extract`), encoded in one call of the tokenizer, laid end to end,
cut to the longest length, and rid of the records that were refused on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from tokenmill.encode import Refusal
from tokenmill.encode.chat.conversation import Conversation
from tokenmill.encode.recipe import extract
from tokenmill.encode.recipe.recipe import DTYPES, Recipe
from tokenmill.encode.tokenizer import (
    Tokenizer,
    TokenizerIdentity,
    frame,
    offsets_of,
    place,
    surrogate_in,
    token_dtype,
    with_second_bos,
)
from tokenmill.errors import ConfigError, TokenizerError
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
        """Say of each item whether any of its tokens is trained."""
        some = np.zeros(self.owners.size, np.bool_)
        filled = np.flatnonzero(self.lengths)  # reduceat takes an empty run for its first neighbour
        if filled.size:
            some[filled] = np.maximum.reduceat(self.mask, self.offsets[filled]) > 0
        return some

    @property
    def num_trained(self) -> Int64Array:
        """How many tokens of each item are trained."""
        ends = np.zeros(self.mask.size + 1, np.int64)
        np.cumsum(self.mask, out=ends[1:])
        return np.diff(ends[self.offsets])

    @property
    def positions(self) -> Uint32Array:
        """Of each token, how many of its item stand before it."""
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
        """Bring the items of two into the order of their records."""
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
        """Return of each item where its first trained token is and where its last ends; each must have one."""
        trained = np.flatnonzero(self.mask)
        first = trained[np.searchsorted(trained, self.offsets[:-1])]
        last = trained[np.searchsorted(trained, self.offsets[1:]) - 1]
        return first, last + 1

    def same_as_first(self) -> BoolArray:
        """Say of each item whether it is, token for token, the first item of its record."""
        _, first, inverse = np.unique(self.owners, return_index=True, return_inverse=True)
        model = first[inverse.reshape(-1)]
        same: BoolArray = np.equal(self.lengths, self.lengths[model])
        own = np.flatnonzero(same)
        left, right = self.taken(own), self.taken(model[own])
        differs = np.zeros(left.ids.size + 1, np.int64)
        np.cumsum(left.ids != right.ids, out=differs[1:])
        same[own] = np.diff(differs[left.offsets]) == 0
        return same


def lay_out(encoded: Encoded, items: extract.PlainItems, identity: TokenizerIdentity, *, close: bool) -> Ragged:
    """Lay the texts of every item end to end, BOS before each that begins anew and EOS where one ends.

    An EOS shares the fate of the text before it; a BOS is never trained. No token straddles two texts, as each was
    encoded on its own. What is not to `close` gets no EOS: something else goes on behind it.
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
"""Why a record with more than max_seq_len tokens is refused, where it is not cut."""
_STAND_IN = "answer"
"""What an assistant would say behind a prompt alone."""
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

    `tokenizer_spec` is what names the tokenizer, whose folder may hold a chat template. Where it has none, and some
    records may do without, only those that cannot are refused, one by one. `add_bos` says whether BOS is put before
    conversations whose template writes none; None: as transformers has it, not, but before the built-in template.
    `template` is what another process found that opened the same, or why it found none: then no file is read.
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
    """Return what encodes conversations, with a template, or that of a tokenizer by what names it."""
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
        add_bos=add_bos,
    )


def _no_template(tokenizer_spec: str, error: ConfigError) -> str:
    from tokenmill.encode.chat.template import NAME_ONE, has_template

    try:
        there = has_template(tokenizer_spec)
    except ConfigError:
        there = True  # and cannot be read, which is what the error says
    return str(error) if there else f"none beside the tokenizer {tokenizer_spec!r}; {NAME_ONE}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """A record, and which variant of the recipe reads it."""

    record: extract.Record
    reader: extract.VariantReader | Refusal
    """Or why none does."""

    @property
    def content(self) -> str | None:
        """The text of the record that is used, fields a line each.

        None for a record that will be refused, as its fields are not those of the recipe or hold no text to train
        on. A record that has a text may be refused as well, for what `encode` alone can see.
        """
        return None if isinstance(self.reader, Refusal) else self.reader.content(self.record)


@dataclass(kw_only=True, slots=True)
class _Batch:
    """The records of a batch while they are read: what they gave, and why some are refused."""

    size: int
    texts: dict[str, extract.PlainItems]
    """Source -> its plain texts."""
    conversations: dict[str, list[tuple[int, Conversation]]]
    """Source -> its conversations, each with the record that it belongs to."""
    rewards: dict[int, list[float]] = field(default_factory=dict)
    refused: dict[int, Refusal] = field(default_factory=dict)
    cut: set[int] = field(default_factory=set)
    """Records of which something was cut off."""
    unanswered: set[int] = field(default_factory=set)
    """Records that are a prompt alone, whose answer only says where it ends."""
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
class RecordEncoder:
    """Turns records into the arrays of one training type."""

    recipe: Recipe
    keys: Mapping[str, str]
    """Array -> dtype as numpy writes it. `position_ids` that go on through a shard are left to the caller."""
    readers: tuple[extract.VariantReader, ...]
    tokenizer: Tokenizer
    chat: ChatEncoder | None
    """Where the recipe has conversations."""
    no_template: str | None
    """Why there is no chat template although some records may need one."""

    def to_json(self) -> dict[str, object]:
        """Return what the arrays depend on beside the tokenizer: the recipe, and what its chat template says."""
        if self.chat is None:
            return {**self.recipe.to_json(), "chat_template": None}
        # Once BOS was put before all conversations: what says nothing of it has it still.
        lacking = {"bos": "none"} if self.chat.lacks_bos else {}
        return {**self.recipe.to_json(), "chat_template": {**self.chat.template.to_json(), **lacking}}

    @property
    def lacks_bos(self) -> bool:
        """Whether texts start with BOS and conversations do not, as the chat template writes none."""
        return self.chat is not None and self.chat.lacks_bos

    def spelled(self) -> tuple[str, ...]:
        """Return what ends turns in the chat template but is ordinary text to the tokenizer: worth a warning."""
        return () if self.chat is None else self.chat.spelled

    def read(self, record: extract.Record) -> Reading:
        """Choose the variant of the recipe that reads a record."""
        record = self.recipe.names.renamed(record)
        try:
            return Reading(record=record, reader=extract.choose(self.readers, record))
        except Refusal as refusal:
            return Reading(record=record, reader=refusal)

    def encode(self, records: Sequence[extract.Record | Reading]) -> Records:
        """Encode records, or what `read` made of them; those that cannot be are refused, each with its reason."""
        names = list(token_arrays(self.recipe.kind))
        batch = _Batch(
            size=len(records),
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
            self._refuse_longer(batch, items)
        for name in names:
            if name == "prompts":
                self._refuse_long(batch, items[name])
            else:
                items[name] = self._shortened(batch, items[name])
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
            self._add_group(batch, index, reading, reader)
            return
        for name, source in reader.sources.items():
            if reader.template:
                messages = self._with_system(batch, index, source.messages(record), reading)
                batch.conversations[name].append((index, self._conversation(messages, record)))
            else:
                source.add_texts(batch.texts[name], index, record)

    def _add_group(self, batch: _Batch, index: int, reading: Reading, reader: extract.VariantReader) -> None:
        record = reading.record
        if "responses" not in reader.sources:
            self._add_prompt(batch, index, reading, reader)
            return
        prompts, responses = reader.sources["prompts"], reader.sources["responses"]
        rewards = reader.sources["rewards"].numbers(record)
        if reader.template:
            if responses.sections[0][1] == prompts.sections[0][1]:
                asked, answers = prompts.parted(record)
            else:
                asked, answers = prompts.messages(record), responses.answers(record)
            prompt = self._with_system(batch, index, asked, reading)
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

    def _add_prompt(self, batch: _Batch, index: int, reading: Reading, reader: extract.VariantReader) -> None:
        """Add a group without responses; where its prompt ends is found by an answer that is not kept."""
        prompts = reader.sources["prompts"]
        if reader.template:
            prompt = self._with_system(batch, index, prompts.messages(reading.record), reading)
            answered = [*prompt, {"role": "assistant", "content": _STAND_IN}]
            batch.conversations[ANSWERS].append((index, self._conversation(answered, reading.record)))
            batch.unanswered.add(index)
        else:
            prompts.add_texts(batch.texts["prompts"], index, reading.record)
        batch.rewards[index] = []

    def _with_system(
        self, batch: _Batch, index: int, messages: list[extract.Message], reading: Reading
    ) -> list[extract.Message]:
        """Put the fields `history` and `system` before messages, and note the latter; else what the recipe says."""
        reader = reading.reader
        if isinstance(reader, Refusal):
            return messages
        if reader.has_history(reading.record):
            messages = extract.with_history(messages, reading.record[extract.HISTORY])
        whole = (
            extract.with_system(messages, reading.record.get(extract.SYSTEM)) if reader.reads_system else messages
        )
        if len(whole) > len(messages):
            batch.notes.setdefault("system_field", set()).add(index)
        if self.recipe.system is not None and whole[0]["role"] not in ("system", "developer"):
            whole = extract.with_system(whole, self.recipe.system)
        return whole

    def _conversation(self, messages: list[extract.Message], record: extract.Record) -> Conversation:
        """Put the tools of a record to messages; refuse them if there is no chat template to write them with."""
        name = self.recipe.tools_field
        tools = None if name is None else extract.tools_of(extract.look_up(record, tuple(name.split("."))), name)
        if self.no_template is not None:
            raise Refusal("no_template", self.no_template)
        options = extract.options_of(record.get(extract.OPTIONS))
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
        texts = [text for each in batch.texts.values() for text in each.texts]
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
            # A response goes on where its prompt ends: nothing closes the one, nothing opens the other.
            items[name] = lay_out(part, plain, identity, close=name != "prompts")
            if self.recipe.control_strings == "encode":
                twice = with_second_bos(items[name].ids, items[name].offsets, identity)
                batch.refuse((plain.owners[item] for item in twice), "second_bos", "two")
            # Where nothing is masked an empty text is a document as any other, if a short one.
            if name not in ("prompts", "responses") and self.recipe.kind != "seq":
                _refuse_nothing_said(batch, part, plain)
        return items

    def _encode_checked(self, batch: _Batch, texts: list[str]) -> Encoded:
        """Encode texts, without those that are no Unicode, whose records are refused."""
        try:
            return self._cast(self.tokenizer.encode(texts))
        except TokenizerError:
            bad = [index for index, text in enumerate(texts) if surrogate_in(text) is not None]
            if not bad:
                raise
        owners = np.concatenate([np.repeat(each.owners, each.counts) for each in batch.texts.values()])
        for index in bad:
            batch.refuse([int(owners[index])], "utf8", f"a lone surrogate in {texts[index][:40]!r}")
            texts[index] = ""
        return self._cast(self.tokenizer.encode(texts))

    def _cast(self, encoded: Encoded) -> Encoded:
        """Check that ids are in the vocabulary, and cast them; where BOS and EOS stand is known elsewhere."""
        return frame(encoded, replace(self.tokenizer.identity, add_bos=False, add_eos=False))

    def _encode_conversations(self, batch: _Batch) -> dict[str, Ragged]:
        """Encode the conversations of all sources in one call; each keeps those that could be.

        What the template did not write of a record is noted.
        """
        pairs = [pair for each in batch.conversations.values() for pair in each]
        if self.chat is None or not pairs:
            return dict.fromkeys(batch.conversations, Ragged.empty())
        owners = np.array([owner for owner, _ in pairs], np.int64)
        done = self.chat.encode([conversation for _, conversation in pairs])
        for refused in done.refused:
            batch.refuse([int(owners[refused.index])], refused.reason, refused.detail)
        for owner, names in zip(owners[done.kept].tolist(), done.notes, strict=True):
            for name in names:
                batch.notes.setdefault(name, set()).add(owner)
        encoded = self._cast(done.encoded)
        ragged = Ragged(ids=encoded.ids, mask=done.masks, offsets=encoded.offsets, owners=owners[done.kept])
        ragged = self._all_trained(ragged)
        items: dict[str, Ragged] = {}
        begin = 0
        for name, each in batch.conversations.items():
            first, last = np.searchsorted(done.kept, [begin, begin + len(each)])
            begin += len(each)
            items[name] = ragged.taken(np.arange(first, last))
        return items

    def _all_trained(self, ragged: Ragged) -> Ragged:
        """Train on all of a conversation but its BOS, where that is what the recipe says."""
        sections = [section for variant in self.recipe.variants for section, _ in variant.sections()]
        if self.recipe.kind == "grpo" or not any(each.template and each.action == "train" for each in sections):
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

    def _refuse_longer(self, batch: _Batch, items: Mapping[str, Ragged]) -> None:
        """Refuse records of which anything is longer than max_seq_len."""
        most = self.recipe.preprocessing.max_seq_len
        assert most is not None, "a recipe says what becomes of long records only where there can be some"
        for ragged in items.values():
            for item in np.flatnonzero(ragged.lengths > most).tolist():
                detail = f"{int(ragged.lengths[item])} tokens, max_seq_len is {most}"
                batch.refuse([int(ragged.owners[item])], TOO_LONG, detail)

    def _refuse_long(self, batch: _Batch, prompts: Ragged) -> None:
        most = self.recipe.preprocessing.max_seq_len
        for item in np.flatnonzero(prompts.lengths > most).tolist() if most is not None else ():
            detail = f"{int(prompts.lengths[item])} tokens, max_seq_len is {most}"
            batch.refuse([int(prompts.owners[item])], "prompt_too_long", detail)


def _split(batch: _Batch, answers: Ragged) -> tuple[Ragged, Ragged]:
    """Cut conversations before the answer: the prompt of each record once, and all answers."""
    first, last = answers.trained_run()
    items = np.arange(answers.owners.size)
    prompts = answers.sliced(items, answers.offsets[:-1], first)
    detail = "the template writes something else before the answer than before the first one"
    batch.refuse(answers.owners[~prompts.same_as_first()].tolist(), "prompts_differ", detail)
    _, once = np.unique(prompts.owners, return_index=True)
    return prompts.taken(once), answers.sliced(items, first, last)


def _refuse_nothing_said(batch: _Batch, encoded: Encoded, items: extract.PlainItems) -> None:
    """Refuse items whose trained texts are all empty: an EOS alone is no answer."""
    if not items.counts:
        return
    counts = np.array(items.counts, np.int64)
    trained = np.diff(encoded.offsets) * np.array(items.trained, np.int64)
    silent = np.flatnonzero(np.add.reduceat(trained, np.cumsum(counts) - counts) == 0).tolist()
    batch.refuse((items.owners[item] for item in silent), "no_supervision", "the text that is trained is empty")
