"""Old spellings of a config: read for one release, with a warning that names the new one.

`split` and `on_long` became one key, `on_long`. `shuffle = "block"` became `"window"`. No other file knows the key
`split`. The meaning of two old values depends on the kind of the stores: `on_long = "cut"`, and `split = "allow"`
of a stage. Until the stores are open they stay as words of `on_long`, which `long_documents` reads.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache, wraps
from typing import Any, NamedTuple, TypeVar

from tokenmill.errors import ConfigError
from tokenmill.tables import check_choice

T = TypeVar("T")
Table = Mapping[str, Any]
logger = logging.getLogger("tokenmill.config.spelling")
_SPLITS = ("allow", "forbid", "truncate_start", "truncate_end")
_USUAL_PACKING = "best_fit"
OLD_ON_LONG = {
    "allow": ("split", "stop"),
    "cut": ("split", "truncate_end"),
    "allow cut": ("split", "truncate_end"),
}
"""Old word of `on_long` -> the new word under best_fit, and where a row holds one record. `cut` of a stage uses
the end that [run] truncates, `allow cut` does not."""


class _Rows(NamedTuple):
    """Rows that a table describes, as far as they are known."""

    packings: set[str] | set[None]
    """None: that of [run], which a stage made in Python does not know."""
    records: bool | None = None
    """Whether the rows are pairs or groups. None: unknown."""
    inherited: str | None = None
    """Value of [run], for a stage."""

    def meanings(self, word: str) -> list[str]:
        """Return the new values that an old word may mean; empty for the default."""
        if word == "allow" and self.inherited is None:
            return []
        if word == "cut" and self.inherited in ("truncate_start", "truncate_end"):
            return [self.inherited]
        alone = {packing == "padded" or (self.records if packing else None) for packing in self.packings}
        return [
            new for new, is_alone in zip(OLD_ON_LONG[word], (False, True), strict=True) if alone & {is_alone, None}
        ]


def read_old(tables: Table, where: str) -> dict[str, Any]:
    """Return tables in the new spelling, and log each old value."""
    new, notes = respell(tables)
    for note in notes:
        logger.warning("%s: %s", where, note)
    return new


def respell(tables: Table, *, records: bool | None = None) -> tuple[dict[str, Any], list[str]]:
    """Return tables in the new spelling, and a sentence for each old value.

    `records` tells whether the stores hold pairs or groups. While it is None, a value that depends on it stays.
    What is no table stays as well: the reader of tables rejects it.
    """
    new, notes = dict(tables), list[str]()
    run = tables["run"] if isinstance(tables.get("run"), Mapping) else {}
    usual = _packing(run, _USUAL_PACKING)
    stages, evals = (_tables(tables.get(name)) for name in ("stages", "evals"))
    if run:
        silent = [
            stage
            for stage in stages.values()
            if stage.get("split") is None and stage.get("on_long") in (None, "cut")
        ]
        packings = {usual, *(_packing(stage, usual) for stage in silent)}
        new["run"] = run = _respell_table("run", run, _Rows(packings, records), notes)
    for name, listed, packing in (("stages", stages, usual), ("evals", evals, _USUAL_PACKING)):
        inherited = run.get("on_long") if name == "stages" else None
        if listed:
            new[name] = list(tables[name])
        for number, table in listed.items():
            rows = _Rows({_packing(table, packing)}, records, inherited)
            new[name][number] = _respell_table(f"{name}[{number}]", table, rows, notes)
    return new, notes


def _packing(table: Table, usual: str) -> str:
    """Return the packing of a table, as far as it can be one."""
    return str(table.get("packing") or usual)


def _tables(value: object) -> dict[int, Table]:
    """Return the tables of a list by their number."""
    items = enumerate(value) if isinstance(value, list | tuple) else ()
    return {number: item for number, item in items if isinstance(item, Mapping)}


def takes_old_keys(kind: type[T]) -> type[T]:
    """Make a record of the config take the old keyword `split`; it warns once of each old value."""
    make: Any = kind.__init__

    @wraps(make)
    def __init__(self: T, **values: Any) -> None:  # noqa: ANN401 - the fields of the record
        notes = list[str]()
        rows = _Rows({_packing(values, _USUAL_PACKING)})
        if kind.__name__ == "StageConfig":
            rows = _Rows({None}, inherited="?")  # it does not know its run
        new = _respell_table(kind.__name__, values, rows, notes)
        make(self, **new)
        for note in notes if new != values else ():  # a copy of a record is not told again of a word that stays
            _warn_once(note)

    kind.__init__ = __init__  # type: ignore[assignment]
    return kind


@cache
def _warn_once(note: str) -> None:
    logger.warning("%s", note)


def _respell_table(where: str, table: Table, rows: _Rows, notes: list[str]) -> dict[str, Any]:
    """Return one table in the new spelling; add a note for each old value."""
    new = dict(table)
    word = _joined(where, new.pop("split", None), table.get("on_long"))
    if word == "allow cut" and rows.inherited is None:
        word = "cut"
    if isinstance(word, str) and (table.get("split") is not None or word in OLD_ON_LONG):
        meanings = rows.meanings(word) if word in OLD_ON_LONG else [word]
        # A state of live text names `allow`, which stays what it is.
        is_settled = len(meanings) == 1 and (word != "allow" or rows.records is not None)
        new["on_long"] = meanings[0] if is_settled else word
        if not meanings:
            del new["on_long"]
        old = " with ".join(f"{key} = {table[key]!r}" for key in ("split", "on_long") if table.get(key) is not None)
        advice = "write " + ", or for padded rows, pairs and groups ".join(f"on_long = {new!r}" for new in meanings)
        notes.append(f"{where}: {old} is an old spelling; {advice if meanings else 'leave it out'}")
    if new.get("shuffle") == "block":
        new["shuffle"] = "window"
        notes.append(
            f"{where}: shuffle = 'block' is read as 'window', another order of rows; write 'window', and "
            "finish runs that began with 'block' with the release that they began with"
        )
    return new


def _joined(where: str, split: object, on_long: object) -> object:
    """Return the one word for both keys."""
    if split is None:
        return on_long
    check_choice(where, "split", str(split), _SPLITS)
    if split == "allow":
        return "allow" if on_long is None else "allow cut" if on_long == "cut" else on_long
    if on_long is None or (on_long == "cut" and split != "forbid"):
        return "stop" if split == "forbid" else split
    raise ConfigError(
        f"{where}: split is an old key that on_long replaces, got {split!r} with on_long = {on_long!r}; "
        "remove split"
    )
