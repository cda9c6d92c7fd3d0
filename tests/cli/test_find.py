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
    assert (outcome.code, "expected FIELD=VALUE, got 'https://a.b'" in outcome.err) == (2, True)
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
    assert (outcome.code, "expected one of --document and --find" in outcome.err) == (2, True)


def test_when_names_an_unknown_source_and_a_value_that_no_document_has(tokenmill, found_run):
    outcome = tokenmill("when", found_run, "--source", "wob", "--find", "id=3")
    assert "unknown source: 'wob'; did you mean 'web'?" in outcome.err
    outcome = tokenmill("when", found_run, "--source", "web", "--find", "id=99")
    assert (outcome.code, "no document of 'web' has id=99" in outcome.err) == (1, True)


def quarantined(tokenmill, run, *more, urls=("https://a.b/7", "https://a.b/12")):
    (run.parent / "urls.txt").write_text("\n".join(urls) + "\n\n")
    return tokenmill("quarantine", run, "--file", run.parent / "urls.txt", *more)


def test_quarantine_by_url_edits_the_config_and_keeps_its_comments(tokenmill, found_run):
    before = found_run.read_text()
    outcome = quarantined(tokenmill, found_run, "--from-step", 3, "--reason", 'licence "x"')
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.lines[0] == "2 of 2 values of 'url' are in 3 documents of 'web'"
    numbers = found_run.parent / "run-quarantine-web-1.txt"
    assert numbers.read_text() == "7  # https://a.b/7\n12  # https://a.b/12\n27  # https://a.b/7\n"
    edit = '[[quarantine]]\nsource = "web"\nfrom_step = 3\nfile = "run-quarantine-web-1.txt"\n'
    assert found_run.read_text() == f'{before}\n\n{edit}reason = "licence \\"x\\""\n'
    run = tm.Run.from_toml(found_run)
    assert [use.step for number in (7, 12, 27) for use in run.plan().when("web", number) if use.step >= 3] == []
    assert run.plan().fingerprint_at(3) == tm.Run.build(
        str(found_run.parent / "web"), seq_len=32, global_batch_size=4, steps=12
    ).plan().fingerprint_at(3)


def test_a_second_quarantine_adds_what_is_new_and_leaves_the_first(tokenmill, found_run):
    quarantined(tokenmill, found_run)
    first = found_run.read_text()
    again = quarantined(tokenmill, found_run)
    assert (again.code, "nothing to add" in again.out, found_run.read_text()) == (0, True, first)
    more = quarantined(tokenmill, found_run, "--json", urls=("https://a.b/7", "https://a.b/1")).json
    assert (more["documents"], more["added"], more["missing"]) == (4, 2, [])
    assert found_run.read_text().startswith(first)
    assert (
        found_run.parent / "run-quarantine-web-2.txt"
    ).read_text() == "1  # https://a.b/1\n21  # https://a.b/1\n"


def test_a_missing_url_stops_the_quarantine_unless_it_may(tokenmill, found_run):
    before, urls = found_run.read_text(), ("https://a.b/3", "https://nowhere", "https://nowhere")
    outcome = quarantined(tokenmill, found_run, urls=urls)
    assert (outcome.code, found_run.read_text()) == (1, before)
    assert "not found: https://nowhere" in outcome.err
    assert "1 of 2 values of 'url' are in no document of 'web'" in outcome.err
    assert list(found_run.parent.glob("*quarantine*")) == []
    allowed = quarantined(tokenmill, found_run, "--skip-missing", "--json", urls=urls).json
    assert (allowed["missing"], allowed["added"]) == (["https://nowhere"], 2)


def test_quarantine_by_a_number_that_is_kept(tokenmill, found_run):
    outcome = quarantined(tokenmill, found_run, "--field", "id", "--json", urls=("29", "0"))
    assert (outcome.json["added"], outcome.json["values"]) == (2, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: 'quarantine = [{ source = "web", from_step = 1, documents = [1] }]\n' + text, "at its end"),
        (lambda text: text.replace("steps = 12", "steps = 2"), "from_step must be below run.steps"),
    ],
)
def test_a_quarantine_that_cannot_be_added_leaves_everything(tokenmill, found_run, change, message):
    found_run.write_text(change(found_run.read_text()))
    before = found_run.read_text()
    outcome = quarantined(tokenmill, found_run, "--from-step", 3)
    assert (outcome.code, found_run.read_text()) == (2, before)
    assert message in outcome.err
    assert list(found_run.parent.glob("*quarantine*")) == []


def test_quarantine_of_a_linked_config_edits_the_file_that_it_leads_to(tokenmill, found_run, tmp_path):
    link = tmp_path / "jobs" / "job.toml"
    link.parent.mkdir()
    link.symlink_to(found_run)
    found_run.chmod(0o640)
    outcome = quarantined_by(tokenmill, link, found_run.parent / "urls.txt")
    numbers = found_run.parent / "run-quarantine-web-1.txt"
    assert (outcome.code, link.is_symlink(), found_run.stat().st_mode & 0o777) == (0, True, 0o640)
    assert (f"wrote {numbers}: 2 documents" in outcome.out, numbers.is_file()) == (True, True)
    assert tm.Run.from_toml(link).config.quarantine[0].file == numbers.name


def quarantined_by(tokenmill, run, file):
    file.write_text("https://a.b/7\n")
    return tokenmill("quarantine", run, "--file", file)
