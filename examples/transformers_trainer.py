"""Train a small Llama with the Hugging Face Trainer; run it again, on any number of ranks, and it resumes.

python examples/transformers_trainer.py [FOLDER]
torchrun --standalone --nproc-per-node 2 examples/transformers_trainer.py FOLDER
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import transformers
from transformers.trainer_utils import get_last_checkpoint

import tokenmill as tm
from tokenmill.adapters.transformers import LoaderTrainer
from tokenmill.demo import CORPUS_DIR, TOKENIZER_DIR

RUN = f"""
[run]
steps = 10
global_batch_size = 8
seq_len = 64

[[sources]]
name = "prose"
documents = ["{CORPUS_DIR}/prose.jsonl"]
tokenizer = "{TOKENIZER_DIR}"
"""


def main(folder: Path) -> None:
    """Train, or resume, in a folder."""
    file = folder / "run.toml"
    file.write_text(RUN, encoding="utf-8")
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=4096, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
        )
    )
    args = transformers.TrainingArguments(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        logging_steps=2,
        save_steps=5,
        report_to="none",
        use_cpu=True,
    )
    trainer = LoaderTrainer(model=model, args=args, train_dataset=tm.Run.from_toml(file))
    trainer.train(resume_from_checkpoint=get_last_checkpoint(args.output_dir))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
