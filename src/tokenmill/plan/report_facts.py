"""What the compiler's report is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenmill.types import Fates


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceShare:
    """What one stage draws from one source, in all its parts."""

    stage: str
    source: str
    asked: float
    """Share of rows that the weights ask for: the mean over the steps that are trained on; 0 if none is."""
    realised: float
    """Share of rows that these steps draw."""
    asked_tokens: float
    """Share of tokens that the asked rows would hold, were each like the mean row of its source."""
    realised_tokens: float
    """Share of tokens that the drawn rows hold; padding is none."""
    rows: int
    tokens: int
    """Input slots of the rows, over all their arrays: trained + unlabelled + padding."""
    epochs: float | None
    """How often the source has been read by the end of the stage; skipped steps read, too. None of live text."""
    trained: int
    """Labels that the rows have, less those that a mask leaves out."""
    unlabelled: int
    """Tokens whose next one is no label: the last of a document, or of a row that is not full, and one before a
    token that a mask leaves out. Of pairs and groups: tokens that are not trained on."""
    padding: int
    """Input slots of the rows that hold no token."""
    counted: bool
    """Whether the three above are exact, or taken in part from the mean of an epoch."""
    dropped: Mapping[str, int]
    """Tokens of an epoch that no row of the stage holds, by reason."""
    skipped_rows: int
    """Rows of steps that are skipped: they count as read, and in nothing else here."""
    skipped_tokens: int
    """Input slots of these."""

    @property
    def held(self) -> int:
        """Tokens that the rows hold."""
        return self.trained + self.unlabelled


@dataclass(frozen=True, kw_only=True, slots=True)
class StageFacts:
    """One stage of the config at a glance."""

    name: str
    start_step: int
    end_step: int
    steps: int
    """Steps that are trained on."""
    skipped_steps: int
    global_batch_size: int
    seq_len: int
    lr_scale: float
    ramp_end: int | None
    """Step at which its ramp ends, if it has one."""
    rows: int
    tokens: int
    """Input slots of its rows, over all their arrays."""
    skipped_rows: int
    skipped_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFacts:
    """One source over the whole run."""

    name: str
    rows: int | None
    """Rows of one epoch; None of live text, which is counted when it is read."""
    drawn: int
    """Rows that are read: those that are trained on, and those of skipped steps."""
    skipped: int
    """Rows of skipped steps."""
    lanes: int | None
    """Streams of live text: the number of ranks must divide them, and they the batch of a later stage."""
    epochs: float | None
    first_repeat: int | None
    """Step at which a row of the source is read for the second time; what skipped steps read counts."""
    gone_from: int | None
    """Step from which it has no row left, if it stops then and the run goes on."""
    fates: Fates | None
    """What becomes of its tokens in an epoch, as the last stage that uses it packs them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quarantined:
    """What is put aside of a source at a step, beside what was before."""

    source: str
    from_step: int
    documents: int | None
    tokens: int | None
    """Over all arrays; both None of live text, which nobody has counted."""
    whole: bool
    """Whether nothing of the source is left."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport:
    """The compiler's report. What skipped steps read is counted apart, everywhere."""

    fingerprint: str
    steps: int
    """Of the run, those that are skipped among them."""
    rows: int
    tokens: int
    skipped_steps: int
    skipped_rows: int
    skipped_tokens: int
    stages: tuple[StageFacts, ...]
    shares: tuple[SourceShare, ...]
    sources: tuple[SourceFacts, ...]
    quarantined: tuple[Quarantined, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return asdict(self)
