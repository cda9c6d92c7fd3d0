"""The command line.

1. In: the arguments of `tokenmill COMMAND`.
2. Does: calls what Python users call, and prints the result. It computes nothing of its own. Files hold commands
   of one kind; `console.py` is shared by all, `tables.py` sets tables in text, `summary.py` is for one screen.
3. Out: summaries and tables for people, `--json` for programs, files of HTML and SVG; errors and progress on
   stderr.
"""
