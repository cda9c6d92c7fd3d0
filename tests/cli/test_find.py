"""From a kept field, such as a url, to documents, steps and a quarantine."""

from __future__ import annotations

import json

import pytest

import tokenmill as tm

URLS = [f"https://a.b/{number % 20}" for number in range(30)]


@pytest.fixture
def found_run(tmp_path):
    """Return the config of a run whose source keeps url and id."""
    rows = [{"text": f"page {number} of the mill", "url": url, "id": number} for number, url in enumerate(URLS)]
    (tmp_path / "web.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = tm.PrepareOptions(keep=("url", "id"))
    tm.prepare(tmp_path / "web.jsonl", out=tmp_path / "web", tokenizer="bytes", options=options, progress=False)
    (tmp_path / "run.toml").write_text(
        "# my run\n[run]\nsteps = 12\nglobal_batch_size = 4\nseq_len = 32  # short\n\n"
        '[[sources]]\nname = "web"\nstore = "web"'
    )
    return tmp_path / "run.toml"


def test_inspect_finds_documents_by_a_kept_field(tokenmill, found_run):
    store = found_run.parent / "web"
    (first, second) = tokenmill("inspect", store, "--find", "url=https://a.b/7", "--json").json
    assert (first["store"], first["document"], first["origin"]["place"]) == ("web", 7, 8)
    assert (second["document"], second["text"]) == (27, "<|bos|>page 27 of the mill<|eos|>")
    assert tokenmill("inspect", store, "--find", "id=27").lines == [
        "document 27 of web, from web.jsonl:28",
        "  <|bos|>page 27 of the mill<|eos|>",
    ]
    assert [each["document"] for each in tokenmill("inspect", found_run, "--find", "id=3", "--json").json] == [3]


def test_inspect_says_that_no_document_has_the_field(tokenmill, found_run):
    outcome = tokenmill("inspect", found_run.parent / "web", "--find", "url=https://a.b", "--json")
    assert (outcome.code, outcome.out) == (1, "[]\n")
    assert "no document has url=https://a.b; the value must be the whole" in outcome.err
    outcome = tokenmill("inspect", found_run.parent / "web", "--find", "https://a.b")
    assert (outcome.code, "expected FIELD=VALUE, got 'https://a.b'" in outcome.err) == (1, True)
    outcome = tokenmill("inspect", found_run.parent / "web", "--find", "uri=x")
    assert "unknown field 'uri'; did you mean 'url'?" in outcome.err


def test_when_by_a_field_is_when_of_each_document(tokenmill, found_run):
    arguments = ("when", found_run, "--source", "web", "--json")
    one, two = tokenmill(*arguments, "--find", "url=https://a.b/7").json
    assert one == tokenmill(*arguments, "--document", 7).json
    assert two == tokenmill(*arguments, "--document", 27).json
    assert one["uses"]


@pytest.mark.parametrize("both", [(), ("--document", 3, "--find", "id=3")])
def test_when_takes_a_document_or_a_field(tokenmill, found_run, both):
    outcome = tokenmill("when", found_run, "--source", "web", *both)
    assert (outcome.code, "expected one of --document and --find" in outcome.err) == (1, True)


def test_when_names_an_unknown_source_and_a_value_that_no_document_has(tokenmill, found_run):
    outcome = tokenmill("when", found_run, "--source", "wob", "--find", "id=3")
    assert "unknown source: 'wob'; did you mean 'web'?" in outcome.err
    outcome = tokenmill("when", found_run, "--source", "web", "--find", "id=99")
    assert (outcome.code, "no document of 'web' has id=99" in outcome.err) == (1, True)
