"""Check which chats each template of trl's wheel can store, and whether ids and masks agree with other code.

    python tools/chat_matrix.py [--templates NAME,...] [--tokenizers FOLDER] [--write] [--json]

Each template and tokenizer gets 70 conversations of 1 to 10 turns: plain, with a system text, with tools, with
texts next to calls, with reasoning. The recipe `chat` reads them from Parquet, and they must equal those from
JSONL. Ids are compared with those of `apply_chat_template` of transformers. Masks are compared with its mask of
generation blocks, if a template has them. They are also checked by words, because each role uses words that no
other role uses: the trained text must contain all words of the assistant, no other words, and at most the end of
the last turn after them. `--write` updates the table of docs/reference/chat-templates.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tokenmill.documents import ReadOptions
from tokenmill.documents.inputs import cut_files, find_files, read_unit
from tokenmill.encode.chat.conversation import Conversation
from tokenmill.encode.chat.template import load_template
from tokenmill.encode.chat.tokens import ChatEncoder
from tokenmill.encode.engines import open_tokenizer
from tokenmill.encode.recipe import load_recipe
from tokenmill.encode.recipe.extract import VariantReader, choose, tools_of
from tokenmill.encode.tokenizer import Tokenizer

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "chat-templates.md"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
FAMILIES = {"qwen": "qwen3", "llama3": "llama3_1", "deepseek": "deepseek_v3"}
BYTES, PIECES = "llama3_1", "llama2"
"""Tokenizers of two kinds, byte-level BPE and SentencePiece, for templates of no family that is there."""
IN_PARTS = ("idefics3", "llava_next", "smolvlm")
"""Templates for images as well, which read contents as lists of parts only."""
GLM_ENDS = re.compile(r"<\|(?:user|observation)\|>\Z")
"""A turn of GLM ends with the control token of who speaks next."""
KINDS = ("plain", "system", "tools", "arguments as text", "tools beside text", "reasoning", "tools and reasoning")
MAX_TURNS = 10
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "toolword0 of a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    },
}
_WORD = re.compile(r"(user|bot|tool|system)word\d+")
# Text allowed after the last word of a turn: closing JSON, quotes and fences, and end-of-turn tokens.
_TAIL = re.compile(
    r"""[\s"'`\\}\])>.,<|]*(?:(?:<｜[^<>]{1,40}｜>|(?:</?|\[/?|<\|)[^<>\[\]\s]{1,40}(?:>|\]|\|>))[\s"'`}\])]*){0,4}"""
)
_CALL_ID = re.compile(r'"id": "call\d{5}"')
_OPENS = re.compile(r"im_start|start_header|start_of_turn|\|turn>|START_OF_TURN|<｜User|\bINST\b(?!\])|<\|user")


def record(turns: int, kind: str) -> dict[str, Any]:
    """Return a conversation in which every word of a role occurs once."""
    numbers = iter(range(10_000))

    def word(role: str) -> str:
        return f"{role}word{next(numbers)}"

    messages: list[dict[str, Any]] = []
    if kind == "system":
        messages.append({"role": "system", "content": f"{word('system')} {word('system')}"})
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{word('user')} and {word('user')}?"})
        thought = {"reasoning_content": f"hm, {word('bot')}"} if "reasoning" in kind else {}
        if ("tools" in kind or "arguments" in kind) and turn % 2 == 0:
            arguments: object = {"days": turn, "town": word("bot")}
            arguments = json.dumps(arguments) if "as text" in kind else arguments
            call = {
                "id": f"call{turn:05}",
                "type": "function",
                "function": {"name": "weather", "arguments": arguments},
            }
            beside = f"{word('bot')}." if "beside" in kind else ""
            messages.append({"role": "assistant", "content": beside, "tool_calls": [call], **thought})
            result = {"role": "tool", "name": "weather", "tool_call_id": call["id"], "content": word("tool")}
            messages.append(result)
        messages.append({"role": "assistant", "content": f"{word('bot')}, {word('bot')}.", **thought})
    tools = [TOOL] if "tools" in kind or "arguments" in kind else None
    return {"messages": messages, **({"tools": tools} if tools else {})}


def records(template: str) -> list[dict[str, Any]]:
    """Return the conversations of the matrix, as a template takes them."""
    given = [record(turns, kind) for kind in KINDS for turns in range(1, MAX_TURNS + 1)]
    if not template.startswith(IN_PARTS):
        return given
    for each in given:
        for message in each["messages"]:
            message["content"] = [{"type": "text", "text": message["content"]}]
    return given


