"""Contents of stores and of training steps, for people to look at.

1. In: a store, or a run and a step.
2. Does: summarizes stores (`stores`), counts what is trained on (`audit`), decodes examples and documents
   (`examples`), and shows the rows of a step (`steps`).
3. Out: records that the command line and the viewer print.
"""
