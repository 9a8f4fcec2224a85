"""A small GPT that learns to write Python, from the source of the standard library on this machine.

The model reads bytes, so there is no tokenizer and nothing to download. The progress bar shows tokens per second and
the model FLOPs utilization (MFU): the share of the device's measured matmul speed that training makes use of.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset

from drivetrain import Callback, LightningModule, Trainer, seed_everything
from drivetrain.callbacks import LearningRateMonitor
from drivetrain.loggers import CSVLogger

VOCABULARY = 256  # every byte is a token

Batch = tuple[Tensor, Tensor]  # inputs and targets, both (B, T) int64; a target is the byte after its input


# ---- data ------------------------------------------------------------------------------------------------------------


class Blocks(Dataset[Batch]):
    """A text as consecutive blocks of ``block_size`` bytes, each with its targets."""

    def __init__(self, text: bytes, block_size: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.block_size = block_size

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.block_size  # the last byte is only ever a target

    def __getitem__(self, index: int) -> Batch:
        start = index * self.block_size
        block = self.text[start : start + self.block_size + 1].long()
        return block[:-1], block[1:]


def read_standard_library(limit_bytes: int) -> tuple[bytes, bytes]:
    """Training and validation text: whole files in sorted order up to the limit, every tenth for validation."""
    root = Path(sysconfig.get_paths()["stdlib"])
    training, validation = bytearray(), bytearray()
    for number, file in enumerate(sorted(root.rglob("*.py"))):
        if {"site-packages", "dist-packages"} & set(file.parts):
            continue  # installed packages may lie below the standard library
        if len(training) + len(validation) >= limit_bytes:
            break
        (validation if number % 10 == 0 else training).extend(file.read_bytes())
    return bytes(training), bytes(validation)


def unigram_entropy(text: bytes) -> float:
    """Nats per byte for a model that knows how frequent each byte is and nothing else."""
    counts = torch.bincount(torch.frombuffer(bytearray(text), dtype=torch.uint8).long())
    return torch.distributions.Categorical(probs=counts.double()).entropy().item()


# ---- model -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """One decoder layer: attention to earlier positions, then a multilayer perceptron, each behind a layer norm."""

    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.norm1, self.norm2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.qkv = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.project = nn.Linear(n_embd, n_embd, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd, bias=False), nn.GELU(), nn.Linear(4 * n_embd, n_embd, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C) -> (B, T, C)
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    def attend(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, self.n_head, -1))  # (B, T, 3, H, C / H)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each (B, H, T, C / H)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(attended.transpose(1, 2).flatten(-2))


class GPT(LightningModule):
    """Decoder-only transformer over bytes, with the input embedding as its output layer too."""

    def __init__(
        self, block_size: int, n_layer: int, n_head: int, n_embd: int, learning_rate: float, total_steps: int
    ) -> None:
        super().__init__()
        self.block_size = block_size
        self.learning_rate = learning_rate
        self.total_steps = total_steps
        self.tokens = nn.Embedding(VOCABULARY, n_embd)
        self.positions = nn.Embedding(block_size, n_embd)
        self.blocks = nn.Sequential(*(Block(n_embd, n_head) for _ in range(n_layer)))
        self.norm = nn.LayerNorm(n_embd)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                # What writes into the residual stream starts smaller, so that the stream's variance does not grow with
                # depth (GPT-2).
                writes = name.endswith(("project.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * n_layer) if writes else 0.02)
        # Of N parameters each costs 2 FLOPs per token forward and 4 backward; the position embedding is only looked
        # up. Attention adds 12 L H Q T, where H heads of Q dimensions make n_embd (PaLM, arXiv:2204.02311, appendix B).
        matmul_parameters = sum(p.numel() for p in self.parameters()) - self.positions.weight.numel()
        self.flops_per_token = 6 * matmul_parameters + 12 * n_layer * n_embd * block_size

    def forward(self, inputs: Tensor) -> Tensor:  # (B, T) -> (B, T, 256) logits
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.tokens(inputs) + self.positions(positions)
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)

    def loss(self, batch: Batch) -> Tensor:
        """Mean nats per byte."""
        inputs, targets = batch
        return F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self) -> dict[str, object]:
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        vectors = [p for p in self.parameters() if p.dim() < 2]  # norms: decay would only shrink their scale
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.learning_rate, betas=(0.9, 0.95))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.learning_rate_factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def learning_rate_factor(self, step: int) -> float:
        """Linear warm-up over a tenth of the steps, then a cosine down to a tenth of the peak."""
        warmup = max(1, self.total_steps // 10)
        if step < warmup:
            return (step + 1) / warmup
        done = min(1.0, (step - warmup) / max(1, self.total_steps - warmup))
        return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))

    @torch.no_grad()
    def sample(self, prompt: bytes, length: int) -> bytes:
        """``prompt``, continued by ``length`` bytes drawn from the model."""
        text = torch.tensor([list(prompt)], device=self.device)
        for _ in range(length):
            probabilities = self(text[:, -self.block_size :])[0, -1].softmax(dim=-1)
            text = torch.cat([text, torch.multinomial(probabilities, 1)[None]], dim=1)
        return bytes(text[0].tolist())


# ---- throughput ------------------------------------------------------------------------------------------------------


def measure_peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs per second of a large square matmul here, the best within a second.

    A device that is busy with something else all that time gives too low a peak, and so too high an MFU.
    """
    size = 512 if device.type == "cpu" else 8192
    generator = torch.Generator().manual_seed(0)  # its own, so that measuring does not change the training
    a, b = (torch.randn(size, size, generator=generator).to(device, dtype) for _ in range(2))
    end_s = time.perf_counter() + 1.0
    best_s = math.inf
    while (start_s := time.perf_counter()) < end_s:
        a @ b
        wait_for(device)
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2 * size**3 / best_s


