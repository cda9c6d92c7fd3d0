"""One unit of work: a function of its job and its task alone."""

import msgspec
import pytest
from tests.build.corpus import files_of, some_texts, write_file

from tokenmill.build import PrepareOptions, prepare
from tokenmill.build.journal import UnitResult
from tokenmill.build.unit import run_unit
from tokenmill.build.worker import WorkerPool

TEXTS = some_texts(200)


def build(inputs, out, **options):
    return prepare(inputs, out=out, workers=1, progress=False, options=PrepareOptions(chunk_bytes=3000, **options))


@pytest.mark.parametrize("options", [{}, {"deduplicate": True, "val_fraction": 0.3, "max_seq_len": 50}])
def test_units_may_be_done_in_any_order_and_more_than_once(tmp_path, monkeypatch, options):
    """[C1] What goes in and out is JSON, so that any process that sees the files can do them."""
    corpus = write_file(tmp_path / "a.jsonl", TEXTS * 2)
    build(corpus, tmp_path / "straight", **options)
    num_tasks = []

    def run(pool, tasks, _tick):
        num_tasks.append(len(tasks))
        job = msgspec.json.encode(pool.opened.job)
        messages = {task.key: msgspec.json.encode(task) for task in tasks}
        answers = {key: run_unit(job, messages[key]) for key in [*messages, *reversed(messages)]}
        return (msgspec.json.decode(answers[task.key], type=UnitResult | None) for task in tasks)

    monkeypatch.setattr(WorkerPool, "run", run)
    build(corpus, tmp_path / "elsewhere", **options)
    assert min(num_tasks) > 3
    assert files_of(tmp_path / "elsewhere") == files_of(tmp_path / "straight")
