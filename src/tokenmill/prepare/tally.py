"""The counts of a build, and the bad records by place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenmill.documents import RULES, InputFile, Unit, place
from tokenmill.errors import DocumentError
from tokenmill.prepare.select import LEFT_OUT
from tokenmill.prepare.unit import MAX_LISTED, Bad, UnitResult


@dataclass(kw_only=True, slots=True)
class Tally:
    """What has been counted so far, unit by unit in input order; a line's number follows from the units before."""

    stop: bool
    """Whether the first bad record ends the build."""
    done_bytes: int = 0
    text_bytes: int = 0
    new_text_bytes: int = 0
    """Of units that were done now, not in an earlier try."""
    truncated: int = 0
    lines: Counter[str] = field(default_factory=Counter)
    """By path."""
    documents: int = 0
    tokens: int = 0
    taken: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    """Path -> route -> documents and tokens."""
    reasons: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    listed: list[dict[str, Any]] = field(default_factory=list)

    def add(self, unit: Unit, result: UnitResult, *, new: bool) -> None:
        """Count a unit; where bad records stop a build, raise the first."""
        counts = result.counts
        # Where a piece begins in its file, in lines: those of the earlier pieces of the same file.
        begins = []
        for piece, lines in zip(unit.pieces, counts.lines, strict=True):
            begins.append(self.lines[piece.file.path])
            self.lines[piece.file.path] += lines
        for route, pieces in sorted(counts.taken.items()):
            for index, (documents, tokens) in pieces.items():
                numbers = self.taken.setdefault(unit.pieces[index].file.path, {}).setdefault(route, [0, 0])
                numbers[0] += documents
                numbers[1] += tokens
        self.documents += counts.documents
        self.tokens += counts.tokens
        for bad in counts.bad:
            line = begins[bad.piece] + bad.line
            if self.stop:
                raise _bad_record(unit, line, bad)
            if len(self.listed) < MAX_LISTED:
                name = unit.pieces[bad.piece].file.name
                self.listed.append({"file": name, "line": line + 1, "reason": bad.reason, "detail": bad.detail})
        self.done_bytes += unit.bytes
        self.text_bytes += counts.text_bytes
        self.new_text_bytes += counts.text_bytes if new else 0
        self.truncated += counts.truncated
        self.reasons.update(counts.skipped)
        self.notes.update(counts.notes)

    def refuse_nothing(self, first: InputFile, num_files: int, *, new: bool) -> None:
        """Raise if there is not one document: an empty store is a mistake that would show much later.

        To a store that is there files may add nothing, unless all their records are bad.
        """
        all_bad = self.reasons and not self.reasons.keys() & LEFT_OUT
        if not self.documents and (new or all_bad):
            told = ", ".join(f"{reason} {count:,}" for reason, count in sorted(self.reasons.items()))
            raise DocumentError(
                f"{first.path}{f' and {num_files - 1} more' if num_files > 1 else ''}: must hold at least one "
                f"document, got none, {self.reasons.total()} skipped ({told or 'the files are empty'}); "
                "check the files and the fields"
            )


def _rules() -> Mapping[str, str]:
    from tokenmill.encode.recipe import RULES as RECIPE_RULES

    # A chat without messages lacks no text field: the recipe knows better which fields it wants.
    missing = {"missing_field": RECIPE_RULES["missing_field"]}
    return {"domain": "the domain must be a name", **RECIPE_RULES, **RULES, **missing}


def _bad_record(unit: Unit, line: int, bad: Bad) -> DocumentError:
    rule = _rules().get(bad.reason, f"a record must fit the recipe ({bad.reason})")
    ways = "mend the record"
    if bad.reason in ("missing_field", "not_text"):
        ways = "name the field with --text-field, or what the records are with --recipe (chat, dpo, ...)"
    elif bad.reason == "too_long":
        ways = "cut the record, allow it with --max-record-bytes"
    return DocumentError(
        f"{place(unit.pieces[bad.piece], line)}: {rule}, got {bad.detail}; "
        f"{ways}, or skip bad ones with --on-error skip"
    )
