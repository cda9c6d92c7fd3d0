"""A config of KempnerForge becomes sources and stages; what it says of training is left alone."""

import tomllib

import pytest

from tokenmill.config.dialects import translate
from tokenmill.errors import ConfigError

MIXTURE = """
[model]
dim = 256
vocab_size = 50257

[train]
batch_size = 4
grad_accum_steps = 2
seq_len = 1024
max_steps = 500
seed = 7
compile_model = true

[optimizer]
name = "adamw"

[data]
tokenizer_path = "/tok"
mix_temperature = 2.0
num_workers = 4
pin_memory = true
prefetch_factor = 2

[[data.datasets]]
name = "web"
path = "/data/tokenized/web"
weight = 0.7

[[data.datasets]]
hf_name = "bigcode/the-stack"
hf_config = "python"
weight = 0.3

[[data.phases]]
start_step = 100
dataset_weights = { web = 0.3, "bigcode/the-stack" = 0.7 }
lr_scale = 0.5

[[data.phases]]
start_step = 400
dataset_weights = { web = 0 }
"""
TRAIN = {"batch_size": 4, "grad_accum_steps": 1, "seq_len": 64, "max_steps": 100}
WEB, CODE = {"name": "web", "path": "/web", "weight": 3.0}, {"path": "/code"}


def taken(data, *, world_size=1, train=TRAIN, **tables):
    return translate({"data": data, "train": train, **tables}, where="kf.toml", world_size=world_size)


def stages_of(data, **tables):
    return taken(data, **tables).tables["stages"]


def refused(data, **tables):
    with pytest.raises(ConfigError) as caught:
        taken(data, **tables)
    return str(caught.value)


def test_a_mixture_with_phases_is_taken_whole():
    found = translate(tomllib.loads(MIXTURE), where="kf.toml", world_size=8)
    assert found.dialect == "KempnerForge"
    assert found.tables == {
        "run": {
            "steps": 500,
            "global_batch_size": 64,
            "seq_len": 1024,
            "seed": 7,
            "packing": "concat",
            "cross_document_labels": True,
            "positions": "row",
            "temperature": 2.0,
        },
        "sources": [
            {"name": "web", "store": "/data/tokenized/web/*.npy", "vocab_size": 50257},
            {"name": "the-stack", "documents": ["hf:bigcode/the-stack:python"], "tokenizer": "/tok"},
        ],
        "stages": [
            {"name": "base", "start_step": 0, "weights": {"web": 0.7, "the-stack": 0.3}},
            {"name": "phase-1", "start_step": 100, "weights": {"web": 0.3, "the-stack": 0.7}, "lr_scale": 0.5},
            {"name": "phase-2", "start_step": 400, "weights": {"the-stack": 0.3}},
        ],
    }
    assert found.notes == (
        "data.num_workers = 4: not needed, batches are assembled by threads",
        "data.pin_memory = true: not needed, the loader of the adapter decides it",
        "data.prefetch_factor = 2: not needed, the loader says how many batches are made ahead",
        "data.pack_sequences = false: rows are the stream of tokens cut, and labels cross documents",
        "model.vocab_size = 50257: taken as the vocabulary of all token files, whose ids are looked at once",
    )


def test_what_is_not_said_is_as_there_and_noted():
    found = translate({"data": {"dataset_path": "/web"}}, where="kf.toml")
    assert found.tables["run"] == {
        "steps": 100_000,
        "global_batch_size": 8,
        "seq_len": 2048,
        "seed": 42,
        "packing": "concat",
        "cross_document_labels": True,
        "positions": "row",
    }
    assert found.tables["stages"] == [{"name": "base", "start_step": 0}]
    assert found.warnings == found.notes[1:2]
    assert found.notes[:2] == (
        "train: taken as there by default, batch_size = 8, seq_len = 2048, max_steps = 100000, "
        "grad_accum_steps = 1",
        "the rows of a step are those of one rank, as the config does not say how many there are; "
        "give world_size=N",
    )


