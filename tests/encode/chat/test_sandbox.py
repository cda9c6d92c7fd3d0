from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import tokenmill as tm
from tokenmill.encode import Refusal
from tokenmill.encode.chat import limits, sample, turns
from tokenmill.encode.chat.conversation import Conversation
from tokenmill.encode.chat.render import render
from tokenmill.encode.chat.template import ChatTemplate, compile_template, load_template
from tokenmill.encode.chat.tokens import ChatEncoder
from tokenmill.encode.engines import open_tokenizer
from tokenmill.errors import ConfigError

MESSAGES = [{"role": "user", "content": "question"}, {"role": "assistant", "content": "answer"}]


def rendered(source: str, **options: object) -> str:
    template = ChatTemplate(source=source, where="test", special_tokens={"eos_token": "</s>"})
    return render(template, MESSAGES, kwargs=options, add_generation_prompt=True).text


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__']['__base__'] }}",
    "{{ [].__class__.__base__.__subclasses__()[0] }}",
    "{{ messages.__class__.__init__.__globals__ }}",
    "{{ messages[0].content.__class__ }}",
    "{{ messages[0].content._runs }}",
    "{{ messages[0].content['_runs'] }}",
    "{{ messages[0].__class__.__getitem__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ raise_exception.__globals__['__builtins__']['open']('/etc/passwd').read() }}",
    "{{ strftime_now.__closure__[0].cell_contents }}",
    "{{ range.__self__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ lipsum.__globals__ }}",
    "{{ dict.__base__.__subclasses__() }}",
    "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}",
    "{% macro m() %}{% endmacro %}{{ m._func.__globals__ }}",
    "{% for x in [1] %}{{ loop.__init__.__globals__ }}{% endfor %}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ '{0.__class__.__init__.__globals__}'.format_map({'0': 1}) }}",
    "{{ ('%s'.format)('x') }}",
    "{{ messages | attr('__class__') }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ messages | map(attribute='content.__class__') | join }}",
    "{{ messages | selectattr('__class__') | first }}",
    "{{ messages.append({'role': 'user'}) }}",
    "{{ messages[0].update({'content': 'x'}) }}",
    "{{ messages[0].pop('content') }}",
    "{{ tools.__class__ }}{{ (1).__class__.__base__ }}",
    "{{ (1).to_bytes(4, 'big') }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% extends 'x' %}",
    "{{ environment }}{{ context }}",
    "{{ ().__class__.__bases__[0] }}",
    "{{ caller.__globals__ }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_cannot_leave_the_sandbox(source):
    """[S.c]"""
    assert len(ESCAPES) >= 30
    try:
        outcome = rendered(source)
    except Refusal as error:
        outcome = error.reason
    except ConfigError as error:
        outcome = str(error).split(",")[0]
    # What the sandbox hides prints as nothing.
    assert outcome in ("", "template_error", "untracked", "chat template test: must compile")


def test_a_template_that_does_not_compile_names_its_line():
    with pytest.raises(ConfigError, match=r"chat template 'x.jinja': must compile, got .*endfor.* at line 3;"):
        compile_template("a\n{% for x in y %}\n{% endif %}", "'x.jinja'")
    with pytest.raises(ConfigError, match=r"No filter named .*random.* at line 1"):
        compile_template("{{ [1, 2] | random }}", "x")


