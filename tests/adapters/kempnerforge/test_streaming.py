"""A stream of text resumes exactly, at any number of ranks, and never by a buffer."""

import json
from itertools import islice

import orjson
import pytest
from torch.utils.data import DataLoader

from tokenmill.adapters.kempnerforge import StreamingDataLoader, StreamingHuggingFaceDataset, merge_states
from tokenmill.encode.load import open_tokenizer
from tokenmill.errors import ConfigError, ResumeError

TEXTS = [f"document {number} of the mill " * (1 + number % 5) for number in range(60)]


@pytest.fixture
def folder(tmp_path, hub):  # noqa: ARG001 - it keeps the library off the network
    place = tmp_path / "text"
    place.mkdir()
    for part in range(4):
        lines = (orjson.dumps({"text": text}) + b"\n" for text in TEXTS[part::4])
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


def test_an_unknown_option_names_the_nearest(folder):
    with pytest.raises(ConfigError, match="got 'worldsize'; did you mean 'world_size'"):
        StreamingHuggingFaceDataset(str(folder), "train", "text", 32, "bytes", worldsize=2)


def test_ranks_are_those_of_the_launcher_unless_they_are_given(folder, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    stream = StreamingHuggingFaceDataset(str(folder), "train", "text", 32, "bytes")
    assert (stream.rank, stream.world_size) == (1, 3)


def test_a_state_of_kempnerforge_itself_is_refused(folder):
    with pytest.raises(ResumeError, match=r"got none of \['live'\].*order of KempnerForge's own is another"):
        make(folder).load_state_dict({"epoch": 0, "rank_docs_consumed": 12})
