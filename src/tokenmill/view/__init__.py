"""The viewer: local, read-only web pages of any batch, any mixture and any difference of two runs.

1. In: a run, a store, or the folder of a build.
2. Does: calls `run`, `store` and `build`, and draws the results. It has no logic of its own, and writes nothing.
3. Out: HTML pages, and the same as JSON under `/api/`.
"""
