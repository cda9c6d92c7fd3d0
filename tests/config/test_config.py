import pytest

from tokenmill.config.combine import check_combinations
from tokenmill.config.run import WHOLE_BATCH_ARRAYS, parse_config, read_tables
from tokenmill.config.schedule import read_numbers
from tokenmill.errors import ConfigError
from tokenmill.loader.buffers import array_shapes
from tokenmill.run.run import Run
from tokenmill.types import ARRAYS

RUN = {"steps": 10, "global_batch_size": 8, "seq_len": 16}
WEB = {"name": "web", "store": "stores/web"}
BOOKS = {"name": "books", "store": "stores/books"}


def config(**changes):
    return parse_config({"run": RUN, "sources": [WEB]} | changes)


def test_the_example_of_the_design_is_read(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        """
        [run]
        seed = 1234
        steps = 1000
        global_batch_size = 32
        seq_len = 2048
        packing = "concat"
        shuffle = "full"

        [[sources]]
        name = "web"
        store = "stores/web"

        [[sources]]
        name = "books"
        store = "stores/books"
        max_epochs = 2

        [[stages]]
        name = "base"
        start_step = 0
        weights = { web = 0.9, books = 0.1 }

        [[stages]]
        name = "late"
        start_step = 800
        global_batch_size = 8
        seed = 5
        weights = { web = 0.4, books = 0.6 }
        """
    )
    read = parse_config(read_tables(file))
    assert read.source_names == ("web", "books")
    assert read.sources[1].max_epochs == 2
    base, late = read.resolved_stages
    assert (base.seed, base.global_batch_size, base.shuffle, base.weights) == (
        1234,
        32,
        "full",
        {"web": 0.9, "books": 0.1},
    )
    assert (late.seed, late.global_batch_size, late.seq_len) == (5, 8, 2048)


def test_no_stages_is_one_stage_from_run():
    (stage,) = config().resolved_stages
    assert (stage.name, stage.start_step, stage.weights) == ("main", 0, {"web": 1.0})


def test_weights_of_run_serve_stages_that_say_none():
    read = config(
        run=RUN | {"weights": {"web": 3, "books": 1}},
        sources=[WEB, BOOKS],
        stages=[{"name": "a", "start_step": 0}, {"name": "b", "start_step": 5, "weights": {"books": 1}}],
    )
    assert [stage.weights for stage in read.resolved_stages] == [{"web": 3, "books": 1}, {"books": 1}]


STAGE = {"name": "a", "start_step": 0, "weights": {"web": 1}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"runn": {}}, r"config: unknown key: 'runn'; did you mean 'run'\?"),
        ({"run": RUN | {"seqlen": 8}}, r"run: unknown key: 'seqlen'; did you mean 'seq_len'\?"),
        ({"sources": [WEB | {"pth": 1}]}, r"sources\[0\]: unknown key: 'pth'"),
        ({"stages": [STAGE | {"weigths": {}}]}, r"stages\[0\]: unknown key: 'weigths'; did you mean 'weights'\?"),
        ({"run": {"steps": 1, "seq_len": 1}}, "run: missing key: global_batch_size"),
        ({"run": RUN | {"steps": 0}}, "run: steps must be at least 1, got 0"),
        ({"run": RUN | {"steps": 1.5}}, r"run\.steps: expected a whole number, got 1\.5"),
        ({"run": RUN | {"steps": True}}, r"run\.steps: expected a whole number, got True"),
        ({"run": RUN | {"seed": "x"}}, r"run\.seed: expected a whole number, got 'x'"),
        ({"run": RUN | {"packing": 1}}, r"run\.packing: expected a string, got 1"),
        ({"run": RUN | {"cross_document_labels": 1}}, "expected true or false, got 1"),
        ({"run": RUN | {"arrays": "labels"}}, r"run\.arrays: expected a list of strings, got 'labels'"),
        ({"run": RUN | {"packing": "concatt"}}, r"packing must be one of .*; did you mean 'concat'\?"),
        ({"run": 3}, "run: expected a table, got 3"),
        ({"sources": {}}, r"sources: expected a list of tables, got dict; write \[\[sources\]\]"),
        ({"sources": []}, "sources: no sources"),
        ({"sources": [WEB, WEB]}, "sources: names must differ, got 'web' twice"),
        ({"sources": [WEB | {"name": "a/b"}]}, "letters, digits, - _ . only, got 'a/b'"),
        ({"sources": [WEB | {"max_epochs": 0}]}, "source 'web': max_epochs must be positive, got 0"),
        ({"stages": [STAGE, STAGE]}, "stages: names must differ, got 'a' twice"),
    ],
)
def test_a_config_that_cannot_be_right_says_where_and_what(changes, message):
    """[A1.a]"""
    with pytest.raises(ConfigError, match=message):
        config(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sources": [WEB, BOOKS]},
            r"stage 'main': no weights for 2 sources; "
            r'add weights = \{ web = 1, books = 1 \} under \[run\], or weights = "tokens"',
        ),
        (
            {"sources": [WEB, BOOKS], "stages": [{"name": "a", "start_step": 0}]},
            r"stage 'a': no weights for .* books = 1 \} under \[run\] or to the stage, or",
        ),
        (
            {"run": RUN | {"weights": "token"}},
            r"run\.weights: expected .* one of tokens, rows, documents, got 'token'; did you mean 'tokens'\?",
        ),
        (
            {"stages": [{"name": "a", "start_steps": 0}]},
            r"unknown key: 'start_steps'; did you mean 'start_step'",
        ),
        ({"stages": [{"name": "a"}]}, r"stages\[0\]: missing key: start_step; add start_step = "),
        (
            {"steps": 5},
            r"config: steps is outside of a table; write \[run\]",
        ),
        (
            {"stages": [STAGE | {"weights": {"wb": 1}}]},
            r"weights must name sources, got 'wb'; did you mean 'web'\?",
        ),
        (
            {"stages": [STAGE | {"weights": {"web": -1}}]},
            r"weights must be positive, got \{'web': -1\}; leave a source out",
        ),
        ({"stages": [STAGE | {"weights": {}}]}, "weights must be positive"),
        (
            {"stages": [STAGE | {"name": "a\tb"}]},
            r"stages.name: must be letters that can be printed, got .a\\tb.; rename it",
        ),
        ({"stages": [STAGE | {"start_step": -1}]}, "start_step must not be negative, got -1"),
        ({"stages": [STAGE | {"seq_len": 0}]}, "stage 'a': seq_len must be at least 1, got 0"),
        (
            {"stages": [STAGE | {"packing": "x"}]},
            "stage 'a': packing must be one of .*; choose one of them",
        ),
    ],
)
def test_a_stage_that_cannot_be_right_says_where_and_what(changes, message):
    """[A1.a]"""
    with pytest.raises(ConfigError, match=message):
        _ = config(**changes).resolved_stages


