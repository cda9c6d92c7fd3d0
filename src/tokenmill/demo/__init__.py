"""Folders of the bundled demo corpus and its tokenizer."""

from pathlib import Path

CORPUS_DIR: Path = Path(__file__).parent / "corpus"
"""Folder of prose.jsonl, code.jsonl and dialogue.jsonl, with one `{"id": ..., "text": ...}` per line."""

TOKENIZER_DIR: Path = Path(__file__).parent / "tokenizer"
"""Folder of tokenizer.json and tokenizer_config.json: a byte-level BPE of 4096 tokens, trained on that corpus."""
