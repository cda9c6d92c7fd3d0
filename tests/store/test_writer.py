from __future__ import annotations

import filecmp
import os
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.errors import StoreBusyError, StoreError, StoreExistsError, StoreMissingError
from tokenmill.store import StoreSpec, StoreWriter, open_store, read_manifest, verify
from tokenmill.store.files import write_atomically

GOLDEN = Path(__file__).parent / "golden" / "v1"


def spec_of(size: int = 8, vocab_size: int = 300, dtype: str = "<u2") -> StoreSpec:
    return StoreSpec(
        keys={"sequence": dtype},
        tokenizer={"vocab_size": vocab_size},
        recipe={"name": "text"},
        max_tokens_per_shard=size,
    )


def write(path, lengths, *, cuts=(), size=8, dtype="<u2"):
    """Write documents of these lengths, one `append` between two cuts."""
    offsets = np.cumsum([0, *lengths])
    tokens = (np.arange(offsets[-1]) % 250).astype(dtype)
    with StoreWriter(path, spec_of(size, dtype=dtype)) as writer:
        for first, last in pairwise([0, *sorted(cuts), len(lengths)]):
            part = offsets[first : last + 1]
            writer.append({"sequence": tokens[part[0] : part[-1]]}, part - part[0])
        writer.commit()
    return tokens


