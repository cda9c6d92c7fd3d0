"""A run over time.

1. In: a config, and the stores and live texts that it names.
2. Does: joins them to a plan and to loaders, keeps the history of edits, compares runs, forks them, and reports on
   them before the first step.
3. Out: plans, loaders, evals, reports, differences, forks.
"""

from tokenmill.run.run import Run

__all__ = ["Run"]
