"""The command line.

1. In: the arguments of `tokenmill COMMAND`.
2. Does: calls what Python users call, and prints the result. It computes nothing of its own; files hold commands
   that belong together, `console.py` what they share, `tables.py` tables as text, `summary.py` what fits one screen.
3. Out: summaries and tables for people, `--json` for programs, files of HTML and SVG; errors and progress on stderr.
"""
