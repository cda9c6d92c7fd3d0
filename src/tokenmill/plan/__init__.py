"""Rows of every step, as a pure function of the plan and the step.

1. In: weights, batch size, seed and shuffle of each stage, and a row index (sizes) of each source.
2. Does: step -> stage -> position -> (source, ordinal of its row) by the mixture -> row by the shuffle, and back.
3. Out: the rows of any step (`Plan.rows`), their documents (`what`), the uses of a document (`when`), and a digest
   of everything that decided the batches before a step.
"""

from tokenmill.plan.compile import compile_plan
from tokenmill.plan.order import Shuffle
from tokenmill.plan.plan import Moment, Plan
from tokenmill.plan.rows import Rows
from tokenmill.plan.stages import Ramp, Stage, StageSpec
from tokenmill.plan.uses import DocumentUses, RowUse

__all__ = ["DocumentUses", "Moment", "Plan", "Ramp", "RowUse", "Rows"]
__all__ += ["Shuffle", "Stage", "StageSpec", "compile_plan"]
