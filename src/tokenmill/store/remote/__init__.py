"""Stores in object storage: read by exact ranges, kept in a mirror, proven page by page.

1. In: an address such as `s3://bucket/path`, the options of [remote], and the spans that rows need.
2. Does: asks for the ranges that are not here yet, many at a time; proves them; keeps them in a mirror on disk if
   there is one.
3. Out: memory in which every wanted byte stands at its offset in its file, as kernels know it from local files.

Nothing here is imported, and obstore is not needed, unless an address is used. Credentials are those that obstore
finds in the environment; none are kept, and what a server says is never repeated in a message.
"""