@pytest.mark.parametrize(
    ("data", "source"),
    [
        ({"dataset_path": "/data/web"}, {"name": "web", "store": "/data/web/*.npy"}),
        ({"dataset_path": "/data/web/", "file_pattern": "a*.npy"}, {"name": "web", "store": "/data/web/a*.npy"}),
        ({"dataset_path": "/data/web[1]"}, {"name": "web-1-", "store": "/data/web[[]1]/*.npy"}),
        ({"dataset_path": "/"}, {"name": "data", "store": "/*.npy"}),
        (
            {"hf_dataset_name": "wikitext", "hf_dataset_config": "w-2", "tokenizer_path": "/tok"},
            {"name": "wikitext", "documents": ["hf:wikitext:w-2"], "tokenizer": "/tok"},
        ),
        (
            {
                "dataset_path": "",
                "hf_dataset_name": "org/x",
                "hf_dataset_config": "",
                "hf_dataset_split": "validation",
                "hf_dataset_text_field": "body",
                "tokenizer_path": "/tok",
            },
            {"name": "x", "documents": ["hf:org/x::validation"], "tokenizer": "/tok", "text_field": "body"},
        ),
    ],
)
def test_one_source_is_files_or_a_dataset_of_hugging_face(data, source):
    assert taken(data).tables["sources"] == [source]


def test_datasets_go_before_a_path_and_a_path_before_hugging_face():
    both = {"dataset_path": "/web", "hf_dataset_name": "x", "tokenizer_path": "/tok"}
    found = taken(both)
    assert found.tables["sources"] == [{"name": "web", "store": "/web/*.npy"}]
    assert found.notes[0] == "data.hf_dataset_name: not read, dataset_path goes before it"
    found = taken(both | {"datasets": [{"path": "/code"}]})
    assert found.tables["sources"] == [{"name": "code", "store": "/code/*.npy"}]
    assert found.notes[:2] == (
        "data.dataset_path: not read, datasets goes before it",
        "data.hf_dataset_name: not read, datasets goes before it",
    )


@pytest.mark.parametrize("streaming", [True, False])
def test_streaming_is_live_text(streaming):
    data = {"datasets": [{"hf_name": "x"}, {"path": "/web"}], "tokenizer_path": "/tok", "hf_streaming": streaming}
    found = taken(data)
    assert ["live" in source for source in found.tables["sources"]] == [streaming, False]


def test_names_are_kept_or_derived_and_doubled_ones_numbered():
    datasets = [
        {"path": "/a/web"},
        {"path": "/b/web"},
        {"path": "/c/web", "name": "web"},
        {"path": "/d", "name": "my corpus"},
        {"hf_name": "org/web"},
    ]
    found = taken({"datasets": datasets, "tokenizer_path": "/tok"})
    names = ["web-2", "web-3", "web", "my-corpus", "web-4"]
    assert found.notes[0] == "dataset 'my corpus': called 'my-corpus'"
    assert [source["name"] for source in found.tables["sources"]] == names
    assert found.tables["stages"] == [{"name": "base", "start_step": 0, "weights": dict.fromkeys(names, 1.0)}]


def test_phases_may_call_a_dataset_by_its_name_or_by_what_stands_for_it_there():
    datasets = [{"path": "/a/web"}, {"path": "/b/web"}, {"path": "/d", "name": "my corpus"}]
    said = [{"/b/web": 5}, {"web-2": 5}, {"my corpus": 5}, {"my-corpus": 5}]
    weights = [
        stages_of({"datasets": datasets, "phases": [{"start_step": 1, "dataset_weights": phase}]})[1]["weights"]
        for phase in said
    ]
    assert weights == [
        {"web": 1.0, "web-2": 5, "my-corpus": 1.0},
        {"web": 1.0, "web-2": 5, "my-corpus": 1.0},
        {"web": 1.0, "web-2": 1.0, "my-corpus": 5},
        {"web": 1.0, "web-2": 1.0, "my-corpus": 5},
    ]


def test_a_source_that_a_phase_does_not_name_has_its_original_weight():
    phases = [{"start_step": 10, "dataset_weights": {"web": 9}}, {"start_step": 20, "dataset_weights": {"code": 2}}]
    assert [stage["weights"] for stage in stages_of({"datasets": [WEB, CODE], "phases": phases})] == [
        {"web": 3.0, "code": 1.0},
        {"web": 9, "code": 1.0},
        {"web": 3.0, "code": 2},
    ]


def test_a_phase_at_step_0_replaces_the_first_stage():
    phases = [{"dataset_weights": {"web": 0}}, {"start_step": 5, "lr_scale": 0.1}]
    found = taken({"datasets": [WEB, CODE], "phases": phases})
    assert found.tables["stages"] == [
        {"name": "phase-1", "start_step": 0, "weights": {"code": 1.0}},
        {"name": "phase-2", "start_step": 5, "weights": {"web": 3.0, "code": 1.0}, "lr_scale": 0.1},
    ]


