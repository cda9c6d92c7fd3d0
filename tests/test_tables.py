"""Tables become records, or an error that says where, the rule, the value and the way out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import pytest

from tokenmill import Run, open_store, open_tokenizer
from tokenmill.encode.chat.template import load_template
from tokenmill.encode.recipe.recipe import load_recipe
from tokenmill.errors import ConfigError, StoreError, TokenmillError
from tokenmill.tables import Number, as_json, read_json, read_list, read_table


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    name: str
    documents: int = 0

    def __post_init__(self) -> None:
        if self.name == "":
            raise ConfigError("shard: name must be given, got ''; write one")


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    kind: Literal["seq", "sft"] = "seq"
    shards: tuple[Shard, ...] = ()
    by_domain: Mapping[str, Shard] = field(default_factory=dict)
    first: Shard | None = None
    fate: Mapping[str, Literal["train", "mask"]] = field(default_factory=dict)
    weights: Mapping[str, Number] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()
    size: Annotated[int, msgspec.Meta(ge=1, le=9)] | None = None
    share: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    column: Annotated[str, msgspec.Meta(pattern="^[a-z]+$", description="the name of a field")] = "text"
    names: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)] = ("a",)
    seed: int | str = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    flag: bool = False


def test_records_within_records_are_read_and_written_back():
    table = {
        "kind": "sft",
        "shards": [{"name": "a", "documents": 3}, {"name": "b"}],
        "by_domain": {"web": {"name": "c"}},
        "first": {"name": "d"},
        "fate": {"user": "mask"},
        "weights": {"web": 1, "code": 0.5},
        "size": 9,
        "share": 0,
        "seed": "x",
        "options": {"a": [1, None, {"b": True}]},
    }
    store = read_table(Store, table, "store")
    assert store.shards == (Shard(name="a", documents=3), Shard(name="b"))
    assert store.by_domain == {"web": Shard(name="c")}
    assert store.first == Shard(name="d")
    assert (store.weights, str(store.weights["web"])) == ({"web": 1, "code": 0.5}, "1")
    assert (store.share, str(store.share), store.options) == (0.0, "0.0", {"a": [1, None, {"b": True}]})
    assert read_table(Store, as_json(store), "store") == store
    assert list(as_json(Shard(name="a"))) == ["name", "documents"]
    assert as_json(store)["shards"] == [{"name": "a", "documents": 3}, {"name": "b", "documents": 0}]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"shard": []}, "store: unknown key: 'shard'; did you mean 'shards'?"),
        ({"shards": [{}, {"nme": 1}]}, "store.shards[1]: unknown key: 'nme'; did you mean 'name'?"),
        (
            {"by_domain": {"web": {"nme": 1}}},
            "store.by_domain.web: unknown key: 'nme'; did you mean 'name'?",
        ),
        ({"first": {"nme": 1}}, "store.first: unknown key: 'nme'; did you mean 'name'?"),
        ({"shards": [{"documents": 1}]}, "store.shards[0]: missing key: name; add name = ..."),
        ({"by_domain": {"a": {}}}, "store.by_domain.a: missing key: name; add name = ..."),
        ({"first": {}}, "store.first: missing key: name; add name = ..."),
        ({"first": 3}, "store.first: expected a table, got 3; write [store.first]"),
        ({"shards": {}}, "store.shards: expected a list of tables, got {}; change its type"),
        ({"shards": [3]}, "store.shards[0]: expected a table, got 3; write [[store.shards]]"),
        ({"shards": [None]}, "store.shards[0]: expected a table, got None; write [[store.shards]]"),
        (
            {"shards": [{"name": "a"}, {"name": "b", "documents": "2"}]},
            "store.shards[1].documents: expected a whole number, got '2'; leave out the quotes",
        ),
        (
            {"by_domain": {"web": {"name": "b"}, "code": {"name": 2}}},
            "store.by_domain.code.name: expected a string, got 2; change its type",
        ),
        ({"by_domain": []}, "store.by_domain: expected a table, got []; change its type"),
        ({"kind": "stf"}, "store.kind: expected one of seq, sft, got 'stf'; did you mean 'sft'?"),
        ({"kind": 3}, "store.kind: expected one of seq, sft, got 3; change its type"),
        (
            {"fate": {"user": "mask", "tool": "tarin"}},
            "store.fate.tool: expected one of train, mask, got 'tarin'; did you mean 'train'?",
        ),
        (
            {"weights": {"web": "1"}},
            "store.weights: expected a table of numbers, got {'web': '1'}; change its type",
        ),
        ({"sizes": [1, 2.5]}, "store.sizes: expected a list of whole numbers, got [1, 2.5]; change its type"),
        ({"size": 0}, "store.size: expected a whole number that is at least 1 and at most 9, got 0; change it"),
        (
            {"size": True},
            "store.size: expected a whole number that is at least 1 and at most 9, got True; change its type",
        ),
        ({"share": 1}, "store.share: expected a number that is at least 0 and below 1, got 1; change it"),
        ({"column": "a.b"}, "store.column: expected the name of a field, got 'a.b'; change it"),
        ({"names": []}, "store.names: expected a list of strings, 1 or more, got []; change it"),
        ({"seed": 1.5}, "store.seed: expected a whole number or a string, got 1.5; change its type"),
        ({"options": {1: 2}}, "store.options: expected a table, got {1: 2}; change its type"),
        ({"flag": 1}, "store.flag: expected true or false, got 1; change its type"),
        ({"shards": [{"name": ""}]}, "shard: name must be given, got ''; write one"),
        ({"by_domain": {"a": {"name": ""}}}, "shard: name must be given, got ''; write one"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_with_its_place(table, message):
    with pytest.raises(ConfigError) as raised:
        read_table(Store, table, "store")
    assert str(raised.value) == message


def test_a_place_that_ends_with_a_colon_is_a_file():
    with pytest.raises(
        StoreError, match=r"^a\.json: shards\[0\]\.name: expected a string, got 3; change its type$"
    ):
        read_json(Store, '{"shards": [{"name": 3}]}', "a.json:", error=StoreError)
    with pytest.raises(StoreError, match=r"^a\.json: unknown key: 'x'; "):
        read_json(Store, '{"x": 1}', "a.json:", error=StoreError)
    with pytest.raises(StoreError, match=r"^a\.json: first: expected a table, got 3; write \[first\]$"):
        read_json(Store, '{"first": 3}', "a.json:", error=StoreError)
    with pytest.raises(StoreError, match=r"^a\.json: expected a table, got \[\]; write {\.\.\.}$"):
        read_json(Store, "[]", "a.json:", error=StoreError)
    for text in (b"{", b"\xff", "[" * 100_000):
        with pytest.raises(StoreError, match=r"^a\.json: expected JSON, got .*; put back what was written there$"):
            read_json(Store, text, "a.json:", error=StoreError)


def test_a_list_of_tables_may_be_left_out():
    assert read_list(Shard, {}, "shards") == ()
    assert read_list(Shard, {"shards": [{"name": "a"}]}, "shards") == (Shard(name="a"),)
    with pytest.raises(ConfigError, match=r"^shards: expected a list of tables, got dict; write \[\[shards\]\]$"):
        read_list(Shard, {"shards": {}}, "shards")
    with pytest.raises(ConfigError, match=r"^shards\[1\]: missing key: name"):
        read_list(Shard, {"shards": [{"name": "a"}, {}]}, "shards")


OPENERS = {
    "x.jinja": lambda path: load_template(str(path), tokenizer="bytes"),
    "recipe.json": lambda path: load_recipe(str(path)),
    "tokenizer.json": lambda path: open_tokenizer(str(path)),
    "tokenizer.model": lambda path: open_tokenizer(str(path)),
    "r50k_base.tiktoken": lambda path: open_tokenizer(f"tiktoken:{path}"),
    "run.toml": Run.from_toml,
    "manifest.json": lambda path: open_store(path.parent),
}


@pytest.mark.parametrize("name", OPENERS)
def test_a_file_that_no_memory_holds_is_refused_by_its_size(tmp_path, name):
    """A sparse file takes no room on the disk, and may say any size [S.e]."""
    path = tmp_path / name
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(
        TokenmillError, match=rf"(file too large: .*{name}, more than|{name}: must have at most) \d+ bytes"
    ):
        OPENERS[name](path)
