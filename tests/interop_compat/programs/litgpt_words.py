"""Small language models with LitGPT, which trains with Fabric: pretraining, and fine-tuning with LoRA."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import torch
from litgpt import Config
from litgpt.args import EvalArgs, TrainArgs
from litgpt.data import JSON, DataModule
from litgpt.finetune.lora import setup as adapt
from litgpt.pretrain import setup as pretrain
from litgpt.prompts import Default
from outcome import report
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.utils.data import DataLoader

WORDS = 40
SMALL = Config(
    name="small", block_size=64, vocab_size=WORDS, padded_vocab_size=WORDS, n_layer=2, n_head=2, n_embd=16,
    rotary_percentage=1.0, parallel_residual=False, bias=False, norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP",
    intermediate_size=32,
)  # fmt: skip


class Text(DataModule):
    """Sentences in which each word follows from the one before, but for some noise."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)
        rows = [torch.randint(WORDS, (48, 1), generator=self.generator)]
        for _ in range(16):
            noise = torch.randint(3, (48, 1), generator=self.generator)
            rows.append((3 * rows[-1] + noise) % WORDS)
        self.sentences = torch.cat(rows, dim=1)

    def connect(self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int | None = None) -> None:
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        return DataLoader(self.sentences[:32], batch_size=self.batch_size, shuffle=True, generator=self.generator)

    def val_dataloader(self) -> Any:
        return DataLoader(self.sentences[32:], batch_size=self.batch_size)


def train(**changes: Any) -> TrainArgs:
    return TrainArgs(global_batch_size=8, micro_batch_size=4, lr_warmup_steps=2, save_interval=4, **changes)


def logged(folder: Path) -> dict[str, list[float]]:
    """The columns of the newest log that do not depend on the clock."""
    path = max(folder.rglob("metrics.csv"), key=lambda path: path.parent.name)
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        name: [float(row[name]) for row in rows if row[name]] for name in ("loss", "learning_rate") if name in rows[0]
    }


def size(path: Path) -> float:
    state = torch.load(path, weights_only=False)
    state = state.get("model", state)
    return float(sum(value.double().norm() for value in state.values()))


def pretrained(folder: Path, seed: int, steps: int) -> dict[str, Any]:
    tokens = steps * 8 * 16
    sys.argv = ["litgpt", "small"]  # it saves the command line that it was started with
    pretrain(
        "small", SMALL, folder, precision="32-true", data=Text(seed), logger_name="csv", devices=1,
        train=train(max_tokens=tokens, max_seq_length=16, max_norm=1.0, tie_embeddings=False, min_lr=1e-4),
        eval=EvalArgs(interval=4, max_iters=2), seed=seed,
        optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01}},
    )  # fmt: skip
    return {"logged": logged(folder), "weights": size(folder / "final" / "lit_model.pth")}


def pretraining(folder: Path, seed: int) -> dict[str, Any]:
    return pretrained(folder, seed, steps=12)


def adapters(folder: Path, seed: int) -> dict[str, Any]:
    """LoRA on a pretrained model, on instructions in a JSON file."""
    pretrained(folder / "base", seed, steps=4)
    base = folder / "base" / "final"
    words = {word: index for index, word in enumerate(["<unk>", "</s>", *(f"w{index}" for index in range(WORDS - 2))])}
    tokenizer = Tokenizer(WordLevel(words, "<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(base / "tokenizer.json"))
    settings = {"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (base / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    tasks = [{"instruction": f"w{index}", "output": f"w{(3 * index) % 38} w{index}"} for index in range(24)]
    (folder / "tasks.json").write_text(json.dumps(tasks), encoding="utf-8")
    state = torch.load(base / "lit_model.pth", weights_only=False)
    torch.save(state["model"], base / "lit_model.pth")  # as litgpt's convert_pretrained_checkpoint
    sys.argv = ["litgpt", str(base), "--lora_r", "2", "--lora_projection", "true"]
    adapt(
        base, folder / "adapted", precision="32-true", lora_r=2, lora_projection=True, seed=seed,
        data=JSON(folder / "tasks.json", val_split_fraction=0.25, prompt_style=Default(), num_workers=0),
        train=train(epochs=2, max_seq_length=16), eval=EvalArgs(interval=2, max_new_tokens=4, max_iters=2),
        optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01}},
    )  # fmt: skip
    return {
        "logged": logged(folder / "adapted"),
        "adapters": size(folder / "adapted" / "final" / "lit_model.pth.lora"),
        "merged": size(folder / "adapted" / "final" / "lit_model.pth"),
    }


if __name__ == "__main__":
    report(pretraining=pretraining, adapters=adapters)
