from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import tokenmill as tm
from tokenmill.run.run import Run

ENTRY = Path(sys.executable).parent / "tokenmill"


def spans_of(found):
    """Return the spans of `what --json`, each with its row."""
    return [
        {"slot": row["slot"], "source": row["source"], "row": row["row"], **span}
        for row in found["rows"]
        for span in row["spans"]
    ]


def test_what_names_the_rows_of_the_global_batch_in_order(tokenmill, run_toml):
    """[O1.a]"""
    run = Run.from_toml(run_toml)
    plan, loader = run.plan(), run.loader(arrays=("input_ids",))
    for step in (0, 5, 6, 9):
        sources, rows = plan.rows(step)
        spans = spans_of(tokenmill("what", run_toml, "--step", step, "--json").json)
        seen = list(dict.fromkeys((span["slot"], span["source"], span["row"]) for span in spans))
        assert seen == [
            (slot, plan.sources[source], row)
            for slot, (source, row) in enumerate(zip(sources.tolist(), rows.tolist(), strict=True))
        ]
        ids = loader[step]["input_ids"]
        for slot in range(len(rows)):
            found: list[int] = []
            for span in spans:
                if span["slot"] == slot:
                    document = run.stores[span["source"]].fetch_record(span["document"], "sequence")
                    found += document[span["start"] : span["start"] + span["length"]].tolist()
            # A full row has one token more than it has inputs, the last label; another is filled with padding.
            assert found[:16] == ids[slot].tolist()[: len(found)]


def test_what_shows_the_text_of_each_span(tokenmill, run_toml, folder):
    """[O1.a]"""
    texts = {
        name: [json.loads(line)["text"] for line in (folder / f"{name}.jsonl").read_text("utf-8").splitlines()]
        for name in ("web", "books")
    }
    spans = spans_of(tokenmill("what", run_toml, "--step", 3, "--json").json)
    for span in spans:
        framed = [b"<|bos|>", *(bytes([b]) for b in texts[span["source"]][span["document"]].encode()), b"<|eos|>"]
        pieces = framed[span["start"] : span["start"] + span["length"]]
        end = next((end for end in range(16, len(pieces)) if pieces[end][0] & 0xC0 != 0x80), len(pieces))
        piece = b"".join(pieces[:end]).decode(errors="replace")
        shown = piece.replace("\n", "⏎").replace("\t", "→").replace("\x1b", "\ufffd")
        assert span["text"].removesuffix("…") == shown


def test_what_of_a_rank_is_its_slice(tokenmill, run_toml):
    """[O1.a]"""
    whole = tokenmill("what", run_toml, "--step", 2, "--json").json["rows"]
    parts = [
        tokenmill("what", run_toml, "--step", 2, "--rank", rank, "--world-size", 4, "--json").json["rows"]
        for rank in range(4)
    ]
    assert [span for part in parts for span in part] == whole
    assert [sorted({span["slot"] for span in part}) for part in parts] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_what_as_a_table_shows_documents_as_they_are(tokenmill, run_toml):
    done = tokenmill("what", run_toml, "--step", 7, "--full")
    assert (done.code, done.err) == (0, "")
    assert done.lines[0].strip() == "Step 7, stage 'late'"
    assert "[bold]" in done.out
    assert "\x1b" not in done.out
    without = tokenmill("what", run_toml, "--step", 7, "--no-text")
    assert without.code == 0
    assert "[bold]" not in without.out


