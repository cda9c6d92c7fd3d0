"""States: refused with the reason where they cannot be gone on from."""

from __future__ import annotations

import json

import pytest

from tokenmill.errors import ResumeError
from tokenmill.live import LiveOptions, merge_states, open_live
from tokenmill.loader.state import signed


def saved(loader):
    return json.loads(json.dumps(loader.state_dict()))


def lanes_of(state):
    """Return where the lanes of a state stand."""
    return state["live"]["lanes"]["text"]


def edited(state, **lanes):
    """Return a state with other lanes."""
    live = state["live"]
    return {**state, "live": signed({**live, "lanes": {"text": {**live["lanes"]["text"], **lanes}}})}


def test_a_state_holds_a_few_numbers_a_lane_and_little_else(make_source, make_loader, draw):
    loader = make_loader(make_source(window_bytes=3000), global_batch_size=8, world_size=2, rank=1)
    state = saved(loader)
    assert lanes_of(state) == {str(lane): [0, 0] for lane in range(4, 8)}
    assert list(state) == ["version", "step", "fingerprint", "made_of", "live"]
    assert len(json.dumps(state)) - len(json.dumps(lanes_of(state))) < 1000
    draw(loader, 4)
    state = saved(loader)
    assert [line[:3] for line in lanes_of(state).values()] == [[0, 0, [[0, 1]]]] * 4
    assert state["live"]["formats"] == [[16, "best_fit", "allow", "return"]]


def test_a_state_of_many_files_stays_small(tmp_path, write, make_source, make_loader):
    for number in range(200):
        write(tmp_path / f"{number}.jsonl", ["1 2 3"])
    source = make_source([tmp_path])
    state = saved(make_loader(source))
    assert len(json.dumps(state)) < 2048
    (tmp_path / "77.jsonl").write_text((tmp_path / "77.jsonl").read_text().replace("1 2 3", "3 2 1"))
    with pytest.raises(ResumeError, match=r"got one of 76\.jsonl to 79\.jsonl with other content"):
        make_loader(make_source([tmp_path])).load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 4}, r"options\.seed must be as when it was saved, 3, got 4"),
        ({"seq_len": 17}, r"options\.seq_len .* 16, got 17"),
        ({"packing": "concat"}, r"options\.packing .* 'best_fit', got 'concat'"),
        ({"shuffle": False}, r"options\.shuffle .* True, got False"),
        ({"window_bytes": 301}, r"options\.window_bytes .* 300, got 301"),
        ({"lanes": 2}, r"options\.lanes .* 4, got 2"),
        ({"text_field": "n"}, r"options\.text_field .* 'text', got 'n'"),
    ],
)
def test_an_option_that_decides_rows_must_stay(corpus, make_source, make_loader, change, message):
    state = saved(make_loader(make_source(corpus / "b.jsonl")))
    loader = make_loader(make_source(corpus / "b.jsonl", **change))
    with pytest.raises(ResumeError, match=message):
        loader.load_state_dict(state)


def test_options_that_decide_no_rows_may_change(make_source, make_loader, draw):
    first = make_loader(make_source(), threads=1, ahead=1)
    draw(first, 9)
    other = make_loader(make_source(on_error="skip"), threads=2, ahead=5, arrays=("labels",), steps=99)
    other.load_state_dict(saved(first))
    assert saved(other) == saved(first)


def test_a_changed_tokenizer_is_refused(make_source, make_loader, numbers):
    state = saved(make_loader(make_source()))
    for tokenizer, message in (
        (numbers(shift=1), r"state: tokenizer\.content must be as when it was saved"),
        ("bytes", r"state: tokenizer\.content must be .* got 'f4756294691334de153f0ae6c3ebbbd7'"),
    ):
        with pytest.raises(ResumeError, match=message):
            make_loader(make_source(tokenizer=tokenizer)).load_state_dict(state)


def test_changed_files_are_refused_by_name(corpus, make_source, make_loader, write):
    state = saved(make_loader(make_source()))
    file = corpus / "b.jsonl"
    old = file.read_text()
    file.write_text(old.replace("11", "12"))
    with pytest.raises(ResumeError, match=r"got b\.jsonl with other content; put it back"):
        make_loader(make_source()).load_state_dict(state)
    file.write_text(old + old)
    with pytest.raises(ResumeError, match=r"got b\.jsonl with other content"):
        make_loader(make_source()).load_state_dict(state)
    file.write_text(old)
    write(corpus / "z.jsonl", ["1"])
    with pytest.raises(ResumeError, match=r"files\.count must be as when it was saved, 5, got 6"):
        make_loader(make_source()).load_state_dict(state)
    (corpus / "z.jsonl").unlink()
    file.rename(corpus / "bb.jsonl")
    with pytest.raises(ResumeError, match="got other names"):
        make_loader(make_source()).load_state_dict(state)


