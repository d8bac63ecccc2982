"""The optimizers a run can have: fixed point, and float32 to compare it with."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import marvin
import perfmodel
from perfmodel.cost import weights_of
from train import distributed
from train.config import MSGD_KEYWORDS, QUANTIZED_KEYWORDS, SGD_KEYWORDS, Config

__all__ = ["add_l1_", "make_optimizer", "normalize_gradients_", "prepare_gradients_"]


def make_optimizer(
    config: Config, model: nn.Module, layers: Sequence[perfmodel.Layer]
) -> torch.optim.Optimizer:
    """Return the optimizer ``config`` asks for; a fixed-point one quantises ``model`` at once.

    Args:
        config: What is asked for.
        model: To train.
        layers: What it multiplies.

    Raises:
        ValueError: A hyper-parameter is out of range.
    """
    if config.method == "msgd":
        return marvin.MSGD(model.named_parameters(), **_keywords(config, MSGD_KEYWORDS))
    sgd = torch.optim.SGD(model.named_parameters(), **_keywords(config, SGD_KEYWORDS))
    if config.optimizer == "sgd":
        return sgd
    keywords = _keywords(config, QUANTIZED_KEYWORDS)
    own = config.quantize_gradients or None  # None: as the policy wants
    policy = _policy(config, layers)
    if config.is_range:
        keywords["one_dim"] = policy.rules.one_dim
    return marvin.Quantized(sgd, policy, quantize_gradients=own, **keywords)


def _policy(config: Config, layers: Sequence[perfmodel.Layer]) -> marvin.Policy:
    if config.policy == "muppet":
        return marvin.MuppetPolicy()
    if config.is_range:
        return _range_policy(config, layers)
    wl, fl = map(int, config.policy.removeprefix("fixed:").split(","))
    return marvin.FixedPolicy(wl, fl, config.symmetric)


def _range_policy(config: Config, layers: Sequence[perfmodel.Layer]) -> marvin.Policy:
    first, second = config.policy_bits
    ends_wl = config.ends_bits or None
    common = {"ends_wl": ends_wl, "per_channel": config.per_channel}
    if config.policy == "static":
        return marvin.StaticPolicy(**_given(weights=first, activations=second), **common)
    own = len(range(config.batch_size)[distributed.share(config.batch_size)])
    batch_size = None if config.quantize_activations else own * config.accumulation_steps
    return marvin.LossBudgetPolicy(
        kappa=config.kappa,
        max_noise=config.max_noise,
        batch_size=batch_size,
        target_bits=config.target_bits or None,
        target_ebops=config.target_ebops or None,
        madds=tuple(
            (w.name, w.madds) for w in weights_of(layers) if w.name and config.target_ebops
        ),
        free_zeros=config.free_zeros,
        loss_floor=config.loss_floor,
        late=config.late,
        **_given(min_wl=first, max_wl=second),
        **common,
    )


def _given(**lengths: int) -> dict[str, Any]:
    """Return the word lengths that are not 0; for the others the policy has defaults."""
    return {name: length for name, length in lengths.items() if length}


def _keywords(config: Config, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(config, name) for name in names}


def prepare_gradients_(config: Config, model: nn.Module) -> None:
    """Do to float32 gradients what MSGD does by itself, so that the comparison is fair."""
    if config.l1:
        add_l1_(model.parameters(), config.l1, config.l1_params == "all")
    if config.normalize_gradients:
        normalize_gradients_(model.parameters())


@torch.no_grad()
def add_l1_(parameters: Iterable[Tensor], l1: float, every: bool) -> None:
    """Add the gradient of ``l1 * |p|`` to the gradients of weights, or of ``every`` parameter."""
    for p in parameters:
        if p.grad is not None and (every or p.ndim >= 2):
            p.grad.add_(p.sign(), alpha=l1)


@torch.no_grad()
def normalize_gradients_(parameters: Iterable[Tensor]) -> None:
    """Divide each parameter's gradient by its 2-norm; a gradient of zeros stays."""
    for p in parameters:
        if p.grad is not None:
            norm = torch.linalg.vector_norm(p.grad)
            p.grad.div_(torch.where(norm > 0, norm, torch.ones_like(norm)))
