"""The reference engines."""

import os
import subprocess
import sys

import numpy as np
import pytest

from tokenmill.encode.engines import open_tokenizer
from tokenmill.errors import TokenizerError

FORK = """
import os, sys
from tokenmill.encode.engines import open_tokenizer
tokenizer = open_tokenizer(sys.argv[1], engine="tokenizers")
tokenizer.encode(["some text"] * 100)
child = os.fork()
if child == 0:
    tokenizer.encode(["some text"] * 100)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_fork_prints_nothing(specs):
    environment = {key: value for key, value in os.environ.items() if key != "TOKENIZERS_PARALLELISM"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK, specs["tiny"]],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_nothing_is_cut_or_padded_whatever_the_file_says(write):
    def change(value):
        value["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
        value["padding"] = {
            "strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None,
            "pad_id": 2, "pad_type_id": 0, "pad_token": "<pad>",
        }  # fmt: skip

    texts = ["a", "one two three four five six seven " * 20]
    plain = open_tokenizer(write()).encode(texts)
    spec = write(change)
    for engine in ("fastokens", "tokenizers"):
        encoded = open_tokenizer(spec, engine=engine).encode(texts)
        assert encoded.offsets.tolist() == plain.offsets.tolist()
        assert encoded.ids.tolist() == plain.ids.tolist()


@pytest.mark.parametrize("engine", ["fastokens", "tokenizers"])
def test_the_template_of_the_file_adds_no_bos(opened, engine):
    """T2.b: the file says '<s> $A', but BOS is placed by `frame` alone."""
    tokenizer = opened("tiny", engine)
    encoded = tokenizer.encode(["text", ""])
    assert np.count_nonzero(encoded.ids == tokenizer.identity.bos_id) == 0
    assert encoded.offsets[1] == encoded.offsets[2]


@pytest.mark.parametrize("engine", ["fastokens", "tokenizers"])
def test_an_added_word_that_is_no_control_string_is_one_token(opened, tiny, engine):
    ids = opened("tiny", engine).encode(["<tool>"]).ids.tolist()
    assert ids == [tiny["added_tokens"][-1]["id"]]


@pytest.mark.parametrize(
    ("name", "engine"), [("tiny", "tokenizers"), ("claude", "tokenizers"), ("r50k", "tiktoken")]
)
def test_a_lone_surrogate_is_refused_with_its_text(opened, name, engine):
    with pytest.raises(TokenizerError, match="text 1 of the batch must be valid Unicode"):
        opened(name, engine).encode(["a", "\ud800"])


@pytest.mark.parametrize(
    ("name", "engine"), [("tiny", "tokenizers"), ("claude", "tokenizers"), ("r50k", "tiktoken")]
)
def test_no_texts_give_no_ids(opened, name, engine):
    encoded = opened(name, engine).encode([])
    assert (encoded.ids.tolist(), encoded.offsets.tolist()) == ([], [0])


@pytest.mark.parametrize(
    ("name", "module", "message"),
    [
        ("r50k", "tiktoken", r"pip install 'tokenmill\[tiktoken\]'"),
        ("tiny", "tokenizers", "pip install tokenizers"),
    ],
)
def test_a_missing_library_says_what_to_install(specs, monkeypatch, name, module, message):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(TokenizerError, match=f"{module}: must be installed.*{message}"):
        open_tokenizer(specs[name], engine=module)


def test_a_missing_fast_engine_says_what_to_install(specs, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastokens", None)
    with pytest.raises(TokenizerError, match=r"fastokens: must be installed.*pip install fastokens, or take"):
        open_tokenizer(specs["tiny"])


def test_a_model_that_does_not_fit_the_text_is_one_line(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text('{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}}')
    tokenizer = open_tokenizer(str(path), engine="tokenizers")
    with pytest.raises(TokenizerError, match=r"tokenizers .*: must encode 1 texts, got .*[Mm]issing"):
        tokenizer.encode(["b"])
