"""Any optimizer of torch's kind, on fixed-point weights."""

import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from marvin.base import QuantizingOptimizer
from marvin.gradients import Gradients
from marvin.policy import Policy, check_policy

__all__ = ["Quantized"]


class Quantized(QuantizingOptimizer):
    """Let any optimizer train a model whose weights are quantised as a policy decides.

    The wrapped optimizer is built from the model's parameters as always. From then on its step
    works on float32 masters in their place; the model gets the masters, rounded stochastically to
    the formats that the policy chooses. A step

    1. lets the policy see the gradients and change formats;
    2. gives the masters the gradients, and calls the wrapped optimizer's ``step``;
    3. writes the masters to the model, rounded.

    Call ``step``, ``zero_grad``, ``state_dict`` and ``load_state_dict`` on this object, not on the
    wrapped one; a learning-rate scheduler may have either. Parameter groups are common to both,
    and hold the hyper-parameters of the policy and those below too: a group may differ.

    Args:
        optimizer: Has float32, bfloat16 or float16 parameters, and reads ``grad`` of each
            parameter in ``step()``. Optimizers that need a closure (LBFGS) do not work.
        policy: ``marvin.MarvinPolicy()``, ``marvin.FixedPolicy(8, 4)`` or another.
        l1: As of ``marvin.MSGD``.
        l1_params: As of ``marvin.MSGD``.
        normalize_gradients: Divide each parameter's gradient by its 2-norm, as MSGD does.
        quantize_gradients: Round gradients stochastically to their layer's format first; None:
            as the policy wants it.
        one_dim: As of ``marvin.MSGD``; None: as the policy wants it.
        master_init: As of ``marvin.MSGD``.
        nonfinite: As of ``marvin.MSGD``.
        seed: Of the rounding noise.

    Raises:
        TypeError: A parameter is not float32, bfloat16 or float16; ``optimizer`` is no optimizer,
            or fixed-point already; ``policy`` is no policy.
        ValueError: An argument is out of range; ``optimizer`` needs a closure, or has a
            hyper-parameter of the same name as one of these.
        FloatingPointError: In ``step``, before anything has changed: see ``nonfinite``.

    Examples:
        >>> adamw = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
        >>> optimizer = marvin.Quantized(adamw, marvin.MarvinPolicy(buffer_bits=6))
        >>> optimizer.step(loss=loss)

    Note:
        ``Quantized(SGD(momentum=0.9, weight_decay=1e-4), MarvinPolicy(),
        normalize_gradients=True)`` is MSGD, bit for bit.
    """

    def __init__(  # noqa: PLR0913  every hyper-parameter is an argument, as in torch.optim
        self,
        optimizer: Optimizer,
        policy: Policy,
        *,
        l1: float = 0.0,
        l1_params: Literal["weights", "all"] = "weights",
        normalize_gradients: bool = False,
        quantize_gradients: bool | None = None,
        one_dim: Literal["previous", "float"] | None = None,
        master_init: Literal["float", "quantized"] = "float",
        nonfinite: Literal["raise", "skip"] = "raise",
        seed: int = 0,
    ) -> None:
        check_policy(policy)
        if quantize_gradients is None:
            quantize_gradients = policy.quantizes_gradients
        options = {
            "l1": l1,
            "l1_params": l1_params,
            "normalize_gradients": normalize_gradients,
            "quantize_gradients": quantize_gradients,
            "one_dim": policy.one_dim if one_dim is None else one_dim,
            "master_init": master_init,
            "nonfinite": nonfinite,
            "seed": seed,
            **policy.settings(),
        }
        _check_wrapped(optimizer, options)
        self.optimizer = optimizer
        self._masters: dict[Tensor, Tensor] = {}  # as the wrapped optimizer sees them
        super().__init__(optimizer.param_groups, {**optimizer.defaults, **options}, policy)
        own = ((self._masters.get(p, p), s) for p, s in optimizer.state.items())
        optimizer.state = defaultdict(dict, own)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to both optimizers, and quantise them."""
        is_new = all(group is not param_group for group in self.optimizer.param_groups)
        if is_new:
            self.optimizer.add_param_group(param_group)
        try:
            super().add_param_group(param_group)
        except (TypeError, ValueError):
            if is_new:
                self.optimizer.param_groups.pop()
            raise

    def _initialise(self, group: dict[str, Any]) -> None:
        super()._initialise(group)
        self._show_masters(group["params"])

    def _show_masters(self, params: Iterable[Tensor]) -> None:
        shards = self._layout.shards
        self._masters |= {p: shards[p].outer(self.state[p]["master"]) for p in params}

    def state_dict(self) -> dict[str, Any]:
        """Return everything that decides the future; ``"optimizer"`` is the wrapped one's state."""
        packed = super().state_dict()
        with self._on_masters():
            packed["optimizer"] = self.optimizer.state_dict()
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See ``marvin.MSGD``: tensors keep their dtypes, the model's weights are not touched."""
        self._saved_states(state_dict)
        if "optimizer" not in state_dict:
            raise ValueError("the state must be Quantized's own, got one of MSGD")
        super().load_state_dict(state_dict)
        self._show_masters(self._layout.names)
        with self._on_masters():
            self.optimizer.load_state_dict(self._spread(state_dict["optimizer"]))
        self.__setstate__({"param_groups": list(self.optimizer.param_groups)})

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "optimizer": self.optimizer,
            "_masters": self._masters,
        }

    def _update(self, batches: Sequence[Gradients]) -> None:
        """Do one step of the wrapped optimizer on the masters."""
        with self._on_masters():
            masters = [self._masters[p] for batch in batches for p in batch.params]
            grads = [
                shard.outer(grad)
                for batch in batches
                for shard, grad in zip(batch.shards, batch.values, strict=True)
            ]
            for master, grad in zip(masters, grads, strict=True):
                master.grad = grad
            try:
                self.optimizer.step()
            finally:
                for master in masters:
                    master.grad = None

    def _spread(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the wrapped optimizer's state, its tensors as spread as the parameters are."""
        states = dict(state_dict["state"])
        for index, shard in enumerate(self._layout.shards.values()):
            if index in states:
                states[index] = {
                    name: shard.outer(shard.held(value))
                    if isinstance(value, Tensor) and value.shape == shard.shape
                    else value
                    for name, value in states[index].items()
                }
        return {**state_dict, "state": states}

    @contextmanager
    def _on_masters(self) -> Iterator[None]:
        """Let the wrapped optimizer's groups hold the masters in the parameters' place."""
        params = [group["params"] for group in self.param_groups]
        for group, own in zip(self.optimizer.param_groups, params, strict=True):
            group["params"] = [self._masters[p] for p in own]
        try:
            yield
        finally:
            for group, own in zip(self.optimizer.param_groups, params, strict=True):
                group["params"] = own


def _check_wrapped(optimizer: Optimizer, options: dict[str, Any]) -> None:
    if isinstance(optimizer, QuantizingOptimizer):
        raise TypeError(f"Quantized needs a float optimizer, got {type(optimizer).__name__}")
    if not isinstance(optimizer, Optimizer):
        got = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
        raise TypeError(
            "Quantized needs an optimizer that was made of the model's parameters, such as "
            f"torch.optim.SGD(model.named_parameters(), lr=0.1), got {got}"
        )
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"Quantized needs an optimizer whose step needs no closure, "
            f"got {type(optimizer).__name__}"
        )
    if clash := sorted(set(optimizer.defaults) & set(options)):
        raise ValueError(
            f"{type(optimizer).__name__} must have no hyper-parameter of Quantized's or its "
            f"policy's, got {', '.join(clash)}"
        )
