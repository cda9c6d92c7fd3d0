from __future__ import annotations

import re
import resource
import signal
import subprocess
import sys
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from jinja2.exceptions import SecurityError

from tokenmill.encode import Refusal
from tokenmill.encode.chat import tracked, turns
from tokenmill.encode.chat.conversation import Conversation
from tokenmill.encode.chat.render import render
from tokenmill.encode.chat.template import ChatTemplate, compile_template, load_template
from tokenmill.encode.chat.tokens import ChatEncoder
from tokenmill.encode.chat.tracked import budget
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


BOMBS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "{% set ns = namespace(x='aaaa') %}{% for i in range(64) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x='aaaa') %}{% for i in range(64) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(64) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[]) %}{% for i in range(64) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=1) %}{% for i in range(64) %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}{% endfor %}",
    "{% set ns = namespace(x=1) %}{% for i in range(64) %}{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}",
    "{% set ns = namespace(x=1) %}{% for i in range(64) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}",
    "{% set ns = namespace(x=9) %}{% for i in range(64) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
    "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x.replace('a', 'aa') %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = [n.x, n.x] | join(n.x) %}{% endfor %}",
    "{{ 'a' * 10000000000 }}",
    "{{ 10000000000 * 'a' }}",
    "{{ [0] * 10000000000 }}",
    "{{ 9 ** 99999999 }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ range(10000000000) | list }}",
    "{{ [1, 2] | tojson(indent=1000000000) }}",
]


@pytest.mark.parametrize("source", BOMBS)
def test_a_template_cannot_take_all_time_or_memory(source, monkeypatch):
    """[S.c]"""
    monkeypatch.setattr(turns, "budget", partial(budget, 100_000))  # the limit itself takes seconds to reach
    with pytest.raises(Refusal) as caught:
        rendered(source)
    assert caught.value.reason in ("too_many_steps", "too_large", "template_error")


def test_there_is_a_limit_without_being_asked_for():
    """[S.c]"""
    with pytest.raises(Refusal, match="more steps than a render may"):
        rendered(BOMBS[0])


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


