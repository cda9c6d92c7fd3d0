"""Job of a build: its options, recipe and tokenizer, and a function of the user.

A job contains all that a worker needs in addition to the input and the output folder, also the files of the
tokenizer and the chat template. So any machine that sees input and output can do its tasks. A function of the user
is never pickled: job and manifest have its name and a hash of its source, and a worker imports it by its module.
"""

from __future__ import annotations

import atexit
import importlib
import inspect
import os
import shutil
import socket
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import xxhash

from tokenmill import __version__
from tokenmill.build.journal import Journal
from tokenmill.build.options import PrepareOptions as PrepareOptions  # noqa: PLC0414 - others have it from here
from tokenmill.build.progress import Show
from tokenmill.documents import InputFile, ReadOptions, find_files, sample_texts
from tokenmill.encode.engines import framing_of, open_tokenizer, trusted
from tokenmill.encode.files import copy_of, spec_of_copy
from tokenmill.encode.hub import is_hub_name, parse, pinned
from tokenmill.encode.recipe import PRESETS, Recipe, RecordEncoder, load_recipe, open_encoder, record_keys
from tokenmill.encode.recipe.recipe import SYSTEM_PROMPT, Preprocessing, check_recipe
from tokenmill.encode.tokenizer import Framing, Tokenizer, token_dtype, with_policy
from tokenmill.errors import (
    ConfigError,
    DocumentError,
    TokenizerError,
    warn,
)
from tokenmill.fields import top_fields
from tokenmill.store import StoreSpec
from tokenmill.store.writer import MAX_TOKENS_PER_SHARD
from tokenmill.tables import as_json, path_of, read_table

if TYPE_CHECKING:
    from tokenmill.build.records import Paths
    from tokenmill.encode.chat.template import ChatTemplate

Record: TypeAlias = Mapping[str, Any]
MapRecord: TypeAlias = Callable[[dict[str, Any]], "Record | Sequence[Record] | bool | None"]
"""Function of the user that is called with every record. It returns the record to encode, or a list of records.
True keeps the record as it is. None, False and an empty list leave it out."""
TEXT_KEY = "sequence"
"""Array of a build whose records are only a text."""
RecipeSpec: TypeAlias = "str | os.PathLike[str] | Mapping[str, object]"


def settle_recipe(spec: RecipeSpec, options: PrepareOptions) -> Recipe:
    """Return the recipe that a spec names, with the options that are set over it."""
    if not isinstance(options, PrepareOptions):
        raise ConfigError(f"options: must be PrepareOptions, got {options!r}; write tm.PrepareOptions(name=value)")
    if not isinstance(spec, Mapping):
        spec = path_of("recipe", spec)
    if options.text_field is not None:
        if spec != "text":
            raise ConfigError(
                f"text_field: must be given with the recipe 'text' only, got {spec!r}; name fields in the recipe"
            )
        section = {"field": options.text_field, "action": "train"}
        spec = {"name": "text", "input": {"sections": [section]}}
    if options.chat_template is not None and isinstance(spec, str) and spec in PRESETS:
        spec = {"preset": spec, "chat_template": options.chat_template}
    recipe = load_recipe(spec)
    if options.chat_template is not None:
        recipe = replace(recipe, chat_template=options.chat_template)
    table = as_json(recipe)
    set_options = {name: value for name, value in as_json(options).items() if value is not None}
    if options.mask is not None:
        set_options["mask"] = dict(sorted({**recipe.mask, **options.mask}.items()))
    for part in (table, table["preprocessing"], table["output"]):
        part |= {name: set_options[name] for name in part if name in set_options}
    if table != as_json(recipe):
        # Options that are named like keys of a recipe are checked like them.
        recipe = read_table(Recipe, table, "recipe:")
        check_recipe(recipe, "recipe")
    return recipe


# A function of the user over records.


@dataclass(frozen=True, kw_only=True, slots=True)
class MapIdentity:
    """Identity of a function of the user."""

    module: str
    name: str
    source: str
    """Hash of its source text."""


