"""Sources of a run: its stores, live texts and the stores of its evals, opened and checked to go together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill.config.run import Config, SourceConfig
from tokenmill.config.schedule import long_documents
from tokenmill.errors import ConfigError
from tokenmill.fingerprint import key64
from tokenmill.tables import is_address, read_table
from tokenmill.types import NO_DOCUMENTS, RECORD_TYPES, STORED_ARRAYS, Int64Array

if TYPE_CHECKING:
    from tokenmill.config.evals import EvalSource
    from tokenmill.live.lanes import LiveRows
    from tokenmill.packing import ConcatRows, PackedRows, Policy, RecordRows
    from tokenmill.store import Store
    from tokenmill.store.remote.fetch import Network

Places = tuple[str, ...]
"""Paths and addresses of the stores that are read as one."""


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Open stores and live texts of a config. Each is opened when it is first needed, and then kept open.

    Tables of the config that name no data, such as stages and edits, are not read here.
    """

    config: Config
    folder: Path
    """Folder that relative paths start from."""

    @cached_property
    def stores(self) -> dict[str, Store]:
        """The open store of each stored source; all share one bounded set of maps."""
        from tokenmill.store.maps import MapCache

        stored = [source for source in self.config.sources if not source.live]
        maps = MapCache() if stored else None
        # Stores in object storage are opened at the same time, because each waits for round trips.
        remote = [source for source in stored if any(map(is_address, places_of(source.store)))]
        with ThreadPoolExecutor(max(1, len(remote))) as pool:
            opened = pool.map(lambda source: self._open(source, maps), remote)
            remote_stores = dict(zip((source.name for source in remote), opened, strict=True))
        stores = {
            source.name: remote_stores[source.name] if source.name in remote_stores else self._open(source, maps)
            for source in stored
        }
        names = {source.name: source.tokenizer for source in self.config.sources}
        _check_tokenizers(
            {name: _tokenizer_of(store) for name, store in stores.items()}
            | {name: (rows.source.tokenizer.identity.to_json(), names[name]) for name, rows in self.live.items()}
        )
        _check_kinds(stores, self.live)
        return stores

    @cached_property
    def live(self) -> dict[str, LiveRows]:
        """Live texts by name: files are listed and tokenizers open, and [run] decides the rows."""
        return {source.name: self._open_live(source) for source in self.config.sources if source.live}

    @property
    def record_kind(self) -> str | None:
        """Training type of the stores if it is one whose records are rows (pairs, groups, prompts)."""
        return next((s.manifest.kind for s in self.stores.values() if s.manifest.kind in RECORD_TYPES), None)

    @cached_property
    def network(self) -> Network | None:
        """Requests, memory and counters that all stores in object storage share; None if all stores are local."""
        evals = [source.store for config in self.config.evals for source in config.sources]
        stored = [*(source.store for source in self.config.sources), *evals]
        if not any(is_address(path) for each in stored for path in places_of(each)):
            return None
        from tokenmill.store.remote.fetch import Network

        options = self.config.remote
        if options.mirror is not None:
            options = replace(options, mirror=str(self.folder / Path(options.mirror).expanduser()))
        return Network(options)

    def eval_store(self, source: EvalSource) -> Store:
        """Return the store that an eval takes documents from, opened once; its ids must mean what the run's do."""
        if source.source is not None:
            return self.stores[source.source]
        places = places_of(source.store)
        if places not in self._eval_stores:
            from tokenmill.store import open_store

            # It has maps of its own, so that an eval takes none from the training loader.
            store = open_store(self._paths(places), remote=self.network)
            tokenizers = {name: _tokenizer_of(each) for name, each in self.stores.items()}
            _check_tokenizers({**tokenizers, str(store.path): _tokenizer_of(store)})
            self._eval_stores[places] = store
        return self._eval_stores[places]

    @cached_property
    def _eval_stores(self) -> dict[Places, Store]:
        return {}

    def rows(
        self, source: str, seq_len: int, policy: Policy, excluded: Int64Array = NO_DOCUMENTS
    ) -> ConcatRows | PackedRows | RecordRows:
        """Return the rows of a stored source under a policy, without the `excluded` documents.

        Rows are made once per source, length, policy and set of documents. Pairs and groups are never packed.
        """
        from tokenmill.packing import ConcatRows, RecordRows, pack_rows

        key = (source, seq_len, policy, excluded.tobytes())
        if key not in self._rows:
            crossing = self.config.run.cross_document_labels
            store = self.stores[source]
            if store.manifest.kind in RECORD_TYPES:
                self._rows[key] = RecordRows(store=store, seq_len=seq_len, policy=policy, excluded=excluded)
            elif policy.name == "concat":
                self._rows[key] = ConcatRows(
                    store=store, seq_len=seq_len, cross_document_labels=crossing, excluded=excluded
                )
            else:
                self._rows[key] = pack_rows(
                    store, seq_len=seq_len, policy=policy, cross_document_labels=crossing, excluded=excluded
                )
        return self._rows[key]

    @cached_property
    def _rows(self) -> dict[tuple[str, int, Policy, bytes], ConcatRows | PackedRows | RecordRows]:
        return {}

    # Stores

    def _open(self, source: SourceConfig, maps: Any) -> Store:  # noqa: ANN401 - a MapCache, imported when needed
        from tokenmill.store import open_store

        store = open_store(
            self._store_paths(source),
            maps=maps,
            dtype=source.dtype,
            vocab_size=source.vocab_size,
            eos_id=self._eos_id(source),
            bos_id=source.bos_id,
            format=source.format,
            remote=self.network,
            verify_pages=source.verify_pages,
        )
        for files in store._remotes:
            files.download_indexes()
        return store

    def _paths(self, places: Places) -> list[Path | str]:
        """Return the paths and addresses to open for places of the config."""
        return [
            path
            for place in places
            for path in _dataset_files(self.folder, place) or [place if is_address(place) else self.folder / place]
        ]

    def _store_paths(self, source: SourceConfig) -> list[Path | str]:
        """Return the paths and addresses of a source's stores; documents are prepared first, once."""
        if source.store is not None:
            return self._paths(places_of(source.store))
        from tokenmill.build.cached import cached_store

        recipe: str | dict[str, object] = "text"
        if source.fim is not None:
            section = {"field": source.text_field, "action": "train", "add_special_tokens": True}
            recipe = {"name": "text", "kind": "seq", "input": {"sections": [section]}, "fim": dict(source.fim)}
        store = cached_store(
            self._texts(source),
            tokenizer=self._tokenizer(source),
            text_field=source.text_field if source.fim is None else None,
            folder=self.folder / ".tokenmill" / "stores",
            where=f"source {source.name!r}",
            keep_empty=source.keep_empty,
            recipe=recipe,
        )
        return [store]

    def _eos_id(self, source: SourceConfig) -> int | None:
        """Return the id that ends documents of token files: that of the source, otherwise of its tokenizer."""
        if source.eos_id is not None or source.store is None or source.tokenizer is None:
            return source.eos_id
        from tokenmill.encode.engines import read_identity

        eos_id = read_identity(self._tokenizer(source)).eos_id
        if eos_id is None:
            raise ConfigError(
                f"source {source.name!r}: tokenizer {source.tokenizer!r} has no EOS, which ends documents; set it "
                "in the tokenizer_config.json next to it, or set eos_id"
            )
        return eos_id

    # Text

    def _open_live(self, source: SourceConfig) -> LiveRows:
        from tokenmill.encode.fim import Fim
        from tokenmill.live.lanes import LiveRows
        from tokenmill.live.source import LiveOptions, open_live

        run, lanes = self.config.run, self.config.num_lanes(source)
        options = LiveOptions(
            seq_len=run.seq_len,
            packing=run.packing,
            split=long_documents("run", run.on_long, run.packing),
            crop=run.crop,
            seed=key64(run.seed, "live", source.name) >> 1,  # or sources of one size would be read in one order
            shuffle=run.shuffle != "none",
            text_field=source.text_field,
            lanes=lanes,
            on_error=source.on_error or "stop",
            keep_empty=source.keep_empty,
            fim=None if source.fim is None else read_table(Fim, source.fim, f"source {source.name!r}: fim"),
            window_bytes=source.window_bytes,
        )
        return LiveRows(
            source=open_live(self._texts(source), tokenizer=self._tokenizer(source), options=options),
            lanes=lanes,
            format=options.format,
            cross_document_labels=run.cross_document_labels,
        )

    def _texts(self, source: SourceConfig) -> list[str]:
        """Return the paths of a source's texts; texts in object storage are copied below the run first."""
        texts = [
            text if text.startswith("hf:") or is_address(text) else str(self.folder / text)
            for text in source.documents
        ]
        if not any(map(is_address, texts)):
            return texts
        from tokenmill.build.downloads import copy_inputs
        from tokenmill.documents.inputs import suffix_of

        folder = (self.folder / ".tokenmill" / "inputs").absolute()
        copies = copy_inputs(
            texts, folder, is_known=lambda name: suffix_of(name) is not None, options=self.config.remote
        )
        return list(map(str, copies))

    def _tokenizer(self, source: SourceConfig) -> str:
        assert source.tokenizer is not None
        plain = source.tokenizer == "bytes" or ":" in source.tokenizer
        return source.tokenizer if plain else str(self.folder / source.tokenizer)


