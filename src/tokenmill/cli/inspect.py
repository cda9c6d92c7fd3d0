"""`tokenmill inspect`: what is in a store, or behind a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.text import Text

from tokenmill.cli.console import console, errors, megabytes, print_json, table, tokenizer_of
from tokenmill.cli.import_ import BosId, Dtype, EosId, Format, VocabSize
from tokenmill.cli.picture import check_file, html_examples, html_histogram, html_table, page
from tokenmill.cli.plan import fate_tables, fitting
from tokenmill.cli.verify import places_of
from tokenmill.errors import ConfigError
from tokenmill.run.report import Audit, Example, audit, examples, has_chat_template, percent, printable, share
from tokenmill.store.foreign.files import GIVEN, UNKNOWN
from tokenmill.store.layout import token_keys
from tokenmill.types import Int64Array

if TYPE_CHECKING:
    from tokenmill.plan.report import PlanReport
    from tokenmill.store import ForeignOptions, Store

_BLOCK = 1 << 20
MAX_SKIPPED = 10
"""Skipped records that are listed."""
MARKS = ("⟦", "⟧")
"""Around trained text where there is no colour."""


def inspect(
    path: Annotated[
        Path, typer.Argument(metavar="STORE|RUN.toml", help="Folder of a store, or of several; or config of a run.")
    ],
    html: Annotated[
        Path | None, typer.Option(help="Also write it as one HTML page that needs nothing else.")
    ] = None,
    json: Annotated[bool, typer.Option(help="Print as JSON.")] = False,
    dtype: Dtype = None,
    vocab_size: VocabSize = None,
    eos_id: EosId = None,
    bos_id: BosId = None,
    format: Format = None,
) -> None:
    """Show facts, lengths, the supervision audit and examples of a store, or of every source of a run."""
    from tokenmill.store import ForeignOptions

    options = ForeignOptions(dtype=dtype, vocab_size=vocab_size, eos_id=eos_id, bos_id=bos_id, format=format)
    check_file("--html", html)
    stores, told = _open(path, options)
    views = [_View.of(name, store) for name, store in stores.items()]
    if html is not None:
        html.write_text(page(f"tokenmill: {path.absolute().name}", _html(views)), encoding="utf-8")
    if json:
        fates = {source.name: source.fates for source in told.sources} if told else {}
        print_json({view.name: view.to_json() | ({"fates": fates[view.name]} if told else {}) for view in views})
        return
    for view in views:
        _show(view)
    if told:
        for made in fate_tables(told):
            console.print(made)
    if html is not None:
        console.print(f"wrote {html}", soft_wrap=True, markup=False)


def _open(path: Path, options: ForeignOptions) -> tuple[dict[str, Store], PlanReport | None]:
    """Open a store, all stores in a folder, or those of a run with its report."""
    from tokenmill.store import open_store

    if path.suffix == ".toml" and not path.is_dir():
        from tokenmill.plan.report import report
        from tokenmill.run.run import Run

        if options.given:
            name, value = next(iter(options.given.items()))
            raise ConfigError(
                f"{path}: what files of other projects are must be said in the config of a run, got {name} = "
                f"{value!r} beside it; write it under [[sources]]"
            )
        run = Run.from_toml(path)
        told = report(run.plan())
        for name, rows in run.live.items():
            files = len(rows.source.files)
            size = megabytes(sum(file.bytes for file in rows.source.files))
            line = f"{name}: live text, {files:,} files of {size}, {rows.lanes:,} lanes, tokenized as it is read"
            errors.print(line, highlight=False, soft_wrap=True)
        return dict(run.stores), told
    names = {
        path.absolute().name if place == path else place.relative_to(path).as_posix(): place
        for place in places_of(path)
    }
    return {name: open_store(place, **asdict(options)) for name, place in names.items()}, None


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
    """Return what a store is, as JSON; reads where documents begin, not tokens, a part at a time."""
    manifest = store.manifest
    lengths = {key: _lengths(store, key) for key in token_keys(store.keys)}
    return {
        "path": str(store.path),
        "kind": manifest.kind,
        "fingerprint": manifest.fingerprint,
        "documents": store.num_documents,
        "tokens": manifest.tokens,
        "shards": store.num_shards,
        "bytes": sum(info.bytes for shard in manifest.shards for info in shard.files.values()),
        "keys": dict(manifest.keys),
        "tokenizer": dict(manifest.tokenizer),
        "recipe": dict(manifest.recipe),
        "skipped": dict(manifest.skipped),
        "inputs": [dict(item) for item in manifest.inputs],
        "longest": {key: longest for key, (longest, _) in lengths.items()},
        "lengths": {key: bins for key, (_, bins) in lengths.items()},
    }


def _lengths(store: Store, key: str) -> tuple[int, dict[str, int]]:
    """Return the length of the longest item of an array of token ids, and how many items lie in each bin."""
    axis = store.axis(key)
    items = int(store.axes[axis].items[-1])
    histogram = np.zeros(64, np.int64)
    longest = 0
    for begin in range(0, items, _BLOCK):
        lengths = np.diff(store.offsets(axis, begin, min(begin + _BLOCK, items)))
        histogram += np.bincount(_bins(lengths), minlength=64)
        longest = max(longest, int(lengths.max()))
    return longest, {_bin_name(index): int(count) for index, count in enumerate(histogram) if count}


def _bins(lengths: Int64Array) -> Int64Array:
    """Bin 0 holds empty documents, bin k those of 2^(k-1) to 2^k - 1 tokens."""
    return np.ceil(np.log2(lengths + 1)).astype(np.int64)


def _bin_name(index: int) -> str:
    return "0" if index == 0 else f"{2 ** (index - 1)} to {2**index - 1}"


def _item(key: str) -> str:
    """Name one item of an array of token ids: of sequences, a document."""
    return "document" if key == "sequence" else key.removesuffix("s")


def _histograms(view: _View) -> Iterator[tuple[str, str, dict[str, int]]]:
    """Yield (title, what is counted, bins) of each array of token ids."""
    for key, bins in view.facts["lengths"].items():
        title = "Document lengths" if key == "sequence" else f"Lengths of {key}"
        yield title, "documents" if key == "sequence" else key, bins


def _fact_rows(found: dict[str, Any]) -> list[tuple[str, object]]:
    counts = found["skipped"].get("counts", {})
    whole = "document" if list(found["longest"]) == ["sequence"] else "record"
    return [
        ("kind", found["kind"]),
        (f"{whole}s", found["documents"]),
        ("tokens", found["tokens"]),
        (f"tokens a {whole}", round(found["tokens"] / max(1, found["documents"]), 1)),
        *((f"longest {_item(key)}", longest) for key, longest in found["longest"].items()),
        ("shards", f"{found['shards']:,}, {megabytes(found['bytes'])}"),
        ("arrays", ", ".join(f"{key} {dtype}" for key, dtype in found["keys"].items())),
        ("tokenizer", _tokenizer(found["tokenizer"])),
        ("BOS / EOS", f"{_placed(found, 'bos')} / {_placed(found, 'eos')}"),
        ("recipe", _recipe(found["recipe"])),
        ("input files", len(found["inputs"])),
        ("skipped", ", ".join(f"{reason} {count:,}" for reason, count in counts.items()) or "none"),
        ("fingerprint", found["fingerprint"]),
    ]


def _tokenizer(identity: dict[str, Any]) -> str:
    kind, size = identity.get("kind", UNKNOWN), identity["vocab_size"]
    if kind == UNKNOWN:
        return f"unknown, ids below {size:,}"
    if kind == GIVEN:
        return f"not named, {size:,} ids"
    content = identity.get("content")
    return f"{kind}, {size:,} ids" + (f", content {str(content)[:12]}" if content else "")


def _recipe(recipe: dict[str, Any]) -> str:
    if "imported" in recipe:
        return f"imported from {recipe['imported']}"
    if "name" in recipe:
        return str(recipe["name"])
    return f"{recipe['format']}, read in place" if recipe.get("format") else "none"


def _placed(found: dict[str, Any], which: str) -> str:
    """Say which id starts or ends documents, and whether it does; we did not add what others wrote."""
    identity, recipe = found["tokenizer"], found["recipe"]
    number, added = identity.get(f"{which}_id"), identity.get(f"add_{which}")
    if number is None:
        return "none"
    if "name" not in recipe and ("imported" in recipe or "format" in recipe):
        verb, end = ("starts", "start") if which == "bos" else ("ends", "end")
        return (
            f"id {number}, {verb} every document" if added else f"id {number}, not at the {end} of every document"
        )
    if added and has_chat_template(recipe):
        return f"id {number}, added where no chat template is"
    return f"id {number}, {'added' if added else 'not added'}"


_INPUT_COLUMNS = ("name", "documents", "tokens")
_SKIPPED_COLUMNS = ("file", "line", "reason", "detail")


def _skipped(view: _View) -> tuple[str, list[tuple[object, ...]]] | None:
    """Return a title and the first records that were skipped, by place; None where none was."""
    skipped = view.facts["skipped"]
    first = skipped.get("first", [])[:MAX_SKIPPED]
    if not first:
        return None
    rows = [tuple(one.get(name) for name in _SKIPPED_COLUMNS) for one in first]
    total = sum(skipped.get("counts", {}).values())
    return f"The first {len(first)} of {total:,} skipped records", rows


_AUDIT_COLUMNS = ("array", "rows", "supervised %", "fully masked %", "truncated %", "without EOS %")


def _audit_rows(view: _View) -> list[tuple[object, ...]]:
    return [
        (
            one.key,
            one.items if one.audited == one.items else f"{one.items:,} ({one.audited:,} audited)",
            *(
                None if value is None else round(value, 2)
                for value in (
                    percent(one.supervised, one.tokens),
                    share(one.fully_masked, one.audited),
                    share(one.truncated, one.items),
                    share(one.without_eos, one.audited),
                )
            ),
        )
        for one in view.audits
    ]


def _html(views: Sequence[_View]) -> Iterator[str]:
    for view in views:
        yield html_table(f"Store {view.name}", ("what", "value"), _fact_rows(view.facts))
        yield html_table("Supervision", _AUDIT_COLUMNS, _audit_rows(view))
        for title, _, bins in _histograms(view):
            yield html_histogram(title, bins)
        skipped = _skipped(view)
        if skipped:
            yield html_table(skipped[0], _SKIPPED_COLUMNS, skipped[1])
        inputs = [[one.get(name) for name in _INPUT_COLUMNS] for one in view.facts["inputs"]]
        if inputs:
            yield html_table("Input files", _INPUT_COLUMNS, inputs)
        yield html_examples(view.examples)


def _show(view: _View) -> None:
    console.print(table(f"Store {view.name}", ("what", "value"), _fact_rows(view.facts)))
    for made in fitting("Supervision", _AUDIT_COLUMNS, _audit_rows(view)):
        console.print(made)
    for title, counted, bins in _histograms(view):
        most = max(bins.values(), default=1)
        bars = [(label, count, "█" * round(40 * count / most)) for label, count in bins.items()]
        console.print(table(title, ("tokens", counted, ""), bars))
    skipped = _skipped(view)
    if skipped:
        title, rows = skipped
        shown = [[printable(one) if isinstance(one, str) else one for one in row] for row in rows]
        console.print(table(title, _SKIPPED_COLUMNS, shown))
    _show_examples(view.examples)


def _show_examples(examples: Sequence[Example]) -> None:
    """Print examples; what is trained stands out by colour, or in brackets where there is none."""
    coloured = console.is_terminal and console.color_system is not None and not console.no_color
    open_mark, close_mark = ("", "") if coloured else MARKS
    how = "trained bright, masked dim" if coloured else f"{open_mark}trained{close_mark}, masked without brackets"
    console.print(Text(f"Examples: {how}", "bold") if examples else "")
    for example in examples:
        console.print(f"{example.key} {example.item:,}: {example.tokens:,} tokens, {example.supervised:,} trained")
        text = Text()
        for trained, run in example.runs:
            shown = f"{open_mark}{printable(run)}{close_mark}" if trained else printable(run)
            text.append(shown, "bold green" if trained else "dim")
        console.print(text, "…" if example.cut else "", sep="", soft_wrap=True)