def test_a_folder_may_move(corpus, tmp_path, make_source, make_loader, draw):
    loader = make_loader(make_source())
    draw(loader, 5)
    state, rest = saved(loader), draw(loader)
    corpus.rename(tmp_path / "elsewhere")
    moved = make_loader(make_source(tmp_path / "elsewhere"))
    moved.load_state_dict(state)
    assert draw(moved) == rest


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda _: [], "must be the dict that state_dict"),
        (lambda state: {**state, "stap": 1}, "unknown key: 'stap'; did you mean 'step'"),
        (lambda state: {key: state[key] for key in ("version", "step")}, "missing key: fingerprint"),
        (lambda state: {**state, "version": 2}, "version must be 1, got 2"),
        (lambda state: {**state, "step": -1}, r"state\.step: expected a whole number that is at least 0, got -1"),
        (
            lambda state: {**state, "step": True},
            r"step: expected a whole number that is at least 0, got True",
        ),
        (lambda state: {**state, "step": 11}, "step must be at most the 10 steps of the run, got 11; raise steps"),
        (lambda state: {**state, "live": {**state["live"], "lanes": []}}, r"state\.live\.lanes: expected a table"),
        (lambda state: edited(state, a=[0, 0]), r"lanes\.text\.a: a lane must be named by its number, got 'a'"),
        (
            lambda state: edited(state, **{"0": [0]}),
            r"state\.live\.lanes\.text\.0: expected a list of epoch, turn, drawn, check, got \[0\]",
        ),
        (
            lambda state: edited(state, **{"0": [0, 0, [[0, 1]]]}),
            r"text\.0: drawn must be pairs of one of the 0",
        ),
        (
            lambda state: edited(state, **{"0": [0, 0, [], "12345678"]}),
            r"text\.0: check must be the digest of a window of which rows were drawn, got '12345678'",
        ),
        (
            lambda state: {**state, "live": {**state["live"], "skipped": {"text": {"json": -1}}}},
            r"skipped\.text\.json: expected a whole number that is at least 0, got -1",
        ),
        (lambda state: {**state, "live": {**state["live"], "skipped": 3}}, r"skipped: expected a table.*, got 3"),
        (lambda state: edited(state, **{"1": [0, 99]}), "lane 1 of 'text' must be at one of its"),
        (lambda state: {**state, "batches": 1}, "must have micro_batch and world_size in the middle of a step"),
        (
            lambda state: {**state, "batches": 4, "micro_batch": 1, "world_size": 1, "global_batch_size": 4},
            "batches must lie within step 0",
        ),
        (lambda state: {**state, "fingerprint": "0" * 32}, "got others of the same names and sizes"),
    ],
)
def test_a_state_that_cannot_be_is_refused(make_source, make_loader, edit, message):
    loader = make_loader(make_source())
    before = saved(loader)
    with pytest.raises(ResumeError, match=message):
        loader.load_state_dict(edit(before))
    assert saved(loader) == before


def altered(value):
    """Yield every value that differs from a JSON value in one place: another number or text, or one item less."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield {name: other for name, other in value.items() if name != key}
            yield {**{name: other for name, other in value.items() if name != key}, f"{key}0": item}
            yield from ({**value, key: other} for other in altered(item))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield value[:index] + value[index + 1 :]
            yield from ([*value[:index], other, *value[index + 1 :]] for other in altered(item))
    else:
        yield from (value + 1, value - 1, -value - 1) if isinstance(value, int) else (value + "0", value[1:], "")


def test_every_alteration_of_lanes_is_refused(make_source, make_loader, draw):
    """A lane that stands elsewhere would repeat or lose rows, and nobody would know."""
    loader = make_loader(make_source(window_bytes=3000), global_batch_size=4, micro_batch=2)
    draw(loader, 7)
    state = saved(loader)
    assert state["batches"] == state["live"]["batch"] == 1
    others = [{**state, "live": live} for live in altered(state["live"])]
    others += [{**state, "batches": number} for number in (0, 2)]
    others += [{**state, "step": number} for number in (state["step"] - 1, state["step"] + 1)]
    fresh = make_loader(make_source(window_bytes=3000), global_batch_size=4, micro_batch=2)
    for other in others:
        with pytest.raises(ResumeError, match="state"):
            fresh.load_state_dict(other)
    assert len(others) > 100
    fresh.load_state_dict(state)
    fresh.load_state_dict(json.loads(json.dumps(state, sort_keys=True)))


def with_numbers_for_names(value):
    """Yield a JSON value with a number in place of each name of a table in it."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield {**{name: other for name, other in value.items() if name != key}, 7: item}
            yield {**value, 7: item}
            yield from ({**value, key: other} for other in with_numbers_for_names(item))


def test_names_that_are_no_strings_are_refused(make_source, make_loader, draw):
    loader = make_loader(make_source(window_bytes=3000))
    draw(loader, 3)
    state = saved(loader)
    for other in with_numbers_for_names(state):
        with pytest.raises(ResumeError, match="state"):
            loader.load_state_dict(other)
        with pytest.raises(ResumeError, match="state"):
            merge_states([state, other])
    assert saved(loader) == state


