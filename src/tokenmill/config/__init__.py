"""What a run is.

1. In: the tables of a TOML file: ours, or those of another project (`dialects`).
2. Does: reads them into records, refuses what cannot be right, resolves what stages leave unsaid, and compiles
   the schedule over given row indexes.
3. Out: a `Config`; a plan.
"""

from tokenmill.config.run import Config, parse_config, read_tables

__all__ = ["Config", "parse_config", "read_tables"]
