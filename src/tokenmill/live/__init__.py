"""Text that is tokenized while a model trains.

1. In: files of documents, a tokenizer, and options of packing.
2. Does: cuts the files into windows and assigns them to a fixed number of lanes, epoch after epoch. A lane reads
   one window at a time, shuffles its documents, tokenizes and packs them, in threads that prefetch.
3. Out: rows in an order that depends on neither ranks nor threads, and a position per lane, from which any number
   of ranks resumes.
"""

from tokenmill.live.lanes import LiveLoader
from tokenmill.live.source import ForeignTokenizer, LiveOptions, LiveSource, open_live
from tokenmill.loader.state import merge_states

__all__ = ["ForeignTokenizer", "LiveLoader", "LiveOptions", "LiveSource", "merge_states", "open_live"]
