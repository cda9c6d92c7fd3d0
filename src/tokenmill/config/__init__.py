"""What a run is.

1. In: the tables of a TOML file: ours, or those of another project (`dialects`).
2. Does: reads them into records, refuses what cannot be right, fills in what stages leave out, turns tokens into
   steps, and cuts stages into the parts that a plan is compiled from.
3. Out: a `Config`; the `StageSpec` of each part.
"""

from tokenmill.config.run import Config, parse_config, read_tables

__all__ = ["Config", "parse_config", "read_tables"]
