"""`tokenmill inspect`: what is in a store, or behind a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from tokenmill.cli.console import console, megabytes, print_json, table
from tokenmill.cli.plan import fate_table
from tokenmill.cli.text import excerpt, tokenizer_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from tokenmill.store import Store

_BLOCK = 1 << 20


def inspect(
    path: Annotated[Path, typer.Argument(metavar="STORE|RUN.toml", help="Folder of a store, or config of a run.")],
    json: Annotated[bool, typer.Option(help="Print as JSON.")] = False,
) -> None:
    """Show facts, document lengths and examples of a store, or of every source of a run."""
    from tokenmill.store import open_store

    if path.suffix == ".toml":
        from tokenmill.plan.report import report
        from tokenmill.run import Run

        run = Run.from_toml(path)
        stores = run.stores
        told = report(run.plan())
    else:
        stores = {path.name: open_store(path)}
        told = None
    found = {name: facts(store) for name, store in stores.items()}
    if json:
        fates = {source.name: source.fates for source in told.sources} if told else {}
        print_json({name: fact | ({"fates": fates[name]} if told else {}) for name, fact in found.items()})
        return
    for name, store in stores.items():
        _show(name, store, found[name])
    if told:
        console.print(fate_table(told))


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


def _show(name: str, store: Store, found: dict[str, Any]) -> None:
    tokenizer = found["tokenizer"]
    counts = found["skipped"].get("counts", {})
    rows: list[tuple[str, object]] = [
        ("kind", found["kind"]),
        ("documents", found["documents"]),
        ("tokens", found["tokens"]),
        ("tokens a document", round(found["tokens"] / max(1, found["documents"]), 1)),
        ("longest document", found["longest_document"]),
        ("shards", f"{found['shards']:,}, {megabytes(found['bytes'])}"),
        ("arrays", ", ".join(f"{key} {dtype}" for key, dtype in found["keys"].items())),
        ("tokenizer", f"{tokenizer['kind']}, {tokenizer['vocab_size']:,} ids, content {tokenizer['content'][:12]}"),
        ("BOS / EOS", f"{_placed(tokenizer, 'bos')} / {_placed(tokenizer, 'eos')}"),
        ("input files", len(found["inputs"])),
        ("skipped", ", ".join(f"{reason} {count:,}" for reason, count in counts.items()) or "none"),
        ("fingerprint", found["fingerprint"]),
    ]
    console.print(table(f"Store {name}", ("what", "value"), rows))
    most = max(found["lengths"].values(), default=1)
    bars = [(label, count, "█" * round(40 * count / most)) for label, count in found["lengths"].items()]
    console.print(table("Document lengths", ("tokens", "documents", ""), bars))
    _show_examples(store)


def _placed(tokenizer: dict[str, Any], which: str) -> str:
    if tokenizer[f"{which}_id"] is None:
        return "none"
    return f"id {tokenizer[f'{which}_id']}, {'added' if tokenizer[f'add_{which}'] else 'not added'}"


def _show_examples(store: Store) -> None:
    from tokenmill.types import Span

    tokenizer = tokenizer_of(store)
    rows = []
    for document in sorted({0, store.num_documents // 2, store.num_documents - 1} - {-1}):
        if document < store.num_documents:
            begin, end = store.document_bounds(document)
            rows.append(
                (
                    document,
                    end - begin,
                    excerpt(store, Span(document=document, start=0, length=end - begin), tokenizer),
                )
            )
    console.print(table("Examples", ("document", "tokens", "begins with"), rows))
