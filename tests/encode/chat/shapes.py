"""Conversations of every shape, with texts that occur nowhere else, and what stock templates must give for them."""

from __future__ import annotations

import json
from functools import cache

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = dict[str, object]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "TOOLTEXT of a town",
            "parameters": {
                "type": "object",
                "properties": {"town": {"type": "string", "description": "TOOLTEXT town"}},
                "required": ["town"],
            },
        },
    }
]


def turns(count: int) -> list[Message]:
    return [
        {"role": role, "content": f"{word}{index}."}
        for index in range(count)
        for role, word in (("user", "USER"), ("assistant", "ANSWER"))
    ]


def call(index: int, arguments: object, **more: object) -> Message:
    function = {"name": "weather", "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": f"call{index}", "type": "function", "function": function}],
        **more,
    }


def result(index: int) -> Message:
    return {"role": "tool", "name": "weather", "tool_call_id": f"call{index}", "content": f"RESULT{index}"}


def reasoned(index: int) -> Message:
    reason = f"REASON{index}"
    return {"role": "assistant", "content": f"ANSWER{index}.", "reasoning_content": reason, "thinking": reason}


SYSTEM: Message = {"role": "system", "content": "SYSTEM words"}
USER: Message = {"role": "user", "content": "USER asks"}
ANSWER: Message = {"role": "assistant", "content": "ANSWER9."}
SHAPES: dict[str, list[Message]] = {
    "1 turn": turns(1),
    "2 turns": turns(2),
    "5 turns": turns(5),
    "5 turns, system": [SYSTEM, *turns(5)],
    "tools": [USER, call(0, {"town": 'ARG0 "x"\n'}), result(0), ANSWER],
    "tools twice": [
        *turns(1),
        USER,
        call(0, {"town": "ARG0", "days": 3, "full": True, "more": {"a": [1.5, None, "ARG0"]}}),
        result(0),
        call(1, {"town": "ARG1"}),
        result(1),
        ANSWER,
        {"role": "user", "content": "USER thanks"},
        {"role": "assistant", "content": "ANSWER8."},
    ],
    "tools, no arguments": [USER, call(0, {}), result(0), ANSWER],
    "tools, arguments as text": [USER, call(0, '{"town": "ARG0"}'), result(0), ANSWER],
    "tools, text before": [USER, call(0, {"town": "ARG0"}, content="ANSWER0."), result(0), ANSWER],
    "tools, reasoning": [USER, call(0, {"town": "ARG0"}, reasoning_content="REASON0"), result(0), reasoned(1)],
    "reasoning": [USER, reasoned(0), {"role": "user", "content": "USER2"}, reasoned(2)],
    "reasoning in the text": [
        USER,
        {"role": "assistant", "content": "<think>\nREASON0\n</think>\n\nANSWER0."},
        {"role": "user", "content": "USER2"},
        {"role": "assistant", "content": "<think>\nREASON2\n</think>\n\nANSWER2."},
    ],
    "white space": [
        {"role": "user", "content": " \nUSER? \n"},
        {"role": "assistant", "content": "\n  ANSWER0. \n\n"},
        {"role": "user", "content": "\n\n"},
        {"role": "assistant", "content": "\n\nANSWER1.\t"},
    ],
    "last is empty": [*turns(1), {"role": "user", "content": ""}, {"role": "assistant", "content": ""}],
    "first is empty": [USER, {"role": "assistant", "content": ""}, *turns(1)],
    "assistant first": [{"role": "assistant", "content": "ANSWER7."}, *turns(2)],
    "assistant twice": [*turns(1), {"role": "assistant", "content": "ANSWER1."}],
}
FEW = ("2 turns", "5 turns, system", "tools twice", "reasoning", "white space", "last is empty")
"""Those that differ most; the long run takes all of them."""
IN_PARTS = ("idefics3", "llava_next", "smolvlm")
"""Templates for images as well, which read contents as lists of parts only."""


def shaped(template: str, shape: str) -> list[Message]:
    """Return a conversation as the template takes it."""
    messages = SHAPES[shape]
    if template.removesuffix("_training") not in IN_PARTS:
        return messages
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]


def tools_of(shape: str) -> list[dict] | None:
    return TOOLS if shape.startswith("tools") else None