def files_of(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def test_rewriting_the_golden_store_gives_the_same_bytes(tmp_path):
    old = open_store(GOLDEN)
    spec = StoreSpec(
        keys=old.manifest.keys,
        tokenizer=old.manifest.tokenizer,
        recipe=old.manifest.recipe,
        max_tokens_per_shard=8,
    )
    with StoreWriter(tmp_path / "v1", spec) as writer:
        for document in range(old.num_documents):
            ids = old.fetch_record(document, "sequence")
            writer.append({"sequence": ids}, np.array([0, ids.size]))
        writer.commit(inputs=old.manifest.inputs, skipped=old.manifest.skipped)
    shutil.rmtree(tmp_path / "v1" / ".hashes")  # which stores have had since
    assert files_of(tmp_path / "v1") == files_of(GOLDEN)


@given(
    lengths=st.lists(st.one_of(st.integers(0, 12), st.just(3000)), max_size=16),
    cuts=st.lists(st.integers(0, 16), max_size=6),
    size=st.sampled_from([1, 4, 8, 2500, 10**6]),
)
def test_the_files_do_not_depend_on_how_documents_are_grouped(tmp_path_factory, lengths, cuts, size):
    """[T2.c]"""
    folder = tmp_path_factory.mktemp("grouped")
    write(folder / "once", lengths, size=size)
    write(folder / "often", lengths, size=size, cuts=[min(cut, len(lengths)) for cut in cuts])
    assert files_of(folder / "often") == files_of(folder / "once")
    assert verify(folder / "often").documents == len(lengths)


@given(lengths=st.lists(st.integers(0, 12), max_size=16), size=st.integers(1, 15))
def test_a_shard_ends_before_the_document_that_would_take_it_over_its_size(tmp_path_factory, lengths, size):
    folder = tmp_path_factory.mktemp("sizes") / "web"
    write(folder, lengths, size=size)
    shards: list[list[int]] = []
    for length in lengths:
        if not shards or sum(shards[-1]) + length > size:
            shards.append([])
        shards[-1].append(length)
    assert [(shard.documents, shard.tokens) for shard in read_manifest(folder).shards] == [
        (len(shard), sum(shard)) for shard in shards
    ]


def test_a_document_larger_than_a_shard_has_one_to_itself(tmp_path):
    tokens = write(tmp_path / "web", [3, 30, 2, 2], size=4)
    store = open_store(tmp_path / "web")
    assert [shard.tokens for shard in store.manifest.shards] == [3, 30, 4]
    assert store.fetch_record(1, "sequence").tolist() == tokens[3:33].tolist()


def test_empty_documents_are_kept_in_their_places(tmp_path):
    write(tmp_path / "web", [0, 4, 0, 0, 4, 0], size=4)
    store = open_store(tmp_path / "web")
    assert [store.fetch_record(i, "sequence").size for i in range(6)] == [0, 4, 0, 0, 4, 0]
    assert verify(tmp_path / "web").documents == 6


def test_an_empty_store_is_a_store(tmp_path):
    write(tmp_path / "web", [])
    assert verify(tmp_path / "web").bytes == 0
    assert sorted(os.listdir(tmp_path / "web")) == ["manifest.json"]


def test_anchors_name_the_document_of_every_1024th_token(tmp_path):
    lengths = [1000, 0, 24, 0, 0, 2000, 1024, 1, 47]
    write(tmp_path / "web", lengths, size=10**6, cuts=[2, 3, 7])
    data = (tmp_path / "web" / "shard-00000" / "documents.bin").read_bytes()
    assert np.frombuffer(data[: 8 * 10], "<u8").tolist() == np.cumsum([0, *lengths]).tolist()
    assert np.frombuffer(data[8 * 10 :], "<u4").tolist() == [0, 5, 5, 6]


@pytest.mark.parametrize(("dtype", "bytes_per_token"), [("|u1", 1), ("<u2", 2), ("<u4", 4)])
def test_ids_are_flat_and_little_endian(tmp_path, dtype, bytes_per_token):
    tokens = write(tmp_path / "web", [5], dtype=dtype)
    data = (tmp_path / "web" / "shard-00000" / "sequence.bin").read_bytes()
    assert data == b"".join(int(token).to_bytes(bytes_per_token, "little") for token in tokens)


@pytest.mark.parametrize(("vocab_size", "ok"), [(300, False), (301, True)])
def test_an_id_outside_the_vocabulary_is_refused_at_write_time(tmp_path, vocab_size, ok):
    """[T2.a]"""
    writer = StoreWriter(tmp_path / "web", spec_of(vocab_size=vocab_size))
    ids = {"sequence": np.array([1, 300, 2], "<u2")}
    with writer:
        if ok:
            writer.append(ids, np.array([0, 3]))
            writer.commit()
        else:
            with pytest.raises(
                StoreError, match=r"web.*: token ids must be below the vocabulary size 300, got 300; use"
            ):
                writer.append(ids, np.array([0, 3]))
    assert (tmp_path / "web" / "manifest.json").exists() == ok


@given(documents=st.lists(st.lists(st.sampled_from([1, 7, 9]), max_size=4), max_size=6), add_bos=st.booleans())
def test_a_document_with_bos_twice_in_a_row_is_refused_and_no_other(tmp_path, documents, add_bos):
    """[T2.b] BOS, here 7, may end a document before one that starts with it, or stand alone in the midst."""
    tokenizer = {"vocab_size": 300, "bos_id": 7, "eos_id": 9, "add_bos": add_bos}
    spec = StoreSpec(keys={"sequence": "<u2"}, tokenizer=tokenizer, recipe={"name": "text"})
    offsets = np.cumsum([0, *map(len, documents)])
    ids = np.array([token for document in documents for token in document], "<u2")
    bad = [number for number, document in enumerate(documents) if (7, 7) in pairwise(document)]
    with StoreWriter(tmp_path / "web", spec, rebuild=True) as writer:
        if bad and add_bos:
            with pytest.raises(StoreError, match=rf"BOS twice in a row, got that in document {bad[0]} of"):
                writer.append({"sequence": ids}, offsets)
        else:
            writer.append({"sequence": ids}, offsets)


@pytest.mark.parametrize("dtype", ["<i8", "<u4", ">u2", "|u1", "<f4"])
def test_ids_of_another_dtype_are_refused_and_never_cast(tmp_path, dtype):
    """[T2.a]"""
    with (
        StoreWriter(tmp_path / "web", spec_of()) as writer,
        pytest.raises(StoreError, match=r"key 'sequence': ids must be <u2, got .*; cast them first"),
    ):
        writer.append({"sequence": np.array([1], dtype)}, np.array([0, 1]))


@pytest.mark.parametrize("dtype", ["<u8", "<i2", "O", "", "uint16"])
def test_a_spec_refuses_a_dtype_that_is_not_ours(dtype):
    with pytest.raises(StoreError, match=r"store keys: dtypes must be among .*, got .*; cast the ids first"):
        spec_of(dtype=dtype)


def test_a_spec_refuses_no_key_and_no_room():
    with pytest.raises(StoreError, match=r"store keys: .*got no key"):
        StoreSpec(keys={}, tokenizer={"vocab_size": 1}, recipe={})
    with pytest.raises(StoreError, match=r"max_tokens_per_shard: must be at least 1, got 0; leave it out"):
        spec_of(size=0)


@pytest.mark.parametrize("key", ["../x", "a/b", "", ".x", "documents", "a b"])
def test_a_spec_refuses_a_key_that_is_no_plain_name(key):
    """[S.d]"""
    with pytest.raises(StoreError, match=r"store keys: .*must be plain names"):
        StoreSpec(keys={key: "<u2"}, tokenizer={"vocab_size": 1}, recipe={})


def test_a_finished_store_is_replaced_only_when_asked(tmp_path):
    write(tmp_path / "web", [3, 9, 9], size=4)
    before = files_of(tmp_path / "web")
    with pytest.raises(StoreExistsError, match=r"web: must not hold a finished store, got one; .*rebuild=True"):
        StoreWriter(tmp_path / "web", spec_of())
    assert files_of(tmp_path / "web") == before
    with StoreWriter(tmp_path / "web", spec_of(), rebuild=True) as writer:
        writer.append({"sequence": np.array([9], "<u2")}, np.array([0, 1]))
        writer.commit()
    assert open_store(tmp_path / "web").fetch(0, 1, "sequence").tolist() == [9]
    assert sorted(files_of(tmp_path / "web")) == [
        ".hashes/00000.bin",
        ".sums/shard-00000.bin",
        "manifest.json",
        "shard-00000/documents.bin",
        "shard-00000/sequence.bin",
    ]


def test_a_rebuild_that_fails_leaves_the_old_store_as_it_was(tmp_path):
    """[C1.a]"""
    write(tmp_path / "web", [3])
    before = files_of(tmp_path / "web")

    def fail(at):
        with StoreWriter(tmp_path / "web", spec_of(), rebuild=True) as writer:
            writer.append({"sequence": np.array([9], "<u2")}, np.array([0, 1]))
            assert verify(tmp_path / "web").tokens == 3
            if at == "append":
                raise RuntimeError(at)
            writer.commit(check=lambda store: [].index(store.num_documents))

    for at, error in (("append", RuntimeError), ("check", ValueError)):
        with pytest.raises(error):
            fail(at)
        assert files_of(tmp_path / "web") == before


def test_a_writer_that_fails_leaves_no_store_and_no_temporary_file(tmp_path):
    """[C1.a]"""

    def fail():
        with StoreWriter(tmp_path / "web", spec_of(4)) as writer:
            writer.append({"sequence": np.zeros(6, "<u2")}, np.array([0, 4, 6]))
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        fail()
    with pytest.raises(
        StoreMissingError, match=r"\(the folder is empty\); run `tokenmill prepare`, or fix the path"
    ):
        open_store(tmp_path / "web")
    with pytest.raises(StoreMissingError):
        verify(tmp_path / "web")
    assert os.listdir(tmp_path / "web") == []


@pytest.mark.parametrize("documents", [0, 1, 3])
def test_a_killed_writer_leaves_no_store_and_the_next_one_finishes_the_same(tmp_path, documents):
    """[C1.a, C1.d]"""
    program = f"""
import os, signal, sys
import numpy as np
from tokenmill.store import StoreSpec, StoreWriter
spec = StoreSpec(keys={{"sequence": "<u2"}}, tokenizer={{"vocab_size": 300}}, recipe={{"name": "text"}},
                 max_tokens_per_shard=4)
writer = StoreWriter(sys.argv[1], spec)
for i in range({documents}):
    writer.append({{"sequence": np.full(3, i, "<u2")}}, np.array([0, 3]))
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "web")], check=False)
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(StoreMissingError, match=r"run it again"):
        open_store(tmp_path / "web")
    write(tmp_path / "web", [3, 5, 2], size=4)
    write(tmp_path / "fresh", [3, 5, 2], size=4)
    assert files_of(tmp_path / "web") == files_of(tmp_path / "fresh")
    assert verify(tmp_path / "web").shards == 3


KILLED_BUILDS = """
import os, shutil, signal, sys
from pathlib import Path
import numpy as np
from tokenmill.errors import StoreMissingError
from tokenmill.store import StoreSpec, StoreWriter, verify

folder = Path(sys.argv[1])
spec = StoreSpec(keys={"sequence": "<u2"}, tokenizer={"vocab_size": 300}, recipe={}, max_tokens_per_shard=4)
events = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")

def build(path):
    with StoreWriter(path, spec, rebuild=True) as writer:
        for i in range(3):
            writer.append({"sequence": np.full(3 + i, i, "<u2")}, np.array([0, 3 + i]))
        writer.commit()

def files(path):
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}

