"""From raw text to the tensors of every training step of a language model.

import tokenmill as tm

tm.prepare("corpus/*.jsonl", out="stores/web", tokenizer="bytes")
run = tm.Run.from_toml("run.toml")
for batch in run.loader(rank=0, world_size=1, micro_batch=8):
    ...
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from tokenmill.hooks import attach

if TYPE_CHECKING:
    from tokenmill.build import PrepareOptions as PrepareOptions
    from tokenmill.build import prepare as prepare
    from tokenmill.config.evals import EvalConfig as EvalConfig
    from tokenmill.config.run import Config as Config
    from tokenmill.config.run import RunConfig as RunConfig
    from tokenmill.config.run import SourceConfig as SourceConfig
    from tokenmill.config.schedule import QuarantineConfig as QuarantineConfig
    from tokenmill.config.schedule import SkipConfig as SkipConfig
    from tokenmill.config.schedule import StageConfig as StageConfig
    from tokenmill.encode.engines import open_tokenizer as open_tokenizer
    from tokenmill.errors import ConfigError as ConfigError
    from tokenmill.errors import ResumeError as ResumeError
    from tokenmill.errors import StoreError as StoreError
    from tokenmill.errors import TokenmillError as TokenmillError
    from tokenmill.loader import Layout as Layout
    from tokenmill.loader import Loader as Loader
    from tokenmill.plan import Plan as Plan
    from tokenmill.run.run import Run as Run
    from tokenmill.store import Store as Store
    from tokenmill.store import detect_format as detect_format
    from tokenmill.store import export_store as export_store
    from tokenmill.store import import_store as import_store
    from tokenmill.store import open_store as open_store
    from tokenmill.store import verify as verify
    from tokenmill.store.remote.upload import upload as upload

__version__ = "0.1.0"

# Late, so that `import tokenmill` costs nothing: each name is loaded when it is first used.
_HOMES = {
    "Config": "tokenmill.config.run",
    "ConfigError": "tokenmill.errors",
    "EvalConfig": "tokenmill.config.evals",
    "Layout": "tokenmill.loader",
    "Loader": "tokenmill.loader",
    "Plan": "tokenmill.plan",
    "PrepareOptions": "tokenmill.build",
    "QuarantineConfig": "tokenmill.config.schedule",
    "ResumeError": "tokenmill.errors",
    "Run": "tokenmill.run.run",
    "RunConfig": "tokenmill.config.run",
    "SkipConfig": "tokenmill.config.schedule",
    "SourceConfig": "tokenmill.config.run",
    "StageConfig": "tokenmill.config.schedule",
    "Store": "tokenmill.store",
    "StoreError": "tokenmill.errors",
    "TokenmillError": "tokenmill.errors",
    "detect_format": "tokenmill.store",
    "export_store": "tokenmill.store",
    "import_store": "tokenmill.store",
    "open_store": "tokenmill.store",
    "open_tokenizer": "tokenmill.encode.engines",
    "prepare": "tokenmill.build",
    "upload": "tokenmill.store.remote.upload",
    "verify": "tokenmill.store",
}

# What methods of lower rooms call in higher ones.
attach(
    {
        "text_of": "tokenmill.inspect.stores",
        "run_html": "tokenmill.view.notebook",
        "compiled_plan_html": "tokenmill.view.notebook",
        "report_html": "tokenmill.view.notebook",
        "store_html": "tokenmill.view.notebook",
        "open_viewer": "tokenmill.view.notebook",
    }
)

__all__ = [*_HOMES, "__version__"]  # noqa: PLE0604 - the names of one table, listed once


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'tokenmill' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