class _Marked(jinja2.ext.Extension):
    """Puts marks around generation blocks: all that transformers does, written in the simplest way."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

    def marked(self, caller):
        return f"\ue000{caller()}\ue001"


@cache
def _template(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Marked, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, ensure_ascii=False, indent=None: json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent
    )
    environment.globals["strftime_now"] = lambda form: {"%Y-%m-%d": "2025-01-31", "%d %b %Y": "31 Jan 2025"}[form]
    environment.globals["raise_exception"] = lambda text: (_ for _ in ()).throw(jinja2.TemplateError(text))
    return environment.from_string(source)


def _with_reasoning(message: Message) -> Message:
    """Give reasoning the names that templates read, as transformers does since 5.22."""
    found = [message[name] for name in ("reasoning_content", "thinking", "reasoning") if message.get(name)]
    return {"thinking": found[0], **message, "reasoning_content": found[0]} if found else message


def reference(source: str, messages: list[Message], **names: object) -> tuple[str, list[tuple[int, int]]]:
    """Render with plain jinja; return the text and the ranges of generation blocks."""
    names = {"tools": None, "bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": False, **names}
    shown = _template(source).render(messages=[_with_reasoning(message) for message in messages], **names)
    text, ranges = "", []
    for piece in shown.split("\ue000"):
        block, mark, rest = piece.partition("\ue001")
        if mark and block:
            ranges.append((len(text), len(text) + len(block)))
        text += block + rest
    return text, ranges


_CHATML = (("<|im_start|>assistant\n",), ("<|im_end|>",))
_GEMMA4 = (("<|turn>model\n", "<tool_response|>"), ("<turn|>", "<|tool_response>"))
_LLAMA = (("<|start_header_id|>assistant<|end_header_id|>\n\n",), ("<|eot_id|>",))
_DEEPSEEK = (("<｜Assistant｜>", "<｜tool▁outputs▁end｜>"), ("<｜end▁of▁sentence｜>",))
_BARE = (("Assistant:",), ("<end_of_utterance>",))
TURNS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "cohere": (("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",), ("<|END_OF_TURN_TOKEN|>",)),
    "cohere2": (("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>",), ("<|END_OF_TURN_TOKEN|>",)),
    # Which ends no turn behind the first tool call.
    "deepseek_r1_distill": (_DEEPSEEK[0], ("<｜tool▁call▁end｜>", *_DEEPSEEK[1])),
    "deepseekv3": _DEEPSEEK,
    "diffusion_gemma": _GEMMA4,
    "gemma": (("<start_of_turn>model\n",), ("<end_of_turn>",)),
    "gemma3": (("<start_of_turn>model\n",), ("<end_of_turn>",)),
    **dict.fromkeys(("gemma4", "gemma4_v2", "gemma4_v3", "gemma4_v4", "gemma4_v5"), _GEMMA4),
    "glm4moe": (("<|assistant|>",), ()),
    "gptoss": (("<|start|>assistant",), ("<|end|>", "<|return|>", "<|call|>")),
    "idefics3": _BARE,
    **dict.fromkeys(("lfm2", "lfm2_v2"), _CHATML),
    **dict.fromkeys(("llama3", "llama3_1", "llama3_2"), _LLAMA),
    "llava_next": (("[/INST]", "</s> "), ("</s>",)),
    "muse_glimmer": (("<|start|>assistant",), ("<|eot|>", "<|eom|>")),
    **dict.fromkeys(("nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"), _CHATML),
    **dict.fromkeys(("phi3", "phi3_5"), (("<|assistant|>\n",), ("<|end|>",))),
    **dict.fromkeys(("qwen2_5", "qwen2_5_vl", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6"), _CHATML),
    **dict.fromkeys(("qwen3_8", "qwen3_instruct_2507", "qwen3_vl"), _CHATML),
    "smolvlm": _BARE,
}
"""What stands before and at the end of a turn of the assistant, read off the templates without blocks."""


def searched(template: str, text: str, messages: list[Message]) -> list[str]:
    """Find the turns of the assistant in a render by texts that occur only once."""
    headers, ends = TURNS[template]
    found = []
    for message in messages:
        if message["role"] != "assistant":
            continue
        shown = json.dumps(message)
        words = [word for word in ("ANSWER", "REASON", "ARG") for word in _words(shown, word) if word in text]
        if not words:
            continue
        first = min(text.index(word) for word in words)
        last = max(text.rindex(word) for word in words)
        begins = [text.rindex(header, 0, first) + len(header) for header in headers if header in text[:first]]
        begin = max(begins, default=0)
        if ends:
            end = min(text.index(end, last) + len(end) for end in ends if end in text[last:])
        else:
            stops = [
                text.index(stop, last)
                for stop in ("<|user|>", "<|observation|>", "<|assistant|>")
                if stop in text[last:]
            ]
            end = min([*stops, len(text)])
        found.append(text[begin:end])
    return found


def _words(shown: str, word: str) -> list[str]:
    return [f"{word}{digit}" for digit in "0123456789" if f"{word}{digit}" in shown]
