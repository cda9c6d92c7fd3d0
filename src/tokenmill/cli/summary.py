"""Summaries of one screen, which commands print unless `--full` asks for all of a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from rich.text import Text

from tokenmill.view.tables import Table, batch_size, megabytes, totals

if TYPE_CHECKING:
    from tokenmill.plan.report import SourceShare
    from tokenmill.run.reading import ReadingReport
    from tokenmill.run.report import RunReport
    from tokenmill.run.uses import BatchRow

Part: TypeAlias = "Table | tuple[str, str]"
"""A table, or a sentence and its kind, which may be empty."""

MAX_ROWS = 6
"""Stages, sources or evals that a summary lists."""
MAX_SHARES = 4
"""Sources of a stage or step that are named."""
MAX_WARNINGS = 3
MAX_DOCUMENTS = 16
EXACT = 10_000_000
"""Numbers from here on are rounded."""


def short_count(number: int) -> int | str:
    """Return a number, or a large one as four digits and a unit.

    >>> short_count(122_880), short_count(1_099_511_627_776)
    (122880, '1.1T')
    """
    if number < EXACT:
        return number
    unit, size = next((unit, size) for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)) if number >= size)
    return f"{number / size:.4g}{unit}"


def plan_parts(report: RunReport, name: str, reading: ReadingReport | None = None) -> Iterator[Part]:
    """Yield what matters most of a plan: steps, tokens, shares, epochs, padding and warnings."""
    yield _stages(report, f"{name}: {totals(report)}")
    yield _sources(report)
    if report.evals:
        yield _evals(report)
    if report.epochs is not None:
        yield "epochs", report.epochs.sentence(report.steps)
    for item in report.quarantined[:MAX_WARNINGS]:
        documents = "all documents" if item.documents is None else f"{item.documents:,} documents"
        yield "quarantined", f"{documents} of {item.source!r} from step {item.from_step:,}"
    about = "" if report.costs.read_bytes_exact else "about "
    yield "reading", f"{about}{megabytes(report.costs.read_bytes)} of tokens and masks over all ranks"
    if reading is not None:
        planned = [line for line in reading.readings if line.is_planned]
        requests, size = (sum(getattr(line, name) for line in planned) for name in ("requests", "bytes"))
        hours, dollars = sum(line.seconds for line in planned) / 3600, sum(line.dollars for line in planned)
        yield (
            "object storage",
            f"{requests:,} requests, {megabytes(size)}, {hours:.3g} hours, {dollars:.3g} $",
        )
    # The first table shows the padding already.
    ordered = sorted(report.warnings, key=lambda warning: "padding" in warning)
    yield from (("warning", warning) for warning in ordered[:MAX_WARNINGS])
    more = [
        (len(report.warnings) - MAX_WARNINGS, "warning", "warnings"),
        (len(report.quarantined) - MAX_WARNINGS, "quarantine", "quarantines"),
        (len(report.changes), "change within a stage", "changes within stages"),
    ]
    listed = "".join(f"{count:,} more {one if count == 1 else many}, " for count, one, many in more if count > 0)
    yield "", f"plan {report.fingerprint[:12]}; --full prints {listed}all tables"


def _stages(report: RunReport, title: str) -> Table:
    shares: dict[str, list[SourceShare]] = {stage.name: [] for stage in report.stages}
    for share in report.shares:
        shares[share.stage].append(share)
    return _listed(
        ("stage", "steps", "batch", "seq_len", "tokens", "padding", "share of rows"),
        [
            (
                stage.name,
                f"{stage.start_step:,}:{stage.end_step:,}",
                batch_size(stage),
                stage.seq_len,
                short_count(stage.tokens),
                _percent(sum(s.padding for s in shares[stage.name]), sum(s.tokens for s in shares[stage.name])),
                _mixture(shares[stage.name]),
            )
            for stage in report.stages
        ],
        "stages",
        title,
    )


def _mixture(shares: Sequence[SourceShare]) -> str:
    drawn = sorted((share for share in shares if share.rows), key=lambda share: -share.rows)
    if len(drawn) > MAX_SHARES:
        return f"{len(drawn):,} sources"
    return ", ".join(f"{share.source} {100 * share.realised:.3g}%" for share in drawn) or "–"


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "–"


def _sources(report: RunReport) -> Table:
    held, labels, slots = Counter[str](), Counter[str](), Counter[str]()
    for share in report.shares:
        held[share.source] += share.held
        labels[share.source] += share.trained
        slots[share.source] += share.tokens
    sources = sorted(report.sources, key=lambda source: -held[source.name])
    columns: dict[str, list[object]] = {
        "source": [source.name for source in sources],
        "rows": [short_count(source.drawn) for source in sources],
        "tokens": [short_count(held[source.name]) for source in sources],
        "share": [_percent(held[source.name], held.total()) for source in sources],
    }
    if report.supervision:
        columns["labels"] = [_percent(labels[source.name], held[source.name]) for source in sources]
    columns["epochs"] = [None if source.epochs is None else f"{source.epochs:.2f}" for source in sources]
    columns["first repeat"] = [_step(source.first_repeat) for source in sources]
    if any(source.gone_from is not None for source in sources):
        columns["used up"] = [_step(source.gone_from) for source in sources]
    return _listed(tuple(columns), list(zip(*columns.values(), strict=True)), "sources")


def _step(step: int | None) -> str:
    return "–" if step is None else f"step {step:,}"


def _evals(report: RunReport) -> Table:
    rows = []
    for item in report.evals:
        shared = sum(overlap.documents or 0 for overlap in item.overlaps)
        every = f"{item.every_tokens:,} tokens" if item.every_tokens is not None else item.every
        rows.append((item.name, item.documents, item.rows, every, shared))
    return _listed(("eval", "documents", "rows", "every", "trained on"), rows, "evals")


def _listed(columns: Sequence[str], rows: Sequence[Sequence[object]], what: str, title: str = "") -> Table:
    """Return a table of the first rows, and a last row with the number of the others."""
    shown = list(rows[:MAX_ROWS])
    if len(rows) > MAX_ROWS:
        shown.append((f"{len(rows) - MAX_ROWS:,} more {what}", *[""] * (len(columns) - 1)))
    return Table(title=title, columns=columns, rows=shown)


def demo_parts(
    verdicts: Sequence[tuple[str, str]], stores: Table, report: RunReport, folder: str | None
) -> Iterator[Part]:
    """Yield the verdicts of the demo first, then its stores and its run."""
    yield verdict_table(verdicts)
    yield stores
    yield _stages(report, f"Run: {totals(report)}")
    if folder is None:
        yield "", "Nothing was kept. `tokenmill demo --out playground` keeps the stores and the run"
    else:
        yield "", f"kept in {folder}; next: `tokenmill what {folder}/run.toml 41`"


def verdict_table(verdicts: Sequence[tuple[str, str]]) -> Table:
    """Return the guarantees that were checked, and how."""
    rows = [(Text("holds", "green"), *verdict) for verdict in verdicts]
    return Table(title="Guarantees", columns=("result", "guarantee", "check"), rows=rows)


def step_parts(
    step: int, stage: str, seq_len: int, uses: Sequence[BatchRow], texts: Sequence[Mapping[str, object]]
) -> Iterator[Part]:
    """Yield the rows per source of a step, and its first documents with their texts."""
    counts = Counter(use.source for use in uses)
    sources = ", ".join(f"{name} {count:,}" for name, count in counts.most_common(MAX_SHARES))
    others = f", {len(counts) - MAX_SHARES:,} more" if len(counts) > MAX_SHARES else ""
    spans = sum(len(use.spans) for use in uses)
    title = (
        f"Step {step:,}, stage {stage!r}: {len(uses):,} rows of {seq_len:,} tokens "
        f"({sources}{others}), {spans:,} spans"
    )
    columns = ("slot", "source", "document", "from", "text")
    yield Table(
        title=title, columns=columns, rows=[[text[name] for name in columns] for text in texts], clipped=True
    )
    if spans > len(texts):
        yield "", f"{spans - len(texts):,} more spans; --full prints all, with their tokens"
