"""What the bundled corpus and its tokenizer promise."""

import doctest
import json
import subprocess
import sys
import types
from pathlib import Path

import fastokens
import numpy as np
import pytest
import tokenizers

from tokenmill.demo import CORPUS_DIR, TOKENIZER_DIR

TOOLS = Path(__file__).parents[2] / "tools"
KINDS = ("prose", "code", "dialogue")
TOKENIZER_JSON = str(TOKENIZER_DIR / "tokenizer.json")


def run_tool(name, *arguments):
    subprocess.run([sys.executable, str(TOOLS / name), *map(str, arguments)], check=True)


def documents(kind):
    with (CORPUS_DIR / f"{kind}.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def texts(kind):
    return [document["text"] for document in documents(kind)]


@pytest.fixture(scope="module")
def reference():
    tokenizer = tokenizers.Tokenizer.from_file(TOKENIZER_JSON)
    tokenizer.encode_special_tokens = True
    return tokenizer


def reference_ids(reference, batch):
    return [encoding.ids for encoding in reference.encode_batch(batch, add_special_tokens=False)]


def fast_ids(batch):
    ids, offsets = fastokens.Tokenizer.from_file(TOKENIZER_JSON).encode_batch_flat(
        batch, add_special_tokens=False, split_special_tokens=True
    )
    cuts = np.frombuffer(offsets, dtype="<u8")[1:-1].astype(np.int64)
    return [part.tolist() for part in np.split(np.frombuffer(ids, dtype="<u4"), cuts)]


def test_generator_reproduces_the_shipped_corpus_byte_for_byte(tmp_path):
    run_tool("make_demo_corpus.py", tmp_path)
    shipped = {path.name: path.read_bytes() for path in CORPUS_DIR.glob("*.jsonl")}
    assert sorted(shipped) == sorted(f"{kind}.jsonl" for kind in KINDS)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == shipped


def test_training_reproduces_the_shipped_tokenizer_byte_for_byte(tmp_path):
    run_tool("train_demo_tokenizer.py", tmp_path)
    shipped = {path.name: path.read_bytes() for path in TOKENIZER_DIR.iterdir()}
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == shipped


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_between_100_and_200_kilobytes(kind):
    assert 100_000 < (CORPUS_DIR / f"{kind}.jsonl").stat().st_size < 200_000


@pytest.mark.parametrize("kind", KINDS)
def test_ids_count_up_from_one_and_are_all_that_stands_beside_the_text(kind):
    found = documents(kind)
    assert [document["id"] for document in found] == [f"{kind}-{n:04d}" for n in range(1, len(found) + 1)]
    assert {tuple(document) for document in found} == {("id", "text")}


def test_no_document_comes_twice():
    every = [text for kind in KINDS for text in texts(kind)]
    assert len(set(every)) == len(every)


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_range_from_one_sentence_to_several_thousand_characters(kind):
    lengths = sorted(map(len, texts(kind)))
    assert 300 <= len(lengths) <= 600
    assert lengths[0] < 40
    assert 150 < lengths[len(lengths) // 2] < 300
    assert sum(200 <= length <= 800 for length in lengths) > 100
    assert 5_000 < lengths[-2] <= lengths[-1] < 10_000


@pytest.mark.parametrize("kind", KINDS)
def test_some_documents_hold_a_control_string_as_text(kind):
    assert sum("<|endoftext|>" in text for text in texts(kind)) >= 1


@pytest.mark.parametrize("letters", ["éüß", "λν", "水お", "🙂🍞", "\t"])
def test_the_corpus_is_not_just_ascii_letters(letters):
    every = "".join(text for kind in KINDS for text in texts(kind))
    assert [letter for letter in letters if letter not in every] == []


def test_python_documents_run_and_their_examples_hold():
    runner = doctest.DocTestRunner(verbose=False)
    for text in texts("code"):
        if ">>> " in text:
            document = types.ModuleType("document")
            exec(text, document.__dict__)
            for examples in doctest.DocTestFinder().find(document):
                runner.run(examples)
    assert runner.failures == 0
    assert runner.tries > 300


@pytest.mark.parametrize("kind", KINDS)
def test_both_engines_give_the_same_ids(kind, reference):
    batch = texts(kind)
    assert fast_ids(batch) == reference_ids(reference, batch)


@pytest.mark.parametrize("kind", KINDS)
def test_ids_decode_to_the_text_they_came_from(kind, reference):
    batch = texts(kind)
    ids = reference_ids(reference, batch)
    assert reference.decode_batch(ids, skip_special_tokens=False) == batch
    assert fastokens.Tokenizer.from_file(TOKENIZER_JSON).decode_batch(ids) == batch


def test_special_tokens_come_from_no_text(reference):
    config = json.loads((TOKENIZER_DIR / "tokenizer_config.json").read_text(encoding="utf-8"))
    special = {name: reference.token_to_id(token) for name, token in config.items()}
    assert special == {"bos_token": 0, "eos_token": 1, "pad_token": 2}
    every = [text for kind in KINDS for text in texts(kind)] + list(config.values())
    assert min(id_ for ids in fast_ids(every) for id_ in ids) > 2


def test_vocabulary_has_4096_tokens_and_every_byte(reference):
    assert reference.get_vocab_size() == 4096
    anything = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x10000, 7), 0x10FFFF]))
    assert reference.decode(reference.encode(anything, add_special_tokens=False).ids) == anything