def test_no_name_of_what_is_broken_on_a_narrow_terminal(tokenmill, tmp_path, monkeypatch):
    """A long address stands on a line of its own, as it is copied from there."""
    monkeypatch.setenv("COLUMNS", "80")
    address = "https://docs.example.org/en/latest/library/something/very/long/page.html?with=query&and=more"
    text = "These are the words of a page, which are more than sixteen tokens."
    with tarfile.open(tmp_path / "pages-with-a-long-name.tar", "w") as tar:
        for number in range(12):
            for ending, data in (("txt", text), ("json", json.dumps({"url": address}))):
                member = tarfile.TarInfo(f"html/{number:06}.{ending}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data.encode()))
    options = tm.PrepareOptions(keep=("__key__", "url"))
    store = {"out": tmp_path / "html-documents", "tokenizer": "bytes", "workers": 1, "progress": False}
    tm.prepare(tmp_path / "pages-with-a-long-name.tar", options=options, **store)
    tables = '[run]\nsteps = 2\nglobal_batch_size = 2\nseq_len = 99\n[[sources]]\nname = "html-documents"\n'
    (tmp_path / "run.toml").write_text(f'{tables}store = "html-documents"\n', encoding="utf-8")
    spans = spans_of(tokenmill("what", tmp_path / "run.toml", "--step", 1, "--json").json)
    title, head, *lines = tokenmill("what", tmp_path / "run.toml", "--step", 1, "--full").lines
    assert (title, head.split()) == (
        "Step 1, stage 'main'",
        ["slot", "source", "row", "document", "tokens", "from"],
    )
    assert len(lines) == 4 * len(spans)
    for span, line, *below in zip(spans, *(lines[place::4] for place in range(4)), strict=True):
        tokens = f"{span['start']}:{span['start'] + span['length']}"
        where = f"pages-with-a-long-name.tar member {span['document'] + 1}"
        placed = [str(span[name]) for name in ("slot", "source", "row", "document")]
        assert line.split(maxsplit=5) == [*placed, tokens, where]
        key = f"__key__=html/{span['document']:06}"
        assert below == [f"      {each}" for each in (key, f"url={address}", span["text"])]
    assert max(len(line) for line in (title, head, *lines) if address not in line) <= 80


def test_when_is_the_inverse_of_what(tokenmill, run_toml):
    """[O1.b]"""
    uses: dict[tuple[str, int], list[dict[str, object]]] = {}
    for step in range(10):
        for span in spans_of(tokenmill("what", run_toml, "--step", step, "--no-text", "--json").json):
            places = uses.setdefault((span["source"], span["document"]), [])
            place = {"step": step, "slot": span["slot"], "row": span["row"]}
            spans = {"start": span["start"], "length": span["length"]}
            if places and {key: places[-1][key] for key in place} == place:
                places[-1]["spans"].append(spans)
            else:
                places.append({**place, "spans": [spans]})
    for name, count in (("web", 60), ("books", 25)):
        for document in range(count):
            found = tokenmill("when", run_toml, "--source", name, "--document", document, "--json").json
            assert found["uses"] == uses.get((name, document), [])


def test_when_as_a_table(tokenmill, run_toml):
    found = tokenmill("when", run_toml, "--source", "web", "--document", 4, "--json").json["uses"]
    done = tokenmill("when", run_toml, "--source", "web", "--document", 4)
    assert (done.code, done.err) == (0, "")
    assert [line.strip() for line in done.lines[:2]] == [
        "from web.jsonl:5",
        f"Document 4 of 'web': {len(found)} uses",
    ]
    rows = [
        tuple(map(int, match)) for match in re.findall(r"^\s*(\d+)\s+(\d+)\s+(\d+)\s+\d+:", done.out, re.MULTILINE)
    ]
    assert rows == [(use["step"], use["slot"], use["row"]) for use in found]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["what", "--step", 10], r"step: must lie within 0:10, got 10; .*"),
        (["what", "--step", -1], r"step: must lie within 0:10, got -1; .*"),
        (["what", "--step", 0, "--rank", 4, "--world-size", 4], r"--rank: must lie within .*, got 4 and 4; fix .*"),
        (["what", "--step", 0, "--rank", 0, "--world-size", 3], r"--rank: .* divide 8 rows, got 0 and 3; fix .*"),
        (["what", "--step", 0, "--rank", 0, "--world-size", 0], r"--rank: must lie within .*, got 0 and 0; fix .*"),
        (["when", "--source", "wbe", "--document", 0], r"unknown source: 'wbe'; did you mean 'web'\?"),
        (
            ["when", "--source", "web", "--document", 60],
            r".*stores/web: document out of range: 60; .*",
        ),
        (
            ["when", "--source", "web", "--document", -1],
            r".*stores/web: document out of range: -1; .*",
        ),
    ],
)
def test_a_step_source_or_document_outside_the_plan_is_refused(tokenmill, run_toml, arguments, message):
    done = tokenmill(arguments[0], run_toml, *arguments[1:])
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(f"error: {message}\n", done.err)


def test_the_process_tells_an_error_by_its_exit_code(run_toml):
    done = subprocess.run([ENTRY, "what", run_toml, "--step", "99"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: step: must lie within 0:10, got 99; .*\n", done.stderr)


def test_what_and_when_name_the_file_and_line_of_every_document(tokenmill, run_toml):
    """[O1.a, O1.b]"""
    run = Run.from_toml(run_toml)
    found = tokenmill("what", run_toml, "--step", 3, "--no-text", "--json").json
    assert (found["step"], found["stage"]) == (3, run.plan().at(3).stage)
    for span in spans_of(found):
        origin = {"file": f"{span['source']}.jsonl", "place": span["document"] + 1, "counts": "line", "kept": {}}
        assert span["origin"] == origin
        when = tokenmill(
            "when", run_toml, "--source", span["source"], "--document", span["document"], "--json"
        ).json
        assert (when["source"], when["document"], when["origin"]) == (span["source"], span["document"], origin)
    assert re.search(r" web\.jsonl:\d+$", tokenmill("what", run_toml, "--step", 3, "--full").out, re.MULTILINE)
