"""Draw a picture of a notebook that a kernel has executed: ``notebook_picture.py docs/images/notebook.png``.

It needs Chromium. The first cell is shown as it looks while the fit validates: there an exception ends the fit, and
the output stays in its last state.
"""

from __future__ import annotations

import base64
import html
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

WIDTH, HEIGHT = 800, 1400

MODEL = """
import time, torch
from torch.utils.data import DataLoader, TensorDataset
from drivetrain import Callback, LightningModule, Trainer

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.ReLU())
        self.head = torch.nn.Linear(64, 1)

    def training_step(self, batch):
        time.sleep(0.02)
        loss = torch.nn.functional.mse_loss(self.head(self.encoder(batch[0])), batch[0].sum(1, keepdim=True))
        values = {"train_loss": loss, "train_accuracy": 1 - loss / 9, "grad_norm": loss / 3}
        self.log_dict({**values, "tokens_seen": 1e5 + self.global_step * 1024.0}, prog_bar=True)
        return loss

    def validation_step(self, batch):
        time.sleep(0.02)
        loss = torch.nn.functional.mse_loss(self.head(self.encoder(batch[0])), batch[0].sum(1, keepdim=True))
        self.log_dict({"val_loss": loss, "val_accuracy": 1 - loss / 9}, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.005)

class Holds(Callback):
    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 13 and trainer.global_step > 200:
            raise ArithmeticError

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(400, 4)), batch_size=4)
val = DataLoader(TensorDataset(torch.randn(80, 4)), batch_size=4)
model = Net()
trainer = Trainer(max_steps=450, accelerator="cpu", log_every_n_steps=5, callbacks=[Holds()])
"""
FIT = (
    "try:\n    trainer.fit(model, loader, val)\nexcept ArithmeticError:\n    trainer.callbacks = trainer.callbacks[1:]"
)
CELLS = {  # what the picture shows, and what is executed
    "trainer.fit(model, loader, val)": FIT,
    'trainer.plot("loss", "accuracy")': 'trainer.plot("loss", "accuracy")',
    "trainer.history": "trainer.history",
    "trainer.validate(model, val);": "trainer.validate(model, val);",
}
STYLE = """
body { font: 13px system-ui, sans-serif; margin: 12px; color: #222 }
pre { font: 13px/1.4 monospace; margin: 6px 0; white-space: pre-wrap }
pre.in { background: #f5f5f5; border: 1px solid #ddd; padding: 6px; margin-top: 14px }
table { border-collapse: collapse; margin: 6px 0; font-size: 12px } th { border-bottom: 1px solid #bbb }
td, th { padding: 3px 8px } tbody tr:nth-child(odd) { background: #f5f5f5 } img { max-width: 100% }
"""


def page() -> str:
    """Execute the notebook and return its cells as a page."""
    document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in (MODEL, *CELLS.values())])
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(document, timeout=200, resources={"metadata": {"path": folder}}).execute()
    parts = []
    for source, cell in zip(CELLS, document.cells[1:], strict=True):
        parts.append(f'<pre class="in">{html.escape(source)}</pre>')
        for output in cell.outputs:
            data = output.get("data", {})
            if "text/html" in data:
                parts.append(data["text/html"])
            elif "image/png" in data:
                parts.append(f'<img src="data:image/png;base64,{data["image/png"]}">')
            else:
                parts.append(f"<pre>{html.escape(output.get('text', ''))}</pre>")
    return f"<style>{STYLE}</style>{''.join(parts)}"


def main(target: str) -> int:
    """Write the picture."""
    address = "data:text/html;base64," + base64.b64encode(page().encode()).decode()
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={Path(target).absolute()}", address]
    subprocess.run(command, check=True, capture_output=True)
    picture = Image.open(target).convert("RGB")
    ends = max(y for y in range(picture.height) if len(picture.crop((0, y, WIDTH, y + 1)).getcolors(WIDTH)) > 1)
    picture.crop((0, 0, WIDTH, ends + 12)).quantize(64).save(target, optimize=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