def test_a_dataset_that_no_phase_draws_is_left_out():
    found = taken({"datasets": [WEB, CODE], "phases": [{"dataset_weights": {"web": 0}}]})
    assert [source["name"] for source in found.tables["sources"]] == ["code"]
    assert found.notes[0] == "dataset 'web': left out, no phase draws from it"


def test_annealing_is_one_more_stage():
    data = {"datasets": [WEB, CODE], "anneal_start_step": 90, "anneal_weights": {"code": 9}}
    assert stages_of(data) == [
        {"name": "base", "start_step": 0, "weights": {"web": 3.0, "code": 1.0}},
        {"name": "anneal", "start_step": 90, "weights": {"web": 3.0, "code": 9}},
    ]


def test_with_one_source_only_the_scale_of_a_phase_matters():
    data = {
        "dataset_path": "/web",
        "phases": [{"start_step": 5, "dataset_weights": {"nobody": 3}, "lr_scale": 0.5}, {"start_step": 6}],
    }
    found = taken(data)
    assert found.tables["stages"] == [
        {"name": "base", "start_step": 0},
        {"name": "phase-1", "start_step": 5, "lr_scale": 0.5},
        {"name": "phase-2", "start_step": 6},
    ]
    assert found.notes[0] == "stage 'phase-1': dataset_weights has no effect, as there is one source"


def test_annealing_that_is_off_is_noted():
    found = taken({"datasets": [WEB, CODE], "anneal_weights": {"code": 9}})
    assert [stage["name"] for stage in found.tables["stages"]] == ["base"]
    assert found.notes[0] == "data.anneal_weights: no effect, as anneal_start_step is 0"


def test_packed_sequences_keep_labels_and_positions_within_documents():
    """[P1.c]"""
    found = taken({"dataset_path": "/web", "pack_sequences": True, "tokenizer_path": "/tok"})
    assert "cross_document_labels" not in found.tables["run"]
    assert "positions" not in found.tables["run"]
    packed = "data.pack_sequences = true: rows are the stream of tokens cut, labels and positions end at documents"
    files = {"name": "web", "store": "/web/*.npy"}
    assert (found.tables["sources"], found.notes) == ([files | {"tokenizer": "/tok"}], (packed,))
    said = taken(
        {"dataset_path": "/web", "pack_sequences": True, "tokenizer_path": "/tok"}, tokenmill={"eos_id": 3}
    )
    assert (said.tables["sources"], said.notes) == ([files | {"eos_id": 3}], (packed,))
    texts = taken({"hf_dataset_name": "x", "tokenizer_path": "/tok", "pack_sequences": True})
    assert texts.notes == (packed,)


def test_packed_token_files_need_to_know_their_eos_as_there():
    assert refused({"dataset_path": "/web", "pack_sequences": True}) == (
        "kf.toml: data.tokenizer_path: must be given with pack_sequences, as its EOS ends the documents of '/web', "
        "got nothing; add the folder of a tokenizer, or eos_id = ... under [tokenmill]"
    )


def test_a_path_that_is_a_store_of_ours_is_taken_as_it_is():
    tables = {"data": {"datasets": [WEB, CODE], "pack_sequences": True}, "train": TRAIN, "model": {"vocab_size": 9}}
    tables["data"]["tokenizer_path"] = "/tok"
    found = translate(tables, where="kf.toml", world_size=1, is_store=lambda path: path == "/web")
    assert found.tables["sources"] == [
        {"name": "web", "store": "/web"},
        {"name": "code", "store": "/code/*.npy", "tokenizer": "/tok", "vocab_size": 9},
    ]


@pytest.mark.parametrize(
    ("said", "seed"), [({"seed": 5}, 5), ({"seed": 5, "data_seed": 7}, 7), ({"data_seed": 0}, 0)]
)
def test_the_seed_of_data_goes_before_that_of_the_model(said, seed):
    assert taken({"dataset_path": "/web"}, train=TRAIN | said).tables["run"]["seed"] == seed


def test_a_misspelt_key_of_training_is_named():
    """[A1.a]"""
    message = refused({"dataset_path": "/web"}, train=TRAIN | {"max_step": 10})
    assert message == "kf.toml: train: unknown key: 'max_step'; did you mean 'max_steps'?"
    taken({"dataset_path": "/web"}, train=TRAIN | {"compile_model": False, "z_loss_weight": 1e-4})


