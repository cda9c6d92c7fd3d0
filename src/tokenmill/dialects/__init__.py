"""Config files of other projects as native ones.

1. In: the tables of a TOML file: ours, KempnerForge's, or those of the torchtitan fork with data stages.
2. Does: tells which of them it is, checks what it says of data by the rules of its own project, and says the same
   in native tables.
3. Out: native tables for `config.parse_config`, notes on what was taken how; native tables as the text of a file.
4. Must not know: files, stores, tokenizers, ranks. It is given tables and a number of ranks.
"""

from tokenmill.dialects.detect import Translation, translate
from tokenmill.dialects.write import to_toml

__all__ = ["Translation", "to_toml", "translate"]
