"""Runs that draw from live text and from stores, through stages and edits."""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import tokenmill as tm
from tokenmill.errors import ConfigError, DocumentError, PlanError, ResumeError
from tokenmill.live import LiveOptions, merge_states, open_live
from tokenmill.live.lanes import LiveRows
from tokenmill.loader import NO_DOCUMENT, batch_digest, row_digests, stack
from tokenmill.loader.state import signed
from tokenmill.packing import Policy
from tokenmill.run.compare import compare

ARRAYS = ("input_ids", "labels", "position_ids", "doc_ids", "loss_mask", "cu_seqlens", "max_seqlen", "source")
CONFIG = """
[run]
steps = 24
global_batch_size = 8
seq_len = 24
seed = 5
{run}

[[sources]]
name = "web"
documents = ["web*.jsonl"]
tokenizer = "bytes"
live = true
window_bytes = 600
{source}

[[sources]]
name = "books"
store = "books"

[[stages]]
name = "one"
start_step = 0
weights = {{ web = 0.6, books = 0.4 }}

[[stages]]
name = "two"
start_step = 8
seq_len = 40
global_batch_size = 16
weights = {{ web = 0.5, books = 0.5 }}
{two}

[[stages]]
name = "three"
start_step = 16
packing = "concat"
weights = {{ web = 1 }}
{rest}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Live text of several files with unique documents, and a small store."""
    path = tmp_path_factory.mktemp("mixed")
    rng = np.random.default_rng(0)
    for number in range(3):
        lines = [{"text": f"{number}.{i} " + "w" * int(rng.integers(0, 60))} for i in range(40)]
        (path / f"web{number}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    books = [{"text": f"b{i} " + "b" * int(rng.integers(1, 90))} for i in range(60)]
    (path / "books.jsonl").write_text("".join(json.dumps(line) + "\n" for line in books))
    tm.prepare(path / "books.jsonl", out=path / "books", tokenizer="bytes", workers=1, progress=False)
    return path


@pytest.fixture
def make_run(folder, request):
    def make(name="run", config=CONFIG, **parts):
        text = config.format(**{"run": "", "source": "", "two": "", "rest": "", **parts})
        file = folder / f"{request.node.name.split('[')[0][:40]}-{name}.toml"
        file.write_text(text)
        return tm.Run.from_toml(file)

    return make


@pytest.fixture
def open_loaders(request):
    def make(run, world_size=1, micro_batch=1, state=None, **options):
        loaders = [
            run.loader(rank=rank, world_size=world_size, micro_batch=micro_batch, **{"arrays": ARRAYS, **options})
            for rank in range(world_size)
        ]
        for loader in loaders:
            request.addfinalizer(loader.close)
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
        return loaders

    return make


def draw(loaders, until=None):
    """Return step -> digest of the global batch, and the joined state after the last one."""
    plan = loaders[0].plan
    streams = [iter(loader) for loader in loaders]
    found = {}
    while loaders[0].step < (plan.steps if until is None else until):
        step = loaders[0].step
        count = loaders[0].part.batches(plan.stage(step))
        parts = [next(stream) for stream in streams for _ in range(count)]
        found[step] = batch_digest(row_digests(stack(parts)))
    return found, merge_states([loader.state_dict() for loader in loaders])


@pytest.mark.parametrize(("world_size", "micro_batch"), [(1, 8), (2, 1), (4, 2), (8, 1)])
def test_every_world_size_gives_the_same_global_batches_through_all_stages(
    make_run, open_loaders, world_size, micro_batch
):
    """[R1.c]"""
    run = make_run()
    whole, state = draw(open_loaders(run))
    assert len(whole) == 24
    other, same_state = draw(open_loaders(run, world_size, micro_batch))
    assert other == whole
    assert same_state == state


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_nothing(make_run, open_loaders, threads):
    run = make_run()
    assert draw(open_loaders(run, 2, threads=threads)) == draw(open_loaders(run, 2))


@pytest.mark.parametrize("cut", [1, 5, 7, 8, 9, 15, 16, 17, 23])
def test_a_resumed_run_goes_on_at_any_world_size_also_on_edges_and_twice_in_a_row(make_run, open_loaders, cut):
    """[R1.a, R1.b]"""
    run = make_run()
    whole, _ = draw(open_loaders(run))
    first, state = draw(open_loaders(run, 4), cut)
    again, state = draw(open_loaders(run, 2, 4, state), min(cut + 2, 24))
    last, _ = draw(open_loaders(run, 8, 1, state))
    assert {**first, **again, **last} == whole


def test_attribution_names_the_documents_of_stores_and_the_slots_of_live_text(make_run, open_loaders):
    loader = open_loaders(make_run(), 2)[1]
    batch = next(iter(loader))
    part, (web, books) = loader.attribution(0), (loader.plan.sources.index(name) for name in ("web", "books"))
    assert part.slot[part.batch_row == 0].tolist() == [4] * (part.batch_row == 0).sum()
    of_rows = part.source[np.searchsorted(part.batch_row, np.arange(4))]
    assert of_rows[0] == batch["source"][0]
    live = part.source == web
    assert set(part.document[live].tolist()) == {NO_DOCUMENT}
    assert not part.length[live].any()
    assert (part.document[part.source == books] >= 0).all()
    assert live.any()
    assert not live.all()
    assert loader.position.batch == 1, "no row was drawn for it"


def test_a_state_of_the_middle_of_a_step_goes_on_there(make_run, open_loaders):
    """[R1.a]"""
    run = make_run()
    whole = [row_digests(batch) for batch in open_loaders(run, micro_batch=2)[0]]
    for cut in (1, 3, 4, 33, 63, 64, 65, 100):
        (loader,) = open_loaders(run, micro_batch=2)
        stream = iter(loader)
        for _ in range(cut):
            next(stream)
        (fresh,) = open_loaders(run, micro_batch=2, state=loader.state_dict())
        assert [row_digests(batch) for batch in fresh] == whole[cut:]


def test_a_source_says_which_rows_are_live(make_run, open_loaders):
    run = make_run()
    (loader,) = open_loaders(run, micro_batch=8)
    shares = Counter()
    for batch in loader:
        for source, ids in zip(batch["source"], batch["input_ids"], strict=True):
            shares[int(source)] += 1
            letters = set(bytes(ids[ids < 256].astype(np.uint8)).decode())
            assert ("b" in letters) <= (source == 1)
            assert ("w" in letters) <= (source == 0)
    facts = {name: sum(stage.draws.get(name, 0) for stage in run.plan().stages) for name in ("web", "books")}
    assert shares == {0: facts["web"], 1: facts["books"]}


def test_metrics_have_what_is_known_of_live_text_also_after_a_resume(make_run, open_loaders):
    run = make_run()
    loaders = open_loaders(run, 2)
    unread = loaders[0].metrics()
    assert (unread["data/labels"], unread["data/padding"], unread["data/epochs/web"]) == (0, 0.0, 0.0)
    _, state = draw(loaders, 19)
    found, again = loaders[0].metrics(digest=True), open_loaders(run, 2, state=state)[0].metrics()
    of_the_rank = ("data/waited", "data/tokens_per_second")
    assert {name: value for name, value in found.items() if name not in of_the_rank} == {
        name: value for name, value in again.items() if name not in of_the_rank
    }
    plan = run.plan()
    rows = Counter(plan.sources[source] for step in range(19) for source in plan.rows(step)[0])
    slots = Counter()
    for step in range(19):
        for source in plan.rows(step)[0]:
            slots[plan.sources[source]] += plan.stage(step).row_slots
    for name in ("web", "books"):
        assert found[f"data/rows_by_source/{name}"] == rows[name]
        assert found[f"data/tokens_by_source/{name}"] == slots[name]
    assert found["data/tokens"] == slots.total()
    assert found["data/labels_by_source/books"] == plan.seen(19)["books"].trained > 0
    assert found["data/left_out/web"] == 0
    lanes = loaders[0].lanes["web"]
    read = [at.epoch + at.turn / lanes.num_turns(lane) for lane, at in lanes.positions().items()]
    assert found["data/epochs/web"] == sum(read) / len(read) > 0
    unknown = {"data/labels", "data/padding", "data/labels_by_source/web", "data/digest", "data/left_out/books"}
    assert not unknown & found.keys()


def test_skipped_steps_pass_over_the_rows_that_they_would_have_had(make_run, open_loaders):
    run, edited = make_run(), make_run("skip", rest='[[skip]]\nsteps = "5:11"\nreason = "spike"')
    whole, _ = draw(open_loaders(run))
    first, state = draw(open_loaders(run, 2), 5)
    rest, _ = draw(open_loaders(edited, 4, state=state))
    assert {**first, **rest} == {step: digest for step, digest in whole.items() if not 5 <= step < 11}


def test_a_state_saved_before_a_skip_says_where_the_lanes_stand(make_run, open_loaders):
    edited = make_run("skip", rest='[[skip]]\nsteps = "5:11"\nreason = "spike"')
    whole, _ = draw(open_loaders(edited))
    first, state = draw(open_loaders(edited, 2), 5)
    assert (state["step"], state["live"]["at"]) == (11, 5)
    rest, _ = draw(open_loaders(edited, 1, 8, state))
    assert {**first, **rest} == whole


def test_a_stage_that_restarts_begins_the_next_epoch_of_every_lane(make_run, open_loaders):
    run = make_run(two='on_change = "restart"')
    whole, _ = draw(open_loaders(run))
    first, state = draw(open_loaders(run, 2), 8)
    begun, later = draw(open_loaders(run, 1, state=state), 9)
    before, after = (one["live"]["lanes"]["web"] for one in (state, later))
    assert all(after[lane][0] > before[lane][0] for lane in before)
    rest, _ = draw(open_loaders(run, 8, state=later))
    assert {**first, **begun, **rest} == whole


NEW = """
[[sources]]
name = "code"
documents = ["books.jsonl"]
tokenizer = "bytes"
live = true
"""


def test_live_text_may_be_added_to_a_run_under_way(make_run, open_loaders):
    """[M1.b]"""
    run = make_run()
    stages = '[[stages]]\nname = "four"\nstart_step = 20\nweights = { web = 1, code = 1 }\n'
    edited = make_run("added", rest=stages + NEW)
    whole, _ = draw(open_loaders(run))
    first, state = draw(open_loaders(run, 2), 18)
    rest, _ = draw(open_loaders(edited, 4, state=state))
    told, _ = draw(open_loaders(edited))
    assert {**first, **rest} == told
    assert {step: told[step] for step in range(20)} == {step: whole[step] for step in range(20)}
    assert told[21] != whole[21]


def test_a_whole_source_of_live_text_may_be_put_aside(make_run, open_loaders):
    aside = '[[quarantine]]\nsource = "web"\nfrom_step = 12\n'
    edited = make_run("aside", rest=f'{aside}[[stages]]\nname = "end"\nstart_step = 17\nweights = {{ books = 1 }}')
    edited = tm.Run(
        config=replace(edited.config, stages=tuple(s for s in edited.config.stages if s.name != "three")),
        folder=edited.folder,
    )
    whole, _ = draw(open_loaders(make_run()), 12)
    told, _ = draw(open_loaders(edited, 2))
    assert {step: told[step] for step in range(12)} == whole
    assert {int(source) for batch in list(open_loaders(edited)[0])[-64:] for source in batch["source"]} == {1}
    with pytest.raises(ConfigError, match=r"all of \['web'\] are quarantined"):
        make_run("all", rest=aside).plan()


def test_a_batch_that_fails_is_not_lost(make_run, open_loaders, monkeypatch):
    import tokenmill.live.lanes as module

    run = make_run()
    whole = [row_digests(batch) for batch in open_loaders(run, micro_batch=2)[0]]
    (loader,) = open_loaders(run, micro_batch=2)
    found, fails = [], 0
    real = module.tokenize_window
    calls = iter(range(10**6))

    def sometimes(*arguments):
        if next(calls) in (0, 5, 30, 70, 71, 120):
            raise DocumentError("a disk hiccup")
        return real(*arguments)

    monkeypatch.setattr(module, "tokenize_window", sometimes)
    stream = iter(loader)
    while len(found) < len(whole):
        try:
            found.append(row_digests(next(stream)))
        except DocumentError:
            fails += 1
    assert found == whole
    assert fails


def test_what_is_not_known_beforehand_is_refused_with_the_way_out(make_run, open_loaders):
    run = make_run()
    (loader,) = open_loaders(run)
    for ask in (lambda: loader[3], lambda: loader.seek(3)):
        with pytest.raises(
            PlanError, match=r"step: must be 0 or come from a state .* got 3; load a state, or leave out"
        ):
            ask()
    loader.seek(0)
    with pytest.raises(
        PlanError,
        match=r"is live text: the documents of a row are known only after it is read; remove live = true",
    ):
        run.plan().what(0)
    with pytest.raises(
        PlanError,
        match=r"is live text: the documents of a row are known only after it is read; remove live = true",
    ):
        run.plan().when("web", 0)
    with pytest.raises(ConfigError, match=r"num_loss_tokens cannot be combined with live text.*; sum the labels"):
        run.loader(arrays=(*ARRAYS, "num_loss_tokens"))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"source": "max_epochs = 2"},
            "source 'web': max_epochs cannot be combined with live = true",
        ),
        ({"source": 'on_exhausted = "stop"'}, "source 'web': on_exhausted cannot be combined with live = true"),
        ({"source": 'on_error = "ignore"'}, "source 'web': on_error must be one of stop, skip, got 'ignore'"),
        ({"source": "lanes = 0"}, "source 'web': lanes must be at least 1, got 0; raise it"),
        (
            {"source": "lanes = 5"},
            "source 'web': lanes must divide the global_batch_size of every stage .* use 8, or",
        ),
        (
            {"run": 'weigh_by = "tokens"'},
            "stage 'one': weigh_by = \"tokens\" cannot be combined with live text in 'web'",
        ),
        ({"two": "seed = 6"}, "stage 'two': seed of a stage cannot be combined with live text in 'web'"),
        ({"two": 'shuffle = "none"'}, "stage 'two': shuffle of a stage cannot be combined with live text"),
        (
            {"rest": '[[quarantine]]\nsource = "web"\nfrom_step = 3\ndocuments = [1]'},
            "quarantine of 'web': documents of live text have no numbers",
        ),
    ],
)
def test_options_that_do_not_go_with_live_text_are_refused(make_run, parts, message):
    with pytest.raises(ConfigError, match=message):
        make_run(**parts).plan()


