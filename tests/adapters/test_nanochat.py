"""nanochat's loaders: its signature and shapes, its stream of tokens, and exact resume at any world size."""

from __future__ import annotations

import inspect
import itertools
import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from tests.adapters.ranks import call_ranks

import tokenmill.adapters.nanochat as nanochat
from tokenmill.encode.engines import open_tokenizer
from tokenmill.errors import ConfigError, DocumentError, ResumeError, TokenizerError

FLAT, FLAT_STATE = (
    nanochat.tokenizing_distributed_data_loader,
    nanochat.tokenizing_distributed_data_loader_with_state,
)
FIT = nanochat.tokenizing_distributed_data_loader_bos_bestfit
FIT_STATE = nanochat.tokenizing_distributed_data_loader_with_state_bos_bestfit
BOS = 0
T = 16


class Numbers:
    """A tokenizer with nanochat's methods: a text is numbers, and each is its own id; 0 is BOS."""

    def __init__(self):
        self.threads = set()

    def get_bos_token_id(self):
        return BOS

    def get_vocab_size(self):
        return 60_000

    def encode(self, text, prepend=None, num_threads=8):
        self.threads.add(num_threads)
        return [[prepend, *(int(word) if word.isdecimal() else 7 for word in one.split())] for one in text]

    def decode(self, ids):
        return " ".join(map(str, ids))


def write(path, lengths, start, row_group_size=10):
    """Write documents of unique numbers; return their tokens."""
    documents = []
    for length in lengths:
        documents.append(list(range(start, start + int(length))))
        start += int(length)
    texts = [" ".join(map(str, document)) for document in documents]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=row_group_size)
    return documents


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nanochat")
    rng = np.random.default_rng(0)
    for number in range(4):
        write(folder / f"shard_{number:05d}.parquet", rng.integers(1, 40, 60), 100 + 10_000 * number)
    (folder / "shard_00004.parquet.tmp").write_bytes(b"unfinished")
    return folder


@pytest.fixture(autouse=True)
def base_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    return tmp_path / "base"


@pytest.fixture
def make(folder, request):
    """Open loaders that are closed when the test ends; their states resume after the batch that they came with."""

    def made(loader=FIT_STATE, rows=4, split="train", **more):
        own = {"tokenizer_threads": 1, "device": "cpu", "data_dir": folder, "buffer_size": 10, "prefetched": False}
        more = own | more
        stream = loader(more.pop("tokenizer", None) or Numbers(), rows, T, split, **more)
        request.addfinalizer(stream.close)
        return stream

    return made


def take(stream, count):
    """Return batches as lists, with the state as it comes back from a file."""
    out = []
    for inputs, targets, *state in itertools.islice(stream, count):
        out.append((inputs.tolist(), targets.tolist(), *json.loads(json.dumps(state))))
    return out


def test_the_parameters_are_those_of_nanochat_in_their_order_with_their_defaults():
    wanted = {
        "tokenizer": inspect.Parameter.empty,
        "B": inspect.Parameter.empty,
        "T": inspect.Parameter.empty,
        "split": inspect.Parameter.empty,
        "tokenizer_threads": 4,
        "tokenizer_batch_size": 128,
        "device": "cuda",
        "resume_state_dict": None,
        "buffer_size": 1000,
    }
    for loader in (FLAT_STATE, FIT_STATE):
        parameters = inspect.signature(loader).parameters
        assert {name: item.default for name, item in parameters.items() if name != "more"} == wanted


@pytest.mark.parametrize(("plain", "with_state"), [(FLAT, FLAT_STATE), (FIT, FIT_STATE)], ids=["flat", "bestfit"])
def test_the_loaders_without_state_yield_the_same_pairs(make, plain, with_state):
    assert take(make(plain), 20) == [batch[:2] for batch in take(make(with_state), 20)]


