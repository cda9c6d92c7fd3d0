"""Content of each view as records: a thin layer over the functions of runs, stores and builds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from tokenmill.build.status import BuildStatus, build_status
from tokenmill.errors import ConfigError, PlanError, nearest
from tokenmill.inspect.examples import DocumentContents, Example, examples, excerpt, inspect_document
from tokenmill.inspect.steps import (
    MAX_ROWS,
    MAX_TOKENS,
    SourcePacking,
    StepContents,
    StepDeal,
    StripTokens,
    deal_step,
    inspect_packing,
    inspect_step,
    inspect_strip,
    row_arrays,
    same_rows,
)
from tokenmill.inspect.stores import StoreContents, inspect_store, kept_tokenizer, open_stores, why_no_texts
from tokenmill.run.report import RunReport
from tokenmill.run.run import Run, is_config
from tokenmill.store import Store, open_store
from tokenmill.store.layout import JOURNAL_FOLDER, MANIFEST, stores_below
from tokenmill.store.records import keys_of_text, matches
from tokenmill.store.remote.client import parse_address
from tokenmill.types import Span
from tokenmill.view.picture import timeline

DOCUMENTS_A_PAGE = 50
AUDITED_ITEMS = 1 << 14
"""Number of documents whose lengths and masks are read, so that a page of a larger store takes no longer."""
EXCERPT_TOKENS = 40
NUMBERS_A_PAGE = 512
MAX_USES = 1000
"""Maximum number of steps in the list of those that see a document."""

T = TypeVar("T")
Parameters = Mapping[str, str]
"""Query parameters of an address."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepView:
    """A step."""

    contents: StepContents
    stages: tuple[tuple[str, int], ...]
    """Name and first step of every stage."""
    deal: StepDeal | None
    """The rank and micro-batch of each row, if a number of ranks was given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StripView:
    """One strip of a row, token by token."""

    tokens: StripTokens
    controls: tuple[int, ...]
    """Ids of special tokens among them."""
    no_text: str | None
    """Reason why no text can be shown, if any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArraysView:
    """The arrays of a batch for one row."""

    step: int
    slot: int
    first: int
    """Index of the first number that is shown."""
    length: int
    """Length of the longest array."""
    arrays: Mapping[str, list[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingView:
    """Packing of the tokens of each source into rows."""

    report: RunReport
    sources: tuple[SourcePacking, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedDocument:
    """One document in a list."""

    document: int
    tokens: int
    text: str | None
    """Beginning of its text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreView:
    """A store, and one page of its documents."""

    name: str
    names: tuple[str, ...]
    """Names of all open stores."""
    contents: StoreContents
    first: int
    documents: tuple[ListedDocument, ...]
    examples: tuple[Example, ...]
    no_text: str | None
    keep: tuple[str, ...] = ()
    """Kept fields by which documents can be found."""
    sought: tuple[str, str] | None = None
    """Field and value of the search; `documents` are then the matches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """A step that sees a document."""

    step: int
    slot: int
    row: int
    spans: tuple[tuple[int, int], ...]
    """(first token, length) of each span."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentView:
    """One document of a store, and the steps that see it."""

    source: str
    num_documents: int
    contents: DocumentContents
    first: int
    """First token of each part that is shown."""
    controls: tuple[int, ...]
    uses: tuple[Use, ...]
    num_uses: int
    in_run: bool
    no_text: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffView:
    """Two runs, compared."""

    names: tuple[str, str]
    others: tuple[str, ...]
    """Configs in the same folder, with which it can be compared."""
    other: str = ""
    """Config with which it is compared."""
    difference: Mapping[str, Any] | None = None
    step: int | None = None
    """Step whose batches are shown: the first that differs, unless another one is given."""
    steps: int = 0
    """Number of steps of the longer run."""
    sides: tuple[StepContents | str, ...] = ()
    """Batch of each run at that step, or the reason why it has none."""
    equal: tuple[tuple[int, int], ...] = ()
    """Slots of rows that are equal in both runs."""


@dataclass(frozen=True)
class Opened:
    """The target of the viewer: a run, stores, or the folder of a build."""

    path: Path | str
    """Path of a config, store or folder; a string is an address in object storage."""
    other: Path | None = None
    """Config of a run to compare with."""
    target: Run | Store | None = None
    """Run or store that is already open."""

    since: float = field(default_factory=time.time)
    """Time of opening, in seconds since 1970."""
    lock: threading.Lock = field(default_factory=threading.Lock, compare=False, repr=False)
    """Held while a view is made, one at a time, so that everything is opened only once."""

    @classmethod
    def of(cls, target: Run | Store) -> Opened:
        """Return a target for a run or store that is already open."""
        if isinstance(target, Run):
            return cls(path=target.folder / f"{target.name}.toml", target=target)
        return cls(path=target.where if target._remotes else target.path, target=target)

    @property
    def name(self) -> str:
        """Name of the target in titles."""
        return parse_address(self.path).name if isinstance(self.path, str) else self.path.absolute().name

    @cached_property
    def run(self) -> Run | None:
        """The run; None if a store was opened."""
        if self.target is not None:
            return self.target if isinstance(self.target, Run) else None
        return Run.from_toml(self.path) if is_config(self.path) else None

    @property
    def views(self) -> tuple[str, ...]:
        """Names of its views; a build has no store until it has finished one."""
        if self.run is None:
            return (*(("store",) if self.stores else ()), *(("build",) if self.has_build else ()))
        return ("step", "timeline", "packing", "store", "diff")

    @property
    def has_build(self) -> bool:
        """Whether its folder is or was the output of a build."""
        return isinstance(self.path, Path) and (self.path / JOURNAL_FOLDER).is_dir()

    @property
    def first_view(self) -> str:
        """Name of the first view."""
        return "step" if self.run is not None else "store" if self.stores else "build"

    @property
    def stores(self) -> dict[str, Store]:
        """The stores by name: those of the run, the one that was opened, or all in its folder."""
        if isinstance(self.path, Path) and self.has_build and not (self.path / MANIFEST).exists():
            # A running build may have finished some of its stores. So they are listed again for each view.
            return {place.relative_to(self.path).as_posix(): open_store(place) for place in stores_below(self.path)}
        return self._stores

    @cached_property
    def _stores(self) -> dict[str, Store]:
        if self.run is not None:
            return dict(self.run.stores)
        return {self.name: self.target} if isinstance(self.target, Store) else open_stores(self.path)

    @cached_property
    def report(self) -> RunReport:
        """Report of the run, as `tokenmill plan` prints it."""
        return self.the_run.report()

    @cached_property
    def others(self) -> dict[str, Path]:
        """Configs with which the run can be compared: the one of `--diff`, and those in the same folder."""
        beside = sorted(path for path in self.the_run.folder.glob("*.toml") if path.name != self.name)
        return {path.name: path for path in (*beside, *([self.other] if self.other else []))}

    @cached_property
    def _opened_others(self) -> dict[str, Opened]:
        return {}

    def beside(self, name: str) -> Opened:
        """Return another run, opened once."""
        if name not in self.others:
            raise ConfigError(
                f"with: must be a config beside {self.name}, got {name[:80]!r}; "
                f"{nearest(name, self.others) if self.others else 'there is no other one'}"
            )
        if name not in self._opened_others:
            self._opened_others[name] = Opened(path=self.others[name])
        return self._opened_others[name]

    @property
    def the_run(self) -> Run:
        """The run; an error if a store was opened."""
        if self.run is None:
            raise ConfigError(
                f"{self.path}: this view needs a run, got a store; open its config, `tokenmill view RUN.toml`"
            )
        return self.run

    def store(self, name: str) -> tuple[str, Store]:
        """Return an open store and its name: the one of this name, or the first one without a name."""
        names = list(self.stores)
        if not names:
            if self.run is not None:
                raise ConfigError(
                    f"{self.name}: must read a store for this view, got live text alone; prepare it to look into it"
                )
            raise ConfigError(f"{self.path}: no finished store; wait for the build to finish")
        if name and name not in self.stores:
            raise ConfigError(f"source: must be one that is open, got {name!r}; {nearest(name, names)}")
        chosen = name or names[0]
        return chosen, self.stores[chosen]


def number(parameters: Parameters, name: str, default: int = 0, *, least: int = 0) -> int:
    """Return a whole number from the query."""
    text = parameters.get(name, "").strip() or str(default)
    if not text.isascii() or not text.isdecimal() or len(text) > 18 or int(text) < least:
        raise ConfigError(f"{name}: expected a number of at least {least}, got {text[:40]!r}; write digits")
    return int(text)


def step_view(opened: Opened, parameters: Parameters) -> StepView:
    """Show the rows of a step, grouped by rank and micro-batch if their number is given."""
    run = opened.the_run
    contents = inspect_step(run, number(parameters, "step"), first=number(parameters, "first"), count=MAX_ROWS)
    world_size, micro_batch = number(parameters, "world_size"), number(parameters, "micro_batch")
    plan = run.plan()
    stages = {stage.spec.name: plan.span(stage.spec.number)[0] for stage in plan.stages}
    return StepView(
        contents=contents,
        stages=tuple(stages.items()),
        deal=deal_step(run, contents.step, world_size or 1, micro_batch or 1)
        if world_size or micro_batch
        else None,
    )


def strip_view(opened: Opened, parameters: Parameters) -> StripView:
    """Show one strip of a row, token by token."""
    run, step, slot = opened.the_run, number(parameters, "step"), number(parameters, "slot")
    source = run.what(step)[slot : slot + 1]
    tokenizer = kept_tokenizer(opened.stores[source[0].source]) if source else None
    strip, first, count = (
        number(parameters, name, default) for name, default in (("strip", 0), ("first", 0), ("count", MAX_TOKENS))
    )
    tokens = inspect_strip(run, step, slot, strip, first=first, count=count, tokenizer=tokenizer)
    return StripView(
        tokens=tokens,
        controls=_controls(tokenizer),
        no_text=None if tokenizer else why_no_texts(run.stores[tokens.source]),
    )


def arrays_view(opened: Opened, parameters: Parameters) -> ArraysView:
    """Show the arrays of one row as numbers."""
    step, slot, first = (number(parameters, name) for name in ("step", "slot", "first"))
    arrays = row_arrays(opened.the_run, step, slot)
    return ArraysView(
        step=step,
        slot=slot,
        first=first,
        length=max(map(len, arrays.values())),
        arrays={name: values[first : first + NUMBERS_A_PAGE] for name, values in arrays.items()},
    )


def _controls(tokenizer: Any) -> tuple[int, ...]:  # noqa: ANN401 - of any engine
    return () if tokenizer is None else tuple(sorted(tokenizer.special_ids.values()))


@dataclass(frozen=True, kw_only=True, slots=True)
class TimelineView:
    """Timeline of the whole run."""

    by: str
    """Unit of the horizontal axis: `steps` or `tokens`."""
    report: RunReport
    picture: str
    """Shares, stages and edits over the whole run, as SVG."""


def timeline_view(opened: Opened, parameters: Parameters) -> TimelineView:
    """Show shares, stages, edits and epochs over the whole run."""
    by = parameters.get("by", "steps")
    if by not in ("steps", "tokens"):
        raise ConfigError(f"by: must be steps or tokens, got {by[:40]!r}; choose one of the two")
    run, report = opened.the_run, opened.report
    picture = timeline(run.plan(), report, run.name, report.quarantined, report.evals, by=by)
    return TimelineView(by=by, report=report, picture=picture)


def packing_view(opened: Opened, parameters: Parameters) -> PackingView:  # noqa: ARG001
    """Show the fate of the tokens of each source."""
    return PackingView(report=opened.report, sources=inspect_packing(opened.the_run))


def store_view(opened: Opened, parameters: Parameters) -> StoreView:
    """Show a store: facts, the audit, and some documents in order."""
    name, store = opened.store(parameters.get("source", ""))
    first = number(parameters, "first")
    tokenizer = kept_tokenizer(store)
    chosen: Sequence[int] = range(first, min(store.num_documents, first + DOCUMENTS_A_PAGE))
    field, value = parameters.get("field", ""), parameters.get("value", "")
    if field:
        matched = matches(store, {field: keys_of_text(field, value)})
        chosen = [document for document, _ in islice(matched, DOCUMENTS_A_PAGE)]
    return StoreView(
        name=name,
        names=tuple(opened.stores),
        contents=inspect_store(store, tokenizer, max_items=AUDITED_ITEMS),
        first=first,
        documents=tuple(_listed(store, tokenizer, document) for document in chosen),
        examples=tuple(examples(store, tokenizer)),
        no_text=None if tokenizer else why_no_texts(store),
        keep=tuple(store.manifest.recipe.get("keep") or ()),
        sought=(field, value) if field else None,
    )


def _listed(store: Store, tokenizer: Any, document: int) -> ListedDocument:  # noqa: ANN401
    begin, end = store.document_bounds(document)
    whole = Span(document=document, start=0, length=end - begin)
    text = None if tokenizer is None else excerpt(store, whole, tokenizer, EXCERPT_TOKENS)
    return ListedDocument(document=document, tokens=whole.length, text=text)


def document_view(opened: Opened, parameters: Parameters) -> DocumentView:
    """Show one document: its text, the tokens that are trained on, and all steps that see it."""
    name, store = opened.store(parameters.get("source", ""))
    document, first = number(parameters, "document"), number(parameters, "first")
    tokenizer = kept_tokenizer(store)
    uses = opened.run.when(name, document) if opened.run else ()
    return DocumentView(
        source=name,
        num_documents=store.num_documents,
        contents=inspect_document(store, document, tokenizer, first=first, count=MAX_TOKENS),
        first=first,
        controls=_controls(tokenizer),
        uses=tuple(
            Use(
                step=use.step,
                slot=use.slot,
                row=use.row,
                spans=tuple((span.start, span.length) for span in use.spans),
            )
            for use in uses[:MAX_USES]
        ),
        num_uses=len(uses),
        in_run=opened.run is not None,
        no_text=None if tokenizer else why_no_texts(store),
    )


def diff_view(opened: Opened, parameters: Parameters) -> DiffView:
    """Compare with another run: the first step that differs, the reason, and both batches."""
    run = opened.the_run
    wanted = parameters.get("with", "") or (opened.other.name if opened.other else "")
    others = tuple(opened.others)
    if not wanted:
        return DiffView(names=(run.name, ""), others=others)
    other = opened.beside(wanted).the_run
    difference = run.diff(other)
    step = number(parameters, "step") if parameters.get("step") else difference.first_step
    sides = () if step is None else tuple(_side(each, step) for each in (run, other))
    equal: tuple[tuple[int, int], ...] = ()
    match sides:
        case (StepContents() as here, StepContents() as there):
            equal = same_rows(run, here, other, there)
    return DiffView(
        names=(run.name, other.name),
        others=others,
        other=wanted,
        difference=difference.to_json(),
        step=step,
        steps=difference.steps,
        sides=sides,
        equal=equal,
    )


def _side(run: Run, step: int) -> StepContents | str:
    """Return the batch of a step, or why there is none: the run has ended, skips it, or reads live text."""
    try:
        return inspect_step(run, step)
    except PlanError as error:
        return str(error)


def build_view(opened: Opened, parameters: Parameters) -> BuildStatus:  # noqa: ARG001
    """Show the progress of a build."""
    if isinstance(opened.path, str) or opened.run is not None:
        raise ConfigError(f"{opened.path}: no build in this folder; open the folder of --out")
    return build_status(opened.path)


VIEWS: Mapping[str, Callable[[Opened, Parameters], Any]] = {
    "step": step_view,
    "strip": strip_view,
    "arrays": arrays_view,
    "timeline": timeline_view,
    "packing": packing_view,
    "store": store_view,
    "document": document_view,
    "diff": diff_view,
    "build": build_view,
}
"""View by name. `strip`, `arrays` and `document` are opened from other views."""
