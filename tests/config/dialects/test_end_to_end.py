"""Configs of other projects over real files: the tokens of every step are those that the config asks for."""

import tomllib
from collections import Counter
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest

from tokenmill.build.build import prepare
from tokenmill.config.dialects import translate
from tokenmill.config.run import RunConfig, SourceConfig, StageConfig, parse_config, to_toml
from tokenmill.encode.engines import read_identity
from tokenmill.errors import ConfigError
from tokenmill.run.run import Run

EOS = 0
VOCABULARY = 50_257
EXISTING = {kind: {item.name for item in fields(kind)} for kind in (RunConfig, SourceConfig, StageConfig)}
needs_scale = pytest.mark.skipif("lr_scale" not in EXISTING[StageConfig], reason="native stages have no lr_scale")
needs_heat = pytest.mark.skipif("temperature" not in EXISTING[RunConfig], reason="native runs have no temperature")
needs_text = pytest.mark.skipif(
    "documents" not in EXISTING[SourceConfig], reason="native sources have no documents"
)


def run_of(text, folder, world_size=1):
    found = translate(tomllib.loads(text), where="foreign.toml", world_size=world_size)
    return Run(config=parse_config(found.tables), folder=folder)


def stream(seed, count, document=37):
    """Make a stream of tokens in which every document has so many, an EOS last."""
    ids = np.random.default_rng(seed).integers(1, VOCABULARY, count).astype(np.uint16)
    ids[document - 1 :: document] = EOS
    return ids


@pytest.fixture
def npy(tmp_path):
    """Write web/ and code/ with two .npy each, and return their streams by name."""
    made = {}
    for seed, name in enumerate(("web", "code")):
        ids = made[name] = stream(seed, 37 * 135)
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "part0.npy", ids[: 37 * 50])
        np.save(tmp_path / name / "part1.npy", ids[37 * 50 :])
    return made


def rows_of(ids, seq_len, *, crossing=True):
    """Cut a stream into the inputs and labels of rows; EOS has a label only if labels cross documents."""
    labels = ids[1:].astype(np.int64)
    if not crossing:
        labels[ids[:-1] == EOS] = -100
    starts = range(0, labels.size - seq_len + 1, seq_len)
    return {(tuple(ids[i : i + seq_len].tolist()), tuple(labels[i : i + seq_len].tolist())) for i in starts}


def drawn(run, steps=None):
    """Return (source, inputs, labels) of every row, by step."""
    plan = run.plan()
    loader = run.loader(micro_batch=1, arrays=["input_ids", "labels", "source"])
    found = []
    for step in range(run.config.run.steps) if steps is None else steps:
        rows = []
        batch = loader[step]
        for source, ids, labels in zip(batch["source"], batch["input_ids"], batch["labels"], strict=True):
            rows.append((plan.sources[int(np.ravel(source)[0])], tuple(ids.tolist()), tuple(labels.tolist())))
        found.append(rows)
    return found


KEMPNERFORGE = """
[model]
vocab_size = 50257
[train]
batch_size = 4
grad_accum_steps = 2
seq_len = 32
max_steps = 20
[data]
[[data.datasets]]
name = "web"
path = "web"
weight = 0.75
[[data.datasets]]
path = "code"
weight = 0.25
[[data.phases]]
start_step = 12
dataset_weights = { web = 0.25, code = 0.75 }
"""


@pytest.mark.usefixtures("npy")
def test_a_mixture_of_kempnerforge_is_drawn_by_its_weights_and_switches_at_its_step(tmp_path):
    """[M1.b] There new weights wait for the next epoch."""
    found = drawn(run_of(KEMPNERFORGE, tmp_path))
    assert [len(rows) for rows in found] == [8] * 20
    shares = [Counter(name for name, _, _ in rows) for rows in found]
    assert shares == [{"web": 6, "code": 2}] * 12 + [{"web": 2, "code": 6}] * 8