def test_the_clock_is_not_read_but_given():
    source = "{{ strftime_now('%d %b %Y') }}"
    assert rendered(source, now="2025-01-31") == "31 Jan 2025"
    with pytest.raises(
        ConfigError, match=r"not depend on the clock, got no date; .*chat_template_kwargs = { now = "
    ):
        rendered(source)
    with pytest.raises(ConfigError, match=r"now must be a date in ISO form, got 'today'"):
        rendered(source, now="today")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }};{% endfor %}",
            "1/2False;2/2True;",
        ),
        ("{% for c in 'abc' %}{% if c == 'b' %}{% continue %}{% endif %}{{ c }}{% endfor %}", "ac"),
        ("{% for c in 'abc' %}{% if c == 'b' %}{% break %}{% endif %}{{ c }}{% endfor %}", "a"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}", "a1"),
        ("{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "123"),
        ("{% for x in [] %}{% else %}none{% endfor %}", "none"),
        ("{% set x %}a{{ eos_token }}{% endset %}{{ x | upper ~ 1 ~ none }}", "A</S>1None"),
        ("{% macro m(a, b='z') %}{{ a }}{{ b }}{{ caller() }}{% endmacro %}{% call m('y') %}w{% endcall %}", "yzw"),
        ("{% filter upper %}abc{{ messages[0].role }}{% endfilter %}", "ABCUSER"),
        (
            "{{ ['b', 'a'] | sort | join(', ') }}{{ messages | map(attribute='role') | join('+') }}",
            "a, buser+assistant",
        ),
        ("{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | first }}", "question"),
        ("{{ {'b': 1, 'a': [true, none]} | tojson }}|{{ 'é<' | tojson }}", '{"b": 1, "a": [true, null]}|"é<"'),
        ("{{ 'a,b' .split(',')[-1] }}{{ '%s-%s' % ('x', 1) }}{{ 'x' * 3 }}{{ 7 // 2 }}{{ 2 ** 5 }}", "bx-1xxx332"),
        ("{{ missing }}{{ missing | default('d') }}{{ 'ab' | length }}{{ '12' | int + 1 }}", "d213"),
        (
            "{{ 'a\n' | trim }}{{ ' x ' | string | trim }}{{ messages[0].content | replace('q', 'Q') }}",
            "axQuestion",
        ),
        ("{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}c", "abc"),
        ("{{ [1, 'a', {'k': 'v'}] }}{{ ('t',) }}", "[1, 'a', {'k': 'v'}]('t',)"),
    ],
)
def test_the_language_is_that_of_jinja(source, text):
    # `render` itself compares with plain jinja; here the text is given as well.
    assert rendered(source) == text


def test_a_template_that_takes_long_to_compile_is_refused_by_its_size():
    """[S.c]"""
    with pytest.raises(ConfigError, match=r"chat template x: must have at most 131,072 characters, got 600,006;"):
        compile_template("{{ 1" + " < 1" * 150_000 + "}}", "x")


def test_a_template_that_asks_for_escapes_is_refused():
    """Every text that it prints would be a longer copy [S.c]."""
    with pytest.raises(ConfigError, match=r"autoescape is not supported' at line 2"):
        compile_template("a\n{% autoescape true %}{{ messages[0].content }}{% endautoescape %}", "x")


ENCODER = ChatEncoder(template=load_template("chatml", tokenizer="bytes"), tokenizer=open_tokenizer("bytes"))


def state_of_the_process():
    """All that could stop another part of the program, or be taken from it."""
    signals = (signal.SIGVTALRM, signal.SIGPROF, signal.SIGALRM)
    timers = (signal.ITIMER_VIRTUAL, signal.ITIMER_PROF, signal.ITIMER_REAL)
    return (
        resource.getrlimit(resource.RLIMIT_DATA),
        [signal.getsignal(number) for number in signals],
        [signal.getitimer(timer) == (0, 0) for timer in timers],
    )


def test_the_process_of_the_user_is_left_alone_while_chats_are_encoded():
    """[S.c] Its limits and signals stay as they are, and another thread has all memory."""
    before = state_of_the_process()

    def look():
        states = []
        for _ in range(20):
            states.append(state_of_the_process())
            assert np.empty(5 << 28, np.uint8).size == 5 << 28  # 1.25 GiB
        return states

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        while not looking.done():
            assert not ENCODER.encode([Conversation(messages=MESSAGES)] * 20).refused
        assert looking.result() == [before] * 20
    assert state_of_the_process() == before


def test_the_timer_of_a_program_and_its_handler_run_while_a_template_does():
    calls = []
    before = signal.signal(signal.SIGVTALRM, lambda *_: calls.append(1))
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, 1e-6)
        while not calls:
            assert rendered("{{ messages[0].content }}") == "question"
        assert calls == [1]
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


# Limits of a worker process.

