from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tests.encode.chat.shapes import SHAPES, TOOLS, call, result

from tokenmill import documents, encode
from tokenmill.encode import Refusal
from tokenmill.encode.chat.render import render
from tokenmill.encode.chat.template import CHATML, ChatTemplate
from tokenmill.encode.recipe.encoder import TOO_LONG
from tokenmill.reasons import REASONS

USER = {"role": "user", "content": "USER"}
ANSWER = {"role": "assistant", "content": "ANSWER"}


def reasons_raised() -> set[str]:
    """Return the reason of every refusal in the room: what `Refusal` or `batch.refuse` is called with."""
    files = Path(encode.__file__).parent.rglob("*.py")
    calls = [node for path in files for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    made = [node.args[0] for node in calls if isinstance(node.func, ast.Name) and node.func.id == "Refusal"]
    named = [node.args[1] for node in calls if ast.unparse(node.func) == "batch.refuse"]
    passed_on = {"reason", "refused.reason", "TOO_LONG"}
    assert {ast.unparse(node) for node in made + named if not isinstance(node, ast.Constant)} == passed_on
    return {TOO_LONG, *(node.value for node in made + named if isinstance(node, ast.Constant))}


def reasons_read() -> set[str]:
    """Return the reason of every bad record that a reader makes."""
    files = Path(documents.__file__).parent.glob("*.py")
    calls = [node for path in files for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    makers = ("RecordError", "units.RecordError", "Unread")
    made = [node.args[0] for node in calls if ast.unparse(node.func) in makers]
    made += [key.value for node in calls for key in node.keywords if key.arg == "reason"]
    return {node.value for node in made if isinstance(node, ast.Constant)}


def test_every_reason_has_a_rule_and_every_rule_a_reason():
    """[T1.b]"""
    of_the_build = {"map", "map_failed", "domain"}
    assert reasons_raised() | reasons_read() | of_the_build == set(REASONS)
    assert all(" must " in reason.rule and not reason.rule.endswith(".") for reason in REASONS.values())


def test_the_guide_says_of_every_reason_what_to_do():
    guide = (Path(__file__).parents[2] / "docs" / "reference" / "recipes.md").read_text(encoding="utf-8")
    rows = [f"| `{name}` | {reason.rule} | {reason.way_out} |" for name, reason in REASONS.items()]
    assert "\n".join(rows) in guide


def refused(source: str, messages: object, **more: object) -> tuple[str, str]:
    with pytest.raises(Refusal) as caught:
        render(ChatTemplate(source=source, where="test"), messages, **more)
    return caught.value.reason, caught.value.detail


CALL = {**call(0, {"town": "ARG0"}), "content": None}
LONE = "{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("source", "messages", "reason", "detail"),
    [
        (
            CHATML,
            [USER, CALL, result(0)],
            "missing",
            "the template writes no tool calls, and message 2 of 3 (assistant, with tool calls) has nothing else",
        ),
        (
            CHATML,
            [USER, {"role": "assistant", "content": "", "reasoning_content": "WHY"}],
            "missing",
            "the template writes no reasoning, and message 2 of 2 (assistant, with reasoning) has nothing else",
        ),
        (LONE, [USER, ANSWER], "missing", "the template writes nothing of message 2 of 2 (assistant)"),
        (
            LONE,
            [USER, {**CALL, "content": "ANSWER"}],
            "missing",
            "the template writes nothing of message 2 of 2 (assistant, with tool calls)",
        ),
        (CHATML, [], "no_messages", "[]"),
        (CHATML, [USER, 3], "role", "message 2 of 2: 3"),
        (CHATML, [USER, {"role": "x"}], "role", "message 2 of 2 with the unknown role 'x'"),
        (
            CHATML,
            [{"role": "user", "content": [{"type": "image"}]}, ANSWER],
            "media",
            "a part of type 'image' in message 1 of 2 (user)",
        ),
        (CHATML, [USER, {**ANSWER, "x": b""}], "not_json", "a value of type bytes in message 2 of 2 (assistant)"),
        (CHATML, [USER, {**ANSWER, "x": {1: 2}}], "not_json", "the key 1 in message 2 of 2 (assistant)"),
        (
            CHATML,
            [USER, {"role": "assistant", "content": "\ud800"}],
            "not_unicode",
            "a lone surrogate in message 2 of 2 (assistant)",
        ),
        (CHATML, [USER], "no_trained_message", "no message is of the roles ['assistant'], only ['user']"),
        (
            "U{{ messages[0].content }}A{{ messages[1].content }}{{ messages[1].content }}E",
            [USER, ANSWER],
            "rewritten",
            "'ANSWERE' of message 2 of 2 (assistant), twice or out of order",
        ),
        (
            "{{ messages[1].content[:2] + messages[0].content + messages[1].content[2:] }}",
            [USER, ANSWER],
            "interleaved",
            "message 2 of 2 (assistant) in parts, with others between them",
        ),
        (
            "{{ raise_exception('no tools here') }}",
            [USER, ANSWER],
            "template_error",
            "the template fails with TemplateError: no tools here",
        ),
    ],
)
def test_a_refusal_says_what_is_so_and_counts_messages_from_1(source, messages, reason, detail):
    """[T1.b]"""
    assert refused(source, messages) == (reason, detail)


@pytest.mark.parametrize("wrapped", [lambda inner: [inner], lambda inner: {"a": inner}], ids=["lists", "objects"])
def test_values_that_are_nested_too_deep_are_refused_and_not_followed(wrapped):
    """[S.c]"""
    value = "x"
    for _ in range(900):
        value = wrapped(value)
    assert refused(CHATML, [USER, {"role": "assistant", "content": value}]) == (
        "not_json",
        "values nested deeper than 64 in message 2 of 2 (assistant)",
    )
    tools = [{"name": value}]
    assert refused(CHATML, [USER, ANSWER], tools=tools)[1] == "values nested deeper than 64 in the tools or options"


def test_what_is_wrong_with_tools_is_not_said_of_a_message():
    tools = [{**TOOLS[0], "x": b""}]
    assert refused(CHATML, SHAPES["1 turn"], tools=tools) == (
        "not_json",
        "a value of type bytes in the tools or options",
    )
