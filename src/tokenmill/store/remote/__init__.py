"""Stores in object storage: read by exact ranges, cached in a mirror, verified page by page.

1. In: an address such as `s3://bucket/path`, the options of [remote], and the spans that rows need.
2. Does: downloads ranges that are not on this machine, many at a time; verifies them; stores them in a mirror on
   disk if there is one.
3. Out: memory in which each byte has the offset that it has in its file, so kernels see no difference.

Nothing here is imported, and obstore is not needed, unless an address is used. Credentials are those that obstore
finds in the environment. None are stored, and no message repeats the answer of a server.
"""
