"""The recipes that have a name: plain data, in the words of any other recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Alpaca's headings, so that a prompt ends where an answer begins, in every tokenizer.
_ASKED = "### Instruction:\n"
_INPUT = "\n\n### Input:\n"
_ANSWER = "\n\n### Response:\n"


def _preset_section(field: str, role: str, **more: object) -> dict[str, object]:
    return {"field": field, "action": "$role", "role": role, **more}


def _asked(prompt: str, answer: str, more: str | None = None) -> dict[str, object]:
    """Return a variant: a prompt, perhaps with an input of its own, and the answer."""
    if more is None:
        asked = [_preset_section(prompt, "user", prefix=_ASKED, suffix=_ANSWER)]
    else:
        asked = [
            _preset_section(prompt, "user", prefix=_ASKED),
            _preset_section(more, "user", prefix=_INPUT, suffix=_ANSWER),
        ]
    return {"sections": [*asked, _preset_section(answer, "assistant")]}


def _messages(*fields: str) -> dict[str, object]:
    return {"sections": [{"field": field, "action": "$role", "template": True} for field in fields]}


def _pair(*, prompt: bool, template: bool) -> dict[str, object]:
    asked = [_preset_section("prompt", "user", template=template)] if prompt else []
    return {
        "sources": {
            answer: {"sections": [*asked, _preset_section(answer, "assistant", template=template)]}
            for answer in ("chosen", "rejected")
        }
    }


def _group(*, template: bool) -> dict[str, object]:
    return {
        "sources": {
            "prompts": {
                "sections": [{"field": "prompt", "action": "mask", "role": "user", "template": template}],
            },
            "responses": {
                "sections": [{"field": "responses", "action": "train", "role": "assistant", "template": template}],
                "list_field": True,
                "mask_key": "masks",
            },
            "rewards": {"sections": [{"field": "rewards", "action": "value"}]},
        }
    }


_ROLES = {"system": "mask", "user": "mask", "assistant": "train"}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "text": {"input": {"sections": [{"field": "text", "action": "train"}]}},
    "chat": {
        "input": {
            "tools_field": "tools",
            "variants": [
                _messages("messages"),
                {
                    "sections": [
                        _preset_section("system", "system", template=True),
                        {"field": "conversations", "action": "$role", "template": True},
                    ]
                },
                _messages("conversations"),
            ],
        },
        "mask": _ROLES,
    },
    "instruction": {
        "input": {
            "variants": [
                _asked("prompt", "response"),
                _asked("prompt", "completion"),
                _asked("instruction", "output", "input"),
                _asked("instruction", "output"),
                _asked("instruction", "response", "context"),
                _asked("instruction", "response"),
                _asked("question", "answer"),
            ]
        },
        "mask": _ROLES,
    },
    "dpo": {
        "input": {
            "tools_field": "tools",
            "variants": [
                _pair(prompt=True, template=False),
                _pair(prompt=True, template=True),
                {
                    "sources": {
                        answer: {"sections": [{"field": answer, "action": "$role", "template": True}]}
                        for answer in ("chosen", "rejected")
                    }
                },
            ],
        },
        "mask": _ROLES,
        "train_turns": "last",
    },
    "grpo": {
        "input": {"tools_field": "tools", "variants": [_group(template=False), _group(template=True)]},
        "mask": _ROLES,
    },
}
"""Name -> recipe. The order of variants is the priority by which fields are detected, record by record."""