def identify(function: MapRecord) -> MapIdentity:
    """Return which function it is; refuse one whose source does not say all that it does."""
    name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", None) or ""
    if not inspect.isfunction(function):
        raise ConfigError(f"map: must be a function of a record, got {function!r}; write it with def")
    if function.__closure__:
        raise ConfigError(
            f"map: must depend on nothing but the record, so that its source says what it does, got {name} with "
            f"{', '.join(function.__code__.co_freevars)} from around it; write them into it"
        )
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        raise ConfigError(
            f"map: must be written in a file, so that its source can be hashed, got {name} without one; do so"
        ) from None
    return MapIdentity(module=module, name=name, source=xxhash.xxh3_128_hexdigest(source.encode()))


def is_importable(identity: MapIdentity) -> bool:
    """Return whether another process can import the function, which it cannot from the main script."""
    return identity.module != "__main__" and "<" not in identity.name and "." not in identity.name


def load_map(identity: MapIdentity) -> MapRecord:
    """Import a function by its module and name; refuse it if its source is not that of the build."""
    try:
        module = sys.modules.get(identity.module) or importlib.import_module(identity.module)
        function: MapRecord = getattr(module, identity.name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"map: workers cannot import {identity.module}.{identity.name}: {error}; put its folder on PYTHONPATH, "
            "or use workers=1"
        ) from error
    if identify(function) != identity:
        raise ConfigError(
            f"map: {identity.module}.{identity.name} its source has changed since the build began; let "
            "no other process write to it, and run again"
        )
    return function


def find_function(name: str) -> MapRecord:
    """Import the function that `module:function` names, also from the current folder.

    The folder is the last place to look, so that no file in it hides an installed module.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute.isidentifier()):
        raise ConfigError(f"filter: expected module:function, got {name!r}; for example quality:is_good")
    search_current_folder()
    try:
        function: MapRecord = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the module of a user may raise any exception
        raise ConfigError(
            f"filter: cannot import {name!r}: {error}; fix the name, or put its folder on PYTHONPATH"
        ) from error
    return function


def search_current_folder() -> None:
    """Add the current folder to the places where modules are looked for, after all others."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


# The job.


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Arguments of all tasks of a build, as plain values."""

    folder: str
    """Folder of the units."""
    tokenizer: str
    """Name of the tokenizer."""
    files: Mapping[str, bytes]
    """The files of the tokenizer, by name; none for `bytes`."""
    identity: Mapping[str, Any]
    """The identity of the tokenizer that the parent opened."""
    engine: str
    """The engine that the parent chose, as `open_tokenizer` takes it."""
    recipe: Recipe
    template: Mapping[str, Any] | str | None = None
    """Fields of the `ChatTemplate` that the parent read, or why it read none though some records may need one."""
    options: PrepareOptions
    map: MapIdentity | None = None
    """The function of the user that records go through first, if there is one."""
    version: str = __version__
    """Version of tokenmill that made the job; only this version does its tasks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenJob:
    """A job with its tokenizer and recipe open, for all units that a process does."""

    folder: Path
    """Folder of the units."""
    stop: bool
    """True if a bad record stops the build."""
    keep_empty: bool
    """True if a text without a character is a document."""
    tokenizer: Tokenizer
    encoder: RecordEncoder | None
    """None if records are only a text."""
    chosen: Preprocessing
    """Filters and splits."""
    keep: tuple[str, ...]
    """Fields of a record that are kept with its document."""
    reading: ReadOptions
    spec: StoreSpec
    map: MapRecord | None
    """Function of the user that every record passes first."""
    key_fields: tuple[str, ...]
    """Fields by which records are compared, without the domain; empty if records are only a text."""


