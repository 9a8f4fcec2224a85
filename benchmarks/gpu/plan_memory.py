"""What ``drivetrain plan`` says of six programs, beside the memory that they take on this GPU.

For an MLP, a CNN and a GPT, in "32-true" and "bf16-mixed", it prints the peak of the plan's tensors, the peak that
torch's allocator has handed out in the third window of a real run (``allocated_bytes.all.peak``), what it has reserved,
the ratio, and the kinds of the plan. The plan runs on fake tensors on the host, in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

PROGRAM = """
import json
import sys
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from drivetrain import Callback, LightningModule, Trainer

NAME, PRECISION = sys.argv[1:3]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.n1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        if NAME == "mlp":
            layers = [nn.Sequential(nn.Linear(2048, 8192), nn.ReLU(), nn.Linear(8192, 2048)) for _ in range(6)]
            self.net = nn.Sequential(*layers, nn.Linear(2048, 1000))
        elif NAME == "cnn":
            layers, width = [], 3
            for after in (64, 128, 256, 512):
                layers += [nn.Conv2d(width, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]
                width = after
            self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000))
        else:
            self.words, self.places = nn.Embedding(32000, 1024), nn.Embedding(512, 1024)
            self.blocks = nn.ModuleList(Block(1024, 16) for _ in range(6))
            self.norm, self.head = nn.LayerNorm(1024), nn.Linear(1024, 32000, bias=False)

    def training_step(self, batch, batch_idx):
        x, y = batch
        if NAME != "gpt":
            return F.cross_entropy(self.net(x), y)
        hidden = self.words(x) + self.places(torch.arange(x.shape[1], device=self.device))
        for block in self.blocks:
            hidden = block(hidden)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), y.flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Peak(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 2:
            torch.accelerator.synchronize()
            torch.accelerator.reset_peak_memory_stats()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 2:
            torch.accelerator.synchronize()
            stats = torch.accelerator.memory_stats()
            print(json.dumps({
                "peak": stats["allocated_bytes.all.peak"], "requested": stats["requested_bytes.all.peak"],
                "reserved": stats["reserved_bytes.all.peak"],
            }))


if NAME == "gpt":
    x = y = torch.randint(32000, (32, 512))
else:
    x = torch.randn(2048, 2048) if NAME == "mlp" else torch.randn(256, 3, 64, 64)
    y = torch.randint(1000, (len(x),))
Trainer(
    accelerator="gpu", devices=1, precision=PRECISION, max_steps=3, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, callbacks=[Peak()],
).fit(Net(), DataLoader(TensorDataset(x, y), batch_size=8 if NAME == "gpt" else len(x) // 4))
"""
COMMAND = "import sys; from drivetrain.cli.command import main; sys.exit(main())"


def last_json(words: list[str], folder: str) -> dict[str, object]:
    """Run Python with ``words`` and return its last line, which is JSON."""
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True)
    try:
        found: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        return {"failed": (done.stderr or done.stdout)[-2000:]}
    return found


def main() -> None:
    print(torch.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else "without CUDA")
    print(f"{'program':<18}{'plan':>10}{'allocated':>11}{'requested':>11}{'reserved':>10}{'ratio':>8}   seconds")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(PROGRAM, encoding="utf-8")
        for name in ("mlp", "cnn", "gpt"):
            for precision in ("32-true", "bf16-mixed"):
                began = time.monotonic()
                plan = ["-c", COMMAND, "plan", "--devices", "1", "--device", "H100 80GB", "--no-changes", "--json"]
                said = last_json([*plan, "train.py", name, precision], folder)
                middle = time.monotonic()
                real = last_json(["train.py", name, precision], folder)
                times = f"{middle - began:.0f} + {time.monotonic() - middle:.0f}"
                if "peak" not in said or "peak" not in real:
                    print(f"{name} {precision}: plan {said}, real {real}")
                    continue
                sizes = [int(str(each)) for each in (said["peak"], real["peak"], real["requested"], real["reserved"])]
                shown = "".join(
                    f"{size / 2**20:>{wide}.1f}" for size, wide in zip(sizes, (10, 11, 11, 10), strict=True)
                )
                print(f"{name + ' ' + precision:<18}{shown}{sizes[0] / sizes[1]:>8.4f}   {times}")
                print(f"    {said['at']} {said['kinds']}", flush=True)


if __name__ == "__main__":
    main()