KEEP = (
    "{% set n = namespace(a=none) %}{% set y = 'Ω' * 1000000 %}"
    "{% for i in range(99999) %}{% set n.a = namespace(p=n.a, v=y ~ i) %}{% endfor %}"
)
ROUNDS = "{% for i in range(99999) %}BODY{% endfor %}"
SLOW = {
    "sum": "{{ range(99999) | sum }}",
    "sort": "{{ range(99999) | sort | length }}",
    "unique": "{{ range(99999) | unique | list | length }}",
    "in": "{{ -1 in (range(9999) | list) }}",
    "is in": "{{ -1 is in (range(9999) | list) }}",
    "==": "{{ (range(9999) | list) == (range(9999) | list) }}",
    "int": "{{ ('9' * 4000) | int }}",
    "round": "{{ 1e300 | round(300) }}{% for i in range(99) %}{{ 1e300 | round(300) }}{% endfor %}",
    "slice": "{{ ('a' * 1000000)[::-1] | length }}",
    "groupby": "{{ ([{'a': 1}] * 9999) | groupby('a') | length }}",
}
GROWTH = [
    *("{{ l | join | length }}", "{{ l | map('string') | join | length }}", "{{ ''.join(l | map('string')) }}"),
    *("{{ ([{'a': y}] * 999) | join('', attribute='a') }}", "{{ (l ~ '') | length }}", "{{ l }}"),
    *("{{ l | string | length }}", "{{ l | upper }}", "{{ l | trim }}", "{{ l | safe }}", "{{ l | tojson }}"),
    *("{{ ('a' * 999) | replace(old='a', new=y) }}", "{{ (10 ** 999) | replace('0', y) }}"),
    *("{{ ('a' * 999).replace('a', y, 900) }}", "{{ (('a' * 999) | safe).replace('a', y) }}"),
    *("{{ ('a' | safe).join(l) }}", "{{ l | replace('a', y) }}", "{{ '%r' % l }}", "{{ raise_exception(l) }}"),
    *("{% macro m() %}{% for x in l %}{{ y }}{% endfor %}{% endmacro %}{{ m() | length }}", "{{ {}[l].x }}"),
    *("{{ namespace(a=l) }}", "{{ namespace(a=l) | upper }}", "{{ dict(a=l).values() }}", "{{ [namespace(a=l)] }}"),
    *("{% set z %}{% for x in l %}{{ y }}{% endfor %}{% endset %}{{ z | length }}", "{{ l | sum(start=[y]) }}"),
    *(
        "{% for x in l %}{{ y }}{% endfor %}",
        "{% filter upper %}{% for x in l %}{{ y }}{% endfor %}{% endfilter %}",
    ),
    "{{ ([range(99999) | list] * 999) | sum(start=[]) | length }}",
    *("{{ l | sort }}", "{{ l | unique | list }}", "{{ l | max }}", "{{ l | map('default') | sort | length }}"),
    *("{{ ([{'a': y}] * 999) | groupby('a') }}", "{{ ([{'a': y}] * 999) | sort(attribute='a') | length }}"),
    *("{{ y.join('a' * 999) | length }}", f"{{{{ y.join({dict.fromkeys(map(str, range(99)), 1)}) | length }}}}"),
    *("{{ l is lower }}", "{{ [l] | select('upper') | list }}"),
    "{{ [{'a': l}] | rejectattr('a', 'lower') | list }}",
]
"""Texts and lists that would be huge, of a long text `y` and a list `l` of it."""
KEPT = [
    *("y | list", "y.split('Ω')", "y.split()", "y.splitlines()", "y[1:]", "y | upper", "y.lower()", "y.strip('Ω')"),
    *("y.removeprefix('Ω')", "y.partition('n')", "y ~ i", "y + 'b'", "'%s' % y", "y | reverse", "y | trim('Ω')"),
    *("l.copy()", "l[:]", "l | sort", "l | list", "cycler(*l).items", "dict(a=l | list)"),
    *("{}.fromkeys(l)", "l | map('string') | list", "{'a': l}.copy()", "namespace(x=l | reverse | list)"),
]
"""What takes memory, if it is kept again and again."""
LARGE = [
    "{% set n = namespace(c=[1]) %}{% for i in range(60) %}{% set n.c = cycler(n.c, n.c).items %}{% endfor %}"
    "{{ n.c == n.c[0] }}",
    "{% set n = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}"
    "{% set n.b = [n.b, n.b] %}{% endfor %}{{ n.a == n.b }}",
    "{% set a = 'x' * 1000000 %}{{ a | replace('x', a) | length }}",
    "{% set a = 'x' * 1000000 %}{{ a.replace('x', a) | length }}",
    "{% set a = 'x' * 100000 %}{{ (['x' * 1000] * 1000) | map('replace', 'x', a) | list | length }}",
    "{% set n = namespace(a='xx') %}{% for i in range(60) %}{% set n.a = ''.join([n.a, n.a]) %}{% endfor %}",
    "{% set n = namespace(a='xx') %}{% for i in range(60) %}{% set n.a = n.a ~ n.a %}{% endfor %}",
    *("{% set y = 'a' * 4000000 %}{% set l = [y] * 1000 %}" + growth for growth in GROWTH),
    *(
        "{% set y = 'Ω\n' * 1000000 %}{% set l = range(9999) | list %}{% set n = namespace(a=none) %}"
        "{% for i in range(9999) %}{% set n.a = namespace(p=n.a, v=KEPT) %}{% endfor %}".replace("KEPT", kept)
        for kept in KEPT
    ),
    "{% set l = range(9999) | list %}{{ ([l] * 9999).count(range(9999) | list) }}",
    "{{ 5 | round(-99999999) }}",
    "{{ ('1' * 4000000) | float }}",
    "{{ '%*d' % (999999999, 1) }}",
    *("{{ '%999999999d' is odd }}", "{{ '%999999999d' is divisibleby(3) }}"),
    "{{ ['%999999999d'] | select('even') }}",
    *("{{ ('粉-' * 8000000) | title }}", "{{ ('粉' * 16000000) | sort }}", "{{ ('粉' * 16000000) | join(',') }}"),
    *("{{ [1] | sort(attribute=',' * 16000000) }}", "{{ [1] | map(attribute='ab.' * 5000000) | list }}"),
    *(
        "{% set x, z = ['ab' * 8000000] * 99999, 'ab' * 8000000 %}" + comparison
        for comparison in (
            *("{{ x == [z] * 99999 }}", "{{ x is eq([z] * 99999) }}", "{{ x.count(z) }}", "{{ z ~ 'c' in x }}"),
            *("{{ (z ~ 'c') is in x }}", "{% for w in [x, [z] * 99999] %}{{ loop.changed(w) }}{% endfor %}"),
        )
    ),
]