def open_job(job: Job) -> OpenJob:
    """Open a job in a process that did not make it."""
    if job.version != __version__:
        raise ConfigError(
            f"{socket.gethostname()}: workers must have the tokenmill of the build, {job.version}, got "
            f"{__version__}; install that one there"
        )
    spec: str | None = job.tokenizer
    if job.files:
        # It stays as long as the process: the reference of a fast engine is opened by the first text that needs it.
        folder = Path(mkdtemp(prefix="tokenmill-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        for name, data in job.files.items():
            (folder / name).write_bytes(data)
        spec = spec_of_copy(folder)
    assert spec is not None, sorted(job.files)
    tokenizer = open_tokenizer(spec, **job.options.framing(), engine=job.engine)
    if tokenizer.identity.to_json() != job.identity:
        raise TokenizerError(
            f"tokenizer {job.tokenizer!r}: must stay the same during a build, "
            f"got content {tokenizer.identity.content} after {job.identity['content']}; "
            "let nothing write to it, run again"
        )
    return _open_with(job, tokenizer, None if job.map is None else load_map(job.map))


def _open_with(job: Job, tokenizer: Tokenizer, map: MapRecord | None) -> OpenJob:
    """Open a job with its tokenizer and its function."""
    recipe, encoder = job.recipe, None
    tokenizer = with_policy(tokenizer, recipe.control_strings)
    if recipe.fim is not None:
        tokenizer = recipe.fim.wrap(tokenizer)
    identity, output = tokenizer.identity, recipe.output
    # The recipe reads one text field, and nobody asks for another one: not `keep`, and no function either.
    text_only = recipe.text_field is not None and not job.options.keep and map is None
    # Ids of `encode` contain no special tokens, so BOS is only where it is placed; templates may place two.
    bare = text_only and recipe.control_strings != "encode"
    bos_is_control = identity.bos_id in tokenizer.special_ids.values()
    if not text_only:
        template: ChatTemplate | str | None = None if isinstance(job.template, Mapping) else job.template
        if isinstance(job.template, Mapping):
            from tokenmill.encode.chat.template import ChatTemplate  # late: jinja2 takes time to load

            template = msgspec.convert(job.template, ChatTemplate)
        encoder = open_encoder(
            recipe, tokenizer, tokenizer_spec=job.tokenizer, add_bos=job.options.add_bos, template=template
        )
    return OpenJob(
        folder=Path(job.folder),
        stop=job.options.on_error == "stop",
        keep_empty=job.options.keep_empty or recipe.kind != "seq",  # of others, the recipe refuses what is empty
        tokenizer=tokenizer,
        encoder=encoder,
        chosen=recipe.preprocessing,
        keep=job.options.keep,
        reading=ReadOptions(
            text_field=recipe.text_field if text_only else None,
            # A function may read any field.
            fields=None if text_only or map is not None else _fields_of(recipe, job.options),
            text_unit=job.options.text_unit,
            max_record_bytes=job.options.max_record_bytes,
            max_expansion=job.options.max_expansion,
            delimiter=job.options.delimiter,
            skip_broken=job.options.on_error == "skip",
        ),
        spec=StoreSpec(
            keys={TEXT_KEY: token_dtype(identity.vocab_size).str}
            if text_only
            else record_keys(recipe, identity.vocab_size),
            tokenizer=job.identity,
            recipe={},
            kind=recipe.kind,
            max_tokens_per_shard=output.max_tokens_per_shard or MAX_TOKENS_PER_SHARD,
            storage=output.storage_format,
            ids_checked=bare and (bos_is_control or not identity.add_bos),
        ),
        map=map,
        key_fields=()
        if recipe.text_field is not None
        else replace(recipe, preprocessing=replace(recipe.preprocessing, domain_key=None)).fields,
    )


def _fields_of(recipe: Recipe, options: PrepareOptions) -> tuple[str, ...]:
    """Return the top-level fields that a build reads of records; a function of the user may read any."""
    noted = [SYSTEM_PROMPT] if recipe.template else []
    return tuple(dict.fromkeys([*recipe.fields, *top_fields(options.keep), *noted]))


# From what was asked for to an open job.

_IDENTITY_OPTIONS = ("format", "text_unit", "max_record_bytes")
"""Options that change the content of a store, in addition to the recipe; others do only if they are set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """Arguments of a build, with its job open."""

    journal: Journal
    files: Sequence[InputFile]
    job: Job
    opened: OpenJob
    warning: str | None
    """Reason why the fast engine of the tokenizer is not used; None if it is."""
    framing: str
    """Strings of BOS and EOS, and the file that specifies them."""


def open_setting(
    inputs: Paths | InputFile,
    *,
    out: str | os.PathLike[str],
    tokenizer: str | os.PathLike[str],
    recipe: RecipeSpec,
    map: MapRecord | None,
    options: PrepareOptions,
    show: Show,
    rebuild: bool,
) -> Setting:
    """List the files and open the tokenizer, as `prepare` was asked to."""
    settled = settle_recipe(recipe, options)
    options = _with_framing(options, settled)
    journal = Journal(Path(path_of("out", out)).expanduser())
    files = _input_files(inputs, journal.out, options)
    tokenizer = path_of("tokenizer", tokenizer)
    with show("open the tokenizer", 0, lambda: (0, 0, 0)):
        if is_hub_name(tokenizer):
            tokenizer = _pinned(tokenizer, None if rebuild else journal.hub_tokenizer())
        job, opened, warning = _new_job(journal, tokenizer, settled, options, files, map)
        framing = _settle_framing(tokenizer, settled, options, opened)
    return Setting(journal=journal, files=files, job=job, opened=opened, warning=warning, framing=framing)


def _pinned(tokenizer: str, known: str | None) -> str:
    """Return a hub name with its commit. A store that has one keeps it, unless the user names a revision."""
    if known is None or parse(known)[0] != parse(tokenizer)[0]:
        return pinned(tokenizer)
    if parse(tokenizer)[1] is None:
        return pinned(known)
    now = pinned(tokenizer)
    if now != known:
        warn(
            f"tokenizer {tokenizer!r} is now the commit {parse(now)[1]}; the store was begun with "
            f"{parse(known)[1]}. Leave the revision out to continue with that commit"
        )
    return now


def field_of_strings(recipe: Recipe) -> str | None:
    """Return the field that holds the text, if a record is one plain text; None for conversations and the like."""
    section, *more = recipe.sections
    if recipe.kind != "seq" or more or section.template:
        return None
    return recipe.names.fields.get(section.field, section.field)


def record_setting(tokenizer: str | os.PathLike[str], recipe: RecipeSpec, options: PrepareOptions) -> Recipe:
    """Return the recipe of records in memory; raise on what is wrong, before the first record is read."""
    settled = settle_recipe(recipe, options)
    if options.format is not None:
        raise ConfigError(f"format: {options.format!r} is for files, and the inputs are in memory; remove it")
    if (spec := path_of("tokenizer", tokenizer)) != "bytes":
        copy_of(spec)
    return settled


def _with_framing(options: PrepareOptions, recipe: Recipe) -> PrepareOptions:
    """Return options that have BOS and EOS of the recipe where they do not specify them."""
    framing = {name: getattr(recipe.framing, name) for name, value in options.framing().items() if value is None}
    return replace(options, **framing)


def _input_files(inputs: Paths | InputFile, out: Path, options: PrepareOptions) -> Sequence[InputFile]:
    """List the files to read; those of the store itself, which may lie among them, are not."""
    if isinstance(inputs, InputFile):
        return (inputs,)
    listed = find_files(inputs, format=options.format)
    for path in (str(out.absolute()), *(file.path for file in listed.files)):
        if not path.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in path):
            raise DocumentError(f"{path!r}: a path must be UTF-8; rename it")
    store = os.path.realpath(out)
    real_folder = cache(os.path.realpath)  # of few folders there may be millions of files

    def is_outside(path: str) -> bool:
        return not os.path.join(real_folder(os.path.dirname(path)), "").startswith(os.path.join(store, ""))

    outside = [file.path for file in listed.files if is_outside(file.path)]
    if not outside:
        raise DocumentError(f"inputs: must not all lie in the store, got {store}; choose another path for it")
    passed_over = list(filter(is_outside, listed.passed_over))
    if passed_over:
        warn(
            f"{len(passed_over)} files in the given folders are not read, as they are of no known kind: "
            f"{', '.join(passed_over[:3])}{', ...' if len(passed_over) > 3 else ''}"
        )
    if len(outside) == len(listed.files):
        return listed.files
    # Once more without them, as names and order are relative to the folder that all files share.
    return find_files(outside, format=options.format).files


def _new_job(
    journal: Journal,
    tokenizer: str,
    recipe: Recipe,
    options: PrepareOptions,
    files: Sequence[InputFile],
    map: MapRecord | None,
) -> tuple[Job, OpenJob, str | None]:
    """Make the job and open it; return also why the fast engine is not used, if it is not."""
    opened_tokenizer, warning = _open_tokenizer(tokenizer, recipe, options, files)
    job = Job(
        folder=str(journal.units.absolute()),
        tokenizer=tokenizer,
        files={} if tokenizer == "bytes" else copy_of(tokenizer),
        identity=opened_tokenizer.identity.to_json(),
        engine=opened_tokenizer.engine.split()[0],
        recipe=recipe,
        options=options,
        map=None if map is None else identify(map),
    )
    opened = _open_with(job, opened_tokenizer, map)
    if opened.encoder is not None:
        for text in opened.encoder.describe().warnings:
            warn(text)
        chat = opened.encoder.chat
        job = replace(job, template=opened.encoder.no_template if chat is None else chat.template.fields())
    return job, opened, warning


def _open_tokenizer(
    spec: str, recipe: Recipe, options: PrepareOptions, files: Sequence[InputFile]
) -> tuple[Tokenizer, str | None]:
    """Return the tokenizer, and why its fast engine is not used, if it is not."""
    if options.engine != "auto":
        return open_tokenizer(spec, engine=options.engine, **options.framing()), None
    skip_broken = options.on_error == "skip"
    sample = sample_texts(files, recipe.text_field, delimiter=options.delimiter, skip_broken=skip_broken)
    tokenizer, warning = trusted(spec, sample, Framing(**options.framing()))
    if warning:
        warn(warning)
    return tokenizer, warning


def _settle_framing(spec: str, recipe: Recipe, options: PrepareOptions, opened: OpenJob) -> str:
    """Return which strings are BOS and EOS, in words; warn if plain text would end as turns of a chat do."""
    framing = framing_of(spec, Framing(**options.framing()))
    if framing.turn_end is not None and recipe.kind == "seq":
        other = f", such as {framing.end_of_text!r}" if framing.end_of_text else ""
        warn(
            f"every document of plain text will end with {framing.turn_end!r}, which ends a turn of a chat "
            f"({framing.line}); name the end of a text with eos_token=...{other}, or this one if it is meant"
        )
    lacks_bos = opened.encoder is not None and opened.encoder.lacks_bos
    return framing.line + ("; no BOS before conversations, as the chat template writes none" if lacks_bos else "")


def asked_for(
    inputs: Paths,
    tokenizer: str | os.PathLike[str],
    recipe: RecipeSpec,
    options: PrepareOptions,
    map: MapRecord | None = None,
) -> dict[str, Any]:
    """Return the arguments of a build as JSON, to compare them with those of a part."""
    items = [inputs] if isinstance(inputs, str | os.PathLike) else list(inputs)
    return {
        "inputs": [path_of("inputs", item) for item in items],
        "tokenizer": path_of("tokenizer", tokenizer),
        "recipe": dict(recipe) if isinstance(recipe, Mapping) else path_of("recipe", recipe),
        "options": as_json(options),
        **({} if map is None else {"map": as_json(identify(map))}),
    }


def build_identity(job: Job, opened: OpenJob) -> dict[str, Any]:
    """Return what two builds must have in common to be one."""
    return {
        "tokenizer": opened.tokenizer.identity.to_json(),
        "recipe": opened.encoder.to_json() if opened.encoder else job.recipe.to_json(),
        "options": {name: getattr(job.options, name) for name in _IDENTITY_OPTIONS}
        | ({} if job.options.keep_empty else {"keep_empty": False})
        | ({} if job.options.delimiter is None else {"delimiter": job.options.delimiter})
        | ({"keep": list(job.options.keep)} if job.options.keep else {})
        | ({"map": {"name": job.map.name, "source": job.map.source}} if job.map else {}),
    }