@pytest.mark.parametrize(
    ("distributed", "world_size", "ranks", "warned"),
    [
        ({"dp_shard": 4, "tp": 2}, None, 4, None),
        ({"dp_shard": 4, "dp_replicate": 2}, None, 8, None),
        ({"dp_shard": 4, "dp_replicate": 2}, 8, 8, None),
        ({"dp_replicate": 2}, 6, 6, None),
        ({"dp_replicate": 2}, None, 1, "the rows of a step are those of one rank"),
        (
            {"dp_shard": 4},
            2,
            2,
            "distributed.dp_shard, dp_replicate: not read, as 2 ranks were asked for, got 4 there",
        ),
    ],
)
def test_the_ranks_are_those_of_the_config_unless_it_is_asked_for_others(distributed, world_size, ranks, warned):
    """[A1.b]"""
    found = taken({"dataset_path": "/web"}, world_size=world_size, distributed=distributed)
    assert found.tables["run"]["global_batch_size"] == 4 * ranks
    assert [note.startswith(warned or "-") for note in found.warnings] == ([] if warned is None else [True])


def test_a_degree_that_cannot_be_is_refused():
    message = refused({"dataset_path": "/web"}, distributed={"dp_shard": 0})
    assert message == (
        "kf.toml: distributed.dp_shard, dp_replicate: must be at least 1, or -1 for the first, got 0 and 1; "
        "raise them"
    )


def test_raw_files_are_proven_by_the_vocabulary_or_ask_for_their_dtype():
    data = {"dataset_path": "/web", "file_pattern": "*.bin"}
    unknown = (
        "files that end in .bin do not say their dtype, and no size proves it: if no file beside them does, "
        'add dtype = "uint16" or "uint32" under [tokenmill]'
    )
    assert unknown in taken(data).notes
    assert unknown not in taken(data, tokenmill={"dtype": "uint16"}).notes
    found = taken(data, model={"vocab_size": 50257})
    assert (found.tables["sources"][0]["vocab_size"], unknown in found.notes) == (50257, False)


def test_files_that_are_mixed_need_a_vocabulary():
    told = (
        "token files do not say their vocabulary, without which only stores of tokenmill can be mixed: "
        "add vocab_size = ... under [tokenmill]"
    )
    assert told in taken({"datasets": [WEB, CODE]}).notes
    assert told not in taken({"datasets": [WEB, CODE]}, tokenmill={"vocab_size": 9}).notes
    assert told not in taken({"datasets": [WEB]}).notes


def test_a_tokenizer_by_name_is_noted_as_none_is_downloaded():
    found = taken({"hf_dataset_name": "x", "tokenizer_path": "gpt2"})
    assert found.notes[-1] == (
        "tokenizer 'gpt2': taken as a file or folder, from the folder of the config; none is downloaded"
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {},
            "data: dataset_path, hf_dataset_name or datasets must be given, got none; "
            "add the one that says where the data is",
        ),
        (
            {"dataset_path": "", "hf_dataset_name": "", "datasets": []},
            "data: dataset_path, hf_dataset_name or datasets must be given, got none; "
            "add the one that says where the data is",
        ),
        (
            {"hf_dataset_name": "x"},
            "data.tokenizer_path: must be given to read the text of 'x', got nothing; "
            "add the folder of a tokenizer",
        ),
        ({"data_path": "/web"}, "data: unknown key: 'data_path'; did you mean 'dataset_path'?"),
        (
            {"num_workers": -1},
            "data: num_workers must be at least 0 and prefetch_factor at least 1, got -1 and 2; raise them",
        ),
        (
            {"prefetch_factor": 0},
            "data: num_workers must be at least 0 and prefetch_factor at least 1, got 4 and 0; raise them",
        ),
        ({"mix_temperature": 0}, "data: mix_temperature must be positive, got 0; use 1"),
        ({"mix_temperature": "1"}, "data.mix_temperature: expected a number, got '1'; leave out the quotes"),
        ({"pack_sequences": 1}, "data.pack_sequences: expected true or false, got 1; change its type"),
        ({"dataset_path": ["/web"]}, "data.dataset_path: expected a string, got ['/web']; change its type"),
        ({"datasets": ["/web"]}, "data.datasets[0]: expected a table, got '/web'; write [[data.datasets]]"),
        *(
            (
                {"hf_dataset_name": "x", name: 1},
                f"data: must be a config of text, got {name}, which is for images; "
                "leave it out if the run has none",
            )
            for name in ("hf_dataset_image_field", "hf_dataset_prompt_field", "hf_image_size")
        ),
        (
            {"dataset_path": "/web", "anneal_start_step": -1},
            "data: anneal_start_step must be at least 0, got -1; raise it",
        ),
        (
            {"dataset_path": "/web", "anneal_start_step": 5},
            "data: anneal_weights must be given with anneal_start_step, got none; add the weights",
        ),
        (
            {"dataset_path": "/web", "anneal_start_step": 5, "phases": [{"start_step": 3}]},
            "data: phases and anneal_start_step must not be given both, got 1 phases and step 5; "
            "make the annealing one of the phases",
        ),
        (
            {"datasets": [WEB], "anneal_start_step": 100, "anneal_weights": {"web": 1}},
            "data: anneal_start_step must be below the 100 steps of train.max_steps, got 100; "
            "lower it, or leave it out",
        ),
        (
            {"datasets": [WEB], "anneal_start_step": 5, "anneal_weights": {"wbe": 1}},
            "data: anneal_weights must name datasets, got 'wbe'; did you mean 'web'?",
        ),
    ],
)
def test_the_table_of_data_is_checked(data, message):
    """[A1.a]"""
    assert refused(data) == f"kf.toml: {message}"


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"name": "x"}, "dataset 'x': must have either path or hf_name, got none; keep one"),
        ({"path": "/x", "hf_name": "x"}, "dataset '/x': must have either path or hf_name, got both; keep one"),
        ({"path": "/x", "weight": 0}, "dataset '/x': weight must be positive, got 0; leave it out of the list"),
        (
            {"path": "/x", "weight": float("inf")},
            "dataset '/x': weight must be positive, got inf; leave it out of the list",
        ),
        ({"path": "/x", "name": "web"}, "data.datasets[1]: names must differ, got 'web' twice; rename one"),
        ({"path": "/x", "wieght": 1}, "data.datasets[1]: unknown key: 'wieght'; did you mean 'weight'?"),
        (
            {"hf_name": "x"},
            "data.tokenizer_path: must be given to read the text of 'x', got nothing; "
            "add the folder of a tokenizer",
        ),
    ],
)
def test_each_dataset_is_checked(dataset, message):
    """[A1.a]"""
    assert refused({"datasets": [WEB, dataset]}) == f"kf.toml: {message}"