def test_a_file_that_is_not_there_or_not_toml_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config not found: .*none\.toml"):
        read_tables(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[run\n")
    with pytest.raises(ConfigError, match=r"bad\.toml: expected TOML, got"):
        read_tables(tmp_path / "bad.toml")


def test_run_must_be_there():
    with pytest.raises(ConfigError, match=r"missing table: \[run\]"):
        parse_config({"sources": [WEB]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arrays": ["input_id"]}, r"run: arrays must be one of .*, got 'input_id'; did you mean 'input_ids'\?"),
        ({"arrays": ["labels", "source", "labels"]}, "run: arrays must name each array once, got 'labels' twice"),
        (
            {"arrays": ["num_loss_tokens", "cu_seqlens"]},
            r"run: arrays must name one that has a line for every row, got \['num_loss_tokens', 'cu_seqlens'\]",
        ),
        ({"positions": "rows"}, r"run: positions must be one of .*did you mean 'row'\?"),
        ({"seed": 2**63}, "run: seed must lie within 0 and"),
        ({"seed": -1}, "run: seed must lie within 0 and"),
        ({"seq_len": 10**12}, "run: seq_len must be at most"),
        (
            {"on_long": "truncate_end", "packing": "concat"},
            "on_long = 'truncate_end' cannot be combined with packing = 'concat'",
        ),
        ({"crop": "discard"}, "crop is for packing bos_best_fit, got 'discard' with 'best_fit'"),
    ],
)
def test_run_options_are_checked_without_a_loader(changes, message):
    """[A1.a]"""
    with pytest.raises(ConfigError, match=message):
        config(run=RUN | changes)


def test_arrays_of_the_whole_batch_are_those_without_a_line_for_every_row():
    assert set(ARRAYS) - set(array_shapes(ARRAYS, 2, 8)) == set(WHOLE_BATCH_ARRAYS)


def test_the_length_of_an_eval_must_fit_the_multiple_of_segments():
    with pytest.raises(
        ConfigError, match="eval 'val': seq_len must be divisible by segment_multiple, got 12 and 8; use 16"
    ):
        config(run=RUN | {"segment_multiple": 8}, evals=[{"name": "val", "store": "val", "seq_len": 12}])


def test_labels_of_all_ranks_cannot_be_counted_of_live_text():
    live = {"name": "web", "documents": ["a.jsonl"], "tokenizer": "bytes", "live": True}
    with pytest.raises(
        ConfigError, match=r"num_loss_tokens cannot be combined with live text in 'web'; .*sum the labels"
    ):
        check_combinations(config(run=RUN | {"arrays": ["labels", "num_loss_tokens"]}, sources=[live]))


def test_labels_cross_documents_with_concat_only():
    with pytest.raises(ConfigError, match="cross_document_labels cannot be combined with packing = 'best_fit'"):
        check_combinations(config(run=RUN | {"cross_document_labels": True}))


@pytest.mark.parametrize(
    ("text", "problem"),
    [("a = " + "[" * 10_000 + "]" * 10_000, "too deep"), ("a = " + "{a = " * 5000 + "1" + "}" * 5000, "too deep")],
)
def test_a_config_that_is_nested_without_end_is_refused(tmp_path, text, problem):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigError, match=rf"run\.toml: expected TOML, got .*{problem}"):
        Run.from_toml(tmp_path / "run.toml")


def test_files_without_an_end_are_not_read_for_ever(tmp_path):
    with pytest.raises(ConfigError, match=r"file too large: /dev/zero, more than 16777216 bytes"):
        Run.from_toml("/dev/zero")
    (tmp_path / "long.txt").write_text("9" * 5000)
    with pytest.raises(ConfigError, match=r"long\.txt, line 1: must be the number of a document"):
        read_numbers(tmp_path / "long.txt", "quarantine[0]")


def test_a_batch_without_arrays_is_refused(tmp_path):
    config = tmp_path / "run.toml"
    config.write_text(
        '[run]\nsteps = 1\nglobal_batch_size = 1\nseq_len = 4\narrays = []\n[[sources]]\nname = "a"\nstore = "a"\n'
    )
    with pytest.raises(
        ConfigError, match=r"run: arrays must name one at least, got \[\]; leave it out for input_ids"
    ):
        Run.from_toml(config)
