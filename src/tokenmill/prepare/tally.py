"""The counts of a build, and the bad lines by number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenmill.documents import BadRecord, InputFile, Unit
from tokenmill.errors import DocumentError
from tokenmill.prepare.work import MAX_LISTED, UnitResult


@dataclass(kw_only=True, slots=True)
class Tally:
    """What has been counted so far, unit by unit in input order; a line's number follows from the units before."""

    files: Sequence[InputFile]
    done_bytes: int = 0
    text_bytes: int = 0
    lines: Counter[str] = field(default_factory=Counter)
    """By file, as documents and tokens are."""
    documents: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    listed: list[dict[str, Any]] = field(default_factory=list)

    @property
    def input_bytes(self) -> int:
        """Size of all files."""
        return sum(file.bytes for file in self.files)

    def add(self, unit: Unit, result: UnitResult, *, stop: bool) -> None:
        """Count a unit; where bad records `stop` a build, raise the first."""
        name = unit.file.name
        for record in result.bad:
            line = self.lines[name] + record.line + 1
            if stop:
                raise _bad_line(unit.file, line, record)
            if len(self.listed) < MAX_LISTED:
                self.listed.append({"file": name, "line": line, "reason": record.reason, "detail": record.detail})
        self.done_bytes += unit.bytes
        self.text_bytes += result.text_bytes
        self.lines[name] += result.lines
        self.documents[name] += result.documents
        self.tokens[name] += result.tokens
        self.reasons.update(result.skipped)

    def refuse_nothing(self) -> None:
        """Raise if there is not one document: an empty store is a mistake that would show much later."""
        if not self.documents.total():
            raise DocumentError(
                f"{self.files[0].path} and {len(self.files) - 1} more: must hold at least one document, "
                f"got none, {self.reasons.total()} skipped {dict(self.reasons)}; check the files and text_field"
            )

    def inputs(self) -> list[dict[str, Any]]:
        """Return what the manifest says of each file."""
        return [
            {
                "name": file.name,
                "bytes": file.bytes,
                "documents": self.documents[file.name],
                "tokens": self.tokens[file.name],
            }
            for file in self.files
        ]

    def skipped(self) -> dict[str, Any]:
        """Return what the manifest says of skipped records: nothing if there are none."""
        if not self.reasons:
            return {}
        return {"counts": dict(sorted(self.reasons.items())), "first": self.listed}


def _bad_line(file: InputFile, line: int, record: BadRecord) -> DocumentError:
    rules = {
        "json": "a line must be one JSON object",
        "utf8": "a line must be UTF-8",
        "missing_field": "a record must have the text field",
        "not_text": "the text must be a string",
    }
    return DocumentError(
        f"{file.path}:{line}: {rules[record.reason]}, got {record.detail}; "
        "mend the line, name another text_field, or skip bad lines with --on-error skip"
    )
