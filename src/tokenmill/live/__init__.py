"""Text that is tokenized while a model trains.

1. In: files of documents, a tokenizer, how documents become rows.
2. Does: cuts the files into windows and deals them to a fixed number of lanes, epoch after epoch; a lane reads one
   window at a time, shuffles its documents, tokenizes and packs them, by threads that work ahead.
3. Out: rows that a loader draws, in an order that depends on neither ranks nor threads; a place for each lane, from
   which any world size goes on.
"""

from tokenmill.live.lanes import LiveLoader
from tokenmill.live.source import ForeignTokenizer, LiveOptions, LiveSource, open_live
from tokenmill.loader.state import merge_states

__all__ = ["ForeignTokenizer", "LiveLoader", "LiveOptions", "LiveSource", "merge_states", "open_live"]