@pytest.mark.parametrize("key", ["lanes = 2", "window_bytes = 100", 'on_error = "skip"'])
def test_options_of_live_text_are_refused_elsewhere(folder, key):
    file = folder / "elsewhere.toml"
    file.write_text(
        f'[run]\nsteps = 1\nglobal_batch_size = 1\nseq_len = 8\n[[sources]]\nname = "b"\nstore = "b"\n{key}'
    )
    with pytest.raises(
        ConfigError, match=f"source 'b': {key.split()[0]} is for live text, got no live; add live = tr"
    ):
        tm.Run.from_toml(file)


def test_a_store_of_another_tokenizer_is_refused_beside_live_text(make_run, folder, tmp_path):
    tm.prepare(
        folder / "books.jsonl",
        out=tmp_path / "books",
        tokenizer="bytes",
        workers=1,
        progress=False,
        options=tm.PrepareOptions(add_bos=False),
    )
    run = make_run()
    file = tmp_path / "run.toml"
    text = CONFIG.format(run="", source="", two="", rest="").replace('["web*.jsonl"]', f'["{folder}/web*.jsonl"]')
    file.write_text(text)
    with pytest.raises(
        ConfigError,
        match=r"all must be prepared with one tokenizer, got 'books' with .* and 'web' with .* that differ",
    ):
        tm.Run.from_toml(file).plan()
    assert run.plan().steps == 24


