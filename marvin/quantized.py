"""The one optimizer on float32 masters: the order of events in a step."""

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from threading import RLock
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fixedpoint_kernels._torch_private.compiling import left_uncompiled
from fixedpoint_kernels._torch_private.optimizers import AskedByScaler, without_global_step_hooks
from fixedpoint_kernels.compact import Sum
from fixedpoint_kernels.philox import Key
from fixedpoint_kernels.undo import all_or_nothing
from marvin import state as states
from marvin.activations import QuantizedActivations
from marvin.carriers import Carriers
from marvin.compact import CompactMember, in_float, is_compact, master_of, put_tensors, tensors_of
from marvin.compact_moves import moves_of_compact
from marvin.gradients import Gradients, by_layer, complete, gather, nonfinite, read
from marvin.inner_optimizer import check_mode, check_step, check_wrapped, closure_needed, guard_step
from marvin.masters import Counts
from marvin.noise import Purpose, stream
from marvin.overview import ShowsFormats
from marvin.owners import check_owner, claim
from marvin.plans import Plans
from marvin.policies.base import (
    Policy,
    check_lr_scale,
    check_policy,
    check_shared,
    completed,
)
from marvin.policies.observer import Inputs, Sums, inputs_of
from marvin.policies.records import Layer, Step, Update
from marvin.policies.trace import Switch, merged
from marvin.ranks import ALONE, Processes, is_distributed, processes_of
from marvin.refused import check_dtypes, check_loss
from marvin.rounder import ForwardState, Samples
from marvin.sgd import keep_momenta, moves_of
from marvin.shards import Shard, laid_as, local
from marvin.turns import in_turn
from marvin.warned import listed, warn_user
from marvin.wrappers import for_wrappers, unwrapped

__all__ = ["Quantized"]

_ATTRIBUTES = (
    "defaults",
    "param_groups",
    "policy",
    "process_group",
    "shared",
    "state",
    "stored",
    "trace",
)
"""Of an optimizer, also where a wrapper's are set; see ``marvin.wrappers``."""

_IDLE = 10  # steps without a gradient of which a warning tells
_LOOK = 100  # steps between two looks at what is clamped


