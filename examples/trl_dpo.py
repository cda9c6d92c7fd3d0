"""Align a small model with TRL's DPOTrainer on pairs of answers from a store.

python examples/trl_dpo.py [FOLDER]
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import transformers
import trl

import tokenmill as tm
from tokenmill.adapters.trl import DPOTrainer
from tokenmill.demo import TOKENIZER_DIR


def main(folder: Path) -> None:
    """Train in a folder."""
    pairs = [
        {"prompt": f"How much is {n} and {n}?\n", "chosen": f"That makes {2 * n}.", "rejected": "Who knows."}
        for n in range(100)
    ]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    tm.prepare(folder / "pairs.jsonl", out=folder / "pairs", tokenizer=str(TOKENIZER_DIR), recipe="dpo")
    tables = {"run": {"steps": 10, "global_batch_size": 8, "seq_len": 64}}
    run = tm.Run.from_tables(tables | {"sources": [{"name": "pairs", "store": "pairs"}]}, folder=folder)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=4096, **shape))
    reference = transformers.LlamaForCausalLM(model.config)
    reference.load_state_dict(model.state_dict())
    args = trl.DPOConfig(
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
    DPOTrainer(model, args, train_dataset=run, ref_model=reference, processing_class=tokenizer).train()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
