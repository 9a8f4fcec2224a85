"""A GAN on the Engine: two models, two optimizers, one loop. The generator learns a ring of eight Gaussians.

At the end it says how many of the eight it covers, and how many of its points lie on one. Some ten seconds.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import Engine
from drivetrain.loggers import CSVLogger

NOISE = 8  # dimensions of the generator's input
MODES = 8
SPREAD = 0.05  # standard deviation of each Gaussian, on a ring of radius 1


def real_points(count: int, device: torch.device) -> Tensor:
    """(count, 2) points of the ring."""
    angle = torch.randint(MODES, (count,), device=device) * (2 * math.pi / MODES)
    return torch.stack([angle.cos(), angle.sin()], dim=1) + SPREAD * torch.randn(count, 2, device=device)


def perceptron(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2),
                         nn.Linear(64, outputs))  # fmt: skip


def coverage(points: Tensor) -> tuple[int, float]:
    """How many Gaussians hold at least one point in fifty, and what part of the points lies within five spreads."""
    angle = torch.arange(MODES, device=points.device) * (2 * math.pi / MODES)
    centres = torch.stack([angle.cos(), angle.sin()], dim=1)
    distance, nearest = torch.cdist(points, centres).min(dim=1)
    near = distance < 5 * SPREAD
    counts = torch.bincount(nearest[near], minlength=MODES)
    return int((counts >= len(points) / 50).sum()), near.float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default=None)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--output", type=Path, default=Path("demo_output"))
    arguments = parser.parse_args()

    torch.set_num_threads(1)  # layers this small are fastest on one
    engine = Engine(precision=arguments.precision, loggers=CSVLogger(arguments.output, name="gan"))
    engine.launch()
    engine.seed_everything(0)
    generator, discriminator = perceptron(NOISE, 2), perceptron(2, 1)
    generator, generator_optimizer = engine.setup(
        generator, torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    )
    discriminator, discriminator_optimizer = engine.setup(
        discriminator, torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    )

    for step in range(1, arguments.steps + 1):
        real = real_points(128, engine.device)
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
        points = generator(torch.randn(2000, NOISE, device=engine.device))
    modes, near = coverage(points)
    engine.print(f"Modes covered: {modes} of {MODES}; points on them: {near:.2f}")
    engine.logger.finalize("success")


if __name__ == "__main__":
    main()
