"""From files of text to a store.

1. In: paths, globs, folders or datasets; the name of a tokenizer; a recipe; options.
2. Does: cuts the input into units of work, each of which becomes a shard in a worker process, with a journal from
   which any later call goes on; then makes the shards a store. Memory does not grow with the input.
3. Out: a finished store, or one for each domain and split; a report. The bytes depend on the documents and the
   options, never on the number of workers, or on how often the build was interrupted.
4. Must not know: rows, plans, training. It is the only offline place that joins `documents`, `encode` and `store`.
"""

import sys
from types import ModuleType

from tokenmill.prepare.build import prepare
from tokenmill.prepare.options import PrepareOptions
from tokenmill.prepare.report import PrepareReport

__all__ = ["PrepareOptions", "PrepareReport", "prepare"]


class _CallableModule(ModuleType):
    """Lets `tokenmill.prepare(...)` be called whether the name stands for the function or for this package.

    Importing a package binds its name in the parent, over the function of the same name.
    """

    __call__ = staticmethod(prepare)


sys.modules[__name__].__class__ = _CallableModule
