"""What live text is opened from."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFace
from tokenizers import models, pre_tokenizers, trainers

from tokenmill.build import prepare
from tokenmill.documents import ReadOptions, find_files, read_unit
from tokenmill.encode.engines import open_tokenizer
from tokenmill.errors import ConfigError, DocumentError, TokenizerError
from tokenmill.live import ForeignTokenizer, LiveOptions, open_live
from tokenmill.live.source import HEAD, TAIL, WHOLE, cut_windows
from tokenmill.loader import IGNORE
from tokenmill.store import open_store


@pytest.fixture
def tokenizer_file(tmp_path):
    """Train a tiny byte-level BPE."""
    native = HuggingFace(models.BPE())
    native.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    native.train_from_iterator(["the mill grinds the grain of the village"] * 9, trainer)
    native.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def test_live_text_has_the_tokens_of_a_prepared_store(corpus, tmp_path, tokenizer_file, make_loader):
    source = open_live(
        corpus,
        tokenizer=tokenizer_file,
        options=LiveOptions(seq_len=32, packing="concat", shuffle=False, lanes=1),
    )
    prepare(corpus, out=tmp_path / "store", tokenizer=tokenizer_file, workers=1, progress=False)
    store = open_store(tmp_path / "store")
    assert source.tokenizer.identity.to_json() == store.manifest.tokenizer
    loader = make_loader(source, steps=10**6, global_batch_size=1)
    # Every token is a label once, but for the first of each document.
    expected = [
        token
        for document in range(store.num_documents)
        for token in store.fetch_record(document, "sequence")[1:].tolist()
    ]
    seen = []
    for batch in loader:
        labels = batch["labels"][0]
        seen += labels[labels != IGNORE].tolist()
        if loader.text.positions()[0].epoch == 1:
            break
    assert seen == expected


def test_an_open_tokenizer_is_used_as_it_is(corpus):
    tokenizer = open_tokenizer("bytes", add_eos=False)
    assert open_live(corpus, tokenizer=tokenizer, options=LiveOptions(seq_len=8)).tokenizer is tokenizer
    with pytest.raises(ConfigError, match="add_bos: must be left to a tokenizer that is already open, got True"):
        open_live(corpus, tokenizer=tokenizer, options=LiveOptions(seq_len=8, add_bos=True))


def test_options_say_where_bos_and_eos_stand(corpus):
    options = LiveOptions(seq_len=8, add_bos=False)
    identity = open_live(corpus, tokenizer="bytes", options=options).tokenizer.identity
    assert (identity.add_bos, identity.add_eos) == (False, True)
    with pytest.raises(ConfigError, match="bos_best_fit needs documents that start with BOS"):
        open_live(corpus, tokenizer="bytes", options=LiveOptions(seq_len=8, add_bos=False, packing="bos_best_fit"))


def test_an_object_with_the_methods_of_nanochat_is_wrapped(corpus, numbers):
    tokenizer = open_live(corpus, tokenizer=numbers(), options=LiveOptions(seq_len=8)).tokenizer
    assert isinstance(tokenizer, ForeignTokenizer)
    encoded = tokenizer.encode(["5 6", "", "7"])
    assert (encoded.ids.tolist(), encoded.offsets.tolist()) == ([5, 6, 7], [0, 2, 2, 3])
    assert tokenizer.decode(encoded.ids) == "5 6 7"
    assert (tokenizer.identity.bos_id, tokenizer.identity.add_bos, tokenizer.identity.vocab_size) == (
        0,
        True,
        60_000,
    )
    assert tokenizer.identity == ForeignTokenizer(inner=numbers()).identity
    assert tokenizer.identity != ForeignTokenizer(inner=numbers(shift=1)).identity
    assert tokenizer.identity != ForeignTokenizer(inner=numbers(60_001)).identity


def test_an_object_that_is_no_tokenizer_or_does_not_do_as_asked_is_refused(corpus, numbers):
    with pytest.raises(
        TokenizerError, match="have get_bos_token_id, get_vocab_size, encode and decode, got object"
    ):
        open_live(corpus, tokenizer=object(), options=LiveOptions(seq_len=8))

    class Forgetful(numbers):
        def encode(self, text, prepend=None, num_threads=8):  # noqa: ARG002
            return super().encode(text, None, num_threads)

    class Failing(numbers):
        def encode(self, text, prepend=None, num_threads=8):
            if "7" in text:
                raise OSError("no room")
            return super().encode(text, prepend, num_threads)

    with pytest.raises(
        TokenizerError, match="Forgetful: encode must give a list of ids for each text, with prepend=0"
    ):
        ForeignTokenizer(inner=Forgetful()).encode(["5 6"])
    with pytest.raises(TokenizerError, match="Failing: must encode 1 texts, got no room"):
        ForeignTokenizer(inner=Failing()).encode(["7"])


def test_a_source_is_known_by_all_that_decides_its_rows(corpus, make_source, numbers):
    plain = make_source()
    assert plain.fingerprint(4) == make_source(on_error="skip").fingerprint(4)
    others = [make_source(seed=9), make_source(tokenizer=numbers(shift=1)), make_source(corpus / "b.jsonl")]
    assert len({source.fingerprint(lanes) for source in (plain, *others) for lanes in (4, 8)}) == 8


def test_a_row_group_that_is_read_many_times_is_told(tmp_path, texts, write, make_source, caplog):
    source = make_source(write(tmp_path / "x.parquet", texts([9] * 90), [90]), window_bytes=20)
    with caplog.at_level(logging.WARNING, logger="tokenmill"):
        source.windows(1)
    assert "windows are parts of one row group or compressed file" in caplog.text


def test_a_sample_that_cannot_be_read_stops_or_is_told(tmp_path, tokenizer_file, caplog):
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(b"no gzip at all")
    with pytest.raises(DocumentError, match=r"x\.jsonl\.gz"):
        open_live(path, tokenizer=tokenizer_file, options=LiveOptions(seq_len=8))
    with caplog.at_level(logging.WARNING, logger="tokenmill"):
        open_live(path, tokenizer=tokenizer_file, options=LiveOptions(seq_len=8, on_error="skip"))
    assert "engines are compared on hard texts alone" in caplog.text


def test_saved_datasets_are_read(tmp_path, make_loader, numbers, texts):
    import datasets

    datasets.Dataset.from_dict({"text": texts([5] * 20)}).save_to_disk(str(tmp_path / "saved"))
    source = open_live(f"hf:{tmp_path / 'saved'}", tokenizer=numbers(), options=LiveOptions(seq_len=8))
    labels = [batch["labels"].copy() for batch in make_loader(source, steps=30)]
    assert {label for array in labels for label in array.ravel().tolist()} == {-100, *range(10, 110)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seq_len": 0}, "seq_len: must be at least 1, got 0"),
        ({"lanes": 0}, "lanes: must be at least 1, got 0"),
        ({"window_bytes": 0}, "window_bytes: must be at least 1, got 0"),
        ({"packing": "bestfit"}, "did you mean 'best_fit'"),
        ({"split": "cut"}, "split: expected one of"),
        ({"on_error": "ignore"}, "on_error: expected one of stop, skip, got 'ignore'"),
        ({"text_field": "a..b"}, "text_field: must be a name"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        LiveOptions(**{"seq_len": 8, **options})


def test_what_made_a_source_is_json(make_source):
    made_of = make_source().made_of(4)
    assert json.loads(json.dumps(made_of)) == made_of


# Which documents a lane reads when


def documents_of(window):
    """Return the texts of a window."""
    texts = [text for batch in read_unit(window.unit, ReadOptions()) for text in batch.documents]
    return [texts[number] for number in window.members(0, len(texts)).tolist()]


@given(
    lanes=st.integers(1, 40),
    window_bytes=st.integers(20, 3000),
    shuffle=st.booleans(),
    seed=st.integers(0, 5),
    epoch=st.integers(0, 3),
)
def test_the_lanes_of_an_epoch_read_every_document_exactly_once(corpus, lanes, window_bytes, shuffle, seed, epoch):
    """[R1.d]"""
    files = find_files(corpus).files
    windows = cut_windows(files, window_bytes=window_bytes, lanes=lanes, seed=seed, shuffle=shuffle)
    whole = cut_windows(files, window_bytes=10**9, lanes=1, seed=0, shuffle=False)
    read = [
        text
        for lane in range(lanes)
        for turn in range(windows.num_turns(lane))
        for text in documents_of(windows.at(lane, epoch, turn))
    ]
    assert sorted(read) == sorted(documents_of(whole.at(0, 0, 0)))
    assert windows.num_windows >= lanes


def test_a_lane_begins_with_its_share_of_a_window_and_ends_with_the_rest(corpus):
    windows = cut_windows(find_files(corpus).files, window_bytes=300, lanes=4, seed=0, shuffle=True)
    for lane in range(4):
        turns = [windows.at(lane, 0, turn) for turn in range(windows.num_turns(lane))]
        if lane < 3:
            assert [turn.take for turn in turns] == [HEAD, *[WHOLE] * (len(turns) - 2), TAIL]
            assert turns[0].number == turns[-1].number
            assert (turns[0].head, turns[0].of) == (lane + 1, 4)
        else:
            assert [turn.take for turn in turns] == [WHOLE] * len(turns)
        assert [windows.after(lane, 0, turn) for turn in range(len(turns))] == [
            *((0, turn) for turn in range(1, len(turns))),
            (1, 0),
        ]


def test_without_shuffling_windows_are_dealt_in_turn_and_whole(corpus):
    windows = cut_windows(find_files(corpus).files, window_bytes=300, lanes=4, seed=0, shuffle=False)
    for lane in range(4):
        turns = [windows.at(lane, 5, turn) for turn in range(windows.num_turns(lane))]
        assert [turn.number for turn in turns] == list(range(lane, windows.num_windows, 4))
        assert {turn.take for turn in turns} == {WHOLE}


def test_large_row_groups_and_files_are_read_in_parts_of_about_the_size_of_a_window(tmp_path, texts, write):
    path = write(tmp_path / "x.parquet", texts([50] * 100), [100])
    files = find_files(path).files
    windows = cut_windows(files, window_bytes=files[0].bytes // 5, lanes=1, seed=0, shuffle=False)
    assert (windows.num_windows, windows.max_parts) == (5, 5)
    assert [len(documents_of(windows.at(0, 0, turn))) for turn in range(5)] == [20] * 5
    assert str(windows.at(0, 0, 2)) == f"{path} row groups 0:1 (part 3 of 5)"


def test_windows_are_named_by_file_and_place(corpus):
    windows = cut_windows(find_files(corpus).files, window_bytes=1000, lanes=1, seed=0, shuffle=False)
    names = [str(windows.at(0, 0, turn)) for turn in range(windows.num_turns(0))]
    assert names[0].startswith(f"{corpus / 'a.parquet'} row groups 0:")
    assert any(" bytes 0:1000" in name for name in names)
    assert any("c.jsonl.gz" in name for name in names)
    assert any("d.arrow record batches" in name for name in names)


def test_a_source_without_records_is_refused(tmp_path):
    (tmp_path / "x.jsonl").write_text("")
    with pytest.raises(DocumentError, match="must have records, got 1 empty files"):
        cut_windows(find_files(tmp_path).files, window_bytes=8, lanes=1, seed=0, shuffle=True)