def build_until(left, path):
    def hook(event, arguments):
        nonlocal left
        if event in events and str(folder) in str(arguments[0]):
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
    sys.addaudithook(hook)
    build(path)

build(folder / "whole")
for old in (False, True):
    for point in range(1000):
        path = folder / f"{old}-{point}"
        if old:
            shutil.copytree(folder / "whole", path)
        child = os.fork()
        if child == 0:
            build_until(point, path)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        try:
            verify(path)
            state = "whole"
        except StoreMissingError:
            state = "none"
        build(path)
        assert files(path) == files(folder / "whole"), point
        print(old, state, "done" if status == 0 else "killed")
        if status == 0:
            break
"""


@pytest.mark.slow
def test_a_build_killed_before_any_change_of_a_folder_leaves_no_store_or_a_whole_one(tmp_path):
    """[C1.a, C1.d]"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLED_BUILDS, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    fresh = [line for line in lines if line.startswith("False")]
    replaced = [line for line in lines if line.startswith("True")]
    assert len(fresh) > 15
    # Without an old store: none until the manifest has its name; after that only tidying up can be cut short.
    kinds = [line.split()[1] for line in fresh]
    assert kinds == ["none"] * kinds.count("none") + ["whole"] * kinds.count("whole")
    assert kinds.count("whole") >= 1
    # With an old one: the old, then none, then the new one; never a mixture.
    kinds = [line.split()[1] for line in replaced]
    first, last = kinds.index("none"), len(kinds) - kinds[::-1].index("none")
    assert kinds == ["whole"] * first + ["none"] * (last - first) + ["whole"] * (len(kinds) - last)


