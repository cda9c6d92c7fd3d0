"""A run over time.

1. In: a config, and the stores and live texts that it names.
2. Does: joins them to a plan and to loaders, keeps the history of edits, compares runs, forks them, reports on
   them before the first step, and shows what is in stores, documents and steps.
3. Out: plans, loaders, evals, reports, differences, forks, contents.
"""

from tokenmill.run.run import Run

__all__ = ["Run"]
