"""Text that is tokenized while a model trains.

1. In: files of documents, a tokenizer, how documents become rows; a rank, a world size, a number of steps.
2. Does: cuts the files into windows and deals them to a fixed number of lanes, epoch after epoch; a lane reads one
   window at a time, shuffles its documents, tokenizes and packs them, by threads that work ahead.
3. Out: the batches that a loader of stores gives, in an order that depends on neither ranks nor threads; a state of
   three numbers a lane, from which any world size goes on.
"""

from tokenmill.live.loader import LiveLoader
from tokenmill.live.source import ForeignTokenizer, LiveOptions, LiveSource, open_live
from tokenmill.live.state import merge_states

__all__ = ["ForeignTokenizer", "LiveLoader", "LiveOptions", "LiveSource", "merge_states", "open_live"]
