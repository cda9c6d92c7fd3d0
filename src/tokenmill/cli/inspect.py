"""`tokenmill inspect`: what is in a store, or behind a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.text import Text

from tokenmill.cli.audit import Audit, Example, audit, examples, percent, printable
from tokenmill.cli.console import console, megabytes, print_json, table
from tokenmill.cli.page import html_examples, html_histogram, html_table, page
from tokenmill.cli.plan import fate_table
from tokenmill.cli.text import tokenizer_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from tokenmill.store import Store

_BLOCK = 1 << 20


def inspect(
    path: Annotated[Path, typer.Argument(metavar="STORE|RUN.toml", help="Folder of a store, or config of a run.")],
    html: Annotated[
        Path | None, typer.Option(help="Also write it as one HTML page that needs nothing else.")
    ] = None,
    json: Annotated[bool, typer.Option(help="Print as JSON.")] = False,
) -> None:
    """Show facts, lengths, the supervision audit and examples of a store, or of every source of a run."""
    from tokenmill.store import open_store

    if path.suffix == ".toml":
        from tokenmill.plan.report import report
        from tokenmill.run import Run

        run = Run.from_toml(path)
        stores = dict(run.stores)
        told = report(run.plan())
    else:
        stores = {path.name: open_store(path)}
        told = None
    views = [_View.of(name, store) for name, store in stores.items()]
    if html is not None:
        html.write_text(page(f"tokenmill: {path.name}", _html(views)), encoding="utf-8")
    if json:
        fates = {source.name: source.fates for source in told.sources} if told else {}
        print_json({view.name: view.to_json() | ({"fates": fates[view.name]} if told else {}) for view in views})
        return
    for view in views:
        _show(view)
    if told:
        console.print(fate_table(told))
    if html is not None:
        console.print(f"wrote {html}", soft_wrap=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class _View:
    """All that is shown of a store."""

    name: str
    facts: dict[str, Any]
    audits: list[Audit]
    examples: list[Example]

    @classmethod
    def of(cls, name: str, store: Store) -> _View:
        tokenizer = tokenizer_of(store)
        return cls(
            name=name, facts=facts(store), audits=audit(store, tokenizer), examples=examples(store, tokenizer)
        )

    def to_json(self) -> dict[str, Any]:
        return {**self.facts, "audit": [one.to_json() for one in self.audits]}


def facts(store: Store) -> dict[str, Any]:
    """Return what a store is, as JSON; reads document offsets, not tokens, a part at a time."""
    manifest = store.manifest
    histogram = np.zeros(64, np.int64)
    longest = 0
    for begin in range(0, store.num_documents, _BLOCK):
        offsets = store.document_offsets(begin, min(begin + _BLOCK, store.num_documents))
        lengths = np.diff(offsets)
        histogram += np.bincount(_bins(lengths), minlength=64)
        longest = max(longest, int(lengths.max()))
    return {
        "path": str(store.path),
        "kind": manifest.kind,
        "fingerprint": manifest.fingerprint,
        "documents": store.num_documents,
        "tokens": store.num_tokens,
        "shards": store.num_shards,
        "bytes": sum(info.bytes for shard in manifest.shards for info in shard.files.values()),
        "keys": dict(manifest.keys),
        "tokenizer": dict(manifest.tokenizer),
        "recipe": dict(manifest.recipe),
        "skipped": dict(manifest.skipped),
        "inputs": [dict(item) for item in manifest.inputs],
        "longest_document": longest,
        "lengths": {_bin_name(index): int(count) for index, count in enumerate(histogram) if count},
    }


def _bins(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Bin 0 holds empty documents, bin k those of 2^(k-1) to 2^k - 1 tokens."""
    return np.ceil(np.log2(lengths + 1)).astype(np.int64)


def _bin_name(index: int) -> str:
    return "0" if index == 0 else f"{2 ** (index - 1)} to {2**index - 1}"


def _fact_rows(found: dict[str, Any]) -> list[tuple[str, object]]:
    tokenizer = found["tokenizer"]
    counts = found["skipped"].get("counts", {})
    content = str(tokenizer.get("content", "unknown"))[:12]
    return [
        ("kind", found["kind"]),
        ("documents", found["documents"]),
        ("tokens", found["tokens"]),
        ("tokens a document", round(found["tokens"] / max(1, found["documents"]), 1)),
        ("longest document", found["longest_document"]),
        ("shards", f"{found['shards']:,}, {megabytes(found['bytes'])}"),
        ("arrays", ", ".join(f"{key} {dtype}" for key, dtype in found["keys"].items())),
        ("tokenizer", f"{tokenizer.get('kind')}, {tokenizer['vocab_size']:,} ids, content {content}"),
        ("BOS / EOS", f"{_placed(tokenizer, 'bos')} / {_placed(tokenizer, 'eos')}"),
        ("input files", len(found["inputs"])),
        ("skipped", ", ".join(f"{reason} {count:,}" for reason, count in counts.items()) or "none"),
        ("fingerprint", found["fingerprint"]),
    ]


_AUDIT_COLUMNS = ("array", "rows", "supervised %", "fully masked %", "truncated %", "without EOS %")


def _audit_rows(view: _View) -> list[tuple[object, ...]]:
    return [
        (
            one.key,
            one.items if one.audited == one.items else f"{one.items:,} ({one.audited:,} audited)",
            round(percent(one.supervised, one.tokens), 2),
            round(percent(one.fully_masked, one.audited), 2),
            None if one.truncated is None else round(percent(one.truncated, one.items), 2),
            round(percent(one.without_eos, one.audited), 2),
        )
        for one in view.audits
    ]


def _html(views: Sequence[_View]) -> Iterator[str]:
    for view in views:
        yield html_table(f"Store {view.name}", ("what", "value"), _fact_rows(view.facts))
        yield html_table("Supervision", _AUDIT_COLUMNS, _audit_rows(view))
        yield html_histogram("Document lengths", view.facts["lengths"])
        yield html_examples(view.examples)


def _show(view: _View) -> None:
    console.print(table(f"Store {view.name}", ("what", "value"), _fact_rows(view.facts)))
    console.print(table("Supervision", _AUDIT_COLUMNS, _audit_rows(view)))
    lengths = view.facts["lengths"]
    most = max(lengths.values(), default=1)
    bars = [(label, count, "█" * round(40 * count / most)) for label, count in lengths.items()]
    console.print(table("Document lengths", ("tokens", "documents", ""), bars))
    console.print(Text("Examples: trained bright, masked dim", "bold") if view.examples else "")
    for example in view.examples:
        console.print(f"{example.key} {example.item:,}: {example.tokens:,} tokens, {example.supervised:,} trained")
        text = Text()
        for trained, run in example.runs:
            text.append(printable(run), "bold green" if trained else "dim")
        console.print(text, "…" if example.cut else "", sep="", soft_wrap=True)


def _placed(tokenizer: dict[str, Any], which: str) -> str:
    if tokenizer.get(f"{which}_id") is None:
        return "none"
    return f"id {tokenizer[f'{which}_id']}, {'added' if tokenizer.get(f'add_{which}') else 'not added'}"
