"""Runs and stores in a notebook, and the viewer from Python."""

from __future__ import annotations

import html
import re
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from tests.view.conftest import write_lines

import tokenmill as tm
from tokenmill.store.opening import join_stores
from tokenmill.store.remote.upload import upload
from tokenmill.view.pages import store_page
from tokenmill.view.views import Opened, store_view


def page_of(shown):
    """Return the page in the frame that a notebook shows."""
    (srcdoc,) = re.fullmatch(
        r'<iframe sandbox title="[^"]*" style="[^"]*" srcdoc="([^"]*)"></iframe>', shown
    ).groups()
    return html.unescape(srcdoc)


def test_a_run_and_its_report_show_the_tables_of_plan(folder):
    run = tm.Run.from_toml(folder / "run.toml")
    page, report = page_of(run._repr_html_()), page_of(run.report()._repr_html_())
    assert "<svg" in page
    assert "<svg" not in report
    for text in ("late", "books", "<table"):
        assert text in page
        assert text in report


def test_a_plan_shows_its_picture_and_its_stages(folder):
    page = page_of(tm.Run.from_toml(folder / "run.toml").plan()._repr_html_())
    assert "<svg" in page
    assert "first step" in page
    assert "late" in page


def test_a_store_shows_facts_and_examples_with_texts_escaped(folder):
    store = tm.open_store(folder / "stores" / "web")
    page = page_of(store._repr_html_())
    assert "<h2>Examples of web</h2>" in page
    assert "<script" not in page
    assert str(store.num_documents) in page


def test_what_cannot_be_drawn_falls_back_to_its_repr(folder, tmp_path):
    run = tm.Run.build("nowhere", seq_len=16, global_batch_size=4, steps=10, folder=tmp_path)
    assert run._repr_html_() is None
    upload(folder / "stores" / "web", f"file://{tmp_path}/remote")
    assert tm.open_store(f"file://{tmp_path}/remote")._repr_html_() is None


def read(address):
    with urlopen(address, timeout=30) as answer:
        return answer.read().decode()


def test_a_run_in_memory_is_viewed_until_it_is_closed(folder):
    run = tm.Run.build(str(folder / "stores" / "web"), seq_len=16, global_batch_size=4, steps=10, folder=folder)
    viewer = run.view(browser=False)
    try:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", viewer.address)
        assert (str(viewer), repr(viewer)) == (viewer.address, f"<Viewer at {viewer.address}>")
        assert viewer.address in viewer._repr_html_()
        assert "web.jsonl:3" in read(viewer.address + "document?source=web&document=2")
        with pytest.raises(HTTPError, match="404"):
            read(viewer.address.rsplit("/", 2)[0] + "/other-word/")
    finally:
        viewer.close()
    with pytest.raises(OSError, match="refused"):
        read(viewer.address)


def test_stores_are_viewed_as_they_are_open(folder):
    stores = [tm.open_store(folder / "stores" / name) for name in ("web", "books")]
    for store in (stores[0], join_stores(stores)):
        viewer = store.view(browser=False)
        try:
            assert f"{len(store)}" in read(viewer.address + "store")
        finally:
            viewer.close()


def test_a_port_that_is_taken_is_named(folder):
    viewer = tm.open_store(folder / "stores" / "web").view(browser=False)
    port = int(viewer.address.split(":")[2].split("/")[0])
    try:
        with pytest.raises(tm.ConfigError, match=f"port: not available: {port} .*leave it out"):
            tm.open_store(folder / "stores" / "web").view(port=port, browser=False)
    finally:
        viewer.close()


def test_a_store_that_cannot_be_viewed_says_so_in_python(tmp_path):
    run = tm.Run.build("nowhere", seq_len=16, global_batch_size=4, steps=10, folder=tmp_path)
    with pytest.raises(tm.StoreError, match="nowhere"):
        run.view(browser=False)


def test_the_store_view_finds_documents_by_a_kept_field(tmp_path):
    hostile = "https://a.b/<script>"
    rows = [
        {"text": f"page {number}", "url": hostile if number % 30 == 3 else "u", "id": number}
        for number in range(99)
    ]
    write_lines(tmp_path / "web.jsonl", rows)
    options = tm.PrepareOptions(keep=("url", "id"))
    tm.prepare(tmp_path / "web.jsonl", out=tmp_path / "web", tokenizer="bytes", options=options, progress=False)
    opened = Opened.of(tm.open_store(tmp_path / "web"))
    found = store_view(opened, {"field": "url", "value": hostile})
    assert [each.document for each in found.documents] == [3, 33, 63, 93]
    page = store_page(found)
    assert "Documents with url = https://a.b/&lt;script&gt;: 4" in page
    assert "<script" not in page
    assert [each.document for each in store_view(opened, {"field": "id", "value": "7"}).documents] == [7]
    assert ": 50, the first listed" in store_page(store_view(opened, {"field": "url", "value": "u"}))
    assert '<select name="field"><option selected>url</option><option>id</option></select>' in store_page(
        store_view(opened, {})
    )
    with pytest.raises(tm.ConfigError, match="unknown field 'uri'; did you mean 'url'"):
        store_view(opened, {"field": "uri", "value": "u"})
