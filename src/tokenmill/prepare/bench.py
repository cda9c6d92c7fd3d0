"""What a worker opens once and uses for all its units."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from tokenmill.documents import DocumentBatch, ReadOptions, Unit, read_unit
from tokenmill.prepare.job import TEXT_KEY, Job
from tokenmill.prepare.select import Rules
from tokenmill.prepare.unit import Bad
from tokenmill.store import StoreSpec
from tokenmill.types import Records, Refused

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from tokenmill.encode.recipe import RecordEncoder
    from tokenmill.encode.tokenizer import Tokenizer


COMPILED_BYTES = 32 << 20
"""Units from this size on are read and framed by compiled kernels, where there are some: the input is then 24 times
as large, and what they save is more than the 0.4 s and 100 MB that they take to load in every worker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """The tools of a worker."""

    job: Job
    tokenizer: Tokenizer
    encoder: RecordEncoder | None
    """None where records are nothing but a text."""
    rules: Rules
    reading: ReadOptions
    spec: StoreSpec
    key_fields: tuple[str, ...]
    """Fields that tell records apart; the domain is none of them."""

    def encode(self, batch: Joined, chosen: npt.NDArray[np.int64] | None) -> Records:
        """Turn the chosen records of a batch into arrays; None chooses all."""
        if self.encoder is not None:
            records = batch.records if chosen is None else [batch.records[index] for index in chosen.tolist()]
            return self.encoder.encode(records)
        from tokenmill.encode.frame import encode_framed, with_second_bos

        texts = batch.texts if chosen is None else [batch.texts[index] for index in chosen.tolist()]
        # Where the reader has loaded numba, this kernel costs 0.02 s more; else it would not pay for loading it.
        compiled = batch.compiled and "numba" in sys.modules
        encoded = encode_framed(self.tokenizer, texts, compiled=compiled)
        kept, identity = np.arange(len(texts)), self.tokenizer.identity
        bad = [] if self.spec.ids_checked else with_second_bos(encoded.ids, encoded.offsets, identity)
        if bad:
            kept = np.delete(kept, bad)
            encoded = encode_framed(self.tokenizer, [texts[index] for index in kept.tolist()], compiled=compiled)
        return Records(
            values={TEXT_KEY: encoded.ids},
            offsets={"documents": encoded.offsets},
            kept=kept,
            refused=[Refused(index=index, reason="second_bos", detail="two") for index in bad],
        )

    def contents(self, batch: Joined) -> Sequence[str | None]:
        """Return of each record the text that filters, hashes and splits go by; None where it fits no recipe."""
        if self.encoder is None:
            return batch.texts
        return [self.encoder.content(record) for record in batch.records]

    def keys(self, batch: Joined) -> Sequence[bytes]:
        """Return of each record what tells it from others: its text, or all fields that the recipe may use.

        The texts of a conversation alone would not do: who said what is part of it.
        """
        if self.encoder is None:
            return [text.encode(errors="surrogatepass") for text in batch.texts]
        return [_canonical({name: r[name] for name in self.key_fields if name in r}) for r in batch.records]


def open_bench(job: Job, tokenizer: Tokenizer | None = None) -> Bench:
    """Open the tools of a worker; the parent hands in its own tokenizer where it works itself."""
    from tokenmill.encode.control import with_policy

    recipe = job.load_recipe()
    reading = job.reading(recipe)
    opened = with_policy(tokenizer or job.open_tokenizer(), recipe.control_strings)
    # What `encode` gives is bare, so that BOS stands nowhere but where it is placed; templates may place two.
    bare = reading.text_field is not None and recipe.control_strings != "encode"
    bos_is_control = opened.identity.bos_id in opened.special_ids.values()
    return Bench(
        job=job,
        tokenizer=opened,
        encoder=job.open_encoder(recipe, opened) if reading.text_field is None else None,
        rules=Rules.of(recipe),
        reading=reading,
        spec=replace(job.spec(recipe), ids_checked=bare and (bos_is_control or not opened.identity.add_bos)),
        key_fields=replace(recipe, preprocessing=replace(recipe.preprocessing, domain_key=None)).fields or (),
    )


def _canonical(record: Mapping[str, Any]) -> bytes:
    """Return one text for equal records; what JSON does not know, such as a date of a Parquet file, by its name."""
    try:
        return orjson.dumps(record, default=repr, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    except TypeError:  # a whole number beyond 64 bits, or half of a surrogate pair
        return json.dumps(record, sort_keys=True, default=repr).encode()


@dataclass(kw_only=True, slots=True)
class Joined:
    """Consecutive batches as one: enough for the tokenizer, whatever the sizes of files."""

    texts: list[str] = field(default_factory=list)
    records: list[Mapping[str, Any]] = field(default_factory=list)
    bad: list[Bad] = field(default_factory=list)
    runs: list[tuple[int, DocumentBatch]] = field(default_factory=list)
    """Where each batch begins among the records, and the batch."""
    position: int = 0
    compiled: bool = False
    """Whether compiled kernels work on it."""

    @property
    def num_records(self) -> int:
        """Records that could be read."""
        return len(self.texts) + len(self.records)

    def add(self, batch: DocumentBatch) -> None:
        """Put a batch behind the others."""
        self.runs.append((self.num_records, batch))
        self.texts += batch.texts
        self.records += batch.records
        self.bad += [Bad(piece=batch.piece, line=b.line, reason=b.reason, detail=b.detail) for b in batch.bad]
        self.position = batch.position

    def place(self, index: int) -> tuple[int, int]:
        """Return the piece of a record, and its line there."""
        begin, batch = next(run for run in reversed(self.runs) if run[0] <= index)
        return batch.piece, batch.lines[index - begin]

    def pieces_of(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the piece of each of these records."""
        begins: npt.NDArray[np.int64] = np.array([begin for begin, _ in self.runs])
        pieces: npt.NDArray[np.int64] = np.array([batch.piece for _, batch in self.runs])
        return pieces[np.searchsorted(begins, indices, side="right") - 1]


def joined(unit: Unit, reading: ReadOptions) -> Iterator[Joined]:
    """Read a unit in batches that are large enough, also where its files are small.

    They are the same every time, so that a unit can go on after some of them.
    """
    compiled = unit.bytes >= COMPILED_BYTES
    held = Joined(compiled=compiled)
    size = 0
    before = 0
    for batch in read_unit(unit, replace(reading, compiled=compiled)):
        held.add(batch)
        # Of whole records it is not known how large they are, but how much of the input they take.
        size += sum(map(len, batch.texts)) or batch.position - before
        before = batch.position
        if (
            size >= reading.batch_bytes
            or max(held.num_records + len(held.bad), len(held.runs)) >= reading.batch_documents
            or (batch.records and len(unit.pieces) == 1)
        ):
            yield held
            held, size = Joined(compiled=compiled), 0
    if held.runs:
        yield held
