"""Parquet files of every layout are read, and damaged ones give texts or an error that names them."""

import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.documents.corpora import bad_of, num_lines_of, read, reasons_of, texts_of

from tokenmill.documents import columns, cut_files, find_files, sample_texts, streams
from tokenmill.errors import DocumentError

LAYOUTS = st.fixed_dictionaries(
    {
        "compression": st.sampled_from(["none", "snappy", "zstd"]),
        "use_dictionary": st.booleans(),
        "data_page_version": st.sampled_from(["1.0", "2.0"]),
        "data_page_size": st.sampled_from([1, 40, 1 << 20]),
        "write_batch_size": st.sampled_from([1, 7, 1024]),
        "dictionary_pagesize_limit": st.sampled_from([1, 100, 1 << 20]),
        "row_group_size": st.sampled_from([1, 10, 1000]),
        "write_page_checksum": st.booleans(),
        "write_statistics": st.booleans(),
    }
)
CELLS = st.lists(
    st.one_of(st.none(), st.text(max_size=12), st.sampled_from(["", "yes", "no"])), min_size=1, max_size=60
)


def write(path, cells, *, nullable=True, kind=None, **layout):
    schema = pa.schema([pa.field("text", kind or pa.string(), nullable=nullable), pa.field("n", pa.int64())])
    pq.write_table(pa.table({"text": cells, "n": range(len(cells))}, schema=schema), path, **layout)
    return path


@given(cells=CELLS, layout=LAYOUTS, batch_bytes=st.sampled_from([1, 30, 1 << 20]))
@example(cells=["x"] * 1000 + [None] + ["y"] * 1000, layout={"write_batch_size": 3000}, batch_bytes=1 << 20)
@example(cells=[f"{n}" for n in range(5000)] * 2, layout={"compression": "zstd"}, batch_bytes=1 << 20)
def test_texts_nulls_and_lines_are_those_that_were_written(tmp_path_factory, cells, layout, batch_bytes):
    """[K1.a]"""
    path = write(tmp_path_factory.mktemp("pages") / "a.parquet", cells, **layout)
    batches = read(path, 1 << 30, batch_bytes=batch_bytes)
    assert texts_of(batches) == [cell for cell in cells if cell is not None]
    assert [line for batch in batches for line in batch.lines] == [i for i, c in enumerate(cells) if c is not None]
    assert bad_of(batches) == [
        (line, "not_text", "field 'text' is null") for line, cell in enumerate(cells) if cell is None
    ]
    assert num_lines_of(batches) == len(cells)


@given(cells=st.lists(st.text(max_size=12), min_size=1, max_size=60), layout=LAYOUTS)
def test_columns_that_cannot_be_null_are_read(tmp_path_factory, cells, layout):
    path = write(tmp_path_factory.mktemp("pages") / "a.parquet", cells, nullable=False, **layout)
    assert texts_of(read(path)) == cells


@given(number=st.integers(1, 3000), seed=st.integers(0, 99))
def test_dictionaries_of_every_size_are_read(tmp_path_factory, number, seed):
    """Of every width of an index, with rows that repeat and rows that do not."""
    generator = random.Random(seed)
    words = [f"word {index}" for index in range(number)]
    cells = [word for _ in range(60) for word in [generator.choice(words)] * generator.choice([1, 1, 2, 30])]
    path = write(tmp_path_factory.mktemp("pages") / "a.parquet", words + cells)
    assert texts_of(read(path)) == words + cells


@pytest.mark.parametrize("kind", [pa.large_string(), pa.binary(), pa.large_binary()], ids=str)
def test_other_types_of_text_are_read(tmp_path, kind):
    path = write(tmp_path / "a.parquet", ["a", "ä", None], kind=kind)
    assert texts_of(read(path)) == ["a", "ä"]


@pytest.mark.parametrize("use_dictionary", [True, False])
def test_cells_that_are_no_text_are_bad_and_the_rest_is_read(tmp_path, use_dictionary):
    cells = pa.array([b"a", b"\xff", b"x" * 600, b"b", None], pa.binary()).view(pa.string())
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": cells}), path, use_dictionary=use_dictionary)
    batches = read(path, max_record_bytes=500)
    assert texts_of(batches) == ["a", "b"]
    assert reasons_of(batches) == [(1, "utf8"), (2, "too_long"), (4, "not_text")]


def test_a_batch_has_about_its_size_whatever_the_page(tmp_path):
    path = write(tmp_path / "a.parquet", ["x" * 1000] * 500, use_dictionary=False)
    batches = read(path, batch_bytes=10_000)
    assert all(10_000 <= sum(map(len, batch.documents)) < 20_000 for batch in batches[:-1])
    assert all(100 <= len(batch.documents) < 200 for batch in read(path, batch_documents=100)[:-1])


OTHER_LAYOUTS = {
    "gzip": {"compression": "gzip"},
    "lz4": {"compression": "lz4"},
    "brotli": {"compression": "brotli"},
    "delta": {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}},
    "delta lengths": {"use_dictionary": False, "column_encoding": {"text": "DELTA_LENGTH_BYTE_ARRAY"}},
}


@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
def test_other_layouts_are_read(tmp_path, layout):
    cells = [f"{n} text" for n in range(100)]
    path = write(tmp_path / "a.parquet", cells, row_group_size=30, **OTHER_LAYOUTS[layout])
    assert texts_of(read(path)) == cells


@pytest.mark.parametrize("column", [pa.array([{"b": "x"}, None]), pa.array(["x", None]).dictionary_encode()])
def test_other_columns_are_read(tmp_path, column):
    pq.write_table(pa.table({"a": column}), tmp_path / "a.parquet")
    assert texts_of(read(tmp_path / "a.parquet", text_field="a.b" if column.type.num_fields else "a")) == ["x"]


