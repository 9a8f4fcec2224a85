"""Reinforcement learning on the Engine: a pole that learns to balance (REINFORCE). Half a minute.

Needs gymnasium: `pip install gymnasium`. The method is that of Williams, "Simple statistical gradient-following
algorithms for connectionist reinforcement learning", 1992, with the mean return as its baseline.
"""

from __future__ import annotations

import argparse

import gymnasium
import torch
from torch import Tensor, nn

from drivetrain import Engine
from drivetrain.loggers import CSVLogger


def play(env: gymnasium.Env, policy: nn.Module, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Play one episode; return the log-probability of each action, and each reward, both (steps,)."""
    observation, _ = env.reset(seed=seed)
    log_probs, rewards, done = [], [], False
    while not done:
        seen = torch.as_tensor(observation, dtype=torch.float32, device=device)
        actions = torch.distributions.Categorical(logits=policy(seen))
        action = actions.sample()
        log_probs.append(actions.log_prob(action))
        observation, reward, ended, cut, _ = env.step(action.item())
        rewards.append(float(reward))
        done = ended or cut
    return torch.stack(log_probs), torch.tensor(rewards, device=device)


def returns_of(rewards: Tensor, discount: float = 0.99) -> Tensor:
    """The discounted sum of the rewards from each step on, (steps,)."""
    total, found = 0.0, []
    for reward in reversed(rewards.tolist()):
        total = reward + discount * total
        found.append(total)
    return torch.tensor(found[::-1], device=rewards.device)


def main(output: str, updates: int, episodes: int = 8) -> float:
    """Train, and return the mean length of the last episodes; 500 is the longest."""
    engine = Engine(accelerator="cpu", devices=1, loggers=CSVLogger(output, name="reinforce"))
    engine.launch()
    engine.seed_everything(0)
    env = gymnasium.make("CartPole-v1")
    policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
    policy, optimizer = engine.setup(policy, torch.optim.Adam(policy.parameters(), lr=1e-2))

    length = 0.0
    for update in range(updates):
        played = [play(env, policy, update * episodes + each, engine.device) for each in range(episodes)]
        returns = torch.cat([returns_of(rewards) for _, rewards in played])
        advantages = (returns - returns.mean()) / (returns.std() + 1e-6)
        loss = -(torch.cat([log_probs for log_probs, _ in played]) * advantages).mean()
        optimizer.zero_grad()
        engine.backward(loss)
        optimizer.step()
        length = sum(len(rewards) for _, rewards in played) / episodes
        engine.log_dict({"loss": loss.detach(), "episode_length": length}, update)
    engine.print(f"Mean length of the last {episodes} episodes: {length:.0f}")
    engine.logger.finalize("success")
    return length


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="demo_output")
    parser.add_argument("--updates", type=int, default=40)
    options = parser.parse_args()
    main(options.output, options.updates)
