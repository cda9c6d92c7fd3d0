"""What a user may choose about live text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from tokenmill.documents import ReadOptions
from tokenmill.errors import ConfigError, nearest
from tokenmill.packing.policy import Policy
from tokenmill.types import ON_ERROR

MEMORY_BYTES = 256 << 20
"""Input that the windows of all lanes hold together, where the size of a window is not said."""
TEXT_OPTIONS = ("seed", "shuffle", "text_field", "lanes", "window_bytes")
"""What decides which documents a lane reads when; the others of `describe` are how rows are made of them."""
MIN_WINDOW_BYTES, MAX_WINDOW_BYTES = 64 << 10, 8 << 20


class Format(NamedTuple):
    """How documents become rows: what a stage of a run may change."""

    seq_len: int
    packing: str
    split: str
    crop: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveOptions:
    """How text becomes rows."""

    seq_len: int
    packing: str = "best_fit"
    split: str = "allow"
    """What becomes of a document longer than a row, as for a prepared store; `padded` never cuts."""
    crop: str = "return"
    """What `bos_best_fit` does with the rest of a cropped document."""
    seed: int = 0
    shuffle: bool = True
    """Whether windows, the documents of each, and its rows are put into a new order in every epoch."""
    text_field: str = "text"
    """Where the text is in a record; dots go down."""
    lanes: int | None = None
    """How many streams there are; None: the rows of a global batch."""
    on_error: str = "stop"
    """What a record or a part of a file that cannot be read does: `stop` the run, or be `skip`ped and counted."""
    window_bytes: int | None = None
    """How much of a file is packed together; None: 256 MiB divided by the lanes, 64 KiB to 8 MiB."""
    add_bos: bool | None = None
    """Whether documents start with BOS; None: as the tokenizer has it."""
    add_eos: bool | None = None
    bos_token: str | None = None
    """Which of the tokenizer's strings is BOS, where it does not say."""
    eos_token: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("seq_len", self.seq_len), ("lanes", self.lanes), ("window_bytes", self.window_bytes)):
            if value is not None and value < 1:
                raise ConfigError(f"{name}: must be at least 1, got {value}; raise it")
        if self.on_error not in ON_ERROR:
            raise ConfigError(
                f"on_error: must be one of {', '.join(ON_ERROR)}, got {self.on_error!r}; "
                f"{nearest(self.on_error, ON_ERROR)}"
            )
        _ = self.policy, self.reading

    @property
    def format(self) -> Format:
        """How documents become rows, for a state."""
        return Format(self.seq_len, self.packing, self.split, self.crop)

    def in_format(self, format: Format) -> LiveOptions:
        """Return these options with rows made in another way."""
        return self if format == self.format else replace(self, **format._asdict())

    @property
    def policy(self) -> Policy:
        """How documents become rows, for the kernels."""
        return Policy(name=self.packing, split=self.split, crop=self.crop)

    @property
    def reading(self) -> ReadOptions:
        """How records are read."""
        return ReadOptions(text_field=self.text_field)

    @property
    def framing(self) -> dict[str, bool | str | None]:
        """What is said of BOS and EOS, as a tokenizer is opened with."""
        return {
            "add_bos": self.add_bos,
            "add_eos": self.add_eos,
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
        }

    def window_size(self, lanes: int) -> int:
        """Return about how many bytes of a file a window has.

        >>> [LiveOptions(seq_len=8).window_size(lanes) >> 10 for lanes in (1, 512, 10**6)]
        [8192, 512, 64]
        """
        if self.window_bytes is not None:
            return self.window_bytes
        return min(max(MEMORY_BYTES // lanes, MIN_WINDOW_BYTES), MAX_WINDOW_BYTES)

    def describe(self, lanes: int) -> dict[str, int | str | bool]:
        """Return what decides the rows beside files and tokenizer, as JSON.

        `on_error` is no part of it: it decides whether a run goes on, and rows that were delivered are the same.
        """
        return {
            **self.policy.describe(),
            "seq_len": self.seq_len,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "text_field": self.text_field,
            "lanes": lanes,
            "window_bytes": self.window_size(lanes),
        }