# Where the timer speaks amid a callback of the collector, as hypothesis has one, Python prints the error and goes
# on; the timer speaks again.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["tracked", "plain"])
@pytest.mark.parametrize("source", [*(ROUNDS.replace("BODY", body) for body in SLOW.values()), *LARGE, *BOMBS])
def test_limits_hold_in_both_environments_whatever_a_template_does(source, kind, monkeypatch):
    """A template can tell whether its strings are tracked, and do its work where they are not [S.c].

    The limit of the system, which stops what nobody has thought of, is out of the way.
    """
    monkeypatch.setattr(tracked, "MAX_BYTES", 8 << 30)
    monkeypatch.setattr(tracked, "MAX_SECONDS", 0.2)
    template = getattr(compile_template(source, "test"), kind)
    tracemalloc.start()
    begin = time.process_time()
    try:
        errors = (Refusal, OverflowError, TypeError, RecursionError, SecurityError)
        with pytest.raises(errors), budget(100_000), tracked.limits():
            template.render(messages=MESSAGES)
        assert tracemalloc.get_traced_memory()[1] < 300 << 20
    finally:
        tracemalloc.stop()
    assert time.process_time() - begin < 3


def test_another_thread_looks_at_the_memory_before_much_of_it_is_gone(monkeypatch):
    """Texts that are too short to cost much, many of them [S.c]."""
    monkeypatch.setattr(tracked, "MAX_BYTES", 64 << 20)
    source = (
        "{% set y = 'Ω' * 4096 %}{% set n = namespace(a=none) %}"
        f"{{% for i in range(9999) %}}{{% set n.a = namespace(p=n.a, v=[{'y[1:], ' * 999}]) %}}{{% endfor %}}"
    )
    compile_template(source, "test")
    tracemalloc.start()
    try:
        with ThreadPoolExecutor(1) as pool, pytest.raises(Refusal, match="more than 64 MB of memory"):
            pool.submit(rendered, source).result()
        assert tracemalloc.get_traced_memory()[1] < 160 << 20
    finally:
        tracemalloc.stop()


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


UNCOUNTED = {
    "time": "{% for x in range(99999) %}{% for y in range(99999) %}{% endfor %}{% endfor %}",
    "memory": KEEP,
}
TOO_MUCH = r"more than (0.05 s of the processor|64 MB of memory): test$"


def run_uncounted(what):
    """Render with small limits of time and memory, and none of steps."""
    tracked.MAX_SECONDS = 0.05 if what == "time" else 60
    tracked.MAX_BYTES = 64 << 20
    turns.budget = partial(budget, 1 << 40)
    return rendered(UNCOUNTED[what])


@pytest.mark.parametrize("thread", ["main", "other"])
@pytest.mark.parametrize("what", ["time", "memory"])
def test_time_and_memory_of_a_record_are_limited_whatever_the_steps_say(what, thread, monkeypatch):
    """As where an operation takes more than is counted for it; the error names the template [S.c]."""
    for module, name in ((tracked, "MAX_SECONDS"), (tracked, "MAX_BYTES"), (turns, "budget")):
        monkeypatch.setattr(module, name, getattr(module, name))
    before = state_of_the_process()
    with ThreadPoolExecutor(1) as pool, pytest.raises(Refusal, match=TOO_MUCH):
        run_uncounted(what) if thread == "main" else pool.submit(run_uncounted, what).result()
    assert state_of_the_process() == before


@pytest.mark.parametrize("what", ["time", "memory"])
def test_in_a_worker_the_system_itself_holds_a_record_to_time_and_memory(what):
    """[S.c] Also where a template does what nobody has thought to count."""
    program = (
        "from tests.encode.chat.test_sandbox import run_uncounted, tracked\n"
        "tracked.is_worker, tracked._check_limits = True, lambda left: left.__setitem__(0, 1 << 40)\n"
        f"run_uncounted({what!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.search(TOO_MUCH, done.stderr.strip())


def test_memory_that_another_thread_takes_is_not_laid_to_a_record_of_few_steps(monkeypatch):
    """A template that has not worked enough to have taken it goes on."""
    monkeypatch.setattr(tracked, "MAX_BYTES", 1 << 28)
    check = partial(tracked.charge, tracked._STEPS_BETWEEN + 1)
    with budget(), tracked.limits():
        check()
        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(np.ones, 5 << 26, np.uint8).result()
        check()
        check()
        check()
        with pytest.raises(Refusal, match="more than 256 MB of memory"):
            check()
    assert held.size == 5 << 26


def test_a_hostile_template_takes_its_time_once_for_all_that_is_asked_of_it(monkeypatch):
    """[S.c] How it ends turns, and whether it writes BOS, are asked several times of one build."""
    monkeypatch.setattr(tracked, "MAX_SECONDS", 0.2)
    monkeypatch.setattr(turns, "budget", partial(budget, 1 << 40))
    template = ChatTemplate(source=UNCOUNTED["time"], where="test")
    encoder = ChatEncoder(template=template, tokenizer=open_tokenizer("bytes"))
    begin = time.process_time()
    for _ in range(5):
        assert (encoder.spelled, encoder.lacks_bos) == ((), False)
    assert time.process_time() - begin < 0.6