def places_of(store: str | Places | None) -> Places:
    """Return the paths and addresses that a `store` of the config names."""
    return (store,) if isinstance(store, str) else store or ()


def _dataset_files(folder: Path, place: str) -> list[Path | str]:
    """Return the Arrow files of a dataset of ids; empty if the path names files to open as they are.

    The `datasets` library opens `hf:` names, and folders of Parquet files, which it converts in its cache.
    """
    local = folder / Path(place.removeprefix("hf:")).expanduser()
    if is_address(place) or not (place.startswith("hf:") or local.is_dir()):
        return []
    if local.is_dir():
        from tokenmill.store.layout import is_ours

        if is_ours(local) or not (place.startswith("hf:") or _has_parquet(local)):
            return [local]
        place = f"hf:{local}"
    from tokenmill.documents.hugging_face import dataset_files

    return list(map(Path, dataset_files(place)))


def _has_parquet(folder: Path) -> bool:
    """Return whether a folder has Parquet files of ids."""
    first = next(folder.rglob("*.parquet"), None)
    if first is None:
        return False
    from tokenmill.store.foreign.titan import is_preprocessed

    return is_preprocessed(first)


# Checks that sources go together


def _check_kinds(stores: Mapping[str, Store], live: Iterable[str]) -> None:
    """Reject sources whose rows do not fit one batch, and arrays that the kernels cannot read."""
    kinds = {name: store.manifest.kind for name, store in stores.items()} | dict.fromkeys(live, "seq")
    families = {name: kind if kind in RECORD_TYPES else "seq" for name, kind in kinds.items()}
    first, *others = families
    for other in others:
        if families[other] != families[first]:
            raise ConfigError(
                f"sources: {first!r} of {kinds[first]} and {other!r} of {kinds[other]} cannot be combined, because "
                "a batch has one training type (seq and sft go together); make one run of each"
            )
    for store in stores.values():
        for key, dtype in store.manifest.keys.items():
            array = STORED_ARRAYS.get(key)
            if array is not None and array.holds in ("mask", "rewards") and dtype != array.dtype:
                raise ConfigError(
                    f"{store.path}: expected {key} of {array.dtype} for training, got {dtype}; "
                    "prepare the store again"
                )


def _tokenizer_of(store: Store) -> tuple[Mapping[str, Any], str | None]:
    """Return the identity of a store's tokenizer, and the name or path that it was prepared with."""
    return store.manifest.tokenizer, store.manifest.recipe.get("tokenizer")


def _check_tokenizers(tokenizers: Mapping[str, tuple[Mapping[str, Any], str | None]]) -> None:
    """Reject sources whose ids have different meanings; each has the identity of its tokenizer and its name."""
    from tokenmill.store.layout import describe_tokenizer, tokenizer_difference

    first, *others = tokenizers
    for other in others:
        differing = tokenizer_difference(tokenizers[first][0], tokenizers[other][0])
        if differing:
            key, left, right, way_out = differing
            values = "" if key == "content" else f": {left!r} and {right!r}"
            one, another = (f"{name!r} with {describe_tokenizer(*tokenizers[name])}" for name in (first, other))
            raise ConfigError(
                f"sources: all must be prepared with one tokenizer, got {one} and {another} that differ in "
                f"{key}{values}; {way_out}"
            )