def test_ranks_that_lanes_cannot_be_dealt_to_are_refused(make_run):
    run = make_run(source="lanes = 4")
    assert run.loader(world_size=4, rank=3, arrays=ARRAYS).part.rank == 3
    with pytest.raises(ConfigError, match="source 'web': world_size must divide its 4 lanes, got 8; use another"):
        run.loader(world_size=8)


def edited(state, **live):
    return {**state, "live": signed({**state["live"], **live})}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda s: {k: v for k, v in s.items() if k != "live"},
            "must have the lanes of live text, which is drawn before step 4, got none; use a",
        ),
        (lambda s: {**s, "live": 3}, r"state\.live: expected a table, got 3"),
        (lambda s: edited(s, at=2), "live.at must be its step 4, or have skipped steps alone up to it, got 2"),
        (lambda s: edited(s, at=5), "live.at must be its step 4, .* got 5"),
        (lambda s: edited(s, at=-1), r"state\.live\.at: expected a whole number that is at least 0, got -1"),
        (
            lambda s: edited(s, formats=[[1]]),
            r"state\.live\.formats\[0\]: expected a list of seq_len, packing, split, crop, got \[1\]",
        ),
        (lambda s: edited(s, lanes={}), "must have the lanes 0:8 of 'web' for rank 0 of 1, got none of .0, 1"),
        (lambda s: edited(s, lanes={"web": {"a": [0, 0]}}), "a lane must be named by its number, got 'a'"),
        (lambda s: edited(s, lanes={"web": {"0": [0]}}), r"lanes\.web\.0: expected a list of epoch, turn, drawn,"),
        (lambda s: edited(s, lanes={"web": {"0": [0, 0, [[7, 1]]]}}), r"web\.0: drawn must be pairs of one of the"),
        (lambda s: edited(s, lanes={"web": {str(i): [0, 10**6] for i in range(8)}}), "one of its .* windows"),
    ],
)
def test_states_that_cannot_be_are_refused(make_run, open_loaders, edit, message):
    run = make_run()
    _, state = draw(open_loaders(run), 4)
    (loader,) = open_loaders(run)
    with pytest.raises(ResumeError, match=message):
        loader.load_state_dict(edit(state))
    assert loader.state_dict()["step"] == 0


