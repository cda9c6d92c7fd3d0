"""Conversations per second from messages to ids and mask, by template and length.

    python benchmarks/chat.py [--tokenizers FOLDER] [--stock | --mix] [--templates NAME,...] [--tiny] [--json]

One core, CPU-seconds, the tokenizers and templates of Qwen3 and Llama 3.1 (tools/fetch_tokenizers.py). Messages
have about 50 tokens and are new in each turn. If transformers is installed, its `apply_chat_template` runs in
turns with tokenmill, from messages to ids. It gives a mask only for templates with generation blocks, here
chatml.

`--stock` uses every template of trl's wheel, slowest first, with the tokenizer of Llama 3.1 and the special
tokens of all templates. It adds conversations with tools, whose calls have another number each; templates that
either side rejects have no such line.

`--mix` does the same with conversations of many shapes: 1 to 10 turns, half with a system text, half with tools
that some turns call, a third with reasoning. A template gets the kinds that both sides accept. 320 conversations
come before the clock starts, because tokenmill learns the turns of a template from the first of each kind.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import re
import resource
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from tokenmill.encode.chat.conversation import Conversation
from tokenmill.encode.chat.template import load_template
from tokenmill.encode.chat.tokens import ChatEncoder
from tokenmill.encode.engines import open_tokenizer
from tokenmill.encode.tokenizer import Tokenizer

TEMPLATES = {"chatml": ("qwen3", "chatml"), "llama3": ("llama3_1", "tokenizer"), "qwen3": ("qwen3", "tokenizer")}
TINY = "--tiny" in sys.argv
LENGTHS = (2, 4) if TINY else (2, 4, 16, 64)
MESSAGES_A_TURN = 16 if TINY else 512
TURNS = 1 if TINY else 7
MARKUP = re.compile(r"<[|｜][^|｜<>\s]{1,40}[|｜]>|<\|?[a-z_]{2,40}\|?>|\[/?[A-Z_]{3,20}\]")
"""What control strings of templates look like."""
IN_PARTS = ("idefics3", "llava_next", "smolvlm")
"""Templates for images as well, which read contents as lists of parts only."""
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


def conversations(turn: int, length: int, messages: int) -> list[list[dict[str, str]]]:
    return [
        [
            {
                "role": "assistant" if index % 2 else "user",
                "content": f"{turn} {number} "
                + " ".join(WORDS[(number + index + at) % len(WORDS)] for at in range(40)),
            }
            for index in range(length)
        ]
        for number in range(messages // length)
    ]


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}


def mixed(turn: int, count: int) -> list[Conversation]:
    """Return conversations of many shapes, the same for the same turn."""
    chosen = random.Random(turn)
    return [mixed_talk(chosen, f"{turn} {number}") for number in range(count)]


def mixed_talk(chosen: random.Random, name: str) -> Conversation:
    has_tools, thinks = chosen.random() < 0.5, chosen.random() < 1 / 3

    def text(words: int) -> str:
        return f"{name} " + " ".join(chosen.choices(WORDS, k=words))

    messages: list[dict] = [{"role": "system", "content": text(20)}] if chosen.random() < 0.5 else []
    for turn in range(chosen.randint(1, 10)):
        messages.append({"role": "user", "content": text(30)})
        thought = {"reasoning_content": text(20)} if thinks else {}
        if has_tools and chosen.random() < 0.5:
            function = {"name": "weather", "arguments": {"town": text(2)}}
            call = {"id": f"call{turn:05}", "type": "function", "function": function}
            messages.append({"role": "assistant", "content": "", "tool_calls": [call], **thought})
            messages.append({"role": "tool", "name": "weather", "tool_call_id": call["id"], "content": text(10)})
        messages.append({"role": "assistant", "content": text(40), **thought})
    return Conversation(messages=messages, tools=[TOOL] if has_tools else None)


def calling(turn: int, messages: int) -> list[Conversation]:
    """Return conversations of a question, a tool call with a number of its own, a result and an answer."""
    talks = []
    for number, (question, answer) in enumerate(conversations(turn, 2, messages)):
        function = {"name": "weather", "arguments": {"town": "Mill", "days": turn * messages + number}}
        call = {"id": f"call{number:05}", "type": "function", "function": function}
        result = {"role": "tool", "name": "weather", "tool_call_id": call["id"], "content": "It rains."}
        asked = {"role": "assistant", "content": "", "tool_calls": [call]}
        talks.append(Conversation(messages=[question, asked, result, answer], tools=[TOOL]))
    return talks


def compare_calling(name: str, spec: str, path: Path, tokenizer: Tokenizer, other: object | None) -> list[dict]:
    """Compare conversations with tools; an empty list for a template that either side rejects."""
    template = load_template(spec, tokenizer=str(path))
    encoder = ChatEncoder(template=template, tokenizer=tokenizer, kwargs={"now": "2025-01-31"})
    first = calling(TURNS, 32)
    if other is None or encoder.encode(first).refused or not taken_by(other, template.source, first[0]):
        return []
    mine, ratios = [], []
    for turn in range(TURNS):
        talks = calling(turn, 64)
        mine.append(len(talks) / seconds(lambda talks=talks: encoder.encode(talks)))
        rate = len(talks) / seconds(lambda talks=talks: [taken_by(other, template.source, talk) for talk in talks])
        ratios.append(mine[-1] / rate)
    return [
        {
            "template": name,
            "messages": "tools",
            "conversations_per_cpu_s": round(statistics.median(mine)),
            "us_a_message": round(1e6 / statistics.median(mine) / 4),
            "times_transformers": round(statistics.median(ratios), 2),
        }
    ]


def shaped(talks: list[list[dict]], in_parts: bool) -> list[list[dict]]:
    """Give contents as lists of parts to templates that read nothing else."""
    if not in_parts:
        return talks
    return [
        [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
        for messages in talks
    ]


def cpu_seconds() -> float:
    # While a timer of the processor's time runs, as renders are limited by one, Linux moves the clock of
    # `time.process_time` on by ticks of some milliseconds; the usage of the process stays exact.
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def seconds(work: Callable[[], object]) -> float:
    begin = cpu_seconds()
    work()
    return cpu_seconds() - begin


def ours(encoder: ChatEncoder, talks: list[list[dict[str, str]]]) -> None:
    done = encoder.encode([Conversation(messages=messages) for messages in talks])
    assert done.kept.size == len(talks), done.refused[:1]


def theirs(tokenizer: object, source: str, talks: list[list[dict[str, str]]]) -> None:
    masked = "endgeneration" in source
    for messages in talks:
        tokenizer.apply_chat_template(
            messages, chat_template=source, tokenize=True, return_dict=True, return_assistant_tokens_mask=masked
        )


def compare_mixed(name: str, spec: str, path: Path, tokenizer: Tokenizer, other: object) -> dict:
    """Compare conversations of many shapes, of the kinds that both sides take."""
    template = load_template(spec, tokenizer=str(path))
    encoder = ChatEncoder(template=template, tokenizer=tokenizer, kwargs={"now": "2025-01-31"})
    in_parts = name.startswith(IN_PARTS)
    refused: set[tuple[bool, bool]] = set()
    mine, ratios, taken = [], [], 0
    first = -1 if TINY else -10
    for turn in range(first, TURNS):
        talks = [
            Conversation(messages=shaped([talk.messages], in_parts)[0], tools=talk.tools)
            for talk in mixed(turn, 4 if TINY else 32)
            if kind(talk) not in refused
        ]
        if turn == first:  # which compiles, and finds out what is refused
            kept = set(encoder.encode(talks).kept.tolist())
            both = [index in kept and taken_by(other, template.source, talk) for index, talk in enumerate(talks)]
            refused = {kind(talk) for talk, is_taken in zip(talks, both, strict=True) if not is_taken}
            continue
        if turn < 0:
            encoder.encode(talks)
            continue
        taken += len(talks)
        mine.append(len(talks) / seconds(lambda talks=talks: encoder.encode(talks)))
        rate = len(talks) / seconds(lambda talks=talks: [taken_by(other, template.source, talk) for talk in talks])
        ratios.append(mine[-1] / rate)
    return {
        "template": name,
        "conversations": taken,
        "conversations_per_cpu_s": round(statistics.median(mine)),
        "times_transformers": round(statistics.median(ratios), 2),
    }


def kind(talk: Conversation) -> tuple[bool, bool]:
    """Return whether a conversation has a system text, and tools."""
    return talk.messages[0]["role"] == "system", talk.tools is not None


def taken_by(tokenizer: object, source: str, talk: Conversation) -> bool:
    """Encode a conversation with transformers; False if its template fails."""
    try:
        tokenizer.apply_chat_template(
            talk.messages,
            tools=talk.tools,
            chat_template=source,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask="endgeneration" in source,
        )
    except Exception:  # whatever a template raises
        return False
    return True


def stock() -> dict[str, Path]:
    """Return the templates that trl carries, by name."""
    found = importlib.util.find_spec("trl")
    assert found is not None, "pip install --no-deps trl"
    assert found.submodule_search_locations
    paths = sorted((Path(found.submodule_search_locations[0]) / "chat_templates").glob("*.jinja"))
    return {path.stem: path for path in paths}


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
    return compare(name, spec, path, open_tokenizer(str(path)), peer(path), LENGTHS, MESSAGES_A_TURN)


def measure_stock(folder: Path, names: list[str], mix: bool) -> list[dict]:
    chosen = {name: path for name, path in stock().items() if not names or name in names}
    templates = dict(list(chosen.items())[: 3 if TINY else None])
    with tempfile.TemporaryDirectory() as place:
        path = with_controls(folder / "llama3_1", templates.values(), Path(place))
        return compare_all(templates, path, mix)


def with_controls(folder: Path, templates: Iterable[Path], place: Path) -> Path:
    """Copy a tokenizer, and make control tokens of what templates write as such."""
    value = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    known = {token["content"] for token in value["added_tokens"]}
    found = {name for path in templates for name in MARKUP.findall(path.read_text(encoding="utf-8"))}
    plain = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    first = 1 + max(token["id"] for token in value["added_tokens"])
    for number, name in enumerate(sorted(found - known)):
        value["added_tokens"].append({"id": first + number, "content": name, **plain})
    (place / "tokenizer.json").write_text(json.dumps(value), encoding="utf-8")
    shutil.copy(folder / "tokenizer_config.json", place)
    return place


def compare_all(templates: dict[str, Path], path: Path, mix: bool) -> list[dict]:
    tokenizer, other = open_tokenizer(str(path)), peer(path)
    if mix:
        assert other is not None, "pip install transformers"
        mixes = [compare_mixed(name, str(spec), path, tokenizer, other) for name, spec in templates.items()]
        return sorted(mixes, key=lambda line: line["times_transformers"])
    lines = []
    for name, spec in templates.items():
        lines.append(compare(name, str(spec), path, tokenizer, other, LENGTHS[1:3], 64))
        lines.append(compare_calling(name, str(spec), path, tokenizer, other))
    return sorted((line for each in lines for line in each), key=lambda line: line.get("times_transformers", 0))


def compare(
    name: str,
    spec: str,
    path: Path,
    tokenizer: Tokenizer,
    other: object | None,
    lengths: tuple[int, ...],
    messages: int,
) -> list[dict]:
    # Llama's template writes today's date.
    template = load_template(spec, tokenizer=str(path))
    encoder = ChatEncoder(template=template, tokenizer=tokenizer, kwargs={"now": "2025-01-31"})
    in_parts = name.startswith(IN_PARTS)
    results = []
    for length in lengths:
        ours(encoder, shaped(conversations(-1, length, messages), in_parts))
        mine, ratios = [], []
        for turn in range(TURNS):
            talks = shaped(conversations(turn, length, messages), in_parts)
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
    parser.add_argument("--stock", action="store_true", help="all templates of trl's wheel")
    parser.add_argument("--mix", action="store_true", help="the same, with conversations of many shapes")
    parser.add_argument("--templates", default="", help="of trl's wheel, with commas between; all by default")
    parser.add_argument("--tiny", action="store_true", help="see that it runs; the figures mean nothing")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    if options.stock or options.mix:
        names = options.templates.split(",") if options.templates else []
        results = measure_stock(options.tokenizers, names, options.mix)
    else:
        families = ["llama3"] if TINY else TEMPLATES
        results = [line for name in families for line in measure(name, options.tokenizers)]
    if options.json:
        print(json.dumps(results, indent=2))
    else:
        for line in results:
            print("  ".join(f"{key}={value}" for key, value in line.items()))


if __name__ == "__main__":
    main()
