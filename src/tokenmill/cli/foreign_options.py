"""Options of commands that open token files of other projects: what these do not say of themselves."""

from __future__ import annotations

from typing import Annotated

import typer

Dtype = Annotated[str | None, typer.Option(help="Of ids in files that do not say it: uint16, uint32, ...")]
VocabSize = Annotated[int | None, typer.Option(help="Ids of files of other projects must be below.")]
EosId = Annotated[int | None, typer.Option(help="Id that ends documents where the format has no boundaries.")]
BosId = Annotated[int | None, typer.Option(help="Id that starts documents.")]
Format = Annotated[str | None, typer.Option(help="Format of files of other projects; default: told by them.")]
