import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.config.run import parse_config
from tokenmill.config.schedule import read_batch, read_tokens
from tokenmill.errors import ConfigError


def config(run=None, stages=(), **more):
    tables = {
        "run": {"global_batch_size": 4, "seq_len": 10} | (run or {}),
        "sources": [{"name": "web", "store": "web"}],
        "stages": list(stages),
        **more,
    }
    return parse_config(tables)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2T", 2 * 10**12),
        ("800B", 8 * 10**11),
        ("1.5b", 15 * 10**8),
        ("100_000", 10**5),
        (4096, 4096),
        ("12k", 12000),
    ],
)
def test_tokens_are_read_with_their_unit(text, number):
    assert read_tokens("run", "tokens", text) == number


@pytest.mark.parametrize("text", ["", "2X", "-1B", "0", "1.5", "1e", "nan", "inf", "B", True])
def test_what_is_no_number_of_tokens_is_refused(text):
    with pytest.raises(ConfigError, match='run: tokens must be a whole number of tokens, as 2000000, "2M"'):
        read_tokens("run", "tokens", text)


def test_tokens_of_a_run_are_as_many_steps_as_it_takes():
    assert [config({"tokens": tokens}).steps for tokens in (1, 40, 41, "1K")] == [1, 1, 2, 25]


def test_a_stage_begins_with_the_first_step_from_its_tokens_on():
    """[M1.f]"""
    stages = [
        {"name": "a", "start_step": 0},
        {"name": "b", "start_tokens": 401, "seq_len": 20},
        {"name": "c", "start_tokens": "1K", "ramp": "linear", "ramp_tokens": 81, "ramp_from": {"web": 1}},
    ]
    read = config({"tokens": "2K"}, stages)
    # 11 steps of 40 are 440; 7 steps of 80 more are 1,000; then 25 steps of 40.
    assert [stage.start_step for stage in read.stages] == [0, 11, 18]
    assert (read.steps, read.stages[2].ramp_steps) == (43, 3)
    assert [read.clock.tokens_at(step) for step in (0, 11, 18, 43)] == [0, 440, 1000, 2000]


def test_edits_in_tokens_come_to_steps():
    read = config(
        {"steps": 100},
        skip=[{"tokens": "200:1K"}],
        quarantine=[{"source": "web", "from_tokens": "0.4K"}],
    )
    assert read.skip[0].range() == (5, 25)
    assert read.quarantine[0].from_step == 10


def test_a_batch_ramp_has_equal_stretches_of_tokens_and_ends_with_the_last_size():
    ramp = {"from": 2, "to": 8, "step": 2, "over_tokens": 600}
    read = config({"global_batch_size": ramp, "tokens": "1K"})
    # Sizes change at 200, 400 and 600 tokens: after 10 steps of 20, 5 of 40, 4 of 60.
    assert read.resolved_stages[0].batches == ((0, 2), (10, 4), (15, 6), (19, 8))
    assert read.clock.tokens_at(19) == 640
    assert read.steps == 19 + 5
    by_steps = config({"global_batch_size": {"from": 8, "to": 2, "step": 3, "over_steps": 10}, "steps": 30})
    assert by_steps.resolved_stages[0].batches == ((0, 8), (5, 5), (10, 2))


def test_a_ramp_of_the_run_goes_on_through_stages_and_one_of_a_stage_begins_with_it():
    ramp = {"from": 2, "to": 6, "step": 2, "over_steps": 20}
    stages = [{"name": "a", "start_step": 0}, {"name": "b", "start_step": 5}, {"name": "c", "start_step": 15}]
    read = config({"global_batch_size": ramp, "steps": 40}, stages)
    assert [stage.batches for stage in read.resolved_stages] == [((0, 2),), ((5, 2), (10, 4)), ((15, 4), (20, 6))]
    stages[1] |= {"global_batch_size": {"from": 1, "to": 3, "step": 2, "over_steps": 4}}
    read = config({"steps": 40}, stages)
    assert [stage.batches for stage in read.resolved_stages] == [((0, 4),), ((5, 1), (9, 3)), ((15, 4),)]


@given(
    first=st.integers(1, 9),
    last=st.integers(1, 9),
    by=st.integers(1, 4),
    over=st.integers(1, 3000),
    tokens=st.integers(1, 5000),
)
def test_clock_and_steps_are_each_others_inverse(first, last, by, over, tokens):
    batch = {"from": first, "to": last, "step": by, "over_tokens": over} if first != last else first
    read = config({"global_batch_size": batch, "tokens": tokens})
    clock = read.clock
    step = clock.step_at(tokens)
    assert step == read.steps
    assert clock.tokens_at(step - 1) < tokens <= clock.tokens_at(step)
    sizes = [clock.tokens_at(n + 1) - clock.tokens_at(n) for n in range(step)]
    assert sum(sizes) == clock.tokens_at(step)
    assert sizes == sorted(sizes, reverse=last < first)
    assert all(clock.step_at(clock.tokens_at(n)) == n for n in range(step))


def test_steps_beside_tokens_must_be_the_same():
    assert config({"tokens": "1K", "steps": 25}).steps == 25
    with pytest.raises(ConfigError, match="run: steps must be what the tokens come to, 25, got 26; leave one of"):
        config({"tokens": "1K", "steps": 26})
    with pytest.raises(ConfigError, match="must have steps, tokens or epochs, got 1K and 2; leave one of them out"):
        config({"tokens": "1K", "epochs": 2})


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            {"from": 2, "to": 8},
            "expected a number, or from, to, step, and over_tokens or over_steps, got",
        ),
        (
            {"from": 2, "to": 2, "over_steps": 5},
            "must go from one size to another in at most 4096 sizes, got 2 to",
        ),
        ({"from": 0, "to": 2, "over_steps": 5}, "global_batch_size: from must be a whole number from 1 on, got 0"),
        ({"from": 1, "to": 2, "over": 5}, "run.global_batch_size: unknown key: 'over'; did you mean"),
        ({"from": 1, "to": 9999999, "step": 1, "over_steps": 5}, "raise step, or say one number"),
        (0, "run: global_batch_size must be at least 1, got 0"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_with_the_way_out(batch, message):
    with pytest.raises(ConfigError, match=message):
        read_batch("run", batch)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"stages": [{"name": "a"}]}, r"stages\[0\]: missing key: start_step; add start_step = "),
        ({"quarantine": [{"source": "web"}]}, r"quarantine\[0\]: missing key: from_step"),
        ({"stages": [{"name": "a", "start_step": -1}]}, r"start_step must not be negative, got -1; count from 0"),
    ],
)
def test_what_begins_must_say_when(more, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(
            {"run": {"steps": 9, "global_batch_size": 4, "seq_len": 10}, "sources": [{"name": "web", "store": "a"}]}
            | more
        )