def test_rows_of_kempnerforge_are_the_stream_cut_and_none_is_drawn_twice(npy, tmp_path):
    """[R1.d, M1.c] A row is trained once, before and after the switch, until all of them are."""
    rows = [row for step in drawn(run_of(KEMPNERFORGE, tmp_path)) for row in step]
    assert len(set(rows)) == len(rows) == 160
    for name, ids in npy.items():
        wanted = rows_of(ids, 32)
        assert [row for source, *row in rows if source == name and tuple(row) not in wanted] == []


@pytest.mark.usefixtures("npy")
def test_the_global_batch_of_kempnerforge_grows_with_its_ranks(tmp_path):
    assert run_of(KEMPNERFORGE, tmp_path, world_size=2).config.run.global_batch_size == 16


def test_packed_sequences_end_at_the_eos_of_the_tokenizer_by_config_and_by_adapter(tmp_path):
    """[P1.c]"""
    pytest.importorskip("torch")
    from tokenmill.adapters import kempnerforge as adapter

    eos = read_identity("bytes").eos_id
    ids = np.arange(1000, 1000 + 40 * 130, dtype=np.uint16)
    ids[36::37] = eos
    (tmp_path / "web").mkdir()
    np.save(tmp_path / "web" / "part.npy", ids)
    text = "[train]\nmax_steps = 10\nbatch_size = 8\nseq_len = 64\n[data]\ndataset_path = 'web'\n"
    (tmp_path / "kf.toml").write_text(text + "pack_sequences = true\ntokenizer_path = 'bytes'\n")
    config = adapter.DataConfig(
        dataset_path=str(tmp_path / "web"), pack_sequences=True, tokenizer_path="bytes", num_workers=0
    )

    def labels(batches):
        """Return the label of every token, whose ids are all different, and how many labels there are not."""
        pairs = [(batch["input_ids"].ravel().tolist(), batch["labels"].ravel().tolist()) for batch in batches]
        said = {token: label for tokens, follow in pairs for token, label in zip(tokens, follow, strict=True)}
        ends = [token for tokens, _ in pairs for token in tokens].count(eos)
        assert ends == sum(follow.count(-100) for _, follow in pairs) > 100
        return said

    run = Run.from_toml(tmp_path / "kf.toml", world_size=1)
    by_config = labels([run.loader(micro_batch=8)[step] for step in range(10)])
    by_adapter = labels(list(adapter.build_dataloader(config, rank=0, world_size=1, batch_size=8, seq_len=64)))
    shared = by_config.keys() & by_adapter.keys()
    assert len(shared) > 4500
    assert {token: by_config[token] for token in shared} == {token: by_adapter[token] for token in shared}


@pytest.mark.usefixtures("npy")
def test_a_tokenizer_without_eos_cannot_end_documents(tmp_path, monkeypatch):
    monkeypatch.setattr("tokenmill.encode.engines.identify", lambda *_: SimpleNamespace(eos_id=None))
    text = "[data]\ndataset_path = 'web'\npack_sequences = true\ntokenizer_path = 'bytes'\n"
    with pytest.raises(ConfigError) as caught:
        run_of(text, tmp_path).plan()
    assert str(caught.value) == (
        "source 'web': tokenizer 'bytes' has no EOS, which ends documents; set it in the tokenizer_config.json "
        "next to it, or set eos_id"
    )


def test_a_store_of_ours_is_read_as_such_by_a_config_of_kempnerforge(tmp_path):
    """Its manifest says dtype, vocabulary and EOS: nothing of [model] or [data] may contradict it."""
    (tmp_path / "docs.jsonl").write_text('{"text": "a tale of a mill"}\n' * 200)
    prepare(tmp_path / "docs.jsonl", out=tmp_path / "web", tokenizer="bytes")
    (tmp_path / "kf.toml").write_text(
        "[model]\nvocab_size = 50304\n[train]\nmax_steps = 3\nseq_len = 16\n"
        "[data]\ndataset_path = 'web'\npack_sequences = true\n"
    )
    run = Run.from_toml(tmp_path / "kf.toml", world_size=1)
    batch = run.loader(micro_batch=8)[0]
    assert (batch["input_ids"] == run.stores["web"].manifest.tokenizer["eos_id"]).sum() > 0
    assert (
        (batch["input_ids"] == run.stores["web"].manifest.tokenizer["eos_id"]) == (batch["labels"] == -100)
    ).all()


