import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import ConfigError, PlanError
from tokenmill.packing import ConcatRows, Policy, pack_rows
from tokenmill.packing.index import pack_one
from tokenmill.packing.packers import BOS_ADDED, FIRST, TOKENS, TRAINED
from tokenmill.store import open_store
from tokenmill.types import NO_DOCUMENTS

POLICIES = [
    Policy(),
    Policy(split="truncate_start"),
    Policy(split="truncate_end"),
    Policy(split="drop"),
    Policy(name="bos_best_fit"),
    Policy(name="bos_best_fit", crop="discard"),
    Policy(name="padded", split="truncate_start"),
    Policy(name="padded", split="truncate_end"),
    Policy(name="padded", split="drop"),
]
KEEP_ALL = [Policy(), Policy(name="bos_best_fit")]


def trained_labels(rows, offsets):
    """Count for every token of the stream how often it is a label, walking all spans of all rows."""
    counts = np.zeros(int(offsets[-1]), np.int64)
    spans = rows.spans(np.arange(rows.num_rows))
    for number in range(rows.num_rows):
        used = 0
        bos = None
        for span in spans.row(number):
            begin = int(offsets[span.document]) + span.start
            joined = bos == span.document and span.start > 0
            counts[begin + (not joined) : begin + span.length] += 1
            used += span.length
            bos = span.document if (span.start, span.length) == (0, 1) else None
            assert span.start + span.length <= offsets[span.document + 1] - offsets[span.document]
        assert used <= rows.seq_len + 1
    return counts


lengths_and_row = st.integers(1, 30).flatmap(
    lambda seq_len: st.tuples(
        st.just(seq_len),
        st.lists(
            st.one_of(
                st.integers(0, 4),
                st.sampled_from([seq_len, seq_len + 1, seq_len + 2]),
                st.integers(0, 5 * seq_len),
            ),
            min_size=1,
            max_size=60,
        ),
    )
)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.name}-{p.split}-{p.crop}")
@given(shape=lengths_and_row)
def test_every_token_has_one_fate_and_the_totals_balance(make_store, policy, shape):
    """[P2.a] Tokens in = trained + masked + dropped by reason, and what is counted is what the rows hold."""
    seq_len, lengths = shape
    path, tokens, offsets = make_store("any", lengths, add_bos=True)
    rows = pack_rows(open_store(path), seq_len=seq_len, policy=policy)
    fates = rows.fates()
    counts = trained_labels(rows, offsets)
    assert counts.max(initial=0) <= 1
    assert fates.tokens == tokens.size
    assert fates.trained == counts.sum()
    assert fates.tokens == fates.trained + fates.masked + sum(fates.dropped.values())
    spans = rows.spans(np.arange(rows.num_rows))
    used = [sum(span.length for span in spans.row(i)) for i in range(rows.num_rows)]
    assert fates.padding == sum(max(0, seq_len - n) for n in used)


@pytest.mark.parametrize("policy", KEEP_ALL, ids=lambda p: p.name)
@given(shape=lengths_and_row)
def test_the_defaults_drop_nothing(make_store, policy, shape):
    """[P2.b] Every token but the first of its document is a label exactly once."""
    seq_len, lengths = shape
    path, _, offsets = make_store("any", lengths, add_bos=True)
    rows = pack_rows(open_store(path), seq_len=seq_len, policy=policy)
    expected = np.ones(int(offsets[-1]), np.int64)
    expected[offsets[:-1][np.diff(offsets) > 0]] = 0
    assert np.array_equal(trained_labels(rows, offsets), expected)
    assert rows.fates().dropped == {}


@pytest.mark.parametrize("policy", [*KEEP_ALL, Policy(split="truncate_end")], ids=lambda p: f"{p.name}-{p.split}")
def test_a_document_of_a_million_tokens_is_packed(make_store, policy):
    path, _, offsets = make_store("long", [5, 1_000_000, 7], add_bos=True)
    rows = pack_rows(open_store(path), seq_len=2048, policy=policy)
    fates = rows.fates()
    assert fates.tokens == offsets[-1]
    assert fates.dropped == ({"truncated": 1_000_000 - 2049} if policy.split == "truncate_end" else {})
    assert trained_labels(rows, offsets).sum() == fates.trained


@given(shape=lengths_and_row)
def test_rows_of_bos_best_fit_start_with_bos_and_are_full(make_store, shape):
    seq_len, lengths = shape
    path, _, _ = make_store("any", lengths, add_bos=True)
    for crop in ("return", "discard"):
        rows = pack_rows(open_store(path), seq_len=seq_len, policy=Policy(name="bos_best_fit", crop=crop))
        spans = rows.spans(np.arange(rows.num_rows))
        for number in range(rows.num_rows):
            assert spans.row(number)[0].start == 0
            last = crop == "return" and number == rows.num_rows - 1
            assert last or sum(span.length for span in spans.row(number)) == seq_len + 1


