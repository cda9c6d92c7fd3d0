"""Which row stands where: a pure function of the plan and the step.

1. In: for each stage its weights, batch size, seed and shuffle, and for each source a row index (sizes).
2. Does: step -> stage -> position -> (source, ordinal of its row) by the mixture -> row by the shuffle, and back.
3. Out: the rows of any step (`Plan.rows`), what they are made of (`what`), when a document is seen (`when`),
   and a digest of everything that decided the batches before a step.
"""

from tokenmill.plan.compile import compile_plan
from tokenmill.plan.order import Shuffle
from tokenmill.plan.plan import Moment, Plan
from tokenmill.plan.rows import Rows
from tokenmill.plan.stages import Ramp, Stage, StageSpec
from tokenmill.plan.uses import DocumentUses, RowUse

__all__ = ["DocumentUses", "Moment", "Plan", "Ramp", "RowUse", "Rows"]
__all__ += ["Shuffle", "Stage", "StageSpec", "compile_plan"]