@pytest.mark.usefixtures("npy")
def test_a_note_that_matters_is_logged(tmp_path, caplog):
    text = "[train]\nmax_steps = 5\n[data]\ndataset_path = 'web'\nnum_workers = 4\n"
    (tmp_path / "kf.toml").write_text(text)
    with caplog.at_level("WARNING", "tokenmill"):
        Run.from_toml(tmp_path / "kf.toml", world_size=2)
        assert caplog.messages == []
        Run.from_toml(tmp_path / "kf.toml")
    assert caplog.messages == [
        f"{tmp_path / 'kf.toml'}: the rows of a step are those of one rank, as the config does not say how many "
        "there are; give world_size=N"
    ]


@pytest.mark.usefixtures("npy")
def test_packed_sequences_of_kempnerforge_end_labels_and_positions_at_eos(tmp_path):
    """[P1.c]"""
    text = "[tokenmill]\neos_id = 0\n[train]\nmax_steps = 5\nseq_len = 64\n[data]\ndataset_path = 'web'\n"
    run = run_of(text + "pack_sequences = true", tmp_path)
    loader = run.loader(micro_batch=8)
    checked = 0
    for step in range(5):
        batch = loader[step]
        ids, labels, positions = batch["input_ids"], batch["labels"], batch["position_ids"]
        ends = ids == EOS
        assert (labels[ends] == -100).all()
        assert (labels[~ends] >= 0).all()
        assert (positions[:, 1:][ends[:, :-1]] == 0).all()
        checked += int(ends.sum())
    assert checked > 40


def test_raw_files_of_kempnerforge_are_proven_and_not_guessed(tmp_path):
    """A file of 16-bit ids whose length is that of one of 32-bit ids is read as what it is."""
    ids = stream(3, 4000)
    (tmp_path / "web").mkdir()
    ids.tofile(tmp_path / "web" / "a.bin")
    text = "[train]\nmax_steps = 3\nseq_len = 32\n[data]\ndataset_path = 'web'\nfile_pattern = '*.bin'\n"
    run = run_of("[model]\nvocab_size = 50257\n" + text, tmp_path)
    assert run.stores["web"].num_tokens == 4000
    wanted = rows_of(ids, 32)
    assert all(tuple(row) in wanted for step in drawn(run) for _, *row in step)
    assert run_of('[tokenmill]\ndtype = "uint16"\n' + text, tmp_path).stores["web"].num_tokens == 4000


@needs_scale
@pytest.mark.usefixtures("npy")
def test_the_scale_of_a_phase_is_that_of_its_stage(tmp_path):
    text = KEMPNERFORGE + "lr_scale = 0.5\n"
    assert [stage.lr_scale for stage in run_of(text, tmp_path).config.resolved_stages] == [1.0, 0.5]


@needs_heat
@pytest.mark.usefixtures("npy")
def test_temperature_flattens_the_mixture(tmp_path):
    """0.81 and 0.01 are 9 to 1 at temperature 2."""
    text = KEMPNERFORGE.replace("[data]", "[data]\nmix_temperature = 2.0").replace("0.75\n[[", "0.81\n[[")
    text = text.replace("weight = 0.25", "weight = 0.01").replace("batch_size = 4", "batch_size = 5")
    found = drawn(run_of(text, tmp_path), range(10))
    total = Counter(name for rows in found for name, _, _ in rows)
    assert sum(total.values()) == 100
    assert abs(total["web"] - 90) <= 2  # of the weights as they are it would be 99