BOMBS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "output": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "calls": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "one operation": "{{ 9 ** (9 ** 9) }}",
    "one text": "{% set n = namespace(x='aaaa') %}{% for i in range(64) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "many texts": (
        "{% set n = namespace(a=none) %}{% set y = 'Ω' * 1000000 %}"
        "{% for i in range(99999) %}{% set n.a = namespace(p=n.a, v=y ~ i) %}{% endfor %}"
    ),
    "one list": "{{ [0] * 10000000000 }}",
}
WORKER = """
import sys
from pathlib import Path
from tokenmill.encode.chat import limits
from tests.encode.chat.test_sandbox import MESSAGES, Conversation, encoder_of
limits.MAX_SECONDS, limits.HARD_SECONDS, limits.MAX_BYTES = 0.2, 0.6, 64 << 20
limits.enable(Path(sys.argv[1]))
encoder_of(sys.argv[2]).encode([Conversation(messages=MESSAGES)] * 2, ["chats.jsonl:1", "chats.jsonl:2"])
"""


def encoder_of(source: str) -> ChatEncoder:
    template = ChatTemplate(source=source, where="bomb.jinja")
    return ChatEncoder(template=template, tokenizer=open_tokenizer("bytes"))


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_worker_ends_with_an_error_that_names_template_and_record(bomb, tmp_path):
    """[S.c]"""
    note = tmp_path / "note"
    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(note), BOMBS[bomb]], capture_output=True, text=True, check=False
    )
    last = (done.stderr.strip().splitlines() or [""])[-1]
    if done.returncode == -signal.SIGPROF:  # one operation, which Python cannot stop
        last = str(limits.error_of(note))
    assert re.search(
        r"chat template bomb\.jinja: takes more than .* for the record chats\.jsonl:1; use a simpler template", last
    )


def test_no_error_is_made_of_a_worker_that_ends_between_two_renders(tmp_path):
    note = tmp_path / "note"
    assert limits.error_of(note) is None
    subprocess.run([sys.executable, "-c", WORKER, str(note), "{{ messages }}"], capture_output=True, check=True)
    assert limits.error_of(note) is None


def test_a_text_that_is_too_long_is_rejected_in_every_process(monkeypatch):
    """[S.c] The number of characters does not depend on the machine, so the record is rejected."""
    monkeypatch.setattr(turns, "MAX_CHARS", 1000)
    with pytest.raises(Refusal, match=r"the template makes 2,000 characters, more than 1,000"):
        rendered("{{ 'ab' * 1000 }}")


@pytest.mark.slow
def test_a_bomb_ends_a_build_within_20_seconds_of_processor_time(tmp_path):
    """[S.c]"""
    (tmp_path / "bomb.jinja").write_text(
        "{% if messages[0].content == 'question' %}" + BOMBS["one operation"] + "{% endif %}{{ messages }}"
    )
    (tmp_path / "in.jsonl").write_text(json.dumps({"messages": MESSAGES}) + "\n")
    begin = resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises(ConfigError, match=r"bomb\.jinja': takes more than .*in\.jsonl:1;"):
        tm.prepare(
            tmp_path / "in.jsonl",
            out=tmp_path / "out",
            tokenizer="bytes",
            recipe="chat",
            options=tm.PrepareOptions(chat_template=str(tmp_path / "bomb.jinja")),
            progress=False,
        )
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime < 20


@pytest.mark.parametrize("bomb", ["loops", "one operation"])
def test_a_bomb_in_the_sample_ends_in_a_process_of_its_own(bomb, monkeypatch):
    """[S.c] A build renders a sample before its first unit, and never in the process of the user."""
    before = state_of_the_process()
    monkeypatch.setattr(
        sample,
        "PROGRAM",
        "from tokenmill.encode.chat import limits; limits.MAX_SECONDS = 0.2; "
        "limits.HARD_SECONDS = 0.6; from tokenmill.encode.chat.sample import main; main()",
    )
    with pytest.raises(ConfigError, match=r"chat template bomb\.jinja: takes more than .* the record of a sample"):
        _ = encoder_of(BOMBS[bomb]).warnings
    assert state_of_the_process() == before
