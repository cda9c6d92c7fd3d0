"""A local, read-only web page: any batch, any mixture, any difference, in a browser.

1. In: a run, a store, or the folder of a build.
2. Does: asks `run`, `store` and `build` what they know, and draws it. It computes nothing of its own and writes
   nothing.
3. Out: pages of HTML, and under `/api/` the same as JSON.
"""