def test_the_state_of_one_rank_alone_is_refused_at_another_world_size(make_run, open_loaders):
    run = make_run()
    loaders = open_loaders(run, 2)
    draw(loaders, 3)
    with pytest.raises(ResumeError, match=r"lanes 0:8 of 'web' for rank 0 of 1, got none of .4, 5, 6, 7.; join"):
        open_loaders(run, 1, state=loaders[0].state_dict())
    next(iter(loaders[0]))
    states = [loader.state_dict() for loader in loaders]
    with pytest.raises(ResumeError, match="must be the same on all ranks"):
        merge_states(states)


def test_other_text_is_refused_at_resume_with_the_first_difference(open_loaders, folder, tmp_path):
    """[D1.b]"""
    for file in folder.glob("web*.jsonl"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "run.toml").write_text(
        CONFIG.format(run="", source="", two="", rest="").replace('store = "books"', f'store = "{folder}/books"')
    )
    _, state = draw(open_loaders(tm.Run.from_toml(tmp_path / "run.toml")), 3)
    (tmp_path / "web1.jsonl").write_text('{"text": "other"}\n')
    with pytest.raises(ResumeError, match=r"first difference: stages\[0\]\.sources\.web\.files '\w+' -> '\w+'"):
        open_loaders(tm.Run.from_toml(tmp_path / "run.toml"), state=state)


