"""Fine-tune a small model with TRL on packed pairs of question and answer; only answers have labels.

python examples/trl_sft.py [FOLDER]
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import transformers
import trl

import tokenmill as tm
from tokenmill.adapters.trl import SFTTrainer
from tokenmill.demo import TOKENIZER_DIR


def main(folder: Path) -> None:
    """Train in a folder."""
    pairs = [{"prompt": f"How much is {n} and {n}?", "response": f"That makes {2 * n}."} for n in range(200)]
    (folder / "sums.jsonl").write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    tm.prepare(folder / "sums.jsonl", out=folder / "sums", tokenizer=str(TOKENIZER_DIR), recipe="instruction")
    file = folder / "run.toml"
    file.write_text(
        '[run]\nsteps = 10\nglobal_batch_size = 8\nseq_len = 64\n[[sources]]\nname = "sums"\nstore = "sums"\n',
        encoding="utf-8",
    )
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=4096, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
        )
    )
    args = trl.SFTConfig(
        output_dir=str(folder / "out"),
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        logging_steps=2,
        save_steps=5,
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(TOKENIZER_DIR)
    SFTTrainer(model=model, args=args, train_dataset=tm.Run.from_toml(file), processing_class=tokenizer).train()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
