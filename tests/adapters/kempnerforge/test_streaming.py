"""A stream of text resumes exactly, at any number of ranks, and never by a buffer."""

import json
from itertools import islice

import msgspec
import pytest
from torch.utils.data import DataLoader

from tokenmill.adapters.kempnerforge import StreamingDataLoader, StreamingHuggingFaceDataset, merge_states
from tokenmill.encode.engines import open_tokenizer
from tokenmill.errors import ConfigError, ResumeError

TEXTS = [f"document {number} of the mill " * (1 + number % 5) for number in range(60)]


@pytest.fixture
def folder(tmp_path, hub):  # noqa: ARG001 - it keeps the library off the network
    place = tmp_path / "text"
    place.mkdir()
    for part in range(4):
        lines = (msgspec.json.encode({"text": text}) + b"\n" for text in TEXTS[part::4])
        (place / f"{part}.jsonl").write_bytes(b"".join(lines))
    return place


def make(folder, rank=0, world_size=1, **options):
    return StreamingHuggingFaceDataset(
        str(folder), "train", "text", 32, "bytes", rank=rank, world_size=world_size, **options
    )


def rows(batch):
    return batch["input_ids"].tolist()


def draw(loader, count):
    return [rows(batch) for batch in islice(loader, count)]


def saved(loader):
    return json.loads(json.dumps(loader.state_dict()))


def test_every_resume_goes_on_with_the_next_batch(folder):
    """[R1.a, R1.b, R1.c; streaming of KempnerForge resumes in another order]"""
    whole = draw(StreamingDataLoader(make(folder, lanes=4), 4), 60)
    state, drawn = None, []
    for count in (1, 7, 1, 12, 39):
        loader = StreamingDataLoader(make(folder, lanes=4), 4)
        if state is not None:
            loader.load_state_dict(state)
            assert saved(loader) == state
        drawn += draw(loader, count)
        state = saved(loader)
        loader.close()
    assert drawn == whole
    assert state["batches_yielded"] == 60
    assert state["epoch"] >= 1, "it went on into the next epoch"


def test_the_batches_of_all_ranks_are_those_of_one(folder):
    whole = draw(StreamingDataLoader(make(folder, lanes=4), 4), 12)
    ranks = [StreamingDataLoader(make(folder, rank, 2, lanes=4), 2) for rank in range(2)]
    parts = [draw(rank, 5) for rank in ranks]
    assert [left + right for left, right in zip(*parts, strict=True)] == whole[:5]
    joined = merge_states([saved(rank) for rank in ranks])
    alone = StreamingDataLoader(make(folder, lanes=4), 4)
    alone.load_state_dict(json.loads(json.dumps(joined)))
    assert draw(alone, 7) == whole[5:]
    with pytest.raises(ResumeError, match="join the states of all ranks with merge_states"):
        alone.load_state_dict(saved(ranks[0]))


def test_in_the_middle_of_a_step_batches_must_stay_as_they_are(folder):
    """[R1.b]"""
    loader = StreamingDataLoader(make(folder, lanes=4), 2)
    whole = draw(loader, 6)
    loader = StreamingDataLoader(make(folder, lanes=4), 2)
    draw(loader, 3)
    same = StreamingDataLoader(make(folder, lanes=4), 2)
    same.load_state_dict(saved(loader))
    assert draw(same, 3) == whole[3:]
    for size in (1, 4):
        with pytest.raises(ResumeError, match=rf"was saved in the middle of step .* of 2 samples .* of {size};"):
            StreamingDataLoader(make(folder, lanes=4), size).load_state_dict(saved(loader))
    ranks = [StreamingDataLoader(make(folder, rank, 2, lanes=4), 1) for rank in range(2)]
    for rank in ranks:
        draw(rank, 3)
    joined = merge_states([saved(rank) for rank in ranks])
    with pytest.raises(ResumeError, match="was saved in the middle of step"):
        StreamingDataLoader(make(folder, 0, 2, lanes=4), 2).load_state_dict(joined)
    draw(ranks[0], 1)
    with pytest.raises(ResumeError, match="batches_yielded must be the same on all ranks, got 4 and 3"):
        merge_states([saved(rank) for rank in ranks])


def test_between_two_steps_batches_may_change_and_are_counted_anew(folder):
    """[R1.d]"""
    whole = [row for batch in draw(StreamingDataLoader(make(folder, lanes=4), 4), 8) for row in batch]
    loader = StreamingDataLoader(make(folder, lanes=4), 2)
    draw(loader, 6)
    other = StreamingDataLoader(make(folder, lanes=4), 4)
    other.load_state_dict(saved(loader))
    assert other.state_dict()["batches_yielded"] == 3
    assert [row for batch in draw(other, 5) for row in batch] == whole[12:]