def test_labels_may_cross_documents_in_live_text(make_run, open_loaders):
    parts = {
        "run": 'cross_document_labels = true\npacking = "concat"\npositions = "row"',
        "two": 'on_change = "restart"',
        "rest": 'on_change = "restart"',
    }
    run = make_run(**parts)
    (loader,) = open_loaders(run, micro_batch=8)
    batch = next(iter(loader))
    inputs, labels = batch["input_ids"], batch["labels"]
    full = batch["loss_mask"].all(axis=1)
    assert full.any()
    assert (labels[full, :-1] == inputs[full, 1:]).all()
    assert draw(open_loaders(run, 4)) == draw(open_loaders(run))
    with pytest.raises(
        ConfigError,
        match="stage 'two': labels of 'books' that cross documents know no rest of",
    ):
        make_run("b", run=parts["run"]).plan()


def test_rows_that_must_start_with_bos_are_refused_where_no_document_does(folder):
    options = LiveOptions(seq_len=8, add_bos=False)
    source = open_live(folder / "web0.jsonl", tokenizer="bytes", options=options)
    rows = LiveRows(source=source, lanes=1, format=options.format, cross_document_labels=False)
    assert rows.in_format(8, Policy(name="best_fit")) is rows
    with pytest.raises(
        ConfigError, match="packing bos_best_fit needs documents that start with BOS, got a tokenizer"
    ):
        rows.in_format(8, Policy(name="bos_best_fit"))


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        ({"source": "lanes = 4"}, "sources[0].lanes"),
        ({"source": 'on_error = "skip"'}, None),
        ({"source": 'text_field = "body"'}, "sources[0].text_field"),
        (
            {"rest": '[[stages]]\nname = "four"\nstart_step = 20\nweights = { web = 1, code = 1 }\n' + NEW},
            "sources[2]",
        ),
    ],
    ids=["lanes", "on_error", "text_field", "a new source"],
)
def test_edits_of_live_sources_are_compared_and_recorded(make_run, edit, told):
    """[A1.b]"""
    old, new = make_run("old"), make_run("new", **edit)
    found = compare(old.plan(), new.plan(), configs=(old.config, new.config))
    assert found.same == (told is None)
    if told is not None:
        assert found.changes[0].path.startswith(told)
    name = make_run("same").loader(arrays=ARRAYS).plan.fingerprint
    assert (make_run("same", **edit).loader(arrays=ARRAYS).plan.fingerprint == name) == (told is None)


