"""Train the tokenizer of the demo corpus: byte-level BPE with 4096 tokens, always the same bytes."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

DEMO = Path(__file__).resolve().parent.parent / "src" / "tokenmill" / "demo"

VOCABULARY_SIZE = 4096
SPECIAL_TOKENS = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}

# How Llama 3 and cl100k cut text into words; both engines cut the whole corpus alike with it.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def texts(corpus: Path) -> Iterator[str]:
    """Yield the text of every document, file by file in the order of their names."""
    for path in sorted(corpus.glob("*.jsonl")):
        with path.open(encoding="utf-8") as lines:
            yield from (json.loads(line)["text"] for line in lines)


def train(corpus: Path) -> Tokenizer:
    """Learn the merges of a corpus; the special tokens get the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS.values()],
        # All 256 bytes, so that no text is unknown.
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(corpus), trainer)
    return tokenizer


def write_tokenizer(corpus: Path, folder: Path) -> None:
    """Train, and write tokenizer.json and tokenizer_config.json into a folder, which is made if it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train(corpus)
    (folder / "tokenizer.json").write_bytes(tokenizer.to_str(pretty=False).encode() + b"\n")
    (folder / "tokenizer_config.json").write_bytes(json.dumps(SPECIAL_TOKENS, indent=2).encode() + b"\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=DEMO / "tokenizer", help="default: where it ships")
    parser.add_argument("--corpus", type=Path, default=DEMO / "corpus", help="folder of .jsonl files")
    args = parser.parse_args()
    write_tokenizer(args.corpus, args.folder)
