import numpy as np
import pytest

from tokenmill.run.run import Run

TOML = """
[run]
seed = {seed}
steps = 30
global_batch_size = 12
seq_len = 16
packing = "{packing}"
shuffle = "{shuffle}"
cross_document_labels = {crossing}

[[sources]]
name = "web"
store = "web"

[[sources]]
name = "books"
store = "books"

[[stages]]
name = "base"
start_step = 0
weights = {{ web = 0.7, books = {books} }}

[[stages]]
name = "talk"
start_step = {edge}
global_batch_size = 24
seq_len = {late_seq_len}
weights = {{ web = 0.2, books = 0.8 }}
"""


@pytest.fixture
def make_run(make_store, tmp_path):
    """Make a run of two sources and two stages over real stores with documents of all lengths, in many shards."""

    def make(name="run", **options):
        values = {"seed": 1, "shuffle": "full", "crossing": "false", "books": 0.3, "edge": 17, "packing": "concat"}
        values |= {"late_seq_len": 16, "lengths": 50}
        values |= {key: options.pop(key) for key in list(options) if key in values}
        rng = np.random.default_rng(0)
        folder = tmp_path
        for source, count in (("web", 150), ("books", 60)):
            if not (folder / source).exists():
                lengths = [int(n) for n in rng.integers(0, values["lengths"], count)]
                path, _, _ = make_store(source, lengths, **({"max_tokens_per_shard": 700} | options))
                assert path == folder / source
        file = folder / f"{name}.toml"
        file.write_text(TOML.format(**values))
        return Run.from_toml(file)

    return make


@pytest.fixture
def global_batches():
    """Draw a run at a world size; return the global batches step by step, as bytes per array."""

    def draw(run, *, world_size=1, micro_batch=1, steps=None, **options):
        loaders = [
            run.loader(rank=rank, world_size=world_size, micro_batch=micro_batch, **options)
            for rank in range(world_size)
        ]
        streams = [iter(loader) for loader in loaders]
        plan = loaders[0].plan
        out = []
        for step in range(plan.steps if steps is None else steps):
            count = loaders[0].part.batches(plan.stage(step))
            drawn = [next(stream) for stream in streams for _ in range(count)]
            out.append({name: np.concatenate([batch[name] for batch in drawn]).tobytes() for name in drawn[0]})
        return out

    return draw
