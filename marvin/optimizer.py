"""The optimizer: state and order of events; the arithmetic lives in the modules it calls."""

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from fixedpoint_kernels import FixedPoint, quantize_many
from marvin import push_down, push_up
from marvin.adaptation import LayerState, LookbackRounding, observe
from marvin.gradients import Gradients, gather, nonfinite, read
from marvin.layers import is_layer, layout_of
from marvin.noise import Purpose, stream
from marvin.policy import switch_format
from marvin.progress import Progress
from marvin.push_up import Level
from marvin.settings import check_dtypes, check_settings
from marvin.trace import Switch

__all__ = ["MSGD"]


class MSGD(Optimizer):
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
        lr: Learning rate. With normalised gradients, a step moves each tensor by ``lr``.
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
            ``"short"`` window (the lookback's lower bound).
        strategy_margin: The strategy goes up only if the loss is above ``1 + strategy_margin``
            times the average before.
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
        nonfinite: A loss or gradient that is not finite will ``"raise"``, or ``"skip"`` the step.
        seed: Of the rounding noise; torch's generators are not used.

    Raises:
        TypeError: A parameter is not float32, bfloat16 or float16.
        ValueError: An argument is out of range.
        FloatingPointError: In ``step``, before anything has changed: see ``nonfinite``.

    Example:
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
        seed: int = 0,
    ) -> None:
        defaults = {k: v for k, v in locals().items() if k not in ("self", "params", "__class__")}
        self.trace: list[Switch] = []
        self._progress = Progress()
        super().__init__(params, defaults)

    def formats(self) -> dict[str, FixedPoint]:
        """Return the format of every quantised parameter, in parameter order.

        Keys are names, or positions (``"0"``, ``"1"``, ...) where the parameters have none.
        """
        found = ((name, self.format_of(p)) for p, name in self._layout.names.items())
        return {name: fmt for name, fmt in found if fmt is not None}

    def format_of(self, parameter: Tensor) -> FixedPoint | None:
        """Return the format of one parameter; None if it stays float."""
        owner = self._layout.owners[parameter]
        return None if owner is None else self.state[owner]["layer"].fmt

    def __contains__(self, parameter: object) -> bool:
        """Say whether ``parameter`` is one of this optimizer's."""
        return parameter in self._layout.owners

    def activation_noise(self) -> tuple[int, int]:
        """Return seed and stream for one more rounding of activations in training."""
        self._progress.forwards += 1
        return self._seed, stream(Purpose.ACTIVATIONS, self._progress.forwards)

    def layers(self) -> list[str]:
        """Return the names of the parameters that have a format of their own."""
        return [name for p, name in self._layout.names.items() if is_layer(p)]

    def mean_word_length(self) -> float:
        """Return the mean word length over the layers, in bits; NaN without layers."""
        lengths = [state["layer"].fmt.wl for state in self.state.values() if "layer" in state]
        return sum(lengths) / len(lengths) if lengths else math.nan

    @property
    def strategy(self) -> Level:
        """The level at which the adaptive strategy stands."""
        return self._progress.level

    @property
    def skipped_steps(self) -> int:
        """How many steps ``nonfinite="skip"`` has left out."""
        return self._progress.skipped

    @torch.no_grad()
    def adopt_weights(self) -> None:
        """Take the model's weights as the new masters, and quantise the model again.

        Call this after changing the model's weights behind the optimizer's back. Formats,
        momentum and windows stay.
        """
        params = list(self._layout.names)
        for p in params:
            self.state[p]["master"].copy_(p)
        self._write_back(params, Purpose.INITIAL)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, and quantise them; see ``torch.optim.Optimizer.add_param_group``."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            check_settings(group)
            check_dtypes(group["params"])
            self._layout = layout_of(self.param_groups)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        self._initialise(group)

    @torch.no_grad()
    def step(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        closure: Callable[[], float | Tensor] | None = None,
        *,
        loss: float | Tensor | None = None,
    ) -> float | Tensor | None:
        """Do one update.

        Args:
            closure: Evaluates the model, backpropagates and returns the loss.
            loss: The loss of this step, where there is no closure: with gradient accumulation,
                the mean over the micro-batches.

        Returns:
            The loss, as it came.

        Raises:
            FloatingPointError: The loss or a gradient is not finite.
            RuntimeError: A gradient is sparse.
        """
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batches = self._gather()
        if not batches:
            return loss
        total, norms, sum_norms = read(batches, loss)
        if wrong := nonfinite(batches, total, norms, self._layout.names):
            self._leave_out(wrong)
            return loss
        self._progress.step += 1
        self._adapt_strategy(total)
        switched = set()
        for batch, norm, sum_norm in zip(batches, norms, sum_norms, strict=True):
            switched |= self._adapt(batch, norm, sum_norm)
            self._update(batch)
        owners = self._layout.owners.items()
        written = [p for p, owner in owners if p.grad is not None or owner in switched]
        self._write_back(written, Purpose.WEIGHTS)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return everything that decides the future, and the trace, as plain values."""
        packed = super().state_dict()
        packed["state"] = {
            index: {**state, "layer": asdict(state["layer"])} if "layer" in state else state
            for index, state in packed["state"].items()
        }
        packed["marvin"] = {**asdict(self._progress), "trace": [asdict(row) for row in self.trace]}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load, keeping each tensor's own dtype (torch casts them to the parameter's).

        The model's quantised weights are not touched: load them with the model's own state.

        Raises:
            ValueError: ``state_dict`` is not MSGD's, or its parameters differ.
        """
        if "marvin" not in state_dict:
            raise ValueError(f"the state must be MSGD's own, got one with {sorted(state_dict)}")
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        saved = [state_dict["state"].get(index, {}) for index in indices]
        for (p, name), values in zip(self._layout.names.items(), saved, strict=False):
            if (master := values.get("master")) is None or master.shape != p.shape:
                got = "none" if master is None else tuple(master.shape)
                raise ValueError(f"the state of {name} must have shape {tuple(p.shape)}, got {got}")
        super().load_state_dict(state_dict)
        for p, values in zip(self._layout.names, saved, strict=True):
            tensors = {k: v for k, v in values.items() if isinstance(v, Tensor)}
            self.state[p] |= {k: v.detach().to(p.device, copy=True) for k, v in tensors.items()}
            if "layer" in values:
                layer = {**values["layer"], "fmt": FixedPoint(**values["layer"]["fmt"])}
                self.state[p]["layer"] = LayerState(**layer)
        progress = dict(state_dict["marvin"])
        self.trace = [Switch(**row) for row in progress.pop("trace")]
        self._progress = Progress(**{**progress, "losses": list(progress["losses"])})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "trace": self.trace, "_progress": self._progress}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():  # options that an older state lacks
                group.setdefault(name, value)
        self._layout = layout_of(self.param_groups)

    @torch.no_grad()
    def _initialise(self, group: dict[str, Any]) -> None:
        for p in group["params"]:
            state = self.state[p]
            state["master"] = p.detach().to(torch.float32, copy=True)
            state["momentum_buffer"] = torch.zeros_like(state["master"])
            if is_layer(p):
                state["grad_sum"] = torch.zeros_like(state["master"])
                fmt = FixedPoint(group["init_wl"], group["init_fl"], group["symmetric"])
                state["layer"] = LayerState(fmt, group["lookback"][0], group["resolution"][0])
        self._write_back(group["params"], Purpose.INITIAL)
        if group["master_init"] == "quantized":
            for p in group["params"]:
                self.state[p]["master"].copy_(p)

    def _gather(self) -> list[Gradients]:
        gathered = []
        for i, group in enumerate(self.param_groups):
            noise = self._seed, stream(Purpose.GRADIENTS, self._progress.step, i << 12)
            gathered.append(gather(group, self.state, self.format_of, noise))
        return [batch for batch in gathered if batch.params]

    def _leave_out(self, wrong: list[str]) -> None:
        if self.param_groups[0]["nonfinite"] == "raise":
            raise FloatingPointError(
                f"loss and gradients must be finite, got {', '.join(wrong)} after "
                f"{self._progress.step} steps; nothing was changed"
            )
        self._progress.skipped += 1

    def _adapt_strategy(self, loss: float | None) -> None:
        settings = self.param_groups[0]
        if loss is None:
            if self._progress.step == 1 and settings["strategy"] == "adaptive":
                message = "the adaptive strategy needs step(loss=loss); it stays at 'min'"
                warnings.warn(message, stacklevel=4)
            return
        lookbacks = [state["layer"].lookback for state in self.state.values() if "layer" in state]
        self._progress.add_loss(loss, lookbacks, settings)

    def _adapt(
        self, batch: Gradients, norms: Sequence[float], sum_norms: Sequence[float]
    ) -> set[Tensor]:
        """Take the gradients into the windows; return the layers whose window was full."""
        group, switched = batch.group, set()
        for i, window, sum_norm in zip(batch.layers, batch.sums, sum_norms, strict=True):
            p, norm = batch.params[i], norms[i]
            if group["normalize_gradients"]:
                norm = float(norm > 0)
            layer = observe(self.state[p]["layer"], norm, sum_norm, group)
            if layer.is_due:
                layer = self._switch(p, layer)
                window.zero_()
                switched.add(p)
            self.state[p]["layer"], self.state[p]["grad_sum"] = layer, window
        return switched

    def _switch(self, p: Tensor, layer: LayerState) -> LayerState:
        group, step = self._layout.groups[p], self._progress.step
        name = self._layout.names[p]
        level = self._progress.level if group["strategy"] == "adaptive" else group["strategy"]
        noise = (
            self._seed,
            stream(Purpose.PUSH_DOWN, step, list(self._layout.names.values()).index(name)),
        )
        layer, row = switch_format(layer, self.state[p]["master"], group, level, noise)
        self.trace.append(Switch(step=step, layer=name, **row))
        return layer

    def _update(self, batch: Gradients) -> None:
        """Do one step of SGD on the masters; uses up the gradients."""
        group, steps = batch.group, batch.values
        masters = [self.state[p]["master"] for p in batch.params]
        if group["weight_decay"]:
            torch._foreach_add_(steps, masters, alpha=group["weight_decay"])
        if group["momentum"]:
            buffers = [self.state[p]["momentum_buffer"] for p in batch.params]
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, steps)
            steps = buffers
        torch._foreach_add_(masters, steps, alpha=-float(group["lr"]))

    def _write_back(self, params: Sequence[Tensor], purpose: Purpose) -> None:
        """Round the masters of ``params`` into the model, all in one launch."""
        fixed, formats = [], []
        for p in params:
            if fmt := self.format_of(p):
                fixed.append(p)
                formats.append(fmt)
            else:
                p.copy_(self.state[p]["master"])
        quantize_many(
            [self.state[p]["master"] for p in fixed],
            formats,
            seed=self._seed,
            stream=stream(purpose, self._progress.step),
            out=fixed,
        )

    @property
    def _seed(self) -> int:
        return self.param_groups[0]["seed"]
