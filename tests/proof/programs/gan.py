"""Two networks and two optimizers: the critic takes two steps for each of the generator; the random state is restored.

--fault second_optimizer: the critic's optimizer is not restored.
"""

import argparse
import os

import torch
from torch import nn
from torch.nn.functional import softplus

parser = argparse.ArgumentParser()
parser.add_argument("--fault", choices=["second_optimizer"])
fault = parser.parse_args().fault

torch.manual_seed(0)
real = torch.randn(256, 2) * torch.tensor([1.0, 0.2]) + 1
generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
optimizers = [torch.optim.Adam(net.parameters(), lr=0.005, betas=(0.5, 0.99)) for net in (generator, critic)]
parts = {"generator": generator, "critic": critic, "first": optimizers[0], "second": optimizers[1]}
step = 0
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt")
    for name, part in parts.items():
        if not (fault and name == "second"):
            part.load_state_dict(saved[name])
    torch.set_rng_state(saved["random"])
    step = saved["step"]

while step < 30:
    for _ in range(2):
        chosen = real[torch.randint(256, (16,))]
        fake = generator(torch.randn(16, 4)).detach()
        loss = softplus(-critic(chosen)).mean() + softplus(critic(fake)).mean()
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[1].step()
    cheat = softplus(-critic(generator(torch.randn(16, 4)))).mean()
    optimizers[0].zero_grad()
    cheat.backward()
    optimizers[0].step()
    step += 1
    print(f"step {step} loss {loss.item()!r} {cheat.item()!r}", flush=True)
    if step % 4 == 0:
        state = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**state, "random": torch.get_rng_state(), "step": step}, "checkpoint.tmp")
        os.replace("checkpoint.tmp", "checkpoint.pt")
torch.save([generator.state_dict(), critic.state_dict()], "final.pt")
