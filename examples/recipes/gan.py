"""A GAN on the Engine: two models, two optimizers, one loop. The generator learns a ring of eight Gaussians.

At the end it prints how many of the eight it covers, and which share of its points lies on one. Some ten seconds.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import Engine
from drivetrain.loggers import CSVLogger

NOISE, MODES = 8, 8  # dimensions of the generator's input; Gaussians on a ring of radius 1
SPREAD = 0.05  # standard deviation of each Gaussian


def centres(device: torch.device) -> Tensor:
    """(MODES, 2)."""
    angle = torch.arange(MODES, device=device) * (2 * math.pi / MODES)
    return torch.stack([angle.cos(), angle.sin()], dim=1)


def coverage(points: Tensor) -> tuple[int, float]:
    """How many Gaussians hold at least one point in fifty, and which share of the points lies within five spreads."""
    distance, nearest = torch.cdist(points, centres(points.device)).min(dim=1)
    near = distance < 5 * SPREAD
    counts = torch.bincount(nearest[near], minlength=MODES)
    return int((counts >= len(points) / 50).sum()), near.float().mean().item()


def setup(engine: Engine, inputs: int, outputs: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A network and its optimizer, on the device and in the precision of the Engine."""
    net = nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs),
    )  # fmt: skip
    return engine.setup(net, torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.99)))


def main(output: str, steps: int, precision: str | None) -> None:
    torch.set_num_threads(1)  # layers this small are fastest on one
    engine = Engine(precision=precision, loggers=CSVLogger(output, name="gan"))
    engine.launch()
    engine.seed_everything(0)
    generator, generator_optimizer = setup(engine, NOISE, 2)
    discriminator, discriminator_optimizer = setup(engine, 2, 1)
    ring = centres(engine.device)

    for step in range(1, steps + 1):
        real = ring[torch.randint(MODES, (128,), device=engine.device)]
        real = real + SPREAD * torch.randn(128, 2, device=engine.device)
        fake = generator(torch.randn(128, NOISE, device=engine.device))
        discriminator_optimizer.zero_grad()
        discriminator_loss = F.softplus(-discriminator(real)).mean() + F.softplus(discriminator(fake.detach())).mean()
        engine.backward(discriminator_loss)
        discriminator_optimizer.step()
        generator_optimizer.zero_grad()
        generator_loss = F.softplus(-discriminator(fake)).mean()
        engine.backward(generator_loss)
        generator_optimizer.step()
        if step % 100 == 0:
            engine.log_dict({"discriminator_loss": discriminator_loss, "generator_loss": generator_loss}, step)

    with torch.no_grad():
        modes, near = coverage(generator(torch.randn(2000, NOISE, device=engine.device)))
    engine.print(f"Modes covered: {modes} of {MODES}; points on them: {near:.2f}")
    engine.logger.finalize("success")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="demo_output")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--precision", default=None)
    main(**vars(parser.parse_args()))
