from __future__ import annotations

import json
import subprocess
import sys

import pytest
from tests.encode.chat.stock import STOCK, stock_source

from tokenmill.encode.chat.template import CHATML, load_template
from tokenmill.errors import ConfigError


@pytest.fixture
def folder(small_folder, tmp_path):
    """Return a folder with a tokenizer and no template."""
    (tmp_path / "tokenizer.json").write_bytes((small_folder / "tokenizer.json").read_bytes())
    return tmp_path


def write(folder, name: str, value: object) -> None:
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")


def test_every_stock_template_compiles():
    for name, path in STOCK.items():
        template = load_template(str(path), tokenizer=None)
        assert (template.source, template.where) == (stock_source(name), repr(str(path)))


def test_the_built_in_template_is_known_by_name():
    template = load_template("chatml", tokenizer="bytes")
    assert template.source == CHATML
    assert dict(template.special_tokens) == {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}


def test_the_template_of_a_folder_is_found_where_other_libraries_edges_of_sample(folder):
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    write(
        folder,
        "tokenizer_config.json",
        {"chat_template": named, "bos_token": "<s>", "eos_token": {"content": "</s>"}},
    )
    for spec in (str(folder), str(folder / "tokenizer.json")):
        template = load_template("tokenizer", tokenizer=spec)
        assert template.source == "one"
        assert dict(template.special_tokens) == {"bos_token": "<s>", "eos_token": "</s>"}
    assert load_template("tokenizer:tool_use", tokenizer=str(folder)).source == "two"
    write(folder, "tokenizer_config.json", {"chat_template": "plain", "bos_token": None, "unk_token": "<u>"})
    template = load_template("tokenizer", tokenizer=str(folder))
    assert template.source == "plain"
    assert dict(template.special_tokens) == {"eos_token": "</s>", "unk_token": "<u>"}, "a null BOS is none"
    write(folder, "chat_template.json", {"chat_template": "three"})
    assert load_template("tokenizer", tokenizer=str(folder)).source == "three"
    write(folder, "chat_template.jinja", "four\n")
    assert load_template("tokenizer", tokenizer=str(folder)).source == "four\n"


@pytest.mark.parametrize("entry", [3, {"name": "default"}, {"name": ["x"], "template": "x"}, {"template": 1}])
def test_a_list_of_templates_that_is_none_is_refused(folder, entry):
    write(folder, "tokenizer_config.json", {"chat_template": [entry]})
    with pytest.raises(ConfigError, match=r"chat_template must be a text, or a list of objects .*chatml"):
        load_template("tokenizer", tokenizer=str(folder))


def test_what_is_not_there_is_named_with_the_way_out(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"got no such file; did you mean 'chatml'\?"):
        load_template("chatlm", tokenizer=None)
    for tokenizer, place in (("bytes", "for 'bytes'"), (str(folder), f"in {folder}")):
        with pytest.raises(ConfigError) as caught:
            load_template("tokenizer", tokenizer=tokenizer)
        assert str(caught.value) == (
            f"chat template 'tokenizer': the tokenizer must have one, got none {place}; "
            "set chat_template=...: chatml, or the path of a .jinja file"
        )
    write(folder, "tokenizer_config.json", {"chat_template": [{"name": "rag", "template": "x"}]})
    with pytest.raises(ConfigError, match=r"a template named 'default', got \['rag'\]; write tokenizer:<name>"):
        load_template("tokenizer", tokenizer=str(folder))
    write(folder, "tokenizer_config.json", "{")
    with pytest.raises(ConfigError, match="expected JSON"):
        load_template("tokenizer", tokenizer=str(folder))
    (tmp_path / "a.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="must be UTF-8"):
        load_template(str(tmp_path / "a.jinja"), tokenizer=None)
    write(tmp_path, "b.jinja", "{% if %}")
    with pytest.raises(ConfigError, match=r"b.jinja.*must compile, got .* at line 1; correct"):
        load_template(str(tmp_path / "b.jinja"), tokenizer=None)


def test_the_fingerprint_holds_what_decides_the_text(tmp_path):
    """[T2.c]"""
    write(tmp_path, "a.jinja", CHATML)
    one, other = load_template("chatml", tokenizer=None), load_template(str(tmp_path / "a.jinja"), tokenizer=None)
    assert one.to_json() == other.to_json(), "the same template by another name is the same"
    assert len(one.to_json()["content"]) == 32
    assert load_template("chatml", tokenizer="bytes").to_json() != one.to_json()
    write(tmp_path, "a.jinja", CHATML + " ")
    assert load_template(str(tmp_path / "a.jinja"), tokenizer=None).to_json() != one.to_json()


def test_the_fingerprint_is_the_same_in_every_process():
    """[T2.c]"""
    program = (
        "from tokenmill.encode.chat.template import load_template\n"
        "print(load_template('chatml', tokenizer='bytes').to_json())"
    )
    shown = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert shown == {f"{load_template('chatml', tokenizer='bytes').to_json()}\n"}


def test_jinja_is_loaded_with_the_first_recipe_that_has_a_template():
    program = (
        "import sys\n"
        "from tokenmill.encode.engines import open_tokenizer\n"
        "from tokenmill.encode.recipe import load_recipe, open_encoder\n"
        "recipe = load_recipe({'preset': 'chat', 'chat_template': 'chatml'})\n"
        "print('jinja2' in sys.modules)\n"
        "open_encoder(recipe, open_tokenizer('bytes'), tokenizer_spec='bytes')\n"
        "print('jinja2' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\nTrue\n"
