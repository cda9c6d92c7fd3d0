"""The report of the compiler as tables, for the terminal and for a page alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenmill.cli.console import megabytes

if TYPE_CHECKING:
    from tokenmill.cli.costs import Costs
    from tokenmill.plan.report import PlanReport, SourceFacts, SourceShare, StageFacts

Column = tuple[str, Sequence[object]]
"""Header and cells."""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """One table."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    names: int = 1
    """How many columns say what a line is about."""


def views(facts: PlanReport) -> list[View]:
    """Return stages, what they draw, sources over the whole run, what is put aside, the fate of tokens.

    What no line says anything about has no column.
    """
    found = [_stages(facts.stages), _mixture(facts.shares), _sources(facts.sources)]
    if facts.quarantined:
        columns = ("source", "from step", "documents", "tokens", "why")
        rows = tuple(
            (q.source, q.from_step, q.documents, q.tokens, q.reason or ("all of it" if q.whole else "–"))
            for q in facts.quarantined
        )
        found.append(View(title="Put aside", columns=columns, rows=rows))
    return [*found, fate_view(facts)]


def _view(title: str, columns: Sequence[Column], names: int = 1) -> View:
    return View(
        title=title,
        columns=tuple(name for name, _ in columns),
        rows=tuple(zip(*(cells for _, cells in columns), strict=True)),
        names=names,
    )


def _stages(stages: Sequence[StageFacts]) -> View:
    skipping, scaled = any(s.skipped_steps for s in stages), any(s.lr_scale != 1 for s in stages)
    ramped = any(s.ramp_end is not None for s in stages)
    return _view(
        "Stages",
        [
            ("stage", [s.name for s in stages]),
            ("first step", [s.start_step for s in stages]),
            ("end step", [s.end_step for s in stages]),
            *([("ramp until", [s.ramp_end for s in stages])] if ramped else []),
            ("batch", [s.global_batch_size for s in stages]),
            ("seq_len", [s.seq_len for s in stages]),
            *([("lr_scale", [s.lr_scale for s in stages])] if scaled else []),
            ("rows", [s.rows for s in stages]),
            ("tokens", [s.tokens for s in stages]),
            *([("steps skipped", [s.skipped_steps for s in stages])] if skipping else []),
            *([("rows skipped", [s.skipped_rows for s in stages])] if skipping else []),
            *([("tokens skipped", [s.skipped_tokens for s in stages])] if skipping else []),
        ],
    )


def _mixture(shares: Sequence[SourceShare]) -> View:
    def figures(name: str) -> list[object]:
        values = [(share, getattr(share, name)) for share in shares]
        return [value if share.counted else f"about {value:,}" for share, value in values]

    skipping = any(s.skipped_rows for s in shares)
    return _view(
        "Mixture",
        [
            ("stage", [s.stage for s in shares]),
            ("source", [s.source for s in shares]),
            ("asked %", [_percent(s.asked) for s in shares]),
            ("got %", [_percent(s.realised) for s in shares]),
            ("tokens asked %", [_percent(s.asked_tokens) for s in shares]),
            ("tokens got %", [_percent(s.realised_tokens) for s in shares]),
            ("rows", [s.rows for s in shares]),
            ("labels", figures("trained")),
            ("no label", figures("unlabelled")),
            ("padding", figures("padding")),
            ("epochs", [_epochs(s.epochs) for s in shares]),
            *([("rows skipped", [s.skipped_rows for s in shares])] if skipping else []),
        ],
        names=2,
    )


def _epochs(epochs: float | None) -> float | None:
    return None if epochs is None else round(epochs, 4)


def _percent(share: float) -> float:
    return round(100 * share, 4)


def _sources(sources: Sequence[SourceFacts]) -> View:
    skipping, stopping = any(s.skipped for s in sources), any(s.gone_from is not None for s in sources)
    return _view(
        "Sources",
        [
            ("source", [s.name for s in sources]),
            ("rows an epoch", ["live" if s.rows is None else s.rows for s in sources]),
            *([("lanes", [s.lanes for s in sources])] if any(s.lanes for s in sources) else []),
            ("rows drawn", [s.drawn for s in sources]),
            *([("of them skipped", [s.skipped for s in sources])] if skipping else []),
            ("epochs", [_epochs(s.epochs) for s in sources]),
            ("first repeat", [s.first_repeat for s in sources]),
            *([("used up from step", [s.gone_from for s in sources])] if stopping else []),
        ],
    )


def fate_view(facts: PlanReport) -> View:
    """Return what becomes of the tokens of each source in an epoch, as the last stage that uses it packs them."""
    return View(
        title="Fate of the tokens of an epoch",
        columns=("source", "tokens", "= trained", "+ masked", "+ dropped", "why", "padding"),
        rows=tuple(
            (
                s.name,
                s.fates.tokens,
                s.fates.trained,
                s.fates.masked,
                sum(s.fates.dropped.values()),
                ", ".join(f"{reason} {number:,}" for reason, number in s.fates.dropped.items()) or "–",
                s.fates.padding,
            )
            for s in facts.sources
            if s.fates
        ),
    )


def cost_view(costs: Costs) -> View:
    """Return what a run reads and keeps."""
    most = max(costs.read_bytes_a_step, key=lambda name: costs.read_bytes_a_step[name])
    about = "" if costs.read_bytes_exact else "about "
    rows = [
        ("read by the whole run", about + megabytes(costs.read_bytes), "tokens and masks, over all ranks"),
        ("read by a step", about + megabytes(costs.read_bytes_a_step[most]), f"in stage {most}"),
        ("row indexes in memory", megabytes(costs.index_bytes), "for each process"),
        *(
            [("row indexes in files", megabytes(costs.mapped_index_bytes), "mapped, read as needed")]
            if costs.mapped_index_bytes
            else []
        ),
        ("kept ready by a loader", megabytes(costs.loader_bytes), "for each row of a micro-batch"),
    ]
    return View(title="Reading and memory", columns=("what", "bytes", "of"), rows=tuple(rows))