def test_batches_are_int64_tensors_of_rows_and_their_next_tokens(make):
    inputs, targets, state = next(make())
    assert (inputs.shape, targets.shape) == ((4, T), (4, T))
    assert (inputs.dtype, targets.dtype) == (torch.int64, torch.int64)
    assert set(state) == {"pq_idx", "rg_idx", "epoch", "rows", "live"}
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_batches_that_are_kept_are_not_written_over(make):
    kept = list(itertools.islice(make(), 30))
    assert [(inputs.tolist(), targets.tolist()) for inputs, targets, _ in kept] == [
        batch[:2] for batch in take(make(), 30)
    ]


def flat_rows(documents):
    """Cut documents, each behind its BOS, every T tokens; the token behind a row is a target, and the next input.

    A document that ends with it is not taken up again for that token alone.
    """
    rows = [[]]
    for document in documents:
        rest = [BOS, *document]
        while len(rest) > 1 or rest == [BOS]:
            if len(rows[-1]) >= T:
                rows.append([])
            taken = T + 1 - len(rows[-1])
            rows[-1] += rest[:taken]
            rest = rest[taken - 1 :] if len(rest) > taken else []
    return rows


def test_the_flat_loader_delivers_the_stream_token_by_token(tmp_path):
    """One lane and one window: what is left at its end is padded, and no loss sees the padding."""
    rows = flat_rows(write(tmp_path / "a.parquet", [30, 1, 200, 15, 0, 16, 44], 100, 100))
    write(tmp_path / "b.parquet", [40, 40], 9000)
    loader = FLAT(Numbers(), 1, T, "train", device="cpu", data_dir=tmp_path)
    for row in rows:
        (inputs, targets), follows = next(loader), [*row[1:], BOS][:T]
        assert inputs[0].tolist() == (row + [0] * T)[:T]
        assert targets[0].tolist() == follows + [-1] * (T - len(follows))
    assert next(loader)[0][0].tolist() == rows[0][:T]
    loader.close()


def test_in_an_epoch_of_the_flat_loader_every_token_is_a_target_once(make, folder):
    seen = []
    for _, targets, state in make(FLAT_STATE, rows=1, ignore_index=-5, buffer_size=1000):
        seen += [token for token in targets[0].tolist() if token not in (-5, BOS)]
        if state["epoch"] > 1:
            break
    tables = [pq.read_table(folder / f"shard_{number:05d}.parquet") for number in range(3)]
    assert seen == [int(word) for table in tables for text in table["text"].to_pylist() for word in text.split()]


def best_fit(documents, room):
    """Fill rows as nanochat's description says, from a buffer that holds all documents, until it runs short."""
    waiting = [[BOS, *document] for document in documents]
    while sum(map(len, waiting)) >= room:
        row = []
        while len(row) < room:
            fitting = [document for document in waiting if len(document) <= room - len(row)]
            if not waiting:
                return
            chosen = max(fitting, key=len) if fitting else min(waiting, key=len)
            waiting.remove(chosen)
            row += chosen[: room - len(row)]
        yield row


def test_best_fit_rows_are_those_of_nanochats_rule(tmp_path):
    rng = np.random.default_rng(1)
    documents = write(tmp_path / "a.parquet", rng.integers(0, 40, 80), 100, 100)
    write(tmp_path / "b.parquet", [5], 9000)
    wanted = list(best_fit(documents, T + 1))
    loader = FIT(Numbers(), 1, T, "train", device="cpu", data_dir=tmp_path)
    batches = itertools.islice(loader, len(wanted))
    got = [[*inputs[0].tolist(), targets[0, -1].item()] for inputs, targets in batches]
    assert len(wanted) > 40
    assert got == wanted
    loader.close()


@pytest.mark.parametrize("crop", ["discard", "return"])
def test_every_best_fit_row_starts_with_bos_and_says_what_comes_next(make, crop):
    for inputs, targets, _ in itertools.islice(make(crop=crop, seed=5, shuffle=True), 60):
        assert inputs[:, 0].tolist() == [BOS] * 4
        assert torch.equal(inputs[:, 1:], targets[:, :-1]) or crop == "return"
        assert crop == "return" or bool((targets >= 0).all())


