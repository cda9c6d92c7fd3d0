"""Chat: conversations a second from messages to ids and mask, by template and length.

    python benchmarks/chat.py [--tokenizers FOLDER] [--tiny] [--json]

One core, CPU-seconds, the tokenizers and templates of Qwen3 and Llama 3.1 (tools/fetch_tokenizers.py), messages of
about 50 tokens that are new each turn. Side by side, in turns: `apply_chat_template` of transformers where it is
installed, from messages to ids; it gives a mask for templates with generation blocks only, which is chatml here.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tokenmill.encode.chat.conversation import Conversation
from tokenmill.encode.chat.template import load_template
from tokenmill.encode.chat.tokens import ChatEncoder
from tokenmill.encode.engines import open_tokenizer

TEMPLATES = {"chatml": ("qwen3", "chatml"), "llama3": ("llama3_1", "tokenizer"), "qwen3": ("qwen3", "tokenizer")}
TINY = "--tiny" in sys.argv
LENGTHS = (2, 4) if TINY else (2, 4, 16, 64)
MESSAGES_A_TURN = 16 if TINY else 512
TURNS = 1 if TINY else 7
WORDS = (
    *(
        "the",
        "mill",
        "grinds",
        "words",
        "of",
        "every",
        "kind",
        "into",
        "tokens,",
        "12",
        "at",
        "a",
        "time,",
        "while",
    ),
    *("water", "turns", "its", "wheel."),
)


def conversations(turn: int, length: int) -> list[list[dict[str, str]]]:
    return [
        [
            {
                "role": "assistant" if index % 2 else "user",
                "content": f"{turn} {number} "
                + " ".join(WORDS[(number + index + at) % len(WORDS)] for at in range(40)),
            }
            for index in range(length)
        ]
        for number in range(MESSAGES_A_TURN // length)
    ]


def seconds(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def ours(encoder: ChatEncoder, talks: list[list[dict[str, str]]]) -> None:
    done = encoder.encode([Conversation(messages=messages) for messages in talks])
    assert done.kept.size == len(talks), done.refused[:1]


def theirs(tokenizer: object, source: str, talks: list[list[dict[str, str]]]) -> None:
    masked = "endgeneration" in source
    for messages in talks:
        tokenizer.apply_chat_template(
            messages, chat_template=source, tokenize=True, return_dict=True, return_assistant_tokens_mask=masked
        )


def peer(folder: Path) -> object | None:
    try:
        import transformers
    except ImportError as error:
        print(f"transformers is not installed: {error}", file=sys.stderr)
        return None
    transformers.utils.logging.set_verbosity_error()
    return transformers.AutoTokenizer.from_pretrained(str(folder))


def measure(name: str, folder: Path) -> list[dict]:
    family, spec = TEMPLATES[name]
    path = folder / family
    # Llama's template writes today's date.
    encoder = ChatEncoder(
        template=load_template(spec, tokenizer=str(path)),
        tokenizer=open_tokenizer(str(path)),
        kwargs={"now": "2025-01-31"},
    )
    other = peer(path)
    results = []
    for length in LENGTHS:
        ours(encoder, conversations(-1, length))
        mine, ratios = [], []
        for turn in range(TURNS):
            talks = conversations(turn, length)
            mine.append(len(talks) / seconds(lambda talks=talks: ours(encoder, talks)))
            if other is not None:
                rate = len(talks) / seconds(lambda talks=talks: theirs(other, encoder.template.source, talks))
                ratios.append(mine[-1] / rate)
        line = {"template": name, "messages": length, "conversations_per_cpu_s": round(statistics.median(mine))}
        line["us_a_message"] = round(1e6 / statistics.median(mine) / length)
        if ratios:
            line["times_transformers"] = round(statistics.median(ratios), 2)
        results.append(line)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizers", type=Path, default=Path(__file__).parents[1] / ".venv" / "tokenizers")
    parser.add_argument("--tiny", action="store_true", help="see that it runs; the figures mean nothing")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    results = [line for name in (["llama3"] if TINY else TEMPLATES) for line in measure(name, options.tokenizers)]
    if options.json:
        print(json.dumps(results, indent=2))
    else:
        for line in results:
            print("  ".join(f"{key}={value}" for key, value in line.items()))


if __name__ == "__main__":
    main()