def without_web(text):
    """Return the config with stores alone."""
    return (
        text.replace("live = true\nwindow_bytes = 600\n", "")
        .replace('documents = ["web*.jsonl"]\ntokenizer = "bytes"\n', 'store = "books"\n')
        .replace('name = "three"\nstart_step = 16\npacking = "concat"', 'name = "three"\nstart_step = 16')
    )


def test_live_text_may_be_added_to_a_run_of_stores_and_dropped_before_it_is_drawn(folder, open_loaders):
    text = without_web(CONFIG.format(run="", source="", two="", rest=""))
    later = '[[stages]]\nname = "four"\nstart_step = 20\nweights = { web = 1, code = 1 }\n'
    runs = []
    for name, more in (
        ("stores", ""),
        ("added", later + NEW),
        ("skipping", later + NEW + '[[skip]]\nsteps = "10:14"\n'),
    ):
        (folder / f"later-{name}.toml").write_text(text + more)
        runs.append(tm.Run.from_toml(folder / f"later-{name}.toml"))
    plain, added, skipping = runs
    (loader,) = [plain.loader(arrays=ARRAYS)]
    whole = {step: batch_digest(row_digests(loader[step])) for step in range(20)}
    loader.seek(10)
    state = loader.state_dict()
    assert "live" not in state
    told, _ = draw(open_loaders(added))
    rest, _ = draw(open_loaders(added, 2, state=state))
    assert {step: digest for step, digest in told.items() if step >= 10} == rest
    assert {step: told[step] for step in range(20)} == whole
    skipped, late = draw(open_loaders(skipping, 2, state=state), 18)
    assert list(skipped) == [14, 15, 16, 17]
    back = plain.loader(arrays=ARRAYS)
    with pytest.raises(ResumeError):  # of another plan
        back.load_state_dict(late)
    _, early = draw(open_loaders(added), 15)
    back.load_state_dict(early)
    assert back.step == 15