def test_steps_of_several_batches_keep_their_number(folder):
    loader = StreamingDataLoader(make(folder), 2, grad_accum_steps=3)  # a lane of its own for this rank
    draw(loader, 6)
    other = StreamingDataLoader(make(folder), 6, grad_accum_steps=1)
    other.load_state_dict(saved(loader))
    assert (loader.step, other.step, other.state_dict()["batches_yielded"]) == (2, 2, 2)
    draw(loader, 1)
    with pytest.raises(ResumeError, match="middle of step 2, so it must go on with 3 batches a step of 2"):
        other.load_state_dict(saved(loader))
    with pytest.raises(ResumeError, match=r"grad_accum_steps must be given or left out .* 3, got None"):
        StreamingDataLoader(make(folder), 2).load_state_dict(saved(loader))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batches_yielded": -1}, "state.batches_yielded: expected a whole number"),
        ({"batches_yielded": "x"}, "state.batches_yielded: expected a whole number .* got 'x'"),
        ({"batch_size": None}, "state.batch_size: expected a whole number"),
        ({"world_size": 0}, "state.world_size: expected a whole number"),
        ({"grad_accum_steps": 0}, "state.grad_accum_steps: expected a whole number"),
        ({"epoch": "x"}, "state.epoch: expected a whole number"),
        ({"live": None}, "state.live: expected a table, got None"),
    ],
)
def test_a_state_that_cannot_be_is_refused(change, message, folder):
    """[S.b]"""
    loader = StreamingDataLoader(make(folder, lanes=4), 4)
    state = saved(loader)
    with pytest.raises(ResumeError, match=message):
        loader.load_state_dict({**state, **change})
    with pytest.raises(ResumeError, match=r"use a state as state_dict\(\) gave it"):
        loader.load_state_dict(None)
    with pytest.raises(ResumeError, match="missing key"):
        loader.load_state_dict({key: value for key, value in state.items() if key not in change})


def test_a_plain_loader_of_torch_takes_it_and_its_state_is_exact(folder):
    whole = draw(DataLoader(make(folder, lanes=3), batch_size=3), 9)
    dataset = make(folder, lanes=3)
    assert draw(DataLoader(dataset, batch_size=3), 4) == whole[:4]
    again = make(folder, lanes=3)
    again.load_state_dict(saved(dataset))
    assert draw(DataLoader(again, batch_size=3), 5) == whole[4:]


def test_every_token_of_an_epoch_is_delivered_once_and_in_order_without_shuffling(folder):
    """[R1.d, P1.c]"""
    identity = open_tokenizer("bytes").identity
    found = []
    for sample in make(folder, shuffle_buffer_size=0, pack_sequences=True):
        inputs, labels, documents = (sample[name].tolist() for name in ("input_ids", "labels", "doc_ids"))
        real = [place for place, document in enumerate(documents) if document >= 0]
        found += [inputs[place] for place in real]
        ends = [place for place in real if inputs[place] == identity.eos_id]
        assert [labels[place] for place in ends] == [-100] * len(ends)
        assert documents[0] == 0
        text = bytes(token for token in found if token < 256).decode()
        if text.count(TEXTS[-1]) and len(real) < 32:
            break
    expected = [TEXTS[number] for part in range(4) for number in range(part, 60, 4)]
    assert text.startswith("".join(expected)[: len(text)])
    assert set(make(folder).__iter__().__next__()) == {"input_ids", "labels"}


def test_worker_processes_are_refused_as_they_would_keep_the_state(folder):
    loader = DataLoader(make(folder), batch_size=2, num_workers=1)
    with pytest.raises(ConfigError, match=r"num_workers: must be 0 for text that is streamed, .* got 1"):
        next(iter(loader))


def test_ranks_are_those_of_the_launcher_unless_they_are_given(folder, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    stream = StreamingHuggingFaceDataset(str(folder), "train", "text", 32, "bytes")
    assert (stream.rank, stream.world_size) == (1, 3)


def test_a_state_of_kempnerforge_itself_is_refused(folder):
    with pytest.raises(ResumeError, match=r"unknown key: 'rank_docs_consumed'; .*order of KempnerForge's own"):
        make(folder).load_state_dict({"epoch": 0, "rank_docs_consumed": 12})
