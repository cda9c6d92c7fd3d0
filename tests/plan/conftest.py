from dataclasses import dataclass

import numpy as np
import pytest

from tokenmill.plan import Shuffle, StageSpec, compile_plan
from tokenmill.plan.rows import TokenCounts
from tokenmill.types import Fates, Spans


@dataclass(frozen=True)
class NumberedRows:
    """A source of any size whose row r is document r, whole: what the plan must know and no more."""

    num_rows: int
    name: str = "rows"
    seq_len: int = 8
    num_rest: int = 0
    cross_document_labels: bool = False
    segment_multiple: int = 1
    windows: tuple[int, ...] = ()
    """Rows of each packing window, where rows are packed."""

    has_epochs = True

    @property
    def row_slots(self):
        return self.seq_len

    def held(self, rows):
        return TokenCounts(tokens=rows.size * self.seq_len, trained=rows.size * self.seq_len)

    @property
    def description(self):
        return {"store": self.name, "rows": self.num_rows, **({"windows": self.windows} if self.windows else {})}

    def window_starts(self, *, rest):
        return np.array([0, *np.cumsum(self.windows)]) if self.windows and not rest else None

    def spans(self, rows):
        ones = np.ones_like(rows)
        return Spans(
            first=np.arange(rows.size),
            count=ones,
            document=rows,
            start=ones * 0,
            length=ones * (self.seq_len + 1),
            shard=ones * 0,
            token=rows * (self.seq_len + 1),
        )

    @property
    def epoch_description(self):
        return self.description

    def fates(self):
        return Fates(
            rows=self.num_rows,
            tokens=self.num_rows * (self.seq_len + 1),
            trained=self.num_rows * self.seq_len,
            masked=self.num_rows,
            dropped={},
            padding=0,
        )

    def rows_of(self, documents):
        return documents, np.arange(documents.size)


@pytest.fixture
def numbered_rows():
    return NumberedRows


@pytest.fixture
def make_plan():
    """Compile stages given as (start_step, batch, weights[, changes]) over sources given by their sizes."""

    def make(sizes, stages, *, steps, seed=7, shuffle="full", max_epochs=None, stops=None):
        # A source is given by its size, or by the rows of each of its packing windows.
        windows = {name: size if isinstance(size, tuple) else () for name, size in sizes.items()}
        rows = {
            name: NumberedRows(sum(windows[name]) or size, name, windows=windows[name])
            for name, size in sizes.items()
        }
        specs = []
        for index, (start, batch, weights, *rest) in enumerate(stages):
            changes = rest[0] if rest else {}
            specs.append(
                StageSpec(
                    name=f"stage{index}",
                    start_step=start,
                    global_batch_size=batch,
                    seq_len=8,
                    seed=changes.get("seed", seed),
                    shuffle=changes.get("shuffle", Shuffle(mode=shuffle, block_rows=4, window_blocks=3)),
                    weights=weights,
                    rows={name: rows[name] for name in sizes},
                    number=changes.get("number", index),
                    lr_scale=changes.get("lr_scale", 1.0),
                    ramp=changes.get("ramp"),
                    skipped=changes.get("skipped"),
                )
            )
        return compile_plan(specs, sources=tuple(sizes), steps=steps, max_epochs=max_epochs, stops=stops)

    return make
