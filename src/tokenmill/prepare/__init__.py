"""From files of text to a store.

1. In: paths, globs or folders; the name of a tokenizer; options.
2. Does: cuts the input into units of work, tokenizes units in worker processes, each into a part of its own on
   disk, and appends the parts to the store in input order. Memory does not grow with the input.
3. Out: a finished store, or none; a report. The bytes depend on the documents and the options, never on the
   number of workers or on where files were cut.
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