def test_a_build_touches_nothing_in_the_folder_that_is_not_its_own(tmp_path):
    """[C1.d]"""
    strangers = [
        "shard-00000.jsonl",
        "shard-notes/a.txt",
        "shards.txt",
        "data/shard-00000/sequence.bin",
    ]
    for name in strangers:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    with pytest.raises(StoreExistsError, match="must be a folder of its own for the store, got 'data' in it"):
        write(tmp_path, [3])
    assert [(tmp_path / name).read_text() for name in strangers] == strangers
    assert sorted(child.name for child in tmp_path.iterdir()) == sorted({name.split("/")[0] for name in strangers})


def test_a_folder_with_the_name_of_a_shard_but_other_content_is_not_deleted(tmp_path):
    """[C1.d]"""
    (tmp_path / "shard-00000").mkdir()
    (tmp_path / "shard-00000" / "thesis.txt").write_text("years of work")
    with pytest.raises(StoreError, match=r"shard-00000: unknown file .*: thesis\.txt; choose another path"):
        StoreWriter(tmp_path, spec_of())
    assert (tmp_path / "shard-00000" / "thesis.txt").read_text() == "years of work"


def test_a_leftover_link_is_removed_and_what_it_points_to_is_not(tmp_path):
    """[S.d]"""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "sequence.bin").write_text("kept")
    (tmp_path / "web").mkdir()
    (tmp_path / "web" / "shard-00000").symlink_to(tmp_path / "outside")
    write(tmp_path / "web", [3])
    assert (tmp_path / "outside" / "sequence.bin").read_text() == "kept"
    assert verify(tmp_path / "web").tokens == 3


def test_write_atomically_replaces_the_whole_file(tmp_path):
    file = tmp_path / "state.json"
    for data in (b"a longer text", b"short", b""):
        write_atomically(file, data)
        assert file.read_bytes() == data
    assert os.listdir(tmp_path) == ["state.json"]


def test_two_machines_write_the_same_bytes(tmp_path):
    """[T2.c]"""
    program = """
import sys
import numpy as np
from tokenmill.store import StoreSpec, StoreWriter
spec = StoreSpec(keys={"sequence": "<u2"}, tokenizer={"vocab_size": 9, "b": 1, "a": {"y": 1, "x": 2}}, recipe={})
with StoreWriter(sys.argv[1], spec) as writer:
    writer.append({"sequence": np.arange(9, dtype="<u2")}, np.array([0, 4, 9]))
    writer.commit(inputs=[{"name": "a"}], skipped={"counts": {"z": 1, "a": 2}})
"""
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", program, str(tmp_path / seed)], check=True, env=environment)
    assert files_of(tmp_path / "1") == files_of(tmp_path / "2")
    assert filecmp.cmp(tmp_path / "1" / "manifest.json", tmp_path / "2" / "manifest.json", shallow=False)


def test_a_second_build_on_the_same_folder_is_refused(tmp_path):
    """[C1.c] The first one goes on undisturbed; after it the way is free."""
    with StoreWriter(tmp_path / "store", spec_of()) as writer:
        with pytest.raises(StoreBusyError, match="another build writes to it"):
            StoreWriter(tmp_path / "store", spec_of(), rebuild=True)
        writer.commit()
    with StoreWriter(tmp_path / "store", spec_of(), rebuild=True) as writer:
        writer.commit()
    StoreWriter(tmp_path / "other", spec_of())
    with StoreWriter(tmp_path / "other", spec_of()) as writer:
        writer.commit()
