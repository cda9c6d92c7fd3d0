"""`tokenmill batches`: draw batches as a training job would."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import islice
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from tokenmill.cli import console as ui
from tokenmill.errors import ConfigError, ResumeError

if TYPE_CHECKING:
    from tokenmill.loader import Loader


def batches(
    run: ui.RunFile,
    rank: Annotated[
        int | None, typer.Option(help="Rank whose slice is drawn; default: all ranks, the global batch.")
    ] = None,
    world_size: Annotated[int | None, typer.Option(help="Number of ranks; default: 1.")] = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="Rows at a time; default: the whole slice of a rank.")
    ] = None,
    steps: Annotated[str, typer.Option(help="Steps a:b, b exclusive; either may be left out.")] = ":",
    digest: Annotated[bool, typer.Option("--digest", help="Print step, stage and digest of each step.")] = False,
    state: Annotated[
        Path | None, typer.Option(help="File to resume from, if it exists, and to save to after every step.")
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads that work ahead.")] = 1,
    prefetch: Annotated[int, typer.Option(help="Micro-batches kept ready.")] = 8,
    json: Annotated[
        bool, typer.Option("--json", help="Print a JSON object a step, and one of what was waited for and fetched.")
    ] = False,
) -> None:
    """Draw batches as a training would, of one rank or of all; print one line a step.

    Two runs that print the same digests trained on the same data.
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
    from tokenmill.store.durable import write_atomically

    plan = loaders[0].plan
    streams = [iter(loader) for loader in loaders]
    for step in range(loaders[0].step, last):
        stage = plan.stage(step)
        if stage.spec.skipped is not None:
            continue
        rows: list[bytes] = []
        tokens = trained = 0
        for loader, stream in zip(loaders, streams, strict=True):
            for batch in islice(stream, loader.part.batches(stage)):
                room, labels = count_tokens(batch)
                tokens += room
                trained += labels
                rows += row_digests(batch) if digest else []
        made = batch_digest(rows) if digest else f"{tokens:,} tokens, {trained:,} trained"
        line = f"{step}\t{stage.spec.name}\t{made}"
        if json:
            facts = {"step": step, "stage": stage.spec.name, "tokens": tokens, "trained": trained}
            line = msgspec.json.encode(facts | ({"digest": made} if digest else {})).decode()
        sys.stdout.write(line + "\n")
        if state:
            sys.stdout.flush()
            write_atomically(state.absolute(), msgspec.json.encode(_state(loaders)))
    if json:
        _print_counters(loaders)
    _tell_skipped(loaders)
    if not digest and not json:
        ui.errors.print(f"stands at step {loaders[0].step} of {plan.steps}", highlight=False)


def _print_counters(loaders: list[Loader]) -> None:
    """Print for how long was waited, and what was fetched from object storage, as one JSON object."""
    network = loaders[0].network  # all loaders of a run share one
    counted = {"remote": network.counters.to_json()} if network else {}
    waited = sum(loader.waited for loader in loaders)
    sys.stdout.write(msgspec.json.encode({"waited": waited, **counted}).decode() + "\n")


def _tell_skipped(loaders: list[Loader]) -> None:
    """Say what was left out of live text."""
    counts: Counter[tuple[str, str]] = Counter()
    for loader in loaders:
        for source, lanes in loader.lanes.items():
            counts.update({(source, reason): number for reason, number in lanes.skipped.counts.items()})
    for (source, reason), number in sorted(counts.items()):
        ui.errors.print(f"left out of {source}: {reason} {number:,}", highlight=False)


def _state(loaders: list[Loader]) -> dict[str, Any]:
    """Return where the run stands: what any rank says, but for lanes of live text, of which each has its own."""
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
    try:
        saved: dict[str, Any] = msgspec.json.decode(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ResumeError(f"{file}: must be a state in JSON, got {error}; remove it to start over") from None
    if isinstance(saved, dict) and saved.get("batches"):
        raise ResumeError(
            f"{file}: must stand between two steps, got {saved['batches']} micro-batches into step "
            f"{saved.get('step')}; use a state that was saved after a whole step"
        )
    return saved
