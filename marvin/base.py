"""What fixed-point optimizers share: masters, formats, trace, noise, and the state of it all."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from marvin.channels import ChannelFormat
from marvin.gradients import Gradients, complete, gather, nonfinite, read
from marvin.layers import is_layer, layout_of
from marvin.noise import Purpose, stream
from marvin.policy import ActivationFormats, Layer, Policy, Step, layer_tensors, word_length
from marvin.ranks import mean_over_ranks, rank
from marvin.rounding import Format, round_many
from marvin.settings import OPTIONS, check_dtypes, check_settings
from marvin.shards import Shard, is_sharded, local
from marvin.trace import Switch

__all__ = ["QuantizingOptimizer"]


@dataclass
class _Counts:
    """Steps done, steps left out, and activations rounded in training; they number the noise."""

    step: int = 0
    skipped: int = 0
    forwards: int = 0


class QuantizingOptimizer(Optimizer):
    """An optimizer that updates float32 masters and writes them to the model, rounded.

    ``marvin.MSGD`` and ``marvin.Quantized`` are two of this kind. A *layer* is a parameter with
    two or more dimensions. In ``state``, each parameter has its ``"master"``, and a layer also
    the policy's record under ``"layer"`` and the policy's tensors.

    Args:
        params: As of ``torch.optim.Optimizer``.
        defaults: Hyper-parameters, those of the policy among them.
        policy: Decides the formats.
    """

    def __init__(self, params: ParamsT, defaults: dict[str, Any], policy: Policy) -> None:
        self.policy = policy
        self.trace: list[Switch] = []
        self._counts = _Counts()
        super().__init__(params, defaults)

    @abstractmethod
    def _update(self, batches: Sequence[Gradients]) -> None:
        """Move the masters of the parameters in ``batches``."""

    def _check(self, group: dict[str, Any]) -> None:
        """Refuse a parameter group; subclasses add checks of their own."""
        self.policy.check(group)
        check_settings(group, OPTIONS)
        check_dtypes(group["params"], type(self).__name__)
        if not self.policy.takes_shards and any(map(is_sharded, group["params"])):
            raise ValueError(
                f"{type(self.policy).__name__} needs whole parameters, got sharded ones: train on "
                "several processes with DistributedDataParallel"
            )

    def formats(self) -> dict[str, Format]:
        """Return the format of every quantised parameter, in parameter order.

        Keys are names, or positions (``"0"``, ``"1"``, ...) where the parameters have none.
        """
        found = ((name, self.format_of(p)) for p, name in self._layout.names.items())
        return {name: fmt for name, fmt in found if fmt is not None}

    def format_of(self, parameter: Tensor) -> Format | None:
        """Return the format of one parameter; None if it stays float."""
        owner = self._layout.owners[parameter]
        fmt = None if owner is None else self.state[owner]["layer"].fmt
        is_other = owner is not parameter  # whose channels may be others
        return fmt.fmt if is_other and isinstance(fmt, ChannelFormat) else fmt

    def activation_formats(self, parameter: Tensor) -> ActivationFormats | None:
        """Return the formats of activations beside a parameter; None if it stays float."""
        owner = self._layout.owners[parameter]
        return None if owner is None else self.policy.activation_formats(self.state[owner]["layer"])

    def __contains__(self, parameter: object) -> bool:
        """Say whether ``parameter`` is one of this optimizer's."""
        return parameter in self._layout.owners

    def observed(self, parameters: Iterable[Tensor]) -> int | None:
        """Return the layer as which a module's inputs are to be observed in the coming step.

        Args:
            parameters: Of the module: its first layer counts.

        Returns:
            Position among the optimizer's parameters; None where nobody asks.
        """
        if not self.policy.observes(self._counts.step + 1, self.param_groups[0]):
            return None
        own = {id(p) for p in parameters}
        return next((index for index, p in self._layout.layers if id(p) in own), None)

    def activation_noise(self) -> tuple[int, int]:
        """Return seed and stream for one more rounding of activations, this process's own."""
        self._counts.forwards += 1
        return self._seed, stream(Purpose.ACTIVATIONS, self._counts.forwards, rank())

    def layers(self) -> list[str]:
        """Return the names of the parameters that have a format of their own."""
        return [self._layout.names[p] for _, p in self._layout.layers]

    def mean_word_length(self) -> float:
        """Return the mean word length over the layers, in bits; NaN without layers."""
        return _mean_length(self.state[p]["layer"].fmt for _, p in self._layout.layers)

    def input_formats(self) -> dict[str, Format]:
        """Return the format of each layer's inputs, by the layer's name; without it they are float.

        It holds where ``marvin.quantize_activations`` rounds them.
        """
        found = (
            (self._layout.names[p], self.policy.activation_formats(self.state[p]["layer"]).inputs)
            for _, p in self._layout.layers
        )
        return {name: fmt for name, fmt in found if fmt is not None}

    def mean_input_word_length(self) -> float:
        """Return the mean word length over ``input_formats``, in bits; NaN where it is empty."""
        return _mean_length(self.input_formats().values())

    @property
    def skipped_steps(self) -> int:
        """How many steps ``nonfinite="skip"`` has left out."""
        return self._counts.skipped

    @torch.no_grad()
    def adopt_weights(self) -> None:
        """Take the model's weights as the new masters, and quantise the model again.

        Call this after changing the model's weights behind the optimizer's back. Formats,
        momentum and windows stay.
        """
        params = list(self._layout.names)
        for p in params:
            self.state[p]["master"].copy_(local(p))
        self._write_back(params, Purpose.INITIAL)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, and quantise them; see ``torch.optim.Optimizer.add_param_group``."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check(group)
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
                the mean over the micro-batches. Of several processes (DistributedDataParallel)
                each gives its own; all decide by the mean.

        Returns:
            The loss, as it came.

        Raises:
            FloatingPointError: The loss or a gradient is not finite.
            TypeError: ``closure`` is no function: a loss goes by its name.
            RuntimeError: A gradient is sparse, or a CUDA graph is being captured.
        """
        if closure is not None and not callable(closure):
            raise TypeError(
                f"step takes a closure, got {type(closure).__name__}: write step(loss=loss)"
            )
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "step() decides on the host and must be outside of CUDA graphs: "
                "capture forward and backward alone"
            )
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batches = self._gather()
        if not batches:
            value = float(loss.detach() if isinstance(loss, Tensor) else loss or 0.0)
            if not math.isfinite(value):
                self._leave_out([f"loss {value}"])
            return loss
        complete(batches, self.state, self.policy)
        mean = mean_over_ranks(loss, batches[0].norms.device)
        total, norms, numbers = read(batches, mean)
        if wrong := nonfinite(batches, total, norms, self._layout.names):
            self._leave_out(wrong)
            return loss
        self._counts.step += 1
        layers = self._layers()
        for batch, batch_norms, batch_numbers in zip(batches, norms, numbers, strict=True):
            _hand_over(batch, batch_norms, batch_numbers, layers)
        rows = self.policy.on_step(list(layers.values()), self._now(total))
        self._update(batches)
        self._record(rows, stepped=True)
        return loss

    @torch.no_grad()
    def end_epoch(self) -> None:
        """Tell the policy that an epoch is over.

        ``MarvinPolicy`` and ``FixedPolicy`` do not mind. A policy that owns the learning rate
        changes ``lr`` of every group here.
        """
        before = self.policy.lr_scale
        rows = self.policy.on_epoch_end(list(self._layers().values()), self._now(None))
        self._record(rows, stepped=False)
        for group in self.param_groups:
            if self.policy.lr_scale != before:
                group["lr"] = group["lr"] * (self.policy.lr_scale / before)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that decides the future, and the trace, as plain values."""
        packed = super().state_dict()
        shards = list(self._layout.shards.values())
        packed["state"] = {
            index: _packed(state, shards[index]) for index, state in packed["state"].items()
        }
        packed["marvin"] = {
            **asdict(self._counts),
            **self.policy.state_dict(),
            "policy": type(self.policy).__name__,
            "trace": [asdict(row) for row in self.trace],
        }
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load, keeping each tensor's own dtype (torch casts them to the parameter's).

        The model's quantised weights are not touched: load them with the model's own state. Where
        processes share parameters, tensors of a state are spread as these are; a state of whole
        tensors, as one process has it, loads too.

        Raises:
            ValueError: ``state_dict`` is not of this kind or policy, or its parameters differ.
        """
        saved = self._saved_states(state_dict)
        super().load_state_dict(state_dict)
        for p, values in zip(self._layout.names, saved, strict=True):
            tensors = {k: v for k, v in values.items() if isinstance(v, Tensor)}
            held = {name: self._layout.shards[p].held(v.detach()) for name, v in tensors.items()}
            self.state[p] |= {name: v.to(p.device, copy=True) for name, v in held.items()}
            if "layer" in values:
                self.state[p]["layer"] = self.policy.load_record(values["layer"])
        common = state_dict["marvin"]
        self.trace = [Switch(**row) for row in common["trace"]]
        self._counts = _Counts(*(common[name] for name in ("step", "skipped", "forwards")))
        self.policy.load_state_dict(common)

    def _saved_states(self, state_dict: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the saved state of each parameter, in parameter order, after checking it."""
        kind = type(self).__name__
        if "marvin" not in state_dict:
            raise ValueError(f"the state must be {kind}'s own, got one with {sorted(state_dict)}")
        policy = state_dict["marvin"].get("policy", "MarvinPolicy")  # older states name none
        if policy != type(self.policy).__name__:
            raise ValueError(f"the state must be of {type(self.policy).__name__}, got {policy}")
        indices = [index for group in state_dict["param_groups"] for index in group["params"]]
        saved = [state_dict["state"].get(index, {}) for index in indices]
        for (p, name), values in zip(self._layout.names.items(), saved, strict=False):
            if (master := values.get("master")) is None or master.shape != p.shape:
                got = "none" if master is None else tuple(master.shape)
                raise ValueError(f"the state of {name} must have shape {tuple(p.shape)}, got {got}")
        return saved

    def __getstate__(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in ("policy", "trace", "_counts")}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = dict(state.get("defaults", self.__dict__.get("defaults", {})))
        super().__setstate__(state)
        self.defaults = own  # torch adds "differentiable": then only loaded states would have it
        for group in self.param_groups:
            if "differentiable" not in own:  # which earlier versions saved
                group.pop("differentiable", None)
            for name, value in own.items():  # options that an older state lacks
                group.setdefault(name, value)
        self._layout = layout_of(self.param_groups)

    @torch.no_grad()
    def _initialise(self, group: dict[str, Any]) -> None:
        for p in group["params"]:
            state = self.state[p]
            state["master"] = local(p.detach()).to(torch.float32, copy=True)
            if is_layer(p):
                state |= layer_tensors(self.policy.tensors, state["master"])
                state["layer"] = self.policy.start(group)
        self._write_back(group["params"], Purpose.INITIAL)
        if group["master_init"] == "quantized":
            for p in group["params"]:
                self.state[p]["master"].copy_(local(p))

    def _gather(self) -> list[Gradients]:
        gathered = []
        for i, group in enumerate(self.param_groups):
            noise = self._seed, stream(Purpose.GRADIENTS, self._counts.step, i << 12)
            gathered.append(gather(group, self._layout.shards, self.format_of, noise))
        return [batch for batch in gathered if batch is not None]

    def _leave_out(self, wrong: list[str]) -> None:
        self.policy.on_skip()
        if self.param_groups[0]["nonfinite"] == "raise":
            raise FloatingPointError(
                f"loss and gradients must be finite, got {', '.join(wrong)} after "
                f"{self._counts.step} steps; nothing was changed"
            )
        self._counts.skipped += 1

    def _layers(self) -> dict[Tensor, Layer]:
        layout = self._layout
        return {
            p: Layer(index, layout.names[p], layout.groups[p], self.state[p], layout.shards[p])
            for index, p in layout.layers
        }

    def _now(self, loss: float | None) -> Step:
        return Step(self._counts.step, self._seed, self.param_groups[0], loss)

    def _record(self, rows: Sequence[Switch], *, stepped: bool) -> None:
        """Keep the trace, and write what was moved or has another format into the model."""
        self.trace += rows
        switched = {row.layer for row in rows}
        names = self._layout.names
        written = [
            p
            for p, owner in self._layout.owners.items()
            if (stepped and p.grad is not None)
            or (switched and owner is not None and names[owner] in switched)
        ]
        self._write_back(written, Purpose.WEIGHTS)

    def _write_back(self, params: Sequence[Tensor], purpose: Purpose) -> None:
        """Round the masters of ``params`` into the model, all in one launch."""
        fixed, formats = [], []
        for p in params:
            if fmt := self.format_of(p):
                fixed.append(p)
                formats.append(fmt)
            else:
                local(p).copy_(self.state[p]["master"])
        round_many(
            [self.state[p]["master"] for p in fixed],
            formats,
            rounding=self.policy.weight_rounding,
            seed=self._seed,
            stream=stream(purpose, self._counts.step),
            offsets=[self._layout.shards[p].offset for p in fixed],
            out=[local(p) for p in fixed],
        )

    @property
    def _seed(self) -> int:
        return self.param_groups[0]["seed"]


def _hand_over(
    batch: Gradients,
    norms: Sequence[float],
    numbers: Sequence[float],
    layers: dict[Tensor, Layer],
) -> None:
    """Give each layer of a group what was measured: the step is known to be finite now."""
    own = [layers[batch.params[i]] for i in batch.layers]
    for place, layer in zip(batch.layers, own, strict=True):
        layer.norm = norms[place]
    for layer, number in zip(own, numbers, strict=bool(numbers)):
        layer.measured = number
    for name, tensors in batch.measured.tensors.items():
        for layer, tensor in zip(own, tensors, strict=True):
            layer.state[name] = tensor


def _packed(state: dict[str, Any], shard: Shard) -> dict[str, Any]:
    """Return one parameter's state as plain values, and tensors as spread as the parameter."""
    outer = {name: shard.outer(v) for name, v in state.items() if isinstance(v, Tensor)}
    return {**state, **outer, **({"layer": asdict(state["layer"])} if "layer" in state else {})}


def _mean_length(formats: Iterable[Format | None]) -> float:
    """Return the mean word length, in bits; NaN where there are no formats."""
    lengths = [word_length(fmt) for fmt in formats]
    return sum(lengths) / len(lengths) if lengths else float("nan")
