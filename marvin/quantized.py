"""The one optimizer on float32 masters: its state, and the order of events in a step."""

import inspect
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from fixedpoint_kernels._torch_private import version_of
from marvin import state as states
from marvin.activations import Entry, QuantizedActivations
from marvin.channels import ChannelFormat
from marvin.gradients import Gradients, complete, gather, nonfinite, read
from marvin.layers import is_layer, layout_of
from marvin.model_formats import ModuleFormats
from marvin.noise import Purpose, stream
from marvin.policies.base import Policy, check_policy
from marvin.policies.observer import Inputs, Observer, inputs_of
from marvin.policies.records import ActivationFormats, Layer, Step, Update, restored, word_length
from marvin.policies.trace import Switch
from marvin.ranks import mean_over_ranks
from marvin.rounder import ForwardState
from marvin.rounding import Format, round_many
from marvin.settings import OPTIONS, check_dtypes, check_settings
from marvin.shards import is_sharded, local

__all__ = ["Quantized"]

_OWNERS: WeakValueDictionary[int, "Quantized"] = WeakValueDictionary()  # by id of the parameter


@dataclass
class _Counts:
    """Steps done, and steps left out."""

    step: int = 0
    skipped: int = 0


class Quantized(Optimizer):
    """Let any optimizer train a model whose weights are quantised as a policy decides.

    The wrapped optimizer is built from the model's parameters as always. From then on its step
    works on float32 masters in their place; the model gets the masters, rounded to the formats
    that the policy chooses. A step

    1. lets the policy see the gradients and change formats;
    2. gives the masters the gradients, and calls the wrapped optimizer's ``step``;
    3. writes the masters to the model, rounded.

    Call ``step``, ``zero_grad``, ``state_dict`` and ``load_state_dict`` on this object, not on the
    wrapped one; a learning-rate scheduler may have either. Parameter groups are common to both,
    and hold the hyper-parameters of the policy and those below too: a group may differ.

    A *layer* is a parameter with two or more dimensions. In ``state``, each parameter has its
    ``"master"``, and a layer also the policy's record under ``"layer"`` and the policy's tensors.
    Parameters that do not require a gradient stay as they are, in float, until they do.

    Weights that change between two steps (``load_state_dict`` of a pretrained model, ``zero_()``,
    ``clamp_()`` under ``no_grad``) are the new weights: their masters take the new values, and a
    warning says so once. What is written through ``.data`` nobody can see: then call
    ``adopt_weights()``.

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

    Attributes:
        policy: Decides the formats; ``load_state_dict`` gives it the hyper-parameters of the state.
        shared: What the policy knows that is common to all layers.
        trace: What switched, oldest first.

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
        rules = policy.rules
        if quantize_gradients is None:
            quantize_gradients = rules.quantizes_gradients
        options = {
            "l1": l1,
            "l1_params": l1_params,
            "normalize_gradients": normalize_gradients,
            "quantize_gradients": quantize_gradients,
            "one_dim": rules.one_dim if one_dim is None else one_dim,
            "master_init": master_init,
            "nonfinite": nonfinite,
            "seed": seed,
            **policy.settings(),
        }
        _check_wrapped(optimizer, options)
        self.optimizer, self.policy, self.shared = optimizer, policy, policy.init_shared()
        self.trace: list[Switch] = []
        self.forward_state = ForwardState(seed, rules.activation_rounding)
        self._counts = _Counts()
        self._masters: dict[Tensor, Tensor] = {}  # as the wrapped optimizer sees them
        self._versions: dict[Tensor, int] = {}  # of weights, as they were last written
        self._handles: list[QuantizedActivations] = []
        self._observers: dict[int, Observer] = {}  # by position of the layer
        super().__init__(optimizer.param_groups, {**optimizer.defaults, **options})
        optimizer.state = defaultdict(
            dict,
            {
                self._masters.get(p, p): states.float_masters(own, p) if p in self._masters else own
                for p, own in optimizer.state.items()
            },
        )

    def __contains__(self, parameter: object) -> bool:
        """Say whether ``parameter`` is one of this optimizer's."""
        return parameter in self._layout.owners

    def formats(self) -> dict[str, Format]:
        """Return the format of every quantised parameter, in parameter order.

        Keys are names, or positions (``"0"``, ``"1"``, ...) where the parameters have none.
        """
        found = ((name, self.format_of(p)) for p, name in self._layout.names.items())
        return {name: fmt for name, fmt in found if fmt is not None}

    def format_of(self, parameter: Tensor) -> Format | None:
        """Return the format of one parameter; None if it stays float."""
        owner = self._layout.owners[parameter]
        if owner is None or parameter not in self._masters or "layer" not in self.state[owner]:
            return None
        fmt = self.state[owner]["layer"].fmt
        is_other = owner is not parameter  # whose channels may be others
        return fmt.fmt if is_other and isinstance(fmt, ChannelFormat) else fmt

    def activation_formats(self, parameter: Tensor) -> ActivationFormats | None:
        """Return the formats of activations beside a parameter; None if it stays float."""
        owner = self._layout.owners[parameter]
        if owner is None or owner not in self._masters:
            return None
        return self.policy.activation_formats(self.state[owner]["layer"])

    def layers(self) -> list[str]:
        """Return the names of the parameters that have a format of their own."""
        return [self._layout.names[p] for _, p in self._trained()]

    def mean_word_length(self) -> float:
        """Return the mean word length over the layers, in bits; NaN without layers."""
        return _mean_length(self.state[p]["layer"].fmt for _, p in self._trained())

    def input_formats(self) -> dict[str, Format]:
        """Return the format of each layer's inputs, by the layer's name; without it they are float.

        It holds where ``marvin.quantize_activations`` rounds them.
        """
        found = (
            (self._layout.names[p], self.policy.activation_formats(self.state[p]["layer"]).inputs)
            for _, p in self._trained()
        )
        return {name: fmt for name, fmt in found if fmt is not None}

    def mean_input_word_length(self) -> float:
        """Return the mean word length over ``input_formats``, in bits; NaN where it is empty."""
        return _mean_length(self.input_formats().values())

    @property
    def skipped_steps(self) -> int:
        """How many steps ``nonfinite="skip"`` has left out."""
        return self._counts.skipped

    @property
    def lr_scale(self) -> float:
        """What the policy has multiplied the learning rates by so far."""
        return self.policy.lr_scale_at(self.shared)

    @property
    def should_stop(self) -> bool:
        """Whether the training is over as far as the policy is concerned."""
        return self.policy.should_stop_at(self.shared)

    def carry(self, handle: QuantizedActivations) -> None:
        """Keep the formats of a model up to date; see ``marvin.quantize_activations``."""
        self._handles = [h for h in self._handles if h.is_attached] + [handle]
        self._publish()
        self._observe_next()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to both optimizers, and quantise them."""
        is_new = all(group is not param_group for group in self.optimizer.param_groups)
        if is_new:
            self.optimizer.add_param_group(param_group)
        count = len(self.param_groups)
        try:
            super().add_param_group(param_group)
            self._check(self.param_groups[-1])
            self._layout = layout_of(self.param_groups)
        except (TypeError, ValueError):
            del self.param_groups[count:]
            if is_new:
                self.optimizer.param_groups.pop()
            raise
        self._claim()
        self._begin(self.param_groups[-1]["params"])

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
            RuntimeError: A gradient is sparse, a CUDA graph is being captured, or another
                optimizer was made for the same parameters since.
            TypeError: ``closure`` is a loss.
        """
        self._check_call(closure)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._name_uncalled()
        self._adopt_changed()
        self._begin(p for p in self._layout.names if p.grad is not None)
        batches = self._gather()
        if not batches:
            self._check_loss(loss)
            return loss
        complete(batches, self.state, self.policy, self.shared)
        mean = mean_over_ranks(loss, batches[0].norms.device)
        total, norms, numbers = read(batches, mean)
        if wrong := nonfinite(batches, total, norms, self._layout.names):
            self._leave_out(wrong)
            return loss
        samples = self.policy.samples(self.param_groups[0], self.forward_state.samples)
        seen = inputs_of(self._observers, samples)
        layers = self._layers(_measured(batches, norms, numbers), seen)
        number = self._counts.step + 1
        now = Step(number, self._seed, self.param_groups[0], total, samples)
        update = self.policy.update(self.shared, layers, now)
        self._counts.step = number  # from here on nothing is refused
        self._update(batches)
        self._take(update, [p for batch in batches for p in batch.params])
        self._observe_next()
        return loss

    @torch.no_grad()
    def end_epoch(self) -> None:
        """Tell the policy that an epoch is over.

        ``MarvinPolicy`` and ``FixedPolicy`` do not mind. A policy that owns the learning rate
        changes ``lr`` of every group here.
        """
        self._adopt_changed()
        before = self.lr_scale
        now = Step(self._counts.step, self._seed, self.param_groups[0])
        self._take(self.policy.end_epoch(self.shared, self._layers({}, {}), now), [])
        for group in self.param_groups:
            if self.lr_scale != before:
                group["lr"] = group["lr"] * (self.lr_scale / before)

    @torch.no_grad()
    def adopt_weights(self) -> None:
        """Take the model's weights as the new masters, and quantise the model again.

        Call this after changing the model's weights through ``.data``; other changes are seen.
        Formats, momentum and windows stay.
        """
        for p in self._masters:
            self.state[p]["master"].copy_(local(p))
        self._write(self._masters, Purpose.INITIAL)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that decides the future, and the trace, as plain values.

        ``"optimizer"`` is the wrapped one's state.
        """
        self._adopt_changed()
        packed = super().state_dict()
        shards = list(self._layout.shards.values())
        packed["state"] = {
            index: states.packed(own, shards[index]) for index, own in packed["state"].items()
        }
        packed["marvin"] = {
            "version": states.VERSION,
            **asdict(self._counts),
            "forwards": self.forward_state.forwards,
            "policy": states.packed_policy(self.policy, self.shared),
            "wrapped": type(self.optimizer).__name__,
            "trace": [asdict(row) for row in self.trace],
        }
        with self._on_masters():
            packed["optimizer"] = self.optimizer.state_dict()
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state, its policy's hyper-parameters included.

        The model gets the weights and formats that it had when the state was saved, whether its
        own state is loaded before or after. Tensors keep the dtype that they were saved with
        (torch casts them to the parameter's). Where processes share parameters, tensors of a state
        are spread as these are; a state of whole tensors, as one process has it, loads too.

        States of version 1, which earlier releases saved, load; they leave the model's weights as
        they are: load them with the model's own state.

        Raises:
            ValueError: ``state_dict`` is not of this kind, policy or wrapped optimizer, or its
                parameters differ.
        """
        shapes = [(name, p.shape) for p, name in self._layout.names.items()]
        saved = states.checked(state_dict, self.policy, type(self.optimizer).__name__, shapes)
        common = state_dict["marvin"]
        policy, values = states.policy_of(self.policy, common)
        shared = policy.load_shared(values)
        for p, values in zip(self._layout.names, saved, strict=False):
            if not values and p in self._masters:  # it was frozen, in float
                local(p).copy_(self.state[p]["master"])
        super().load_state_dict(state_dict)
        self.policy, self.shared = policy, shared
        self._load_states(saved)
        self.trace = [Switch(**row) for row in common["trace"]]
        self._counts = _Counts(common["step"], common["skipped"])
        wrapped = states.spread_state(
            states.of_wrapped(state_dict), list(self._layout.shards.values())
        )
        with self._on_masters():
            self.optimizer.load_state_dict(wrapped)
        for index, p in enumerate(self._layout.names):
            own = self.optimizer.state.get(self._masters.get(p, p), {})
            states.kept_dtypes(own, wrapped["state"].get(index, {}))
        self.__setstate__({"param_groups": list(self.optimizer.param_groups)})
        self.forward_state.forwards, self.forward_state.seed = common["forwards"], self._seed
        self._write_as_saved()
        self._publish()
        self._observe_next()

    def __getstate__(self) -> dict[str, Any]:
        names = "optimizer", "policy", "shared", "trace", "forward_state", "_counts", "_masters"
        names += "_versions", "_handles", "_observers"
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}}

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
        self._claim()

    def _check(self, group: dict[str, Any]) -> None:
        """Refuse a parameter group; subclasses add checks of their own."""
        self.policy.check(group)
        check_settings(group, OPTIONS)
        check_dtypes(group["params"], type(self).__name__)
        if not self.policy.rules.takes_shards and any(map(is_sharded, group["params"])):
            raise ValueError(
                f"{type(self.policy).__name__} needs whole parameters, got sharded ones: train on "
                "several processes with DistributedDataParallel"
            )

    def _check_call(self, closure: Any) -> None:
        """Refuse a step that cannot be done."""
        if closure is not None and not callable(closure):
            raise TypeError(
                f"step takes a closure, got {type(closure).__name__}: write step(loss=loss)"
            )
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "step() decides on the host and must be outside of CUDA graphs: "
                "capture forward and backward alone"
            )
        for p, name in self._layout.names.items():
            if _OWNERS.get(id(p), self) is not self:
                raise RuntimeError(
                    f"a parameter must have one optimizer, got another {type(self).__name__} made "
                    f"for {name} since: step that one, and drop this one"
                )

    def _check_loss(self, loss: float | Tensor | None) -> None:
        """Refuse a loss that is not finite where there is no gradient to tell."""
        value = float(loss.detach() if isinstance(loss, Tensor) else loss or 0.0)
        if not math.isfinite(value):
            self._leave_out([f"loss {value}"])

    def _name_uncalled(self) -> None:
        """Warn of weights that have a gradient though their module has never been called."""
        if not self.forward_state.waiting:
            return
        names = {
            entry.rounder.name
            for handle in self._handles
            for entry in handle.entries
            if entry.rounder.name in self.forward_state.waiting
            and any(p.grad is not None for p in entry.module.parameters(recurse=False))
        }
        self.forward_state.waiting -= names
        if names:
            warnings.warn(
                "activations are not rounded where a model uses a weight without calling its "
                f"module: {', '.join(sorted(names))}",
                stacklevel=5,
            )

    def _claim(self) -> None:
        """Be the optimizer of these parameters from now on."""
        _OWNERS.update({id(p): self for p in self._layout.names})

    def _trained(self) -> list[tuple[int, Tensor]]:
        """Return position and weight of each layer that has been trained."""
        return [(index, p) for index, p in self._layout.layers if p in self._masters]

    @torch.no_grad()
    def _begin(self, params: Iterable[Tensor]) -> None:
        """Give masters and records to parameters that are trained from now on, and quantise them."""
        if len(self._masters) == len(self._layout.names):
            return
        new = [p for p in params if p.requires_grad and p not in self._masters]
        if not new:
            return
        for p in new:
            own = self.state[p]
            own["master"] = local(p.detach()).to(torch.float32, copy=True)
            if is_layer(p):
                names = self.policy.rules.tensors
                own |= {name: torch.zeros_like(own["master"]) for name in names}
                own["layer"] = self.policy.init(self._layout.groups[p], self.shared)
        self._show_masters(new)
        self._write(new, Purpose.INITIAL)
        for p in new:
            if self._layout.groups[p]["master_init"] == "quantized":
                self.state[p]["master"].copy_(local(p))
        self._publish()

    def _show_masters(self, params: Iterable[Tensor]) -> None:
        shards = self._layout.shards
        self._masters |= {p: shards[p].outer(self.state[p]["master"]) for p in params}

    def _gather(self) -> list[Gradients]:
        gathered = []
        for i, group in enumerate(self.param_groups):
            noise = self._seed, stream(Purpose.GRADIENTS, self._counts.step, i << 12)
            gathered.append(gather(group, self._layout.shards, self.format_of, noise))
        return [batch for batch in gathered if batch is not None]

    def _leave_out(self, wrong: list[str]) -> None:
        self._observe_next()
        if self.param_groups[0]["nonfinite"] == "raise":
            raise FloatingPointError(
                f"loss and gradients must be finite, got {', '.join(wrong)} after "
                f"{self._counts.step} steps; nothing was changed"
            )
        self._counts.skipped += 1

    def _layers(
        self,
        measured: Mapping[Tensor, tuple[float, float | None, Mapping[str, Tensor]]],
        inputs: Mapping[int, Inputs],
    ) -> list[Layer]:
        """Return what the policy sees."""
        found, layout = [], self._layout
        for index, p in self._trained():
            if not p.requires_grad:
                continue
            norm, number, tensors = measured.get(p, (None, None, {}))
            own = {name: v for name, v in self.state[p].items() if isinstance(v, Tensor)}
            master = own.pop("master")
            found.append(
                Layer(
                    index=index,
                    name=layout.names[p],
                    settings=layout.groups[p],
                    record=self.state[p]["layer"],
                    tensors={**own, **tensors},
                    master=master,
                    shard=layout.shards[p],
                    norm=norm,
                    measured=number,
                    inputs=inputs.get(index),
                )
            )
        return found

    def _take(self, update: Update, moved: Sequence[Tensor]) -> None:
        """Keep what the policy made of a step; write what moved or has another format."""
        by_index = dict(self._layout.layers)
        for layer in update.layers:
            own = self.state[by_index[layer.index]]
            for name in [name for name, v in own.items() if isinstance(v, Tensor)]:
                if name != "master" and name not in layer.tensors:
                    del own[name]
            own |= layer.tensors
            own["layer"] = layer.record
        self.shared = update.shared
        self.trace += update.switches
        switched = {row.layer for row in update.switches}
        if not switched:
            self._write(moved, Purpose.WEIGHTS)
            return
        names, chosen = self._layout.names, set(moved)
        for p, owner in self._layout.owners.items():
            is_trained = p in self._masters and p.requires_grad
            if is_trained and owner is not None and names[owner] in switched:
                chosen.add(p)
        self._write([p for p in names if p in chosen], Purpose.WEIGHTS)
        self._publish()

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

    @contextmanager
    def _on_masters(self) -> Iterator[None]:
        """Let the wrapped optimizer's groups hold the masters in the parameters' place."""
        params = [group["params"] for group in self.param_groups]
        for group, own in zip(self.optimizer.param_groups, params, strict=True):
            group["params"] = [self._masters.get(p, p) for p in own]
        try:
            yield
        finally:
            for group, own in zip(self.optimizer.param_groups, params, strict=True):
                group["params"] = own

    def _write(self, params: Iterable[Tensor], purpose: Purpose) -> None:
        """Round the masters of ``params`` into the model, all in one launch."""
        fixed, places = [], []
        first = stream(purpose, self._counts.step)
        for p in params:
            own, fmt, place = self.state[p], self.format_of(p), local(p)
            if fmt is None:
                place.copy_(own["master"])
            else:
                own["stream"] = first + len(fixed)
                fixed.append((own["master"], fmt, self._layout.shards[p].offset, place))
            places.append((p, place))
        masters, formats, offsets, out = zip(*fixed, strict=True) if fixed else [()] * 4
        round_many(
            masters,
            formats,
            rounding=self.policy.rules.weight_rounding,
            seed=self._seed,
            stream=first,
            offsets=offsets,
            out=out,
        )
        self._versions |= {p: version_of(place) for p, place in places}

    def _rounded(self, p: Tensor) -> Tensor | None:
        """Return what ``_write`` last wrote; None where that is not known."""
        own, fmt = self.state[p], self.format_of(p)
        if fmt is None:
            return own["master"].to(p.dtype)
        if "stream" not in own:
            return None
        (y,) = round_many(
            [own["master"]],
            [fmt],
            rounding=self.policy.rules.weight_rounding,
            seed=self._seed,
            stream=own["stream"],
            offsets=[self._layout.shards[p].offset],
            out=[torch.empty_like(local(p))],
        )
        return y

    def _write_as_saved(self) -> None:
        """Give the model the weights that it had when the state was saved."""
        for p in self._masters:
            if (weight := self._rounded(p)) is not None:
                local(p).copy_(weight)
        self._versions = {p: version_of(local(p)) for p in self._masters}

    @torch.no_grad()
    def _adopt_changed(self) -> None:
        """Take weights that others have changed since they were written as the new ones."""
        changed = [p for p, version in self._versions.items() if version_of(local(p)) != version]
        adopted = []
        for p in changed:
            own, weight = local(p), self._rounded(p)
            self._versions[p] = version_of(own)
            if weight is not None and (differs := own != weight).any():
                master = self.state[p]["master"]
                master.copy_(torch.where(differs, own.float(), master))
                adopted.append(p)
        if not adopted:
            return
        self._write(adopted, Purpose.WEIGHTS)
        self._publish()
        names = [self._layout.names[p] for p in adopted]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        warnings.warn(
            f"weights changed outside of {type(self).__name__} are the new masters, rounded: "
            f"{', '.join(names[:3])}{more}",
            stacklevel=4,
        )

    def _load_states(self, saved: Sequence[dict[str, Any]]) -> None:
        """Take tensors as they were saved, and records."""
        self._masters = {}
        for p, values in zip(self._layout.names, saved, strict=True):
            if not values:
                self.state.pop(p, None)
                continue
            self.state[p] = {
                name: self._loaded(p, name, value)
                for name, value in values.items()
                if name != "momentum_buffer"  # of earlier versions: the wrapped optimizer has it
            }
            self._show_masters([p])

    def _loaded(self, p: Tensor, name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._layout.shards[p].held(value.detach()).to(p.device, copy=True)
        if name == "layer":
            return restored(self.policy.init(self._layout.groups[p], self.shared), value)
        return value

    def _publish(self) -> None:
        """Let models carry the formats that hold now."""
        for handle in self._handles:
            for entry in handle.entries:
                if entry.is_live:
                    entry.rounder.write(entry.module, self._formats_for(entry, handle))

    def _formats_for(self, entry: Entry, handle: QuantizedActivations) -> ModuleFormats:
        def first(parameters: Iterable[Tensor]) -> ActivationFormats:
            found = (self.activation_formats(p) for p in parameters if p in self)
            return next((formats for formats in found if formats is not None), ActivationFormats())

        takes_samples = entry.rounder.is_root and self.policy.rules.quantizes_input
        own = first(entry.parameters)
        return ModuleFormats(
            inputs=own.inputs,
            outputs=own.outputs,
            gradients=own.gradients,
            samples=first(entry.module.parameters()).outputs if takes_samples else None,
            weights=tuple(
                self.format_of(p) if p in self else None
                for p in entry.module.parameters(recurse=False)
            ),
            ste=handle.ste,
            eval_rounding=handle.eval_rounding,
        )

    def _observe_next(self) -> None:
        """Forget what went forward, and let modules show their inputs if the next step wants that."""
        self.forward_state.samples = 0
        wants = self.policy.rules.observes_inputs and self.policy.observes(
            self._counts.step + 1, self.param_groups[0]
        )
        if not wants and not self._observers:
            return
        self._observers = {}
        for entry in (entry for handle in self._handles for entry in handle.entries):
            own = {id(p) for p in entry.parameters}
            layer = next((index for index, p in self._trained() if id(p) in own), None)
            entry.rounder.observer = None
            if wants and layer is not None:
                entry.rounder.observer = self._observers.setdefault(layer, Observer())

    @property
    def _seed(self) -> int:
        return self.param_groups[0]["seed"]


def _measured(
    batches: Sequence[Gradients],
    norms: Sequence[Sequence[float]],
    numbers: Sequence[Sequence[float]],
) -> dict[Tensor, tuple[float, float | None, Mapping[str, Tensor]]]:
    """Return norm, the policy's number and the policy's tensors of each layer with a gradient."""
    found = {}
    for batch, own_norms, own_numbers in zip(batches, norms, numbers, strict=True):
        for place, i in enumerate(batch.layers):
            number = own_numbers[place] if own_numbers else None
            tensors = {name: values[place] for name, values in batch.measured.tensors.items()}
            found[batch.params[i]] = own_norms[i], number, tensors
    return found


def _mean_length(formats: Iterable[Format | None]) -> float:
    """Return the mean word length, in bits; NaN where there are no formats."""
    lengths = [word_length(fmt) for fmt in formats]
    return sum(lengths) / len(lengths) if lengths else float("nan")


def _check_wrapped(optimizer: Optimizer, options: dict[str, Any]) -> None:
    if isinstance(optimizer, Quantized):
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
