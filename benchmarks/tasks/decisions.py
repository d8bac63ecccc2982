"""Reinforcement learning: a pole is balanced on a cart."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.tasks.parts import mlp
from benchmarks.tasks.training import Training

__all__ = ["dqn", "reinforce"]


class Poles:
    """Many carts with poles at once; a step of balance is worth 1."""

    def __init__(self, count: int, g: torch.Generator) -> None:
        self.g, self.count = g, count
        self.state, self.age = self._fresh(count), torch.zeros(count)

    def _fresh(self, count: int) -> Tensor:
        return 0.1 * torch.rand(count, 4, generator=self.g) - 0.05

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the state after, who fell, and the state to go on from."""
        _, v, a, w = self.state.unbind(1)
        force = 20.0 * action - 10
        pull = (force + 0.05 * w * w * a.sin()) / 1.1
        spin = (9.8 * a.sin() - a.cos() * pull) / (0.5 * (4 / 3 - 0.1 * a.cos() ** 2 / 1.1))
        push = pull - 0.05 * spin * a.cos() / 1.1
        after = self.state + 0.02 * torch.stack([v, push, w, spin], 1)
        self.age += 1
        fell = (after[:, 0].abs() > 2.4) | (after[:, 2].abs() > 0.21)
        over = fell | (self.age >= 200)
        self.state = torch.where(over[:, None], self._fresh(self.count), after)
        self.age = torch.where(over, 0, self.age)
        return after, fell, self.state


@torch.no_grad()
def balanced(policy: nn.Module, g: torch.Generator) -> float:
    """Return how many of 200 steps the best action balances the pole, mean of 64."""
    poles, alive, total = Poles(64, g), torch.ones(64), 0.0
    for _ in range(200):
        total += alive.sum().item()
        _, fell, _ = poles.step(policy(poles.state).argmax(-1))
        alive *= (~fell).float()
    return total / 64


def dqn(t: Training) -> float:
    """Return steps of balance after Q-learning: the loss says nothing of progress."""
    model, target = mlp(4, 64, 64, 2), mlp(4, 64, 64, 2)
    learner, poles = t.learner(model, 1e-3, batch_size=128), Poles(16, t.generator)
    target.load_state_dict({k: v for k, v in model.state_dict().items() if "fixed_point" not in k})
    memory: list[tuple[Tensor, ...]] = []
    for step in range(t.steps):
        with torch.no_grad():
            state, best = poles.state, model.eval()(poles.state).argmax(-1)
        model.train()
        chance = max(0.05, 1 - 2 * step / t.steps)
        is_random = torch.rand(16, generator=t.generator) < chance
        action = torch.where(is_random, torch.randint(2, (16,), generator=t.generator), best)
        after, fell, _ = poles.step(action)
        memory.append((state, action, after, fell))
        chosen = torch.randint(len(memory), (8,), generator=t.generator)
        columns = zip(*(memory[i] for i in chosen), strict=True)
        s, a, n, f = (torch.cat(column) for column in columns)
        with torch.no_grad():
            wanted = 1 + 0.98 * target(n).max(-1).values * ~f
        learner.step(F.smooth_l1_loss(model(s).gather(1, a[:, None])[:, 0], wanted))
        if step % 50 == 0:
            with torch.no_grad():
                for own, other in zip(target.parameters(), model.parameters(), strict=True):
                    own.copy_(other)
    return balanced(model.eval(), t.generator)


def reinforce(t: Training) -> float:
    """Return steps of balance after policy gradients: a loss of both signs, around 0."""
    model = mlp(4, 32, 2)
    learner = t.learner(model, 1e-2)
    for _ in range(t.steps):
        poles, states, actions = Poles(16, t.generator), [], []
        ages, alive = torch.zeros(200, 16), torch.ones(16)
        for i in range(200):
            with torch.no_grad():
                action = torch.multinomial(
                    model.eval()(poles.state).softmax(-1), 1, generator=t.generator
                )
            states.append(poles.state)
            actions.append(action)
            ages[i] = alive
            alive = alive * (~poles.step(action[:, 0])[1]).float()
            if not alive.any():
                break
        length = len(states)
        returns = ages[:length].flip(0).cumsum(0).flip(0)
        advantage = (returns - returns[ages[:length] > 0].mean()) / (returns.std() + 1)
        logits = model.train()(torch.cat(states)).log_softmax(-1).gather(1, torch.cat(actions))
        weight = (advantage * ages[:length]).reshape(-1, 1)
        learner.step(-(logits * weight).sum() / ages[:length].sum())
    return balanced(model.eval(), t.generator)
