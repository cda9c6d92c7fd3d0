"""The engine under the interfaces that people already use.

1. In: a run, a store or a loader of ours; what a framework passes to its datasets, samplers and loaders.
2. Does: speaks the language of one framework a file: its names, its parameters, its state; nothing is decided here.
3. Out: the batches of the loader as that framework wants them, with exact resume wired in.
4. Must not know: each other, but for `needs`, `torch` and `distributed`, on which others stand; how rows are found
   or made.
"""