def test_a_checksum_that_is_wrong_is_an_error(tmp_path):
    """[C1]"""
    path = tmp_path / "a.parquet"
    layout = {"compression": "none", "write_page_checksum": True, "write_statistics": False}
    data = write(path, ["abcd", "efgh"], **layout).read_bytes()
    assert data.count(b"abcd") == 1
    path.write_bytes(data.replace(b"abcd", b"abce"))
    with pytest.raises(DocumentError, match=r"a\.parquet: must be an intact Parquet file, got .*CRC"):
        read(path)


DAMAGED = [
    ["a", "b", None, "c"] * 5 + ["a"] * 40,
    [None] * 30 + ["a"] * 30 + ["b"] * 20,
    ["one", None, "two", "zwei ä", "two"] * 5,
    [f"{n}" for n in range(40)],
    ["x"] * 50,
    [None] * 20,
]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(1, 60))])
def test_of_damaged_pages_every_row_is_read_or_the_file_is_named(tmp_path, seed):
    """[C1, S.e] Never a crash, and never fewer rows than the file says without an error."""
    generator, path = random.Random(seed), tmp_path / "a.parquet"
    outcomes = {"error": 0, "texts": 0}
    for _ in range(400):
        cells, nullable = generator.choice(DAMAGED), generator.random() < 0.8
        layout = {
            "compression": generator.choice(["none", "snappy", "zstd"]),
            "use_dictionary": generator.random() < 0.7,
            "data_page_version": generator.choice(["1.0", "2.0"]),
            "data_page_size": generator.choice([1, 40, 1 << 20]),
            "write_batch_size": generator.choice([7, 1024]),
            "write_statistics": False,
        }
        damage(write(path, cells, nullable=nullable or None in cells, **layout), generator)
        outcome = rows_or_error(path)
        if isinstance(outcome, str):
            assert outcome.startswith(f"{path}: must be an intact Parquet file, got ")
        else:
            assert outcome == len(cells), (cells, layout)
        outcomes["error" if isinstance(outcome, str) else "texts"] += 1
    assert min(outcomes.values()) > 40


def rows_or_error(path):
    try:
        return num_lines_of(read(path))
    except DocumentError as error:
        return str(error)


def damage(path, generator):
    """Change a byte or two of the column of texts."""
    about = pq.ParquetFile(path).metadata.row_group(0).column(0)
    begin = about.dictionary_page_offset or about.data_page_offset
    data = bytearray(path.read_bytes())
    for _ in range(generator.choice([1, 1, 2])):
        place = generator.randrange(begin, begin + about.total_compressed_size)
        data[place] = generator.choice([generator.randrange(256), 0, 1, 2, 255, data[place] ^ 1])
    path.write_bytes(data)


def test_an_index_that_has_no_bits_is_an_error(tmp_path):
    """[C1] The width of two words, damaged to none: all rows would be the first word."""
    path = tmp_path / "a.parquet"
    layout = {"compression": "none", "write_statistics": False}
    data = bytearray(write(path, [None] * 30 + ["a"] * 30 + ["b"] * 20, **layout).read_bytes())
    about = pq.ParquetFile(path).metadata.row_group(0).column(0)
    widths = [
        place
        for place in range(about.data_page_offset, about.data_page_offset + about.total_compressed_size)
        if data[place : place + 2] == b"\1\x3c"  # one bit, then thirty times the same
    ]
    assert len(widths) == 1
    data[widths[0]] = 0
    path.write_bytes(data)
    with pytest.raises(DocumentError, match=r"a\.parquet: must be an intact Parquet file, got"):
        read(path)


def test_a_small_file_cannot_hold_without_end(tmp_path, monkeypatch):
    """A text that is stored once may stand in any number of rows."""
    path = tmp_path / "bomb.parquet"
    pq.write_table(pa.table({"text": pa.array(["x" * 1000] * 100_000)}), path, compression="zstd")
    assert path.stat().st_size < 20_000
    monkeypatch.setattr(streams, "_CAP_BYTES", 1 << 20)
    with pytest.raises(DocumentError, match=r"bomb\.parquet: must hold at most 1048576 bytes.*raise max_expansion"):
        read(path, max_expansion=2)
    assert len(texts_of(read(path, max_expansion=10**6))) == 100_000


def test_each_file_is_opened_once_to_be_cut_however_often(tmp_path, monkeypatch):
    """A build takes a sample, which cuts all files to find its places, and cuts them again for its units."""
    opened = []
    open_parquet = columns._open_parquet

    def counted(file):
        opened.append(file.name)
        return open_parquet(file)

    monkeypatch.setattr(columns, "_open_parquet", counted)
    for number in range(9):
        write(tmp_path / f"{number}.parquet", ["a", "b", "c"], row_group_size=1)
    files = find_files(tmp_path).files
    assert len(list(cut_files(files, chunk_bytes=1 << 20))) == 1
    assert opened == [file.name for file in files]
    opened.clear()
    assert len(list(cut_files(files, chunk_bytes=1))) == 27
    assert opened == []
    assert sample_texts(files, "text") == ["a", "b", "c"] * 9
    assert opened == [file.name for file in files]


def test_a_file_that_is_replaced_is_cut_again(tmp_path):
    path = write(tmp_path / "a.parquet", ["ab"] * 4, row_group_size=2)
    for row_group_size in (2, 1, 4):
        write(tmp_path / "other", ["ab"] * 4, row_group_size=row_group_size).replace(path)
        cut = list(cut_files(find_files(path).files, chunk_bytes=1))
        assert len(cut) == 4 // row_group_size
