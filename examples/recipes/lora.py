"""Fine-tuning with LoRA: a model laid out as on a hub, of which only small matrices are trained. Half a minute.

Needs transformers and peft: `pip install transformers peft`. The model is made here, so nothing is downloaded; with a
name of a hub in `make_model`, the rest stays as it is.
"""

from __future__ import annotations

import argparse

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from drivetrain import LightningModule, Trainer, seed_everything
from drivetrain.callbacks import ModelCheckpoint

VOCABULARY, LENGTH = 64, 16


class Counting(Dataset[dict[str, Tensor]]):
    """Sequences that count up from a start, with a stride: what the model is to learn."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (index + torch.arange(LENGTH) * (1 + index % 3)) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


def make_model(folder: str) -> str:
    """Write a small model with random weights as a hub lays it out; return where it is."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


class LoRA(LightningModule):
    def __init__(self, name: str) -> None:
        super().__init__()
        config = LoraConfig(
            r=16, lora_alpha=32, target_modules=["q_proj", "v_proj", "down_proj"], modules_to_save=["lm_head"],
        )  # fmt: skip
        self.model = get_peft_model(AutoModelForCausalLM.from_pretrained(name), config)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((each for each in self.parameters() if each.requires_grad), lr=1e-2)


def main(output: str, epochs: int) -> float:
    """Fine-tune, and return the last loss; an untrained model's is the logarithm of the vocabulary, 4.16."""
    seed_everything(0)
    module = LoRA(make_model(f"{output}/base"))
    trainer = Trainer(
        max_epochs=epochs, default_root_dir=output, log_every_n_steps=8, callbacks=[ModelCheckpoint(save_last=True)],
    )  # fmt: skip
    trainer.fit(module, DataLoader(Counting(), 32, shuffle=True))
    module.model.save_pretrained(f"{output}/adapter")  # what a hub keeps of it: some 100 kB
    loss = trainer.callback_metrics["loss"].item()
    trained, whole = module.model.get_nb_trainable_parameters()
    print(f"Loss {loss:.2f}, with {trained} of {whole} parameters trained")
    return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="demo_output")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    main(options.output, options.epochs)
