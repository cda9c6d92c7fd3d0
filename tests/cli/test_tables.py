"""Tables and summaries at several widths: whole words and numbers, no line that is too long."""

from __future__ import annotations

import re

import pytest
from rich.cells import cell_len

from tokenmill.cli.tables import shortened, table_lines, wrapped
from tokenmill.view.tables import FACTS, Bar, Table

SCREEN = 24


def lines_of(table: Table, width: int) -> list[str]:
    return [line.plain for lines in table_lines(table, width) for line in lines]


def test_numbers_are_right_and_texts_left_under_headers_that_wrap_between_words():
    table = Table(
        title="T", columns=("name", "rows per epoch", "at"), rows=[("web", 1234, "step 5"), ("b", None, "–")]
    )
    assert lines_of(table, 80) == [
        "name  rows per epoch  at",
        "web            1,234  step 5",
        "b                  –  –",
    ]
    assert lines_of(table, 24) == [
        "        rows per",
        "name       epoch  at",
        "web        1,234  step 5",
        "b              –  –",
    ]


def test_a_long_text_is_wrapped_between_words_and_a_long_word_loses_its_middle():
    table = Table(
        title="T", columns=("name", "n", "why"), rows=[("w" * 40, 1_234_567_890, "one two three four five six")]
    )
    lines = lines_of(table, 44)
    assert max(map(len, lines)) <= 44
    assert re.search(r"^w+…w+  1,234,567,890  ", lines[1])
    assert " ".join(" ".join(line.split()[-3:]) for line in lines[1:]).endswith("four five six")
    assert [
        word for word in ("one", "two", "three", "four", "five", "six") if word not in " ".join(lines).split()
    ] == []


def test_a_clipped_table_has_one_line_for_each_row():
    rows = [(number, "one two three four five six seven") for number in range(3)]
    lines = lines_of(Table(title="", columns=("n", "text"), rows=rows, clipped=True), 20)
    assert lines == ["n  text", *(f"{number}  one two three…" for number in range(3))]


def test_columns_that_do_not_fit_are_left_out_and_named():
    columns = ("name", *(f"number{index}" for index in range(6)))
    lines = lines_of(Table(title="", columns=columns, rows=[("web", *[1_234_567] * 6)]), 30)
    assert lines == [
        "name    number0    number1",
        "web   1,234,567  1,234,567",
        "not shown at this width:",
        "number2, number3, number4,",
        "number5",
    ]


def test_estimates_are_shown_whole_next_to_counted_figures():
    rows = [("a" * 40, "about 1,234,567,890", "x" * 30), ("b", 7, "–")]
    lines = lines_of(Table(title="T", columns=("name", "labels", "why"), rows=rows), 60)
    assert "about 1,234,567,890" in lines[1]
    assert lines[2].index("7") == lines[1].index("890") + 2


def test_facts_have_no_header_and_bars_fit_the_width():
    assert lines_of(Table(title="T", columns=FACTS, rows=[("kind", "seq"), ("n", 3)]), 80) == [
        "kind  seq",
        "n     3",
    ]
    bars = Table(title="T", columns=("tokens", ""), rows=[("1 to 2", Bar(1.0)), ("3 to 4", Bar(0.5))])
    for width, longest in ((80, 40), (28, 20)):
        assert [line.count("█") for line in lines_of(bars, width)] == [0, longest, longest // 2]


def test_wide_characters_count_as_the_cells_that_they_take():
    text = "水" * 30
    assert cell_len(shortened(text, 11)) <= 11
    assert max(map(cell_len, wrapped("水水 水水 水水", 5))) <= 5
    rows = [(1, text)]
    assert max(map(cell_len, lines_of(Table(title="", columns=("n", "text"), rows=rows), 30))) <= 30


def commands() -> list[list[object]]:
    run, store = "run.toml", "stores/web"
    return [
        ["plan", run],
        ["plan", run, "--full"],
        ["plan", run, "--remote", "--full"],
        ["plan", "long.toml"],
        ["plan", "long.toml", "--full"],
        ["what", run, 5],
        ["what", run, 5, "--full"],
        ["what", "long.toml", 5],
        ["when", run, "--source", "web", "--document", 3],
        ["inspect", run],
        ["inspect", store],
        ["inspect", store, "--document", 3],
        ["prepare", "web.jsonl", "--out", "new", "--workers", 1],
        ["prepare", "web.jsonl", "--out", "units", "--plan-only"],
        ["export", store, "--format", "npy", "--out", "npy"],
    ]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_no_line_of_a_table_or_summary_is_longer_than_the_terminal(tokenmill, folder, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.chdir(folder)
    long = (folder / "run.toml").read_text(encoding="utf-8").replace("steps = 10", "steps = 3_000_000")
    for name in ("web", "books"):
        long = long.replace(f"{name} = ", f"{name}-with-a-long-name = ").replace(
            f'"{name}"', f'"{name}-with-a-long-name"'
        )
    (folder / "long.toml").write_text(long, encoding="utf-8")
    for arguments in commands():
        done = tokenmill(*arguments)
        assert (done.code, done.err) == (0, ""), arguments
        texts = done.out.partition("Examples: ")[0]  # the texts of examples are shown as they are
        assert [line for line in texts.splitlines() if cell_len(line) > width] == [], arguments
        assert "continued" not in done.out.replace("(continued)", "")


@pytest.mark.parametrize("width", [60, 80, 200])
def test_every_number_of_the_summary_is_whole(tokenmill, run_toml, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", "1000")
    whole = {word for word in tokenmill("plan", run_toml).out.split() if re.search(r"\d", word)}
    monkeypatch.setenv("COLUMNS", str(width))
    assert whole - set(tokenmill("plan", run_toml).out.split()) == set()


def test_summaries_fit_one_screen_of_80_columns(tokenmill, run_toml, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    sources = "".join(f'[[sources]]\nname = "s{number}"\nstore = "stores/web"\n\n' for number in range(9))
    text = f'[run]\nseed = 1\nsteps = 90\nglobal_batch_size = 64\nseq_len = 16\nweights = "tokens"\n\n{sources}'
    run_toml.with_name("many.toml").write_text(text, encoding="utf-8")
    many = run_toml.with_name("many.toml")
    for arguments in (["plan", run_toml], ["plan", many], ["what", run_toml, 5], ["what", many, 5]):
        done = tokenmill(*arguments)
        assert (done.code, len(done.lines) <= SCREEN) == (0, True), done.out


def test_what_shows_the_first_documents_and_counts_the_others(tokenmill, run_toml):
    run_toml.write_text(run_toml.read_text().replace("global_batch_size = 8", "global_batch_size = 32"))
    spans = sum(len(row["spans"]) for row in tokenmill("what", run_toml, 2, "--json").json["rows"])
    done = tokenmill("what", run_toml, 2)
    assert re.match(rf"Step 2, stage 'base': 32 rows of 16 tokens \(.*\), {spans} spans", done.out)
    assert f"{spans - 16} more spans; --full prints all, with their tokens" in done.lines
    assert len(tokenmill("what", run_toml, 2, "--full").lines) >= 2 * spans


def test_what_begins_a_document_with_its_words_and_not_with_bos(tokenmill, run_toml):
    texts = [line.split(maxsplit=4)[4] for line in tokenmill("what", run_toml, 5).lines[2:] if line]
    assert [text for text in texts if text.startswith("<|bos|>")] == []
    assert any("<|bos|>" in line for line in tokenmill("what", run_toml, 5, "--full").lines)
