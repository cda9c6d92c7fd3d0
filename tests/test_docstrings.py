"""Public names explain themselves: arguments, returns, errors, and an example, which tests/test_docs.py runs."""

from __future__ import annotations

import dataclasses
import doctest
import inspect
import re

import pytest

import tokenmill as tm

NAMES = [name for name in tm.__all__ if name != "__version__"]
METHODS = [
    *(tm.Run.from_toml, tm.Run.from_tables, tm.Run.build, tm.Run.loader, tm.Run.plan, tm.Run.report, tm.Run.diff),
    *(tm.Run.fork, tm.Run.what, tm.Run.when, tm.Run.to_toml, tm.Plan.rows, tm.Plan.what, tm.Plan.when),
    *(tm.Loader.batch_at, tm.Loader.load_state_dict, tm.Loader.seek, tm.Store.find, tm.Store.view),
]
"""Methods that the guides teach; each has one or more of the sections."""


def sections_of(text):
    return re.findall(r"^(Args|Returns|Raises|Examples):", text, re.MULTILINE)


def explained(text, names):
    """Return the names that have a line under `Args:`."""
    body = re.search(r"^Args:\n((?:(?: .*)?\n)+)", text + "\n", re.MULTILINE)
    return [name for name in names if body and re.search(rf"^    {name}: ", body[1], re.MULTILINE)]


def parameters_of(function):
    return [
        name for name in inspect.signature(function).parameters if name not in ("self", "cls", "args", "fields")
    ]


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_an_example(name):
    text = inspect.getdoc(getattr(tm, name))
    assert doctest.DocTestParser().get_examples(text) != []
    assert "Examples" in sections_of(text)


@pytest.mark.parametrize("name", [name for name in NAMES if not inspect.isclass(getattr(tm, name))])
def test_every_function_explains_each_argument_its_result_and_its_errors(name):
    function = getattr(tm, name)
    text = inspect.getdoc(function)
    assert sections_of(text) == ["Args", "Returns", "Raises", "Examples"]
    assert explained(text, parameters_of(function)) == parameters_of(function)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__qualname__)
def test_methods_of_the_guides_explain_each_argument_and_their_errors(method):
    text = inspect.getdoc(method)
    assert "Raises" in sections_of(text)
    if "Args" in sections_of(text):
        assert explained(text, parameters_of(method)) == parameters_of(method)
    else:
        assert len(parameters_of(method)) < 2


@pytest.mark.parametrize(
    "name", [name for name in NAMES if dataclasses.is_dataclass(getattr(tm, name)) and name != "Store"]
)
def test_every_record_names_its_arguments(name):
    """Options and tables of a config lead to the page or the command that lists their keys."""
    text = inspect.getdoc(getattr(tm, name))
    assert "Raises" in sections_of(text)
    lists_keys = re.search(r"^The arguments are .*(reference/config\.md|--help)", text, re.MULTILINE)
    assert lists_keys or explained(text, parameters_of(getattr(tm, name)))


@pytest.mark.parametrize("name", NAMES)
def test_a_description_begins_with_a_noun_or_a_verb(name):
    first, *_ = inspect.getdoc(getattr(tm, name)).splitlines()
    assert not re.match(r"(What|Whether|Of|Those)\b", first)
    assert first.endswith((".", ":")) or len(first) > 60
