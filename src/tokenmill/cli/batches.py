"""`tokenmill batches`, `what` and `when`: batches as a training draws them, from steps to documents, and back."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import typer

from tokenmill.cli import console as ui
from tokenmill.cli.summary import MAX_DOCUMENTS, step_parts
from tokenmill.errors import ConfigError, ResumeError, harmless
from tokenmill.tables import MAX_CONFIG_BYTES, read_bytes
from tokenmill.view.tables import Table

if TYPE_CHECKING:
    from tokenmill.encode.tokenizer import Tokenizer
    from tokenmill.loader import Loader
    from tokenmill.run.uses import BatchRow
    from tokenmill.store import Origin, Store
    from tokenmill.types import Span

EXCERPT = 60
"""Tokens of a document that are decoded for a line of a summary."""


def batches(
    run: ui.RunFile,
    rank: Annotated[
        int | None, typer.Option(metavar="N", help="Rank whose rows to load", show_default="all ranks")
    ] = None,
    world_size: Annotated[int | None, typer.Option(metavar="N", help="Number of ranks", show_default="1")] = None,
    micro_batch: Annotated[
        int | None, typer.Option(metavar="N", help="Rows per micro-batch", show_default="all rows of a rank")
    ] = None,
    steps: Annotated[
        str, typer.Option(metavar="A:B", help="Steps to load, B exclusive", show_default="all steps")
    ] = ":",
    digest: Annotated[bool, typer.Option("--digest", help="Print a digest of each step")] = False,
    state: Annotated[
        Path | None, typer.Option(metavar="PATH", help="File to resume from and to save each step to")
    ] = None,
    threads: Annotated[int, typer.Option(metavar="N", help="Threads that prefetch batches")] = 1,
    prefetch: Annotated[int, typer.Option(metavar="N", help="Micro-batches to prefetch")] = 8,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per step, then counters")] = False,
) -> None:
    """Load batches and print one line per step.

    With --digest, two runs that print the same lines trained on the same data.
    """
    from tokenmill.loader import usual_arrays

    size = 1 if world_size is None else world_size
    if size < 1:
        raise ConfigError(f"--world-size: must be at least 1, got {size}; leave it out for 1")
    opened = ui.open_run(run, world_size)
    compiled = opened.plan()
    if micro_batch is None:  # the whole slice where all batches are alike, else the largest that fits every stage
        sizes = [stage.spec.global_batch_size for stage in compiled.stages]
        micro_batch = max(1, gcd(*sizes) // size)
    loaders = [
        opened.loader(
            rank=r,
            world_size=size,
            micro_batch=micro_batch,
            threads=threads,
            prefetch=prefetch,
            arrays=usual_arrays(compiled),
            pad_to="row",  # or digests would depend on micro-batches
        )
        for r in (range(size) if rank is None else [rank])
    ]
    first, last = _range(steps, compiled.steps)
    saved = _read_state(state, steps)
    for loader in loaders:
        loader.seek(first) if saved is None else loader.load_state_dict(saved)
    _draw(loaders, last, digest, state, json=json)


def _draw(loaders: list[Loader], last: int, digest: bool, state: Path | None, *, json: bool) -> None:
    from tokenmill.loader import batch_digest, count_tokens, row_digests
    from tokenmill.store.files import write_atomically

    plan = loaders[0].plan
    streams = [iter(loader) for loader in loaders]
    for step in range(loaders[0].step, last):
        stage = plan.stage(step)
        if not stage.is_trained:
            continue
        rows: list[bytes] = []
        tokens = trained = 0
        for loader, stream in zip(loaders, streams, strict=True):
            for batch in islice(stream, loader.part.batches(stage)):
                room, labels = count_tokens(batch)
                tokens += room
                trained += labels
                rows += row_digests(batch) if digest else []
        summary = batch_digest(rows) if digest else f"{tokens:,} tokens, {trained:,} trained"
        line = f"{step}\t{stage.spec.name}\t{summary}"
        if json:
            facts = {"step": step, "stage": stage.spec.name, "tokens": tokens, "trained": trained}
            line = msgspec.json.encode(facts | ({"digest": summary} if digest else {})).decode()
        sys.stdout.write((ui.escaped(line) if json else harmless(line)) + "\n")
        if state:
            sys.stdout.flush()
            write_atomically(state.absolute(), msgspec.json.encode(_state(loaders)))
    if json:
        _print_counters(loaders)
    _show_skipped(loaders)
    if not digest and not json:
        ui.print_note(f"now at step {loaders[0].step} of {plan.steps}")


def _print_counters(loaders: list[Loader]) -> None:
    """Print how long the loaders waited, and what was fetched from object storage, as one JSON object."""
    network = loaders[0].network  # all loaders of a run share one
    counted = {"remote": network.counters.to_json()} if network else {}
    waited = sum(loader.waited for loader in loaders)
    sys.stdout.write(msgspec.json.encode({"waited": waited, **counted}).decode() + "\n")


def _show_skipped(loaders: list[Loader]) -> None:
    """Print what was left out of live text."""
    counts: Counter[tuple[str, str]] = Counter()
    for loader in loaders:
        for source, lanes in loader.lanes.items():
            counts.update({(source, reason): number for reason, number in lanes.skipped.counts.items()})
    for (source, reason), number in sorted(counts.items()):
        ui.print_note(f"skipped in {source}: {reason} {number:,}")


def _state(loaders: list[Loader]) -> dict[str, Any]:
    """Return where the run stands: the state of any rank, or of all together where each has lanes of live text."""
    states = [loader.state_dict() for loader in loaders]
    if "live" not in states[0]:
        return states[0]
    from tokenmill.loader.state import merge_states

    return merge_states(states)


def _range(text: str, end: int) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    try:
        begin = int(first or 0)
        stop = int(last or end) if colon else begin + 1
    except ValueError:
        raise ConfigError(f"--steps: must be a:b, got {text!r}; for example 10:20, :5 or 7") from None
    if not 0 <= begin <= stop <= end:
        raise ConfigError(f"--steps: must lie within 0:{end}, got {text}; shorten it")
    return begin, stop


def _read_state(file: Path | None, steps: str) -> dict[str, Any] | None:
    """Return the state to resume from, if there is one."""
    if file is None or not file.exists():
        return None
    if steps.partition(":")[0]:
        raise ConfigError(
            f"--steps: must be :b where {file} says where to start, got {steps}; leave out the first step"
        )
    data = read_bytes(file, MAX_CONFIG_BYTES, ResumeError)
    try:
        saved: dict[str, Any] = msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        raise ResumeError(f"{file}: must be a state in JSON, got {error}; remove it to start over") from None
    if isinstance(saved, dict) and saved.get("batches"):
        raise ResumeError(
            f"{file}: the state was saved {saved['batches']} micro-batches into step {saved.get('step')}; use one "
            "that was saved between two steps"
        )
    return saved


def check(
    run: ui.RunFile,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write digests of the coming steps to")
    ] = None,
    against: Annotated[Path | None, typer.Option(metavar="FILE", help="Record to compare the run with")] = None,
    steps: Annotated[
        str | None, typer.Option(metavar="A:B", help="Steps to record, B exclusive", show_default="0:1000")
    ] = None,
    world_size: ui.WorldSize = None,
    json: ui.AsJson = False,
) -> None:
    """Compare the batches of a run with a record.

    Run it with --record when a job is set up, and with --against before each start. Digests are computed again from
    the installed packages, the stores and the config. The exit code is 1 if a batch differs.
    """
    if (record is None) == (against is None):
        raise ConfigError("check: expected --record or --against, got both or neither; pass one of them")
    if against is not None and steps is not None:
        raise ConfigError(f"--steps: cannot be combined with --against; {against} names its steps")
    ui.check_file("--record", record)
    opened = ui.open_run(run, world_size)
    with ui.progress() as tell:

        def show(done: int, total: int) -> None:
            tell("steps", done, total)

        if record is not None:
            first, end = _range(steps, opened.plan().steps) if steps is not None else (0, None)
            written = opened.record_batches(record, first, end, show)
        else:
            assert against is not None
            result = opened.check_batches(against, show)
    if record is not None:
        if json:
            ui.print_json({"first_step": written.first_step, "end_step": written.end_step})
        else:
            ui.print_line(f"wrote {record}: digests of steps {written.first_step:,}:{written.end_step:,}")
        return
    if json:
        ui.print_json(result.to_json())
    elif result.same:
        ui.print_line(f"all batches of steps {result.first_step:,}:{result.end_step:,} are the same")
    else:
        sources = f" in rows of {', '.join(result.differing_sources)}" if result.differing_sources else ""
        ui.print_line(f"first difference at step {result.differing_step:,}{sources}")
        ui.print_line(f"because {result.cause}")
    if result.same and result.versions and not json:
        ui.print_line(f"other versions, without effect: {', '.join(result.versions)}")
    raise typer.Exit(0 if result.same else 1)


# From steps to documents, and back


def what(
    run: ui.RunFile,
    number: Annotated[
        int | None, typer.Argument(metavar="STEP", help="Step to show, from 0", show_default=False)
    ] = None,
    step: Annotated[int | None, typer.Option("--step", hidden=True)] = None,
    rank: Annotated[
        int | None, typer.Option(metavar="N", help="Rank whose rows to show", show_default="all ranks")
    ] = None,
    world_size: Annotated[int | None, typer.Option(metavar="N", help="Number of ranks", show_default="1")] = None,
    micro_batch: Annotated[
        int, typer.Option(metavar="N", help="Rows per micro-batch, for runs with a balance")
    ] = 1,
    text: Annotated[bool, typer.Option(metavar="", help="Show the beginning of each document")] = True,
    full: ui.Full = False,
    json: ui.AsJson = False,
    tokenizer: ui.TextsBy = None,
) -> None:
    """Show the documents of a step."""
    from tokenmill.inspect.examples import excerpt
    from tokenmill.loader import Layout, Loader, RankSlice

    if (number is None) == (step is None):
        problem = "no step given" if step is None else f"two steps given: {number} and --step {step}"
        raise ConfigError(f"what: {problem}; name one step, such as `tokenmill what {run} 5`")
    step = number if step is None else step
    assert step is not None  # one of the two
    opened = ui.open_run(run, world_size or None)
    plan = opened.plan()
    uses = opened.what(step)
    if rank is not None:
        size = 1 if world_size is None else world_size
        if not 0 <= rank < size or len(uses) % size:
            raise ConfigError(
                f"--rank: must lie within 0:world_size, and world_size divide {len(uses)} rows, "
                f"got {rank} and {size}; fix one of them"
            )
        layout, balance = Layout(dp=(rank, size)), opened.config.run.balance is not None
        loader = Loader(plan, RankSlice(layout=layout, micro_batch=micro_batch, balance=balance))
        uses = tuple(uses[slot] for slot in loader.slots(step).tolist())
    tokenizers = {
        name: ui.tokenizer_for(store, tokenizer) if text else None for name, store in opened.stores.items()
    }
    stage = plan.at(step).stage
    if not full and not json:
        shown = [
            _recognised(opened.stores[name], name, slot, span, tokenizers[name])
            for slot, name, span in islice(
                ((use.slot, use.source, span) for use in uses for span in use.spans), MAX_DOCUMENTS
            )
        ]
        seq_len = plan.stage(step).spec.seq_len
        ui.print_parts(step_parts(step, stage, seq_len, uses, shown))
        return
    rows, lines, below = [], [], []
    for use in uses:
        store, decoder = opened.stores[use.source], tokenizers[use.source]
        spans = []
        for span in use.spans:
            words = ui.printable(excerpt(store, span, decoder)).replace("\n", "") if decoder else None
            origin = store.origin(span.document)
            spans.append({**_span_json(span), "document": span.document, "origin": origin, "text": words})
            tokens = f"{span.start}:{span.start + span.length}"
            kept = [f"{name}={value}" for name, value in origin.kept.items()]
            below.append([*map(ui.printable, kept), *([words] if words is not None else [])])
            lines.append((use.slot, use.source, use.row, span.document, tokens, str(origin)))
        rows.append({"slot": use.slot, "source": use.source, "row": use.row, "spans": spans})
    if json:
        ui.print_json({"step": step, "stage": stage, "rows": rows})
        return
    columns = ("slot", "source", "row", "document", "tokens", "from")
    ui.show_table(Table(title=f"Step {step}, stage {stage!r}", columns=columns, rows=lines), below)


def _recognised(store: Store, source: str, slot: int, span: Span, decoder: Tokenizer | None) -> dict[str, object]:
    """Return the place of a span, and how its text begins: without BOS, which says nothing, on one line."""
    from tokenmill.inspect.examples import excerpt

    origin = store.origin(span.document)
    text = ", ".join(f"{name}={value}" for name, value in origin.kept.items())
    if decoder is not None:
        bos = store.manifest.tokenizer.get("bos_id")
        start = "" if bos is None else decoder.decode(np.array([bos]))
        text = " ".join(excerpt(store, span, decoder, EXCERPT).removeprefix(start).split())
    return {"slot": slot, "source": source, "document": span.document, "from": str(origin), "text": text}


def _shown(origin: Origin) -> str:
    """Show where a document came from, and what was kept of its record."""
    kept = ", ".join(f"{name}={value}" for name, value in origin.kept.items())
    return ui.printable(f"{origin} {kept}".rstrip())


def when(
    run: ui.RunFile,
    source: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the source", show_default="the only one")
    ] = None,
    document: Annotated[
        int | None, typer.Option(metavar="N", help="Index of the document, from 0", show_default=False)
    ] = None,
    find: ui.Find = None,
    json: ui.AsJson = False,
    world_size: ui.WorldSize = None,
) -> None:
    """List the steps that see a document, past and future."""
    from tokenmill.run.quarantine import only_source
    from tokenmill.run.uses import source_store

    if (document is None) == (find is None):
        raise ConfigError("when: expected one of --document and --find; for example --find url=https://...")
    opened = ui.open_run(run, world_size)
    source = source or only_source(opened)
    documents = [document] if document is not None else []
    if find is not None:
        with ui.busy("reading kept fields"):
            documents = ui.find_documents(source_store(opened, source), find)
    found = []
    for number in documents:
        uses = opened.when(source, number)
        found.append((number, opened.stores[source].origin(number), uses))
    if json:
        shown = [_uses_json(source, *each) for each in found]
        ui.print_json(shown[0] if find is None else shown)
    else:
        for each in found:
            _show_uses(source, *each)
    if not found:
        ui.show_error(f"no document of {source!r} has {find}; check the value with `tokenmill inspect`")
        raise typer.Exit(1)


def _span_json(span: Span) -> dict[str, int]:
    return {"start": span.start, "length": span.length}


def _uses_json(source: str, document: int, origin: Origin, uses: Sequence[BatchRow]) -> dict[str, Any]:
    listed = [
        {
            "step": use.step,
            "slot": use.slot,
            "row": use.row,
            "spans": [_span_json(span) for span in use.spans],
        }
        for use in uses
    ]
    return {"source": source, "document": document, "origin": origin, "uses": listed}


def _show_uses(source: str, document: int, origin: Origin, uses: Sequence[BatchRow]) -> None:
    rows = [
        (use.step, use.slot, use.row, ", ".join(f"{s.start}:{s.start + s.length}" for s in use.spans))
        for use in uses
    ]
    ui.print_line(f"from {_shown(origin)}")
    title = f"Document {document} of {source!r}: {len(rows)} uses"
    ui.print_table(title, ("step", "slot", "row", "tokens of the document"), rows)