def test_a_row_that_a_window_does_not_have_is_refused(make_source, make_loader):
    loader = make_loader(make_source(window_bytes=3000))
    state = saved(loader)
    next(iter(loader))
    drawn = saved(loader)
    lane = [0, 0, [[0, 10**6]], lanes_of(drawn)["0"][3]]
    state["live"]["formats"] = drawn["live"]["formats"]
    loader.load_state_dict(edited(state, **{"0": lane}))
    with pytest.raises(ResumeError, match=r"a lane must be at a row of .*, got row 1000000 of \d+ in epoch 0"):
        next(iter(loader))


def test_in_the_middle_of_a_step_the_ranks_must_stay(make_source, make_loader, draw):
    source = make_source()
    loader = make_loader(source)
    draw(loader, 6)
    state = saved(loader)
    assert (state["step"], state["batches"]) == (1, 2)
    with pytest.raises(
        ResumeError, match="in the middle of step 1, so world_size and micro_batch must stay 1 and 1, got 1 and 2"
    ):
        make_loader(source, micro_batch=2).load_state_dict(state)
    with pytest.raises(ResumeError, match="in the middle of step 1, so global_batch_size must stay 4, got 8"):
        make_loader(make_source(lanes=4), global_batch_size=8).load_state_dict(state)
    other = make_loader(source)
    other.load_state_dict(state)
    assert draw(other) == draw(loader)


def test_states_of_different_steps_or_places_are_not_joined(make_source, make_loader, draw):
    source = make_source()
    ranks = [make_loader(source, world_size=2, rank=rank) for rank in range(2)]
    with pytest.raises(ResumeError, match="states: no state to merge; gather"):
        merge_states([])
    early = saved(ranks[0])
    draw(ranks[1], 2)
    with pytest.raises(ResumeError, match=r"states: step must be the same on all ranks, got 0 and 1"):
        merge_states([early, saved(ranks[1])])
    with pytest.raises(
        ResumeError,
        match=r"lane 0 of 'text' must stand at one place, got .* rows 0, 0, 0 and 0, 1, 0",
    ):
        merge_states([early, edited(early, **{"0": [0, 1]})])
    draw(ranks[0], 2)
    both = merge_states([saved(rank) for rank in ranks])
    assert list(lanes_of(both)) == ["0", "1", "2", "3"]
    assert merge_states([both]) == merge_states([both, saved(ranks[0])]) == both


def test_other_text_in_the_window_of_a_lane_is_refused_with_its_place_though_no_sample_shows_it(
    tmp_path, texts, write, numbers, make_loader
):
    """[D1.b]"""
    path = write(tmp_path / "x.jsonl", texts([30] * 3000))
    options = LiveOptions(seq_len=16, shuffle=False, window_bytes=200_000, lanes=1)
    loader = make_loader(
        open_live(path, tokenizer=numbers(200_000), options=options), global_batch_size=1, steps=9000
    )
    stream = iter(loader)
    while lanes_of(loader.state_dict())["0"][1] < 1:
        next(stream)
    next(stream)
    state = saved(loader)
    data = bytearray(path.read_bytes())
    at = data.index(b" ", 250_000) + 1
    data[at : at + 1] = b"9" if data[at : at + 1] != b"9" else b"8"
    path.write_bytes(data)
    again = make_loader(
        open_live(path, tokenizer=numbers(200_000), options=options), global_batch_size=1, steps=9000
    )
    again.load_state_dict(state)
    with pytest.raises(ResumeError, match=r"x\.jsonl bytes \d+:\d+: must hold what it held .* got other text; put"):
        next(iter(again))


def test_what_was_left_out_is_counted_through_resumes_and_world_sizes(tmp_path, texts, write, numbers, make_loader):
    """[C2.c]"""
    path = write(tmp_path / "x.jsonl", texts([9] * 200))
    lines = path.read_text().splitlines()
    path.write_text("\n".join([line if n % 10 else "{" for n, line in enumerate(lines)]) + "\n")
    options = LiveOptions(seq_len=8, on_error="skip", window_bytes=300, lanes=4)
    source = open_live(path, tokenizer=numbers(), options=options)
    whole = make_loader(source, steps=40)
    list(whole)
    assert whole.skipped.counts["json"] > 10
    state, size = None, 1
    for step in range(1, 41):
        size = {1: 2, 2: 4, 4: 1}[size]
        ranks = [make_loader(source, steps=40, world_size=size, rank=rank) for rank in range(size)]
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
            stream = iter(rank)
            while rank.step < step:
                next(stream)
        state = merge_states([saved(rank) for rank in ranks])
    assert state["live"]["skipped"] == {"text": dict(whole.skipped.counts)}