@pytest.fixture
def nanoset(tmp_path):
    """Write web/, books/ and code/ as datatrove does, and return their streams by name."""
    made = {}
    for seed, name in enumerate(("web", "books", "code")):
        ids = made[name] = stream(seed, 37 * 200)
        (tmp_path / name).mkdir()
        file = tmp_path / name / "00000_a.ds"
        ids.tofile(file)
        np.arange(37, ids.size + 1, 37, dtype="<u8").tofile(f"{file}.index")
        file.with_name(f"{file.name}.metadata").write_text(f"gpt2|2\n{ids.size}\n7.4 kT")
    return made


HEAD = """
[tokenmill]
vocab_size = 50257
[training]
steps = 20
global_batch_size = 10
"""
STAGE = """
[[training.data_stages]]
name = "{name}"
start_step = {start}
dataset_type = "nanoset"
dataset_folders = ["web", "books", "code"]
dataset_weights = {weights}
seq_len = {seq_len}
"""


def test_a_change_of_mixture_happens_at_its_step_and_repeats_nothing(nanoset, tmp_path):
    """[M1.b, M1.c]"""
    text = HEAD + STAGE.format(name="pretrain", start=0, weights=[0.7, 0.2, 0.1], seq_len=32)
    found = drawn(
        run_of(text + STAGE.format(name="anneal", start=15, weights=[0.4, 0.3, 0.3], seq_len=32), tmp_path)
    )
    shares = [Counter(name for name, _, _ in rows) for rows in found]
    assert shares == [{"web": 7, "books": 2, "code": 1}] * 15 + [{"web": 4, "books": 3, "code": 3}] * 5
    rows = [row for step in found for row in step]
    assert len(set(rows)) == len(rows) == 200
    wanted = {name: rows_of(ids, 32, crossing=False) for name, ids in nanoset.items()}
    assert all((ids, labels) in wanted[name] for name, ids, labels in rows)


@pytest.mark.usefixtures("nanoset")
def test_a_longer_context_takes_up_what_the_shorter_one_has_left(tmp_path):
    """[M1.c] No token is trained on in both stages."""
    text = HEAD + STAGE.format(name="base", start=0, weights=[0.5, 0.3, 0.2], seq_len=32)
    run = run_of(text + STAGE.format(name="long", start=15, weights=[0.5, 0.3, 0.2], seq_len=64), tmp_path)
    plan = run.plan()
    trained = Counter(
        (row.source, span.document, position)
        for step in range(20)
        for row in plan.what(step)
        for span in row.spans
        for position in range(span.start + 1, span.start + span.length)  # the first of a span has nothing before it
    )
    assert set(trained.values()) == {1}
    assert sum(trained.values()) > 0.95 * (150 * 32 + 50 * 64)
    assert [batch["input_ids"].shape for batch in (run.loader(micro_batch=10)[step] for step in (14, 15))] == [
        (10, 32),
        (10, 64),
    ]


@pytest.mark.usefixtures("nanoset")
def test_another_seed_orders_the_epochs_that_begin_after_it(tmp_path):
    """[R1.d] Both epochs hold every row once, and in another order."""
    rows = (37 * 200 - 1) // 64
    head = f"[training]\nsteps = {2 * rows}\nglobal_batch_size = 1\n"
    stage = STAGE.replace('["web", "books", "code"]', '["web"]')
    first = stage.format(name="epoch1", start=0, weights=[1.0], seq_len=64) + "dataset_random_seed = 1234\n"
    second = stage.format(name="epoch2", start=rows, weights=[1.0], seq_len=64) + "dataset_random_seed = 5678\n"
    plan = run_of(head + first + second, tmp_path).plan()
    order = [int(plan.rows(step)[1][0]) for step in range(2 * rows)]
    assert sorted(order[:rows]) == sorted(order[rows:]) == list(range(rows))
    assert order[:rows] != order[rows:]
    other = run_of(head + first + second.replace("5678", "9"), tmp_path).plan()
    again = [int(other.rows(step)[1][0]) for step in range(2 * rows)]
    assert (again[:rows] == order[:rows], again[rows:] == order[rows:]) == (True, False)