@pytest.mark.parametrize(
    ("phase", "message"),
    [
        ({"start_step": -1}, "phase: start_step must be at least 0, got -1; raise it"),
        ({"start_step": 5}, "data: phases must rise, got start_step 5 after 5; sort them"),
        (
            {"start_step": 100},
            "data.phases[1]: start_step must be below the 100 steps of train.max_steps, got 100; "
            "lower it, or leave it out",
        ),
        ({"start_step": 9, "lr_scale": 0}, "phase at step 9: lr_scale must be positive, got 0; leave it out for 1"),
        (
            {"start_step": 9, "dataset_weights": {"web": -1}},
            "phase at step 9: dataset_weights must be at least 0 and finite, got {'web': -1}; "
            "0 leaves a source out",
        ),
        (
            {"start_step": 9, "dataset_weights": {"wbe": 1}},
            "data.phases[1]: dataset_weights must name datasets, got 'wbe'; did you mean 'web'?",
        ),
        (
            {"start_step": 9, "dataset_weights": {"web": 0, "code": 0}},
            "data.phases[1]: dataset_weights must leave a source with a weight above 0, got {'web': 0, 'code': "
            "0}; raise one",
        ),
        (
            {"start_step": 9, "dataset_weights": [1]},
            "data.phases[1].dataset_weights: expected a table of numbers, got [1]; change its type",
        ),
        (
            {"start_step": 9, "weights": {}},
            "data.phases[1]: unknown key: 'weights'; did you mean 'dataset_weights'?",
        ),
    ],
)
def test_each_phase_is_checked(phase, message):
    """[A1.a]"""
    data = {"datasets": [WEB, CODE], "phases": [{"start_step": 5}, phase]}
    assert refused(data) == f"kf.toml: {message}"


@pytest.mark.parametrize("name", ["batch_size", "seq_len", "max_steps", "grad_accum_steps"])
def test_numbers_of_training_are_positive(name):
    message = refused({"dataset_path": "/web"}, train=TRAIN | {name: 0})
    assert message == f"kf.toml: train.{name}: expected a whole number from 1 to 2^40, got 0; change it"


def test_what_two_datasets_are_called_alike_names_neither():
    datasets = [{"hf_name": "org/x", "hf_config": "a"}, {"hf_name": "org/x", "hf_config": "b"}]
    phases = [{"start_step": 5, "dataset_weights": {"org/x": 1}}]
    message = refused({"datasets": datasets, "phases": phases, "tokenizer_path": "/tok"})
    assert message == "kf.toml: data.phases[0]: dataset_weights must name datasets, got 'org/x'; known: x, x-2"
