"""Fill-in-the-middle."""

import json
import subprocess
import sys

import numpy as np
import pytest

import tokenmill as tm
from tokenmill.encode.fim import Fim, cut_places
from tokenmill.errors import ConfigError
from tokenmill.run.run import Run

TOKENS = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
TEXTS = [f"def f{number}(x):\n    return x * {number} + 'ü{'y' * (number % 40)}'\n" for number in range(200)]


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    """Write a tokenizer of bytes that has the three control tokens, BOS and EOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", *TOKENS])
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def put_together(text):
    """Return the document that a cut one was made of, and which of its parts stood first."""
    assert text.startswith("<fim_prefix>")
    if text.startswith("<fim_prefix><fim_suffix>"):
        suffix, rest = text.removeprefix("<fim_prefix><fim_suffix>").split("<fim_middle>")
        return rest + suffix, True
    prefix, rest = text.removeprefix("<fim_prefix>").split("<fim_suffix>")
    suffix, middle = rest.split("<fim_middle>")
    return prefix + middle + suffix, False


def test_parts_make_up_the_document(spec):
    """All characters are there, about as many are cut and turned as was asked for, and cuts are anywhere."""
    tokenizer = tm.open_tokenizer(spec)
    cut = Fim(rate=0.5, spm_rate=0.25).wrap(tokenizer)
    encoded = cut.encode([*TEXTS, ""])
    documents = [cut.decode(encoded.ids[a:b]) for a, b in zip(encoded.offsets, encoded.offsets[1:], strict=False)]
    assert documents.pop() == ""
    changed = [(new, old) for new, old in zip(documents, TEXTS, strict=True) if new != old]
    found = [put_together(new) for new, _ in changed]
    assert [text for text, _ in found] == [old for _, old in changed]
    assert 75 < len(changed) < 125
    assert 12 < sum(turned for _, turned in found) < 40
    assert encoded.ids.dtype == tokenizer.encode(TEXTS).ids.dtype


def test_parts_are_tokenized_apart(spec):
    tokenizer = tm.open_tokenizer(spec)
    fim = Fim(rate=1, spm_rate=0)
    prefix, suffix, middle = (tokenizer.special_ids[name] for name in TOKENS)
    for text in TEXTS[:20]:
        first, last, turned = cut_places(text, fim, 0)
        parts = [tokenizer.encode([part]).ids.tolist() for part in (text[:first], text[last:], text[first:last])]
        expected = [prefix, *parts[0], suffix, *parts[1], middle, *parts[2]]
        assert (fim.wrap(tokenizer).encode([text]).ids.tolist(), turned) == (expected, False)


def test_a_cut_is_a_function_of_seed_epoch_and_text():
    fim = Fim(rate=0.5)
    places = [cut_places(text, fim, 0) for text in TEXTS]
    assert places == [cut_places(text, fim, 0) for text in TEXTS]
    assert places != [cut_places(text, fim, 1) for text in TEXTS]
    assert places != [cut_places(text, Fim(rate=0.5, seed=1), 0) for text in TEXTS]
    assert [cut_places(text, Fim(rate=0), 0) for text in TEXTS] == [None] * len(TEXTS)
    assert None not in [cut_places(text, Fim(rate=1), 0) for text in TEXTS]


def write(folder):
    (folder / "code.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return folder / "code.jsonl"


def test_stores_are_the_same_for_any_number_of_workers(tmp_path, spec):
    """[D1.a] The manifest says how documents were cut, every token has a fate, and `inspect` tells of it."""
    file = write(tmp_path)
    recipe = {"preset": "text", "fim": {"rate": 0.5}}
    options = tm.PrepareOptions(chunk_bytes=2000)
    for workers in (1, 2):
        tm.prepare(
            file,
            out=tmp_path / f"s{workers}",
            tokenizer=spec,
            recipe=recipe,
            workers=workers,
            options=options,
            progress=False,
        )
    one, other = (tm.open_store(tmp_path / f"s{workers}") for workers in (1, 2))
    assert one.fingerprint == other.fingerprint
    assert one.manifest.recipe["recipe"]["fim"]["rate"] == 0.5
    tm.prepare(file, out=tmp_path / "plain", tokenizer=spec, progress=False)
    plain = tm.open_store(tmp_path / "plain")
    assert "fim" not in plain.manifest.recipe["recipe"]
    tokenizer = Fim(rate=0.5).wrap(tm.open_tokenizer(spec))
    expected = tokenizer.encode(TEXTS)
    lengths = np.diff(one.document_offsets(0, 200))
    assert lengths.tolist() == (np.diff(expected.offsets) + 2).tolist()
    begin, end = one.document_bounds(7)
    ids = one.fetch(begin, end, "sequence").tolist()
    assert ids[1:-1] == expected.ids[expected.offsets[7] : expected.offsets[8]].tolist()
    bos, eos = tokenizer.identity.bos_id, tokenizer.identity.eos_id
    assert (ids[0], ids[-1]) == (bos, eos)
    told = subprocess.run(
        [sys.executable, "-m", "tokenmill", "inspect", str(tmp_path / "s1")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "fill-in-the-middle 0.5 (suffix first 0.5)" in " ".join(told.stdout.split())
    report = Run.from_tables(
        {"run": {"steps": 2, "global_batch_size": 2, "seq_len": 32}, "sources": [{"name": "code", "store": "s1"}]},
        folder=tmp_path,
    ).report()
    assert report.fim == {"code": 0.5}
    fates = report.sources[0].fates
    assert fates.tokens == one.num_tokens == fates.trained + fates.masked


def tables(spec, **more):
    source = {"name": "code", "documents": ["code.jsonl"], "tokenizer": spec, "fim": {"rate": 0.5}, **more}
    run = {"steps": 40, "global_batch_size": 4, "seq_len": 64, "shuffle": "none", "packing": "padded"}
    return {"run": {**run, "on_long": "truncate_end"}, "sources": [source]}


def test_documents_and_live_text_of_a_run_are_cut(tmp_path, spec):
    """In the first epoch alike; live text otherwise in every epoch, and alike after a resume."""
    write(tmp_path)
    stored = Run.from_tables(tables(spec), folder=tmp_path)
    live = Run.from_tables(tables(spec, live=True, lanes=1), folder=tmp_path)
    first = [
        sorted(row.tobytes() for batch in list(run.loader(micro_batch=4))[:50] for row in batch["input_ids"])
        for run in (stored, live)
    ]
    prefix = tm.open_tokenizer(spec).special_ids["<fim_prefix>"]
    assert first[0] == first[1]
    assert any(np.frombuffer(row, np.int64)[1] == prefix for row in first[0])
    longer = tables(spec, live=True, lanes=1)
    longer["run"]["steps"] = 100
    run = Run.from_tables(longer, folder=tmp_path)
    loader = run.loader(micro_batch=4)
    stream = iter(loader)
    drawn = [next(stream)["input_ids"].copy() for _ in range(60)]
    state = loader.state_dict()
    rest = [batch["input_ids"].copy() for batch in stream]
    assert not np.array_equal(np.concatenate(drawn[:40]), np.concatenate([*drawn, *rest])[200:360])
    again = run.loader(micro_batch=4)
    again.load_state_dict(state)
    assert all(np.array_equal(batch["input_ids"], old) for batch, old in zip(again, rest, strict=True))
    plain = tables(spec, live=True, lanes=1)
    del plain["sources"][0]["fim"]
    assert Run.from_tables(plain, folder=tmp_path).plan().fingerprint != live.plan().fingerprint


def test_a_tokenizer_that_lacks_the_tokens_is_refused(tmp_path, spec):
    file = write(tmp_path)
    recipe = {"preset": "text", "fim": {"rate": 0.5}}
    with pytest.raises(ConfigError, match=r"got none for prefix \('<fim_prefix>'\), suffix .*; add them"):
        tm.prepare(file, out=tmp_path / "s", tokenizer="bytes", recipe=recipe, progress=False)
    with pytest.raises(ConfigError, match=r"got none for prefix .*middle"):
        Run.from_tables(tables("bytes", live=True), folder=tmp_path).plan()
    named = Fim(rate=1, tokens={"prefix": "<fim_suffix>", "suffix": "<fim_prefix>", "middle": "<fim_middle>"})
    assert named.find_ids(tm.open_tokenizer(spec))[0] == tm.open_tokenizer(spec).special_ids["<fim_suffix>"]
    twice = Fim(rate=1, tokens={"prefix": "<s>", "suffix": "<fim_prefix>", "middle": "<fim_middle>"})
    with pytest.raises(ConfigError, match="three control tokens other than BOS and EOS"):
        twice.find_ids(tm.open_tokenizer(spec))


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"preset": "chat", "fim": {"rate": 0.5}}, "fim is for plain texts of one field"),
        ({"preset": "text", "control_strings": "encode", "fim": {"rate": 0.5}}, "are no control tokens"),
        ({"preset": "text", "fim": {"rate": 1.5}}, "rate"),
        ({"preset": "text", "fim": {"rate": 0.5, "spm": 1}}, "unknown key: 'spm'; did you mean 'spm_rate'"),
        ({"preset": "text", "fim": {"rate": 0.5, "level": "token"}}, "level"),
    ],
)
def test_what_cannot_be_cut_is_refused(tmp_path, spec, recipe, message):
    with pytest.raises(ConfigError, match=message):
        tm.prepare(write(tmp_path), out=tmp_path / "s", tokenizer=spec, recipe=recipe, progress=False)


def test_a_store_is_not_cut(spec):
    with pytest.raises(ConfigError, match="fim is for documents, got a store"):
        Run.from_tables({**tables(spec), "sources": [{"name": "a", "store": "b", "fim": {"rate": 1}}]})