def test_train_is_all_files_but_the_last_and_val_is_the_last(make):
    train = {token // 10_000 for batch in take(make(FLAT), 150) for row in batch[0] for token in row if token}
    val = take(make(FLAT, split="val"), 60)
    assert train == {0, 1, 2}
    assert {token // 10_000 for batch in val for row in batch[0] for token in row if token} == {3}


@pytest.mark.parametrize("loader", [FLAT_STATE, FIT_STATE], ids=["flat", "bestfit"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_from_every_state_the_stream_goes_on_exactly(make, loader, shuffle):
    """[R1.a]"""
    whole = take(make(loader, shuffle=shuffle), 120)
    assert whole[-1][2]["epoch"] > 1  # or it is too short to show much
    for k in (0, 1, 7, 40, 41, 90):
        resumed = make(loader, shuffle=shuffle, resume_state_dict=whole[k][2], tokenizer_threads=k % 3 + 1)
        assert take(resumed, 20) == whole[k + 1 : k + 21], k


def base_train(make, steps, save_at=(), resume=None, accumulate=1, **more):
    """Draw as nanochat's base_train does, with the loader's own defaults; return what was trained on, and saves."""
    loader = make(prefetched=True, resume_state_dict=resume, **more)
    step, trained, saved = 0, [], {}
    x, y, dataloader_state_dict = next(loader)  # kick off load of the very first batch of data
    for step in range(steps):
        if step in save_at:
            saved[step] = json.loads(json.dumps(dataloader_state_dict))
        for _ in range(accumulate):
            trained.append((x.tolist(), y.tolist()))
            x, y, dataloader_state_dict = next(loader)  # prefetch the next batch
    return trained, saved


@pytest.mark.parametrize("accumulate", [1, 3])
def test_base_train_goes_on_with_the_very_batch_that_it_had_drawn_when_it_saved(make, accumulate):
    """[R1.a]"""
    whole, saved = base_train(make, 20, save_at=(0, 1, 7), accumulate=accumulate)
    for step, state in saved.items():
        rest, _ = base_train(make, 20 - step, resume=state, accumulate=accumulate)
        assert rest == whole[step * accumulate :], step


def test_a_state_resumes_by_default_with_the_batch_that_it_came_with(folder):
    call = (Numbers(), 4, T, "train", 1, 128, "cpu")
    stream = FIT_STATE(*call, None, 10, data_dir=folder)
    batches = take(stream, 8)
    stream.close()
    resumed = FIT_STATE(*call, batches[5][2], 10, data_dir=folder)
    assert take(resumed, 3) == batches[5:]
    resumed.close()


def joined(ranks):
    """Return the rows of all ranks as batches of one."""
    steps = zip(*ranks, strict=True)
    return [tuple([row for part in parts for row in part[which]] for which in (0, 1)) for parts in steps]


@pytest.mark.parametrize("loader", [FLAT_STATE, FIT_STATE], ids=["flat", "bestfit"])
def test_any_world_size_gives_the_same_rows_and_goes_on_from_the_states_of_another(make, loader):
    """[R2.a]"""
    alone = [batch[:2] for batch in take(make(loader, rows=8), 60)]
    ranks = [take(make(loader, rows=4, rank=rank, world_size=2), 60) for rank in range(2)]
    assert joined(ranks) == alone
    merged = json.loads(json.dumps(nanochat.merge_states([rank[29][2] for rank in ranks])))
    for world_size in (1, 2, 4, 8):
        resumed = [
            take(make(loader, rows=8 // world_size, rank=r, world_size=world_size, resume_state_dict=merged), 10)
            for r in range(world_size)
        ]
        assert joined(resumed) == alone[30:40], world_size
    # Half as many rows a batch: the lanes are those of the state, so two batches are one of before.
    halves = take(make(loader, rows=4, resume_state_dict=merged), 20)
    assert [row for batch in halves for row in batch[0]] == [row for batch in alone[30:40] for row in batch[0]]


def of_ranks(make, world_size, count, resume=None, rows=8, **more):
    """Return so many batches of every rank, which have so many rows together."""
    ranks = range(world_size)
    own = [{"rows": rows // world_size, "rank": rank, "world_size": world_size, **more} for rank in ranks]
    return [take(make(**each, resume_state_dict=resume), count) for each in own]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("loader", [FLAT_STATE, FIT_STATE], ids=["flat", "bestfit"])
def test_the_state_of_rank_0_alone_resumes_all_ranks(make, loader, shuffle):
    """[R2.a] It is all that base_train saves."""
    more = {"loader": loader, "shuffle": shuffle, "prefetched": True}
    ranks = of_ranks(make, 2, 60, **more)
    alone = joined(ranks)
    for step in (0, 1, 8, 30, 52):
        for world_size in (1, 2, 4):
            resumed = of_ranks(make, world_size, 8, ranks[0][step][2], **more)
            assert joined(resumed) == alone[step : step + 8], (step, world_size)


def test_any_one_rank_will_do(make):
    """[R2.a]"""
    ranks = of_ranks(make, 4, 40)
    for rank in range(4):
        assert joined(of_ranks(make, 4, 10, ranks[rank][25][2])) == joined(ranks)[26:36]


def test_a_run_that_was_resumed_with_other_batches_is_resumed_from_one_rank_too(make):
    """[R2.a] In the middle of a step of several batches, and where steps have another size than at the start."""
    first = of_ranks(make, 2, 9, rows=8)
    for rows, saved in ((4, 5), (16, 3), (2, 6)):
        whole = of_ranks(make, 2, 20, first[0][8][2], rows=rows)
        resumed = of_ranks(make, 2, 20 - saved - 1, whole[0][saved][2], rows=rows)
        assert joined(resumed) == joined(whole)[saved + 1 :], rows


@pytest.mark.parametrize("damage", ["gone", "torn", "forged", "of one rank"])
def test_what_the_ranks_have_not_written_down_is_read_again(make, base_dir, caplog, damage):
    """[R2.a]"""
    ranks = of_ranks(make, 2, 40)
    files = sorted((base_dir / "tokenmill_lanes").glob("*/rank-*"))
    assert [file.name for file in files] == ["rank-0-of-2", "rank-1-of-2"]
    for file in files if damage != "of one rank" else files[1:]:
        lines = file.read_bytes().splitlines(keepends=True)
        if damage == "torn":
            file.write_bytes(b"".join(lines[:2]) + lines[2][:7] + b"\n" + b"\xff".join(lines[3:]))
        elif damage == "forged":
            file.write_bytes(b"".join(line.replace(b" ", b" 1", 1) for line in lines))
        else:
            file.unlink()
    resumed = of_ranks(make, 2, 10, ranks[0][29][2])
    assert joined(resumed) == joined(ranks)[30:]
    assert any("reads text again" in record.message for record in caplog.records)


def test_a_folder_that_cannot_be_written_is_told_once_and_resumed_from_all_the_same(make, base_dir, caplog):
    base_dir.write_text("a file where a folder should be")
    ranks = of_ranks(make, 2, 20)
    assert [record.message.count("lane_dir that all ranks can write to") for record in caplog.records] == [1, 1]
    assert joined(of_ranks(make, 2, 5, ranks[0][9][2])) == joined(ranks)[10:15]


def test_one_rank_writes_nothing(make, base_dir):
    take(make(), 5)
    assert not base_dir.exists()


def test_validation_is_the_same_rows_in_the_same_order_for_any_batch_and_any_world_size(make):
    """[R2.a]"""
    for loader in (FLAT, FIT):
        rows = [row for batch in take(make(loader, rows=1, split="val"), 48) for row in zip(*batch, strict=True)]
        for each, world_size in ((2, 1), (8, 1), (24, 1), (2, 4), (12, 2), (1, 3)):
            ranks = [make(loader, rows=each, split="val", rank=r, world_size=world_size) for r in range(world_size)]
            steps = joined([take(rank, 48 // (each * world_size)) for rank in ranks])
            assert [row for batch in steps for row in zip(*batch, strict=True)] == rows, (each, world_size)


def test_validation_goes_on_from_the_state_of_any_rank(make):
    """[R2.a]"""
    ranks = [take(make(split="val", rank=rank, world_size=2), 20) for rank in range(2)]
    assert [batch[2] for batch in ranks[0]] == [batch[2] for batch in ranks[1]]
    for world_size in (1, 2, 4):
        state = ranks[1][11][2]
        own = [
            make(rows=8 // world_size, split="val", rank=rank, world_size=world_size, resume_state_dict=state)
            for rank in range(world_size)
        ]
        assert joined([take(rank, 8) for rank in own]) == joined(ranks)[12:]


def test_a_bad_record_may_be_skipped_as_the_message_says(tmp_path):
    for name in ("a.parquet", "b.parquet"):
        pq.write_table(pa.table({"text": ["1 2 3", None, "4 5 6"] * 20}), tmp_path / name)
    call = {"device": "cpu", "data_dir": tmp_path}
    stream = FLAT(Numbers(), 1, T, "train", **call)
    with pytest.raises(DocumentError, match=r"a\.parquet.*skip it with on_error='skip'"):
        next(stream)
    stream = FLAT(Numbers(), 1, T, "train", on_error="skip", **call)
    assert next(stream)[0][0].tolist() == [0, 1, 2, 3, 0, 4, 5, 6] * 2
    stream.close()


def test_the_keys_of_nanochat_say_where_the_first_lane_reads(make):
    states = [batch[2] for batch in take(make(FLAT_STATE, rows=1), 400)]
    places = [(state["epoch"], state["pq_idx"], state["rg_idx"]) for state in states]
    assert places == sorted(places)
    assert places[0] == (1, 0, 0)
    assert {pq_idx for _, pq_idx, _ in places} == {0, 1, 2}
    assert {rg_idx for _, _, rg_idx in places} == set(range(6))
    assert places[-1][0] == 2


@pytest.mark.parametrize(
    "state", [{"pq_idx": 3, "rg_idx": 8, "epoch": 1}, {"live": 3}, {"live": {}, "rows": -1}, [1]]
)
def test_a_state_of_nanochat_itself_is_refused(make, state):
    with pytest.raises(
        ResumeError, match=r"must be a state of this loader, with 'live' and 'rows'.*start without it"
    ):
        make(resume_state_dict=state)


def test_a_state_of_other_files_or_choices_is_refused(make, tmp_path):
    _, _, state = next(make())
    with pytest.raises(ResumeError, match=r"options.seed must be as when it was saved, 0, got 5"):
        make(resume_state_dict=state, seed=5)
    for name in ("a.parquet", "b.parquet"):
        write(tmp_path / name, [30] * 40, 100)
    with pytest.raises(ResumeError, match="state: files"):
        make(resume_state_dict=state, data_dir=tmp_path)


def test_our_tokenizers_work_by_name_and_open(make):
    opened = open_tokenizer("bytes", add_bos=True, add_eos=False)
    assert take(make(tokenizer="bytes"), 5) == take(make(tokenizer=opened), 5)
    with pytest.raises(ConfigError, match=r"BOS.*add_bos=True"):
        make(FLAT, tokenizer=open_tokenizer("bytes", add_bos=False))
    with pytest.raises(TokenizerError, match="get_bos_token_id"):
        make(tokenizer=object())


def test_threads_are_handed_to_a_tokenizer_that_has_them(make):
    tokenizer = Numbers()
    next(make(tokenizer=tokenizer, tokenizer_threads=3))
    assert tokenizer.threads == {3}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"split": "test"}, r"split: must be 'train' or 'val', got 'test'"),
        ({"buffer_size": 0}, r"buffer_size: must be at least 1, got 0"),
        ({"bufer_size": 5}, r"got 'bufer_size'; .*buffer_size"),
        ({"rows": 0}, r"B, T: must be at least 1, got 0 and 16; raise them"),
        ({"tokenizer": "bytes", "tokenizer_threads": -1}, r"threads must be at least 0.*got -1"),
        ({"lanes": 3, "rank": 1, "world_size": 2}, r"world_size must divide its 3 lanes, got 2"),
        ({"crop": "half"}, r"crop"),
    ],
)
def test_what_is_wrong_is_said_at_the_call(make, wrong, message):
    with pytest.raises(ConfigError, match=message):
        make(**wrong)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_default_device_is_refused_where_there_is_no_gpu(make):
    with pytest.raises(ConfigError, match="device='cpu'"):
        make(device="cuda")


def test_folders_are_found_as_nanochat_does(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    with pytest.raises(DocumentError, match="base_data_climbmix: must be a folder"):
        nanochat.list_parquet_files()
    for name in ("base_data", "base_data_climbmix"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "shard_00000.parquet", [5], 100)
        assert nanochat.list_parquet_files() == [str(tmp_path / name / "shard_00000.parquet")]
    with pytest.raises(DocumentError, match="two Parquet files"):
        FIT(Numbers(), 4, T, "train", device="cpu")
    (tmp_path / "base_data_climbmix" / "a.parquet").write_bytes(b"not one")
    with pytest.raises(DocumentError, match=r"a.parquet: must be an intact Parquet file"):
        FIT(Numbers(), 4, T, "train", device="cpu")


def drawn_by_rank(folder):
    """Draw, gather the state, and draw on from it and from that of rank 0; return the batches and the state."""
    shape = {"device": "cpu", "data_dir": str(folder), "buffer_size": 10, "prefetched": False}
    stream = FIT_STATE(Numbers(), 4, T, "train", **shape)  # by the environment
    drawn = take(stream, 9)
    dist.init_process_group("gloo")
    del os.environ["RANK"], os.environ["WORLD_SIZE"]
    saved = nanochat.gather_state(drawn[-1][2])
    of_first = [drawn[-1][2]]
    dist.broadcast_object_list(of_first)  # as all ranks read the file that rank 0 has saved
    for state in (saved, *of_first):
        resumed = FIT_STATE(Numbers(), 4, T, "train", **shape, resume_state_dict=state)  # by torch.distributed
        drawn += take(resumed, 5)
    stream.close()
    resumed.close()
    dist.destroy_process_group()
    return drawn, saved


def test_ranks_of_one_job_share_the_stream_and_gather_one_state(make, folder):
    """[R2.a]"""
    found = call_ranks(2, drawn_by_rank, folder, GLOO_SOCKET_IFNAME="lo")
    alone = take(make(rows=8), 14)
    assert joined([drawn for drawn, _ in found]) == [batch[:2] for batch in (*alone, *alone[9:])]
    assert found[0][1] == found[1][1]
    assert found[0][1]["live"] == alone[8][2]["live"]


@pytest.mark.parametrize("loader", [FLAT, FLAT_STATE, FIT, FIT_STATE])
def test_another_split_is_an_assertion_error_as_there(make, loader):
    with pytest.raises(AssertionError, match="split: must be 'train' or 'val', got 'valid'; use one of these"):
        make(loader, split="valid")


def test_a_loader_logs_a_line_and_validation_none(make, caplog):
    """The plan behind it is of 2^40 steps, which say nothing to a reader."""
    with caplog.at_level("INFO"):
        for rank in range(2):
            take(make(rank=rank, world_size=2), 3)
        assert caplog.messages == ["nanochat: 3 files in 8 lanes, 4 rows of 16 tokens per batch on 2 ranks"]
        for rank in range(2):
            take(make(split="val", rank=rank, world_size=2), 3)
    assert len(caplog.messages) == 1
