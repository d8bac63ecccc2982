"""MSGD: SGD with momentum on the masters of fixed-point weights, with the paper's policy."""

from dataclasses import fields
from typing import Literal

from torch import Tensor
from torch.optim.optimizer import ParamsT

from marvin.policies import push_down, push_up
from marvin.policies.adaptation import LookbackRounding
from marvin.policies.marvin import MarvinPolicy
from marvin.policies.push_up import Level
from marvin.quantized import Quantized
from marvin.refused import check_params
from marvin.settings import SGD as SGD_CHECKS
from marvin.settings import Group, check_settings
from marvin.sgd import SGD

__all__ = ["MSGD"]


class MSGD(Quantized):
    """Stochastic gradient descent on fixed-point weights, with a format for every layer.

    A *layer* is a parameter with two or more dimensions. The parameters of the model hold
    quantised values; the optimizer's state holds their float32 masters. A step

    1. normalises each gradient, adds it to its layer's window, and adapts the window's length
       (lookback) and the histograms' resolution to the gradients' diversity;
    2. where a window is full: PushDown finds the smallest format that keeps the distribution of
       the master, PushUp raises it by what the diversity and the strategy ask for, and the window
       starts anew;
    3. updates the masters by SGD with momentum and weight decay, and writes them to the model,
       rounded stochastically to their layer's format.

    ``step`` takes a closure, ``loss=``, or nothing; without a loss the adaptive strategy stays at
    its start, ``"min"``. The constructor quantises the model: load weights first, or call
    ``adopt_weights`` after.

    Args:
        params: Parameters, named parameters (``model.named_parameters()`` gives a readable trace)
            or groups, float32, bfloat16 or float16. A group may set any argument below.
        lr: Learning rate. With normalised gradients, a step moves each tensor by up to
            ``lr / (1 - momentum)``.
        momentum: Of SGD, 0 to below 1.
        weight_decay: L2: this times the master is added after normalisation.
        l1: L1: this times the sign of the quantised weight is added to the gradient before
            normalisation, and the penalty to the strategy's loss.
        l1_params: L1 applies to ``"weights"`` (layers) or ``"all"``.
        init_wl: Word length before the first switch, bits.
        init_fl: Fractional length before the first switch, bits.
        max_wl: Longest word, bits.
        min_fl: Lower end of PushDown's search, bits.
        buffer_bits: A word is at least so much longer than its fractional part. Weights and
            quantised activations reach ``2**(buffer_bits - 1)``.
        resolution: Bounds of the histograms' number of bins.
        lookback: Bounds of the window, in steps.
        lookback_momentum: Weight of the newest lookback.
        lookback_rounding: ``"ceil"``, or ``"nearest"``, which can reach the lower bound.
        strategy: ``"adaptive"``, or ``"min"``, ``"mean"`` or ``"max"`` throughout.
        strategy_loss: The adaptive strategy compares the ``"last"`` loss, or the mean of a
            ``"short"`` window (the least of the lookbacks' lower bounds).
        strategy_margin: The strategy goes up only if the loss is above the average before by this
            share of its size.
        kl_eps: PushDown's tolerance in nats, or ``"noise"``: ``(resolution - 1) / (2 n)``.
        kl_smoothing: Added to each count of a histogram.
        kl_direction: ``"pq"``: KL(quantised, float); ``"qp"``: the reverse.
        kl_counts: ``"expected"``: counts expected from stochastic rounding, exact and without
            noise; ``"sampled"``: one draw.
        pushdown_range: PushDown searches below the ``"current"`` format, or the ``"full"`` range.
        pushup: Which reading of the paper's suggestions, ``"adapt"`` or ``"marvin"``.
        normalize_gradients: Divide each parameter's gradient by its 2-norm.
        quantize_gradients: Round gradients stochastically to their layer's format first.
        one_dim: Parameters with fewer dimensions take the format of the layer in their module,
            else of the one before (``"previous"``), or stay ``"float"``.
        master_init: Masters start from the ``"float"`` weights or the ``"quantized"`` ones.
        symmetric: Leave out each format's smallest code.
        nonfinite: A loss, gradient or changed weight that is not finite will ``"raise"``, or ``"skip"`` the step.
        compact_state: Keep masters in 16 bits, and momenta and windows in 8, for layers of 64 or
            more numbers a row (``shape[1:]``); see ``fixedpoint_kernels.compact``. 4 bytes a
            parameter in place of 12.
        seed: Of the rounding noise; torch's generators are not used. Two optimizers with one seed
            draw the same noise: give each its own.

    Raises:
        TypeError: A parameter is not float32, bfloat16 or float16; ``params`` is a model.
        ValueError: An argument is out of range.
        FloatingPointError: In ``step``, before anything has changed: see ``nonfinite``.

    Examples:
        >>> optimizer = marvin.MSGD(model.named_parameters(), lr=0.1)
        >>> for x, y in batches:
        ...     optimizer.zero_grad()
        ...     loss = criterion(model(x), y)
        ...     loss.backward()
        ...     optimizer.step(loss=loss)
        >>> optimizer.formats()["conv1.weight"]
        FixedPoint(wl=14, fl=10, symmetric=False)

    Source:
        MARViN, Algorithms 1 to 4. Differs where the paper contradicts itself; each function this
        class calls says how.
    """

    def __init__(  # noqa: PLR0913  every hyper-parameter is an argument, as in torch.optim
        self,
        params: ParamsT,
        lr: float | Tensor = 0.05,
        *,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        l1: float = 0.0,
        l1_params: Literal["weights", "all"] = "weights",
        init_wl: int = 8,
        init_fl: int = 4,
        max_wl: int = 32,
        min_fl: int = 4,
        buffer_bits: int = 4,
        resolution: tuple[int, int] = (50, 150),
        lookback: tuple[int, int] = (25, 100),
        lookback_momentum: float = 0.9,
        lookback_rounding: LookbackRounding = "ceil",
        strategy: Literal["adaptive"] | Level = "adaptive",
        strategy_loss: Literal["last", "short"] = "last",
        strategy_margin: float = 0.0,
        kl_eps: float | Literal["noise"] = 0.01,
        kl_smoothing: float = 0.5,
        kl_direction: push_down.Direction = "pq",
        kl_counts: Literal["expected", "sampled"] = "expected",
        pushdown_range: Literal["current", "full"] = "current",
        pushup: push_up.PushUp = "adapt",
        normalize_gradients: bool = True,
        quantize_gradients: bool = False,
        one_dim: Literal["previous", "float"] = "previous",
        master_init: Literal["float", "quantized"] = "float",
        symmetric: bool = False,
        nonfinite: Literal["raise", "skip"] = "raise",
        compact_state: bool = False,
        seed: int = 0,
    ) -> None:
        check_params(params, "MSGD(model.named_parameters())")
        own = {k: v for k, v in locals().items() if k not in ("self", "params", "__class__")}
        check_settings(own, SGD_CHECKS)
        names = {f.name for f in fields(MarvinPolicy)}
        policy = MarvinPolicy(**{k: v for k, v in own.items() if k in names})
        sgd = {name: own[name] for name in ("lr", "momentum", "weight_decay")}
        rest = {k: v for k, v in own.items() if k not in names and k not in sgd}
        super().__init__(SGD(params, **sgd, foreach=True), policy, **rest)

    @property
    def strategy(self) -> Level:
        """The level at which the adaptive strategy stands."""
        return self.shared.level

    def _check(self, group: Group) -> None:
        check_settings(group, SGD_CHECKS)
        super()._check(group)