def read_back(given: list[dict[str, Any]]) -> list[Conversation]:
    """Return conversations as read from Parquet, which must equal those from JSONL."""
    recipe = load_recipe("chat")
    readers = [VariantReader.of(recipe, variant) for variant in recipe.variants]
    found: dict[str, list[Conversation]] = {"jsonl": [], "parquet": []}
    with tempfile.TemporaryDirectory() as place:
        # A column of Arrow has one type: each kind has files of its own.
        for begin in range(0, len(given), MAX_TURNS):
            some = given[begin : begin + MAX_TURNS]
            files = {suffix: Path(place) / f"{begin}.{suffix}" for suffix in found}
            files["jsonl"].write_text("".join(json.dumps(each) + "\n" for each in some), encoding="utf-8")
            pq.write_table(pa.Table.from_pylist(some), files["parquet"])
            for suffix, path in files.items():
                for unit in cut_files(find_files(path).files, chunk_bytes=1 << 30):
                    for batch in read_unit(unit, ReadOptions(text_field=None, fields=recipe.fields)):
                        for record in batch.documents:
                            messages = choose(readers, record).sources["sequence"].messages(record)
                            tools = tools_of(record.get("tools"), "tools")
                            found[suffix].append(Conversation(messages=messages, tools=tools))
    assert len(found["jsonl"]) == len(given)
    assert found["parquet"] == found["jsonl"]
    return found["parquet"]


@dataclass(kw_only=True, slots=True)
class Row:
    """What became of the conversations of one template and tokenizer."""

    template: str
    tokenizer: str
    records: int
    stored: int = 0
    same_ids: int = 0
    """Ids of transformers, one for one."""
    other_ids: dict[str, int] = field(default_factory=dict)
    """Reasons for other ids: `cut` at an edge of the trained text, `converted` arguments or contents."""
    masks: int = 0
    """Masks that equal those of generation blocks."""
    words: int = 0
    """Masks that are right by the words."""
    refused: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    """What contradicts a truth; there must be nothing."""


def stock() -> dict[str, Path]:
    """Return the templates that trl carries, by name."""
    found = importlib.util.find_spec("trl")
    assert found is not None, "pip install --no-deps trl"
    assert found.submodule_search_locations
    paths = sorted((Path(found.submodule_search_locations[0]) / "chat_templates").glob("*.jinja"))
    return {path.stem: path for path in paths}


def tokenizers_of(template: str) -> tuple[str, str]:
    """Return the tokenizers that a template is tried with."""
    return next((name for prefix, name in FAMILIES.items() if template.startswith(prefix)), BYTES), PIECES