def test_best_fit_wastes_little(make_store):
    """Less than 0.05% padding on log-normal lengths, and only documents longer than a row are cut."""
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(400), 1.2, 16_384), 1, 100_000).astype(int)
    path, _, _ = make_store("web", lengths.tolist())
    rows = pack_rows(open_store(path), seq_len=2048, policy=Policy())
    assert rows.fates().padding / (rows.num_rows * 2048) < 0.0005
    spans = rows.spans(np.arange(rows.num_rows))
    short = lengths[spans.document] <= 2049
    assert (spans.length[short] == lengths[spans.document[short]]).all()


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.name}-{p.split}-{p.crop}")
@given(shape=lengths_and_row)
def test_rows_of_a_document_are_those_whose_spans_name_it(make_store, policy, shape):
    seq_len, lengths = shape
    path, _, _ = make_store("any", lengths, add_bos=True)
    rows = pack_rows(open_store(path), seq_len=seq_len, policy=policy)
    spans = rows.spans(np.arange(rows.num_rows))
    for document in range(len(lengths)):
        holding = [r for r in range(rows.num_rows) if document in {span.document for span in spans.row(r)}]
        assert rows.rows_of(np.array([document]))[0].tolist() == holding


def test_several_windows_and_many_shards_are_packed_alike(make_store):
    """The rows depend on the lengths of documents, not on shards or threads."""
    lengths = np.random.default_rng(1).integers(0, 12, 40_000).tolist()
    found = []
    for shard_tokens in (10**9, 900):
        path, _, _ = make_store("many", lengths, max_tokens_per_shard=shard_tokens)
        store = open_store(path)
        rows = pack_rows(store, seq_len=50, policy=Policy())
        asked = np.random.default_rng(2).permutation(rows.num_rows)[:500]
        spans = rows.spans(asked)
        found.append([spans.row(i) for i in range(asked.size)])
        assert len(store._maps._maps) <= 64
        windows = {span.document // 16_384 for row in found[-1] for span in row}
        assert windows == {0, 1, 2}
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["best_fit", "padded"])
def test_a_document_that_must_not_be_cut_is_refused_by_name(make_store, name):
    path, _, _ = make_store("any", [5, 11, 12, 13])
    with pytest.raises(
        ConfigError, match=r"at most 12 tokens, got 13 in document 3; raise seq_len, or set on_long"
    ):
        pack_rows(open_store(path), seq_len=11, policy=Policy(name=name, split="forbid"))
    pack_rows(open_store(path), seq_len=12, policy=Policy(name=name, split="forbid"))


@pytest.mark.parametrize("name", ["best_fit", "padded"])
@given(shape=lengths_and_row)
def test_documents_longer_than_a_row_are_dropped_whole_and_no_others(make_store, name, shape):
    seq_len, lengths = shape
    path, _, _ = make_store("any", lengths)
    rows = pack_rows(open_store(path), seq_len=seq_len, policy=Policy(name=name, split="drop"))
    spans = rows.spans(np.arange(rows.num_rows))
    kept = [document for document, length in enumerate(lengths) if 0 < length <= seq_len + 1]
    assert sorted(spans.document.tolist()) == kept
    assert spans.length.tolist() == [lengths[document] for document in spans.document.tolist()]
    lost = sum(length for length in lengths if length > seq_len + 1)
    assert rows.fates().dropped == ({"too_long": lost} if lost else {})
    assert rows.num_long == sum(length > seq_len + 1 for length in lengths)


def test_padded_has_a_row_for_every_document_with_tokens(make_store):
    path, _, _ = make_store("any", [5, 0, 1, 9])
    rows = pack_rows(open_store(path), seq_len=8, policy=Policy(name="padded"))
    spans = rows.spans(np.arange(rows.num_rows))
    assert [[span.document for span in spans.row(i)] for i in range(rows.num_rows)] == [[0], [2], [3]]


def test_a_fragment_that_fills_a_row_is_packed_once():
    """Beside one of the same size that needs BOS before it, and so does not fit."""
    fragments = np.array([[0, 1], [5, 0], [9, 9]], np.int32)
    lengths = np.array([14, 9], np.int32)
    packed = pack_one(0, lambda _: (fragments, lengths), 8, Policy(name="bos_best_fit"), "here", NO_DOCUMENTS)
    # The whole document; BOS and 8 tokens of the other; BOS and its last.
    assert (packed.rows, packed.pieces, packed.cuts) == (3, 3, 2)
    assert packed.counts[[TOKENS, TRAINED, FIRST, BOS_ADDED]].tolist() == [18, 17, 1, 2]


@pytest.mark.parametrize("row", [-1, 10**6])
def test_a_row_outside_is_refused(make_store, row):
    path, _, _ = make_store("some", [9])
    with pytest.raises(PlanError, match="rows must lie within 0:"):
        pack_rows(open_store(path), seq_len=4, policy=Policy()).spans(np.array([row]))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("name", "bestfit", "did you mean 'best_fit'"),
        ("split", "truncate", "did you mean 'truncate_end'|did you mean 'truncate_start'"),
        ("crop", "discrd", "did you mean 'discard'"),
    ],
)
def test_an_unknown_choice_names_the_nearest(field, value, message):
    with pytest.raises(ConfigError, match=message):
        Policy(**{field: value})


def test_descriptions_tell_policies_and_lengths_apart(make_store):
    path, _, _ = make_store("any", [9, 9, 30], add_bos=True)
    store = open_store(path)
    described = [pack_rows(store, seq_len=n, policy=p).description for n in (8, 9) for p in POLICIES]
    described += [ConcatRows(store=store, seq_len=n).description for n in (8, 9)]
    assert len({tuple(sorted(d.items())) for d in described}) == len(described)