def test_sources_of_one_size_are_not_walked_in_step(folder, open_loaders):
    source = '[[sources]]\nname = "{}"\ndocuments = ["web0.jsonl"]\ntokenizer = "bytes"\n'
    source += "live = true\nwindow_bytes = 300\n"
    file = folder / "twins.toml"
    file.write_text(
        "[run]\nsteps = 6\nglobal_batch_size = 8\nseq_len = 64\nweights = { en = 1, fr = 1 }\n"
        + source.format("en")
        + source.format("fr")
    )
    (loader,) = open_loaders(tm.Run.from_toml(file), micro_batch=8)
    together = 0
    for batch in loader:
        rows = [[], []]
        for digest, source in zip(row_digests(batch), batch["source"], strict=True):
            rows[int(source)].append(digest)
        together += len(set(rows[0]) & set(rows[1]))
    assert together < 6  # of 24, were they walked in step


def test_documents_that_a_later_stage_must_not_cut_are_left_out_or_refused_with_their_place(make_run, open_loaders):
    """[C2.c]"""
    config = CONFIG.replace('packing = "concat"', 'on_long = "stop"\nseq_len = 30')
    run = make_run(config=config, source='on_error = "skip"')
    loaders = open_loaders(run)
    whole, state = draw(loaders)
    assert loaders[0].lanes["web"].skipped.counts["too_many_tokens"] > 0
    assert state["live"]["skipped"]["web"] == loaders[0].lanes["web"].skipped.counts
    for cut in (16, 17, 20):  # where the stage begins, and behind it
        first, state = draw(open_loaders(run, 2), cut)
        rest, again = draw(open_loaders(run, 4, state=state))
        assert {**first, **rest} == whole
        assert again["live"]["skipped"] == {"web": dict(loaders[0].lanes["web"].skipped.counts)}
    with pytest.raises(
        DocumentError, match=r"web\d\.jsonl.* line \d+.*: with packing = 'best_fit' and on_long = 'stop'"
    ):
        draw(open_loaders(make_run("stop", config=config)))


def test_a_run_that_has_ended_holds_no_thread_and_none_is_started_where_none_is_wanted(make_run, open_loaders):
    def alive():
        return [thread for thread in threading.enumerate() if thread.name.startswith("tokenmill-live")]

    before = len(alive())
    run = make_run()
    (loader,) = open_loaders(run, threads=1)
    assert len(list(loader)) == len(loader)
    assert len(alive()) == before
    (inline,) = open_loaders(run, threads=0)
    next(iter(inline))
    assert len(alive()) == before


def test_only_the_start_of_a_step_is_the_step(make_run, open_loaders):
    (loader,) = open_loaders(make_run(), micro_batch=2)
    stream = iter(loader)
    for _ in range(4):
        next(stream)
    loader.seek(1)
    next(stream)
    with pytest.raises(PlanError, match="must be 0 or come from a state"):
        loader.seek(1)


def test_a_timeout_can_be_given(make_run):
    assert make_run().loader(timeout=7.5).options.timeout == 7.5
    with pytest.raises(ConfigError, match="timeout more than 0, got 1, 8 and 0"):
        make_run().loader(timeout=0)


@pytest.mark.parametrize("arrays", [ARRAYS, ("loss_mask", "source"), ("labels", "doc_ids")])
def test_more_shards_than_maps_beside_live_text_give_the_same_batches(folder, tmp_path, open_loaders, arrays):
    """[S1.a]"""
    books, small = tmp_path / "books", tm.PrepareOptions(max_tokens_per_shard=40)
    tm.prepare(folder / "books.jsonl", out=books, tokenizer="bytes", workers=1, progress=False, options=small)
    text = CONFIG.format(run="", source="", two="", rest="").replace('["web*.jsonl"]', f'["{folder}/web*.jsonl"]')
    drawn = []
    for name, store in (("few", folder / "books"), ("many", books)):
        (tmp_path / f"{name}.toml").write_text(text.replace('store = "books"', f'store = "{store}"'))
        run = tm.Run.from_toml(tmp_path / f"{name}.toml")
        (loader,) = open_loaders(run, micro_batch=4, arrays=arrays)
        drawn.append([{name: array.tobytes() for name, array in batch.items()} for batch in loader])
    assert run.stores["books"].num_shards > run.stores["books"]._maps.limit // 2  # what a block may hold
    assert drawn[0] == drawn[1]