def wait_for(device: torch.device) -> None:
    """Return when ``device`` has done what it was told; the host always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Throughput(Callback):
    """Logs tokens per second and MFU each time the log is flushed, over the steps since the last flush.

    Args:
        tokens_per_step: inputs in one batch, B * T.
        flops_per_token: forward and backward.
        peak_flops: of the device, per second; ``None``: measured when training starts.
    """

    def __init__(self, tokens_per_step: int, flops_per_token: float, peak_flops: float | None = None) -> None:
        self.tokens_per_step = tokens_per_step
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self.start_s: float | None = None
        self.steps = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.peak_flops is None:
            dtype = torch.bfloat16 if trainer.precision == "bf16-mixed" else torch.float32
            self.peak_flops = measure_peak_flops(pl_module.device, dtype)
            trainer.print(f"Measured peak: {self.peak_flops / 1e12:.3f} TFLOP/s ({dtype} matmul on {pl_module.device})")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.start_s = None  # its time is not training time

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: Batch, batch_idx: int
    ) -> None:
        self.steps += 1
        due = trainer.global_step % trainer.log_every_n_steps == 0
        if not due and self.start_s is not None:
            return
        # The flush that follows reads the device's values anyway, so waiting here costs nothing more.
        wait_for(pl_module.device)
        now_s = time.perf_counter()
        if due and self.start_s is not None:
            tokens_per_s = self.steps * self.tokens_per_step / (now_s - self.start_s)
            mfu = tokens_per_s * self.flops_per_token / self.peak_flops
            pl_module.log_dict({"tokens/s": tokens_per_s, "mfu": mfu}, prog_bar=True)
        self.start_s, self.steps = now_s, 0  # the very first step warms up and is not measured


# ---- the program -----------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=lambda prog: argparse.ArgumentDefaultsHelpFormatter(prog, width=100)
    )
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=16, help="blocks per step")
    parser.add_argument("--block-size", type=int, default=128, help="bytes per block")
    parser.add_argument("--n-layer", type=int, default=4)
    parser.add_argument("--n-head", type=int, default=4)
    parser.add_argument("--n-embd", type=int, default=128)
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="at its peak")
    parser.add_argument("--precision", default="32-true", help="32-true or bf16-mixed")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--limit-mb", type=float, default=4.0, help="how much source to read, in 10**6 bytes")
    parser.add_argument("--peak-tflops", type=float, help="of the device, for the MFU; measured if not given")
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="folder for the log")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    seed_everything(arguments.seed)

    training_text, validation_text = read_standard_library(int(arguments.limit_mb * 1e6))
    training = Blocks(training_text, arguments.block_size)
    validation = Blocks(validation_text, arguments.block_size)
    # A few hundred blocks, evenly spread, judge the model well enough and keep validation short.
    validation_part = Subset(validation, range(0, len(validation), max(1, len(validation) // 512)))
    train_loader = DataLoader(training, arguments.batch_size, shuffle=True, drop_last=True)
    val_loader = DataLoader(validation_part, arguments.batch_size)

    model = GPT(
        block_size=arguments.block_size,
        n_layer=arguments.n_layer,
        n_head=arguments.n_head,
        n_embd=arguments.n_embd,
        learning_rate=arguments.learning_rate,
        total_steps=arguments.steps,
    )
    peak_flops = None if arguments.peak_tflops is None else arguments.peak_tflops * 1e12
    throughput = Throughput(arguments.batch_size * arguments.block_size, model.flops_per_token, peak_flops)
    logger = CSVLogger(arguments.output, name="gpt")
    trainer = Trainer(
        accelerator=arguments.accelerator,
        devices=1,
        precision=arguments.precision,
        max_steps=arguments.steps,
        max_epochs=-1,
        val_check_interval=max(1, arguments.steps // 3),
        check_val_every_n_epoch=None,  # by steps, wherever an epoch ends
        gradient_clip_val=1.0,
        log_every_n_steps=10,
        callbacks=[throughput, LearningRateMonitor()],
        logger=logger,
        enable_checkpointing=False,
    )
    print(f"Text: {len(training_text):,} bytes to train on, {len(validation_text):,} to validate on")

    trainer.fit(model, train_loader, val_loader)
    [result] = trainer.validate(model, val_loader, verbose=False)

    nats = result["val_loss"]
    unigram = unigram_entropy(validation_text)
    print(f"Validation loss: {nats:.3f} nats per byte = {nats / math.log(2):.3f} bits per byte")
    print(f"Unigram entropy: {unigram:.3f} nats per byte = {unigram / math.log(2):.3f} bits per byte")
    print(f"Log:             {logger.log_dir}")
    print("Sample:")
    print(model.eval().sample(b"def ", 200).decode(errors="replace"))


if __name__ == "__main__":
    main()