@for_wrappers
class Quantized(ShowsFormats, AskedByScaler):
    """Let any optimizer train a model whose weights are quantised as a policy decides.

    The wrapped optimizer is built from the model's parameters as always. From then on its step
    works on float32 masters in their place; the model gets the masters, rounded to the formats
    that the policy chooses. A step

    1. lets the policy see the gradients and change formats;
    2. gives the masters the gradients, and calls the wrapped optimizer's ``step``;
    3. writes the masters to the model, rounded.

    Call ``step``, ``zero_grad``, ``state_dict`` and ``load_state_dict`` on this object, not on the
    wrapped one, which refuses all but ``zero_grad`` now; a state that it saved alone, in float32, is loaded before.
    A learning-rate scheduler may have either. Parameter groups are common to both,
    and hold the hyper-parameters of the policy and those below too: a group may differ.

    Of optimizers that evaluate other weights than they train (schedule-free ones), call ``train`` and
    ``eval`` of this object.

    A *layer* is a parameter with two or more dimensions. In ``state``, each parameter has its
    ``"master"``, and a layer also the policy's record under ``"layer"`` and the policy's tensors.
    Parameters that do not require a gradient stay as they are, in float, until they do.

    Weights that change between two steps (``load_state_dict`` of a pretrained model, ``zero_()``,
    ``clamp_()`` under ``no_grad``) are the new weights: their masters take the new values, and a
    warning names each once. So are those that got other memory (``weight.data = x``). What is written
    into ``weight.data`` before the first step is seen, too; later it is lost: call ``adopt_weights()``
    after. The second step and every 100th look for it, and warn once.

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
        compact_state: As of ``marvin.MSGD``; moments of torch's optimizers are kept in 8 bits.
        seed: Of the rounding noise. Two optimizers with one seed draw the same noise: give each its
            own.

    Attributes:
        policy: Decides the formats; ``load_state_dict`` gives it the hyper-parameters of the state.
        process_group: The processes that train this model together, for who averages gradients by hand:
            set it to ``torch.distributed.group.WORLD``, say. None, as at first: that of
            ``DistributedDataParallel`` or ``fully_shard``; without these, this process trains alone.
            Copies and states do not have it.
        shared: What the policy knows that is common to all layers.
        trace: What switched, oldest first.

    Raises:
        TypeError: A parameter is not float32, bfloat16 or float16; ``optimizer`` is no optimizer,
            or fixed-point already; ``policy`` is no policy.
        ValueError: An argument is out of range; ``optimizer`` needs a closure, has a state of
            another kind than torch's, a hyper-parameter of the same name as one of these, or
            another ``Quantized`` has it.
        FloatingPointError: In ``step``, before anything has changed: see ``nonfinite``.

    Examples:
        >>> adamw = torch.optim.AdamW(model.named_parameters(), lr=1e-3)
        >>> optimizer = marvin.Quantized(adamw, marvin.MarvinPolicy(buffer_bits=6))
        >>> optimizer.step(loss=loss)
    """

    process_group: dist.ProcessGroup | None = None
    _processes: Processes | None = None  # that train with this one, once looked for
    _alike: Processes | None = None  # that have compared what they begin with
    _idle = 0  # steps without a gradient
    _set_aside: tuple[dict[int, Sums], Samples] | None = None  # see ``_before_scaled_step``

    @left_uncompiled
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
        compact_state: bool = False,
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
            "compact_state": compact_state,
            "seed": seed,
        }
        check_shared(policy, policy.init_shared())
        check_lr_scale(policy, policy.init_shared(), is_first=True)
        settings = policy.settings()
        if clash := sorted({"params", *options} & settings.keys()):
            raise ValueError(
                f"{type(policy).__name__} must have no hyper-parameter of Quantized's, "
                f"got {', '.join(clash)}: give it another name"
            )
        options |= settings
        options = {k: v.item() if isinstance(v, np.generic) else v for k, v in options.items()}
        if isinstance(optimizer, Quantized):
            raise TypeError(f"Quantized needs a float optimizer, got {type(optimizer).__name__}")
        check_wrapped(optimizer, options)
        self.optimizer, self.policy, self.shared = optimizer, policy, policy.init_shared()
        self.trace: list[Switch] = []
        self.forward_state = ForwardState(seed, rules.activation_rounding)
        self._counts, self._carriers = Counts(), Carriers()
        self._masters, self._marks, self._plans = {}, {}, Plans()
        self._is_made, self._turn = False, RLock()
        made = [*optimizer.param_groups, *optimizer.state.values()]
        with self._taking() as keep, all_or_nothing([optimizer], made):
            super().__init__(optimizer.param_groups, {**optimizer.defaults, **options})
            del self._is_made
            self.forward_state.seed = self._seed  # a group may have one of its own
            self._check_changed()
            params = [*self._layout.names]
            keep(params)
            self._follow(params)
            self._begin(params)  # a bias may come groups before its weight
            self._own_step = guard_step(self, optimizer)
            claim(self)  # nothing refuses any more

    def __setattr__(self, name: str, value: object) -> None:
        """Set an attribute; the policy stays: records and hyper-parameters in the groups are its own."""
        if name in _ATTRIBUTES and (own := unwrapped(self)) is not self:
            setattr(own, name, value)
            return
        if name == "policy" and name in vars(self):
            raise AttributeError(
                f"an optimizer keeps its policy, {type(self.policy).__name__}, got another, "
                f"{type(value).__name__}: make a new optimizer with that, or change a group's "
                'hyper-parameters (optimizer.param_groups[0]["..."] = ...)'
            )
        super().__setattr__(name, value)
        if name == "process_group":
            self._processes = None

    @contextmanager
    def carrying(self, model: nn.Module) -> Iterator[None]:
        """Let this block make a model carry formats; put all back if it raises."""
        with self._carriers.all_or_nothing([self.forward_state, *model.modules()]):
            yield

    def carry(self, handle: QuantizedActivations) -> None:
        """Keep the formats of a model up to date; see ``marvin.quantize_activations``."""
        self._carriers.add(handle)
        self._carriers.publish(self)
        self._observe_next()

    @left_uncompiled
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
            loss: The loss of this step, where there is no closure or it returns None: with gradient
                accumulation, the mean over the micro-batches. Of several processes
                (DistributedDataParallel) each gives its own; all decide by the mean.

        Returns:
            The loss, as it came.

        Raises:
            FloatingPointError: The loss, a gradient or a weight that was changed is not finite; or in the
                second step and every 100th, a master.
            RuntimeError: A gradient is sparse, a CUDA graph is being captured, a model is in ``join()``, another optimizer was
                made for the same parameters since, the wrapped one got parameter groups or is in eval mode, ``state`` lost
                masters, or processes that train together begin with other seeds, masters, settings or formats, or some without a loss.
            TypeError: ``closure`` is a loss, ``loss`` no number, or the model was made float64; or a setting
                of a group must be a number, and was changed to something else.
            ValueError: ``loss`` has more than one element, a parameter has got another shape, or groups
                have other parameters; or the wrapped optimizer needs a closure, or a setting of a group was
                changed to one that is out of range.
        """
        processes = self._ready(closure)
        if closure is not None:
            with torch.enable_grad():
                found = closure()
            loss = loss if found is None else found
            for own in self.stored:  # whose values the forward pass took away
                own.restore()
        check_loss(loss)
        return self._do_step(loss, processes)

    @in_turn
    def _ready(self, closure: object) -> Processes:
        """Refuse a step that cannot be done; return the processes that train together."""
        self._take_back()
        check_step(closure)
        check_mode(self.optimizer)
        self._check_whole()
        return self._find_processes()

    def _check_whole(self) -> None:
        """Refuse to write weights that are no longer this optimizer's, or are not as it was made for."""
        self._check_groups()
        self._check_state()
        check_dtypes(self._layout.names, type(self).__name__)  # model.double() may have come since
        check_owner(self)

    @in_turn
    def _do_step(self, loss: float | Tensor | None, processes: Processes) -> float | Tensor | None:
        """Do one update where gradients and loss are there; see ``step``."""
        broken = self._take_in(processes, has_loss=loss is not None)

        # what the gradients tell; nothing is changed yet
        batches = self._gather()
        if not batches:
            self._carriers.publish(self)  # which names parameters that left a model
            self._check_loss(loss, broken)
            self._name_idle()
            return loss
        complete(batches, self.policy, self.shared, self._noise(self._counts.step + 1))
        told = math.nan if broken and loss is not None else loss  # to the other processes
        mean = processes.mean(told, batches[0].norms.device)
        total, norms, numbers = read(batches, mean)
        if wrong := broken or nonfinite(batches, total, norms, self._layout.names):
            self._leave_out(wrong)
            return loss

        # what the policy makes of it
        samples = self.policy.samples(self.param_groups[0], self.forward_state.counted)
        seen = inputs_of(self._carriers.observers, samples, batches[0].norms.device, processes)
        layers, others = self._layers(by_layer(batches, norms, numbers), seen)
        number = self._counts.step + 1
        settings = self.param_groups[0]
        now = Step(number, self._seed, settings, total, samples, others, processes)
        update = self.policy.update(self.shared, layers, now)
        update = self._completed(update, layers, number)

        self._commit(batches, update, now)
        is_dead = number == 1 and not any(map(any, norms))
        if is_dead or number % _LOOK == 0:
            self._carriers.name_clamped(self.param_groups[0], is_dead=is_dead)
        follows = self.policy.rules.observes_inputs  # the ranges: after its first steps, too
        if number % _LOOK == 0 or (number == 1 and not follows):
            self._name_runaways()
        return loss

    def _take_in(self, processes: Processes, *, has_loss: bool) -> list[str]:
        """Take in what others changed since the last step; return what is said of weights that are not finite."""
        self._name_modules(processes)
        looks = self._counts.step == 1 or self._counts.step % _LOOK == _LOOK - 1
        if looks:
            self._name_unseen()
        broken = self._adopt_changed() + (self._broken_masters() if looks else [])
        # before warnings, which some may take for errors: the others would wait
        self._check_alike(processes, has_loss=has_loss)
        self._name_adopted()
        self._name_taken()
        self._begin(p for p in self._layout.names if p.grad is not None)
        return broken

    def _commit(self, batches: Sequence[Gradients], update: Update, now: Step) -> None:
        """Move masters, and let weights follow: nothing is refused any more."""
        self._counts.step = now.number
        try:
            self._move(batches, update)
            if self._settle(update, now) or now.number % _LOOK == 0:
                self._carriers.publish(self)
            self._observe_next()
        except BaseException:  # else the next step would take half-written weights for the user's
            self._take_groups_back()
            self._write_trained(Purpose.WEIGHTS)
            self._observe_next()
            self._carriers.publish(self)
            raise

    @left_uncompiled
    @torch.no_grad()
    @in_turn
    def end_epoch(self) -> None:
        """Tell the policy that an epoch is over.

        ``MarvinPolicy`` and ``FixedPolicy`` do not mind. A policy that owns the learning rate
        changes ``lr`` of every group here.

        Raises:
            RuntimeError: The wrapped optimizer got parameter groups of its own, ``state`` lost masters, or another
                optimizer was made for the same parameters since.
            TypeError: A setting of groups that were changed must be a number, and is none; or the model was made float64.
            ValueError: A parameter has got another shape, or groups have other parameters or settings that
                are out of range; or the policy gives learning rates a scale that is not above 0.
        """
        self._check_whole()
        before, lrs = self.lr_scale, [group.get("lr", 0.0) for group in self.param_groups]
        now = Step(self._counts.step, self._seed, self.param_groups[0])
        with self.with_values():
            self._adopt_changed()
            self._name_adopted()
            layers, _ = self._layers({}, {})
            update = self.policy.end_epoch(self.shared, layers, now)
            update = self._completed(update, layers, now.number)
            check_lr_scale(self.policy, update.shared)

            # nothing is refused any more
            try:
                written = self._keep(update, [])
                self._merge_rows(now.number)
                self._write(written, Purpose.INITIAL)
                if update.switches:
                    self._carriers.publish(self)
                self._scale_lrs(lrs, before)
            except BaseException:  # else weights, formats and rates would be of two epochs
                self._write_trained(Purpose.INITIAL)
                self._carriers.publish(self)
                self._scale_lrs(lrs, before)
                raise

    @left_uncompiled
    @torch.no_grad()
    def train(self) -> None:
        """Let the model have the weights to train, if the wrapped optimizer evaluates others.

        Schedule-free optimizers do: call this before an epoch, and ``eval`` before the model is evaluated,
        frozen or exported. The masters change as the wrapped one's ``train`` does it, and the weights are
        written anew, rounded. The wrapped one's own method does the same. Of an optimizer without modes,
        nothing changes.

        Raises:
            FloatingPointError: A weight that was changed is not finite; nothing else was changed.
            RuntimeError: Another optimizer was made for the same parameters since, the wrapped one got
                parameter groups, or ``state`` lost masters.
            TypeError: The model was made float64.
            ValueError: A parameter has got another shape, or groups have other parameters.
        """
        self._switch("train")

    @left_uncompiled
    @torch.no_grad()
    def eval(self) -> None:
        """Let the model have the weights to evaluate, if the wrapped optimizer trains others; see ``train``.

        Raises:
            FloatingPointError: As ``train``.
            RuntimeError: As ``train``.
            TypeError: As ``train``.
            ValueError: As ``train``.
        """
        self._switch("eval")

    @in_turn
    def _switch(self, mode: Literal["train", "eval"]) -> None:
        """Let the wrapped optimizer change the masters, and write the weights with the noise that they had."""
        switch = getattr(type(self.optimizer), mode, None)
        if switch is None:
            return
        self._check_whole()
        with self.with_values():
            if wrong := self._adopt_changed():
                raise FloatingPointError(
                    f"{mode}() must have finite weights, got {listed(wrong)}; nothing was changed"
                )
            self._name_adopted()
            compact = [
                CompactMember(master, own, self._layout.shards[p], self._layout.positions[p])
                for p, master in self._masters.items()
                if is_compact(own := self.state[p]) and self.optimizer.state.get(master)
            ]
            try:
                with (
                    self._on_masters(),
                    in_float(self.optimizer, compact, self._seed, self._counts.step),
                ):
                    switch(self.optimizer)
            finally:
                self._write_as_saved()

    def _scale_lrs(self, lrs: Sequence[float | Tensor], before: float) -> None:
        """Give the groups the learning rates that they had at another ``lr_scale``, multiplied."""
        if self.lr_scale != before:
            for group, lr in zip(self.param_groups, lrs, strict=True):
                group["lr"] = lr * (self.lr_scale / before)

    def _name_modules(self, processes: Processes) -> None:
        """Warn of modules that do not round as they should."""
        if not processes.leaves_modules_out():
            self._carriers.name_uncalled(self.forward_state.waiting)
        self._carriers.name_stale()
        self._carriers.name_late(self)
        self._carriers.name_unseen()

    def _find_processes(self) -> Processes:
        """Return those that train with this one; refuse a step that they may not do.

        They are looked for in the first step, and once nobody has the ``DistributedDataParallel`` any more.
        """
        if not is_distributed():
            self._processes = None
            return ALONE
        is_given = "process_group" in vars(self)
        if self._processes is None or (self._processes.are_gone() and not is_given):
            meshes = {groups for own in self._layout.shards.values() if (groups := own.groups)}
            self._processes = processes_of(self, meshes, self.process_group)
            if not (meshes or self._processes.models or is_given):
                warn_user(
                    "this process trains alone: no DistributedDataParallel or fully_shard has the parameters; "
                    "if gradients are averaged by hand, write optimizer.process_group = "
                    "torch.distributed.group.WORLD before the first step, else optimizer.process_group = None"
                )
        self._processes.check_not_joining()
        return self._processes

    def _check_alike(self, processes: Processes, *, has_loss: bool) -> None:
        """Refuse the first step of processes that begin with other things."""
        if not processes.groups or self._alike is processes:
            return
        layout, by_process = self._layout, {"seed", *self.policy.rules.by_process}
        names = [name for name in self.defaults if name not in by_process]
        told: list[tuple[str, object]] = [
            ("parameters", [(name, [*p.shape]) for p, name in layout.names.items()]),
            ("seed", self._seed),
            ("settings", [[group.get(name) for name in names] for group in self.param_groups]),
            ("formats", [self._counts.step, *map(str, self.formats().items())]),
            ("use of loss=", has_loss),
        ]
        sums = self._sums_of_masters(processes)
        told += [("masters", sums.get(place)) for place in range(-1, processes.size)]
        processes.check_alike(told, local(next(iter(layout.names))).device)
        self._alike = processes

    def _sums_of_masters(self, processes: Processes) -> dict[int, list[int]]:
        """Return sums over the bits of masters of which other processes have the same.

        By the place of the part that this process holds; those of whole tensors by -1.
        """
        shared, is_given = processes.shares(), self.process_group is not None
        found: dict[int, list[Tensor]] = {}
        for p in self._masters:
            shard = self._layout.shards[p]
            if shard.template is not None or is_given or p in shared:
                place = -1 if shard.group is None else dist.get_rank(shard.group)
                bits = local(master_of(self.state[p])).contiguous().view(torch.int32)
                found.setdefault(place, []).append(bits.sum(dtype=torch.int64))
        return {place: [int(x) for x in sums] for place, sums in found.items()}

    def _name_idle(self) -> None:
        """Warn once of several steps without a gradient if no step had any, as in a loop over another model."""
        self._idle += 1
        trains = any(p.requires_grad for p in self._layout.names)
        if self._idle == _IDLE and not self._counts.step and trains:
            warn_user(
                f"no parameter of this optimizer has had a gradient in {_IDLE} steps, so nothing trains: call "
                "loss.backward() before step(), and make the optimizer of the model that the loop calls, "
                "marvin.Quantized(torch.optim.Adam(model.named_parameters()), policy)"
            )

    def _check_loss(self, loss: float | Tensor | None, broken: Sequence[str]) -> None:
        """Refuse a loss or weights that are not finite where there is no gradient to tell."""
        value = float(loss.detach() if isinstance(loss, Tensor) else loss or 0.0)
        wrong = [] if math.isfinite(value) else [f"loss {value}"]
        if wrong := [*broken] or wrong:
            self._leave_out(wrong)

    @torch.no_grad()
    def _adopt_changed(self) -> list[str]:
        """Take weights that others have changed since they were written as the new ones.

        Where some are not finite, none is taken; returns what an error says of those.
        """
        adopted, broken = self._adopted()
        if broken:
            remedy = "optimizer.load_state_dict(optimizer.state_dict()) writes them anew"
            if self.param_groups[0]["nonfinite"] == "skip":  # they do not go by themselves
                warn_user(
                    f"steps are skipped while weights are not finite: {listed(broken)}; {remedy}"
                )
            return [f"weights {listed(broken)} ({remedy})"]
        if not adopted:
            return []
        if self._taken is not None:
            name, found = self._taken
            self._taken = name, found.difference(adopted)
        self._write(adopted, Purpose.INITIAL)
        self._carriers.publish(self)
        return []

    def _before_scaled_step(self) -> None:
        """Set aside what went forward: it is that of the step which a scaler may leave out."""
        own = unwrapped(self)
        own._set_aside = own._carriers.take_sums(), own.forward_state.take_samples()

    def _take_back(self) -> None:
        """Take what was set aside, if nothing went forward since: then the scaler does the step."""
        aside, self._set_aside = self._set_aside, None
        seen, now = self._carriers.observers, self.forward_state
        if aside is None or now.counted or any(own.sums is not None for own in seen.values()):
            return
        sums, (now.samples, now.first) = aside
        for index, own in sums.items():
            seen[index].sums = own

    def _observe_next(self) -> None:
        """Forget what went forward, and let modules show their inputs if the next step wants that."""
        self._set_aside = None
        self.forward_state.count_anew()
        number, settings = self._counts.step + 1, self.param_groups[0]
        wants = self.policy.rules.observes_inputs and self.policy.observes(number, settings)
        self._carriers.observe(self._trained() if wants else [])

    def _gather(self) -> list[Gradients]:
        gathered = []
        first = stream(Purpose.GRADIENTS, self._counts.step)  # of a group: one stream a parameter
        for group in self.param_groups:
            if params := [p for p in group["params"] if p.grad is not None]:
                noise = self._seed, first
                gathered.append(gather(group, self._members(params), self.format_of, noise))
            first += len(group["params"])
        return gathered

    def _noise(self, step: int) -> Key:
        """Return the noise of states in a step, from which that of each is counted."""
        return Key(self._seed, stream(Purpose.STATES, step))

    def _leave_out(self, wrong: list[str]) -> None:
        self._observe_next()
        if self.param_groups[0]["nonfinite"] == "raise":
            raise FloatingPointError(
                f"loss, gradients and weights must be finite, got {listed(wrong)} after "
                f"{self._counts.step} steps; nothing was changed"
            )
        self._counts.skipped += 1

    def _layers(
        self,
        measured: Mapping[int, tuple[float, float | None, Mapping[str, Tensor | Sum]]],
        inputs: Mapping[int, Inputs],
    ) -> tuple[list[Layer], list[Layer]]:
        """Return what the policy sees of the layers that train, and of those that are frozen."""
        trained: list[Layer] = []
        frozen: list[Layer] = []
        gone = self._carriers.gone
        for index, (p, own, layer) in self._trained_layers().items():
            trains = p.requires_grad
            found = measured.get(index) if trains else None
            if found is None and gone and p in gone:
                continue
            norm, number, new = found or (None, None, {})
            (trained if trains else frozen).append(
                layer.but(
                    record=own["layer"],
                    tensors=tensors_of(own, new),
                    norm=norm,
                    measured=number,
                    inputs=inputs.get(index) if trains else None,
                )
            )
        return trained, frozen

    def _completed(self, update: Update, layers: list[Layer], step: int) -> Update:
        """Complete what a policy decided, and let switches say that a layer whose inputs follow its weight does not round them."""
        update = completed(self.policy, update, self.shared, layers, step)
        if all(row.input_wl for row in update.switches):
            return update
        rounded = {self._layout.names.get(p) for p in self._carriers.rounded()}
        rows = [
            row if row.input_wl or row.layer in rounded else replace(row, has_float_inputs=True)
            for row in update.switches
        ]
        return replace(update, switches=rows)

    def _move(self, batches: Sequence[Gradients], update: Update) -> None:
        """Move the masters, keep what the policy made of the step, and write the weights."""
        moved = [p for batch in batches for p in batch.members.params]
        if any(any(batch.members.compact) for batch in batches):
            self._move_compact(batches, update, moved)
            return
        moves = moves_of(self.optimizer, batches)
        if moves is None:
            self._update(batches)
        written = self._keep(update, moved)
        if moves is not None and self._write_moved(written, moved, moves):
            keep_momenta(self.optimizer, batches, moves)
        else:
            if moves is not None:  # the kernel does not take these tensors
                self._update(batches)
            self._write(written, Purpose.WEIGHTS)

    def _move_compact(
        self, batches: Sequence[Gradients], update: Update, moved: Sequence[Tensor]
    ) -> None:
        """Do as ``_move`` does where masters are compact."""
        written = self._keep(update, moved)
        is_fixed = self._rounding(written).is_fixed
        moves = moves_of_compact(self.optimizer, batches) if is_fixed else None
        done = moves.rows if moves else []
        if len(done) < len(moved):
            self._update(batches, {id(moved[row]) for row in done})
        if moves is None:
            self._write(written, Purpose.WEIGHTS)
        else:
            self._write_compact(written, moved, moves)

    def _keep(self, update: Update, moved: Sequence[Tensor]) -> Sequence[Tensor]:
        """Keep what the policy made of a step; return what moved or has another format."""
        trained, noise = self._trained_layers(), self._noise(self._counts.step)
        changed = {
            own.weight
            for layer in update.layers
            if (own := trained[layer.index]).state["layer"].fmt is not layer.record.fmt
        }
        kept = [own for own in self._rounding(moved).own if states.KEPT in own]
        for own in kept:
            del own[states.KEPT]
        if kept or changed:
            self._plans.rounding.clear()
        if changed:
            self._keep_formats(changed)
        for layer in update.layers:
            own = trained[layer.index].state
            put_tensors(own, layer.tensors, noise, layer.index, layer.shard)
            own["layer"] = layer.record
        self.shared = update.shared
        self.trace += update.switches
        switched = {row.layer for row in update.switches}
        if not switched:
            return moved
        names, chosen = self._layout.names, set(moved)
        for p, owner in self._layout.owners.items():
            is_trained = p in self._masters and p.requires_grad
            if is_trained and owner is not None and names[owner] in switched:
                chosen.add(p)
        return [p for p in names if p in chosen]

    def _settle(self, update: Update, now: Step) -> bool:
        """Let the policy change formats once masters have moved; say whether any changed in this step."""
        later = self.policy.after_move(update.shared, update.layers, now)
        if later is None:
            return bool(update.switches)
        later = self._completed(later, list(update.layers), now.number)
        records = {layer.index: layer.record for layer in later.layers}
        trained = self._trained_layers()  # of a layer that left its model, too: it has moved
        layers = [
            trained[i].layer.but(record=record, tensors=tensors_of(trained[i].state, {}))
            for i, record in records.items()
        ]
        written = self._keep(replace(later, layers=layers), [])
        self._merge_rows(now.number)
        self._write(written, Purpose.INITIAL)
        return bool(update.switches or later.switches)

    def _merge_rows(self, step: int) -> None:
        """Leave one row a layer of those that the trace has of its last step."""
        count = sum(1 for _ in takewhile(lambda row: row.step == step, reversed(self.trace)))
        if count:
            self.trace[-count:] = merged(self.trace[-count:])

    def _frozen(self) -> set[Tensor]:
        """Return the parameters that have masters and do not move."""
        return {p for p in self._masters if not p.requires_grad and p.grad is None}

    def _write_trained(self, purpose: Purpose) -> None:
        """Write all weights that move anew, after an interrupt that may have left some by half."""
        frozen = self._frozen()
        self._write([p for p in self._masters if p not in frozen], purpose)

    def _keep_formats(self, layers: set[Tensor]) -> None:
        """Let frozen parameters that have the formats of ``layers`` keep those: they change now."""
        for p in self._frozen():
            if (owner := self._layout.owners[p]) in layers and p is not owner:
                self.state[p].setdefault(states.KEPT, self.format_of(p))

    def _update(self, batches: Sequence[Gradients], done: Container[int] = ()) -> None:
        """Do one step of the wrapped optimizer on the masters, but for those whose ids are in ``done``."""
        compact: list[CompactMember] = []
        moved: list[tuple[Tensor, Shard, Tensor]] = []
        for batch in batches:
            members = batch.members
            own = members.params, members.masters, members.shards, members.compact
            for p, master, shard, is_coded, grad in zip(*own, batch.values, strict=True):
                if id(p) in done:
                    continue
                moved.append((master, shard, grad))
                if is_coded:
                    position = self._layout.positions[p]
                    compact.append(CompactMember(master, self.state[p], shard, position))
        with (
            self._on_masters(),
            in_float(self.optimizer, compact, self._seed, self._counts.step),
        ):
            for master, shard, grad in moved:  # compact ones have their memory from here on
                master.grad = shard.to_dtensor(laid_as(grad, local(master)))
            try:
                with without_global_step_hooks():  # which see this optimizer's
                    self.optimizer.step()
            except Exception as error:
                if "closure" in f"{type(error).__name__} {error}".lower():
                    raise closure_needed(self.optimizer) from error
                raise
            finally:
                for master, *_ in moved:
                    master.grad = None
