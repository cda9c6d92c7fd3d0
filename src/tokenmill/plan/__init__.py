"""Which row stands where: a pure function of the plan and the step.

1. In: for each stage its weights, batch size, seed and shuffle, and for each source a row index (sizes).
2. Does: step -> stage -> position -> (source, how-manieth row) by the mixture -> row by the shuffle, and back.
3. Out: the rows of any step (`Plan.rows`), what they are made of (`what`), when a document is seen (`when`),
   and a digest of everything that decided the batches before a step.
4. Must not know: files, clocks, ranks, stores. It is given sizes and asks row indexes for spans.
"""

from tokenmill.plan.plan import Moment, Plan, compile_plan
from tokenmill.plan.provenance import RowUse
from tokenmill.plan.rows import RowIndex
from tokenmill.plan.shuffle import Shuffle
from tokenmill.plan.stages import Ramp, Stage, StageSpec

__all__ = ["Moment", "Plan", "Ramp", "RowIndex", "RowUse", "Shuffle", "Stage", "StageSpec", "compile_plan"]