class Matrix:
    """Tries templates with tokenizers, each opened once, by tokenmill and by transformers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._opened: dict[str, tuple[Tokenizer, Any]] = {}

    def row(self, template: str, path: str, tokenizer: str) -> Row:
        """Try all conversations."""
        own, other = self._open(tokenizer)
        folder = str(self.folder / tokenizer)
        encoder = ChatEncoder(
            template=load_template(path, tokenizer=folder), tokenizer=own, kwargs={"now": date.today().isoformat()}
        )
        given = records(template)
        done = encoder.encode(read_back(given))
        row = Row(template=template, tokenizer=tokenizer, records=len(given), stored=int(done.kept.size))
        row.refused = dict(sorted(Counter(each.reason for each in done.refused).items()))
        spans = pairwise(done.encoded.offsets.tolist())
        for index, notes, (begin, end) in zip(done.kept.tolist(), done.notes, spans, strict=True):
            ids, mask = done.encoded.ids[begin:end], done.masks[begin:end]
            where = f"{template}, {tokenizer}, {KINDS[index // MAX_TURNS]}, {index % MAX_TURNS + 1} turns"
            trained = [own.decode(run) for run in runs(ids, mask)]
            if template.startswith("glm"):
                trained = [GLM_ENDS.sub("", piece) for piece in trained]
            wrong = wrong_words(own.decode(ids), trained)
            row.words += wrong is None
            row.wrong += [f"{where}: {wrong}"] if wrong else []
            self._compare(row, where, given[index], (ids, mask), notes, (encoder, other))
        return row

    def _open(self, name: str) -> tuple[Tokenizer, Any]:
        if name not in self._opened:
            import transformers

            transformers.utils.logging.set_verbosity_error()
            folder = str(self.folder / name)
            # AutoTokenizer takes LlamaTokenizer for it, which has another pre-tokenizer than the file.
            kind = transformers.PreTrainedTokenizerFast if name == PIECES else transformers.AutoTokenizer
            self._opened[name] = open_tokenizer(folder), kind.from_pretrained(folder)
        return self._opened[name]

    def _compare(
        self,
        row: Row,
        where: str,
        given: dict[str, Any],
        own: tuple[np.ndarray, np.ndarray],
        notes: tuple[str, ...],
        by: tuple[ChatEncoder, Any],
    ) -> None:
        ids, mask = own
        encoder, other = by
        source = encoder.template.source
        masked = "endgeneration" in source
        try:
            theirs = other.apply_chat_template(
                given["messages"],
                tools=given.get("tools"),
                chat_template=source,
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=masked,
            )
        except Exception as error:  # whatever a template raises
            theirs = {"input_ids": [], "error": error}
        if theirs["input_ids"] == ids.tolist():
            row.same_ids += 1
            if masked and theirs["assistant_masks"] == mask.tolist():
                row.masks += 1
            elif masked:
                row.wrong.append(f"{where}: another mask than that of generation blocks")
            return
        text, shown = other.decode(theirs["input_ids"]), other.decode(ids.tolist())
        if "arguments_converted" in notes or "error" in theirs or '"content": null' in json.dumps(given):
            why = "converted"
        elif text == shown:
            why = "cut"
        else:
            # A call with an empty content is passed as null to templates that expect null.
            why = "converted" if any("tool_calls" in message for message in given["messages"]) else ""
        if why:
            row.other_ids[why] = row.other_ids.get(why, 0) + 1
        else:
            row.wrong.append(f"{where}: other ids than those of transformers")


def runs(ids: np.ndarray, mask: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the runs of ids that are trained on."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]]).astype(np.int8)))
    yield from (ids[begin:end] for begin, end in zip(edges[::2], edges[1::2], strict=True))


def wrong_words(text: str, trained: list[str]) -> str | None:
    """Describe what is wrong with the trained text, by the words of each role; None if nothing is."""
    written = [match.group() for match in _WORD.finditer(text) if match.group().startswith("bot")]
    found = [match.group() for piece in trained for match in _WORD.finditer(piece)]
    if found != written:
        return f"trained on {sorted(set(found) ^ set(written))[:4]} too much or too little"
    for piece in trained:
        words = list(_WORD.finditer(piece))
        tail = _CALL_ID.sub("", piece[words[-1].end() :] if words else piece)
        if not _TAIL.fullmatch(tail) or _OPENS.search(tail):
            return f"{tail!r} behind the last word of a turn"
    return None


def rows(matrix: Matrix, names: list[str]) -> Iterator[Row]:
    """Check every template with its tokenizers, and each tokenizer with its own template."""
    templates = stock()
    for name in names:
        if name in templates:
            for tokenizer in tokenizers_of(name):
                yield matrix.row(name, str(templates[name]), tokenizer)
    for name in names:
        folder = matrix.folder / name.removesuffix(" (its own)")
        if name.endswith(" (its own)") and folder.is_dir():
            yield matrix.row(name, "tokenizer", folder.name)


def table(done: list[Row]) -> str:
    """Return the table of the page."""
    lines = [
        "| template | tokenizer | stored | same ids | same masks | rejected |",
        "|---|---|---|---|---|---|",
    ]
    for row in done:
        other = "".join(f", {count} {why}" for why, count in sorted(row.other_ids.items()))
        refused = ", ".join(f"{count} `{reason}`" for reason, count in row.refused.items())
        share = f"{row.stored} of {row.records}"
        masks = str(row.masks) if row.masks else ""
        lines.append(
            f"| `{row.template}` | {row.tokenizer} | {share} | {row.same_ids}{other} | {masks} | {refused} |"
        )
    stored, tried = sum(row.stored for row in done), sum(row.records for row in done)
    lines.append(f"| all | | {stored} of {tried} ({100 * stored / max(1, tried):.1f}%) | | | |")
    return "\n".join(lines)


OWN = tuple(f"{name} (its own)" for name in ("qwen3", "qwen2_5", "llama3_1", "mistral_nemo", "deepseek_v3"))
"""Tokenizers that are tried with the template that they carry."""


def main() -> int:
    """Check the selected templates; the exit code is 1 if any result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--templates", default="", help="names, with commas between; all by default")
    parser.add_argument("--tokenizers", type=Path, default=Path(__file__).parents[1] / ".venv" / "tokenizers")
    parser.add_argument("--write", action="store_true", help="write the table into the guide")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    names = options.templates.split(",") if options.templates else [*stock(), *OWN]
    done = list(rows(Matrix(options.tokenizers), names))
    sys.stdout.write((json.dumps([asdict(row) for row in done], indent=1) if options.json else table(done)) + "\n")
    wrong = [line for row in done for line in row.wrong]
    sys.stderr.write("".join(f"{line}\n" for line in wrong[:40]))
    if options.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n\n{table(done)}\n\n{END}{after}", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