@pytest.mark.usefixtures("nanoset")
def test_an_ablation_changes_no_batch_before_its_stage(tmp_path):
    """[M1.c] A run goes on from its checkpoint with another mixture."""
    training = """
dataset_type = "nanoset"
dataset_folders = ["web", "books", "code"]
dataset_weights = [0.7, 0.2, 0.1]
seq_len = 32
"""
    plain = run_of(HEAD + training, tmp_path)
    tried = run_of(
        HEAD + training + STAGE.format(name="ablation", start=5, weights=[0.1, 0.1, 0.8], seq_len=32), tmp_path
    )
    assert [stage.name for stage in tried.config.stages] == ["default", "ablation"]
    before, after = drawn(plain), drawn(tried)
    assert before[:5] == after[:5]
    assert [Counter(name for name, _, _ in rows) for rows in after[5:]] == [{"web": 1, "books": 1, "code": 8}] * 15
    state = plain.loader()
    next(iter(state))
    resumed = tried.loader()
    resumed.load_state_dict(state.state_dict())
    assert resumed.state_dict()["step"] == state.state_dict()["step"]


@pytest.mark.usefixtures("npy")
def test_preprocessed_is_any_store_and_packed_memmap_any_token_file(tmp_path):
    (tmp_path / "texts.jsonl").write_text("".join(f'{{"text": "document {i} of the mill"}}\n' for i in range(200)))
    prepare(tmp_path / "texts.jsonl", out=tmp_path / "ours", tokenizer="bytes", workers=1, progress=False)
    for kind, place, name in (("preprocessed", "ours", "ours"), ("packed_memmap", "web/part0.npy", "part0.npy")):
        text = f"[training]\nsteps = 3\nseq_len = 16\ndataset_type = '{kind}'\ndataset_path = '{place}'\n"
        run = run_of(text, tmp_path)
        assert [source for step in drawn(run) for source, _, _ in step] == [name] * 24


@pytest.mark.usefixtures("nanoset")
def test_files_whose_vocabulary_is_not_said_are_not_mixed(tmp_path):
    """[T2.a]"""
    stage = STAGE.format(name="a", start=0, weights=[0.7, 0.2, 0.1], seq_len=32)
    run = run_of("[training]\nsteps = 20\n" + stage, tmp_path)
    with pytest.raises(ConfigError, match="give the vocab_size of files of other projects"):
        run.plan()


@needs_text
@pytest.mark.parametrize("streaming", ["true", "false"])
def test_text_of_hugging_face_is_prepared_or_streamed(tmp_path, monkeypatch, streaming):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    texts = [f"document {number} of the mill" for number in range(300)]
    datasets.Dataset.from_dict({"body": texts}).save_to_disk(tmp_path / "saved")
    text = f"""
[train]
max_steps = 4
seq_len = 32
[data]
hf_dataset_name = "{tmp_path}/saved"
hf_dataset_text_field = "body"
hf_streaming = {streaming}
tokenizer_path = "bytes"
"""
    run = run_of(text, tmp_path)
    shown = b"".join(batch["input_ids"].astype("u1").tobytes() for batch in run.loader())
    assert len(shown) == 4 * 8 * 32
    assert shown.count(b"of the mill") > 20
    if streaming == "true":
        assert list(run.stores) == []
        assert not (tmp_path / ".tokenmill" / "stores").exists()
    else:
        assert run.stores["saved"].num_documents == 300
        assert [name for step in drawn(run) for name, _, _ in step] == ["saved"] * 32


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.usefixtures("npy")
def test_the_native_file_is_the_same_run(tmp_path, world_size):
    """[A1.b]"""
    found = translate(tomllib.loads(KEMPNERFORGE), where="foreign.toml", world_size=world_size)
    (tmp_path / "native.toml").write_text(to_toml(found.tables), encoding="utf-8")
    native = Run.from_toml(tmp_path / "native.toml").plan()
    assert native.fingerprint == run_of(KEMPNERFORGE, tmp_path, world_size).plan().fingerprint
