"""Token files of other projects, read in place.

1. In: a path (file, folder, glob or prefix) to token files of another project, and what the user knows of them.
2. Does: tells formats apart by their content; checks every size a header claims against the file; finds where
   documents end, once, and keeps that beside the data; executes nothing, never guesses a dtype.
3. Out: a manifest and the places of the arrays, so that a `Store` maps them like its own; or a store of ours,
   converted and compared token by token.

`docs/how-to/foreign-stores.md` says what each format gives.
"""
