"""What decides formats: a frozen record of hyper-parameters, and functions from records to records."""

import dataclasses
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any, ClassVar, Self

from torch import Tensor
from torch.optim import Optimizer

from fixedpoint_kernels import BlockFloat, FixedPoint, Minifloat
from fixedpoint_kernels.compact import Sum
from marvin.policies.records import (
    ActivationFormats,
    Layer,
    LayerFormat,
    Measured,
    Rules,
    Step,
    Update,
    check_plain,
    comes_back,
    fractional_length,
    is_frozen,
    restored,
    word_length,
)
from marvin.policies.trace import Switch
from marvin.rounding import Format
from marvin.settings import Group, Settings, meant

__all__ = [
    "FixedPolicy",
    "Policy",
    "check_activation_formats",
    "check_lr_scale",
    "check_measured",
    "check_policy",
    "check_record",
    "check_remembers_nothing",
    "check_shared",
    "completed",
    "fields_of",
]

_NOW = {  # what policies had before they became records, and where it is
    "level": "optimizer.strategy",
    "load_state_dict": "optimizer.load_state_dict",
    "lr_scale": "optimizer.lr_scale",
    "observations": "policy.rules.observes_inputs",
    "should_stop": "optimizer.should_stop",
    "state_dict": "optimizer.state_dict()['marvin']['policy']",
    "word_length": "optimizer.mean_word_length()",
    **{f.name: f"policy.rules.{f.name}" for f in dataclasses.fields(Rules)},
}
_EARLIER = {
    "start": "init",
    "on_step": "update",
    "on_epoch_end": "end_epoch",
    "load_record": "init",
}


class Policy(ABC):
    """Decides in which formats a model computes, and when they change.

    A policy is a frozen dataclass: its fields are its hyper-parameters. It remembers nothing. What
    it knows of a layer is a frozen *record*, a dataclass of plain values with a field ``fmt``, the
    weight's format; what is common to all layers is one more, the *shared* record. The optimizer
    keeps both, saves them with the fields, and hands them in. So a policy may serve many
    optimizers, and a training that is resumed has the fields that it was started with.

    It is asked in this order. ``init_shared`` and ``init`` give the first records. In each step
    ``measure`` computes on the device what the gradients tell, without changing anything; once
    the step is known to be finite, ``update`` gets the numbers, in one transfer with all others,
    and returns new records. ``after_move`` may change them once masters have moved. ``end_epoch`` does
    the same where the user marks the end of an epoch.

    ``settings`` are the hyper-parameters that ``settings()`` names: each parameter group has them
    and may change them. Weights take ``record.fmt``; ``activation_formats`` may give activations
    others. ``rules`` says what the policy wants beside formats.

    Raises:
        TypeError: A subclass has a method of policies that had a memory of their own; names what
            it is now. Or a hyper-parameter that has to be named came without its name, or there is
            none of that name.
    """

    rules: ClassVar[Rules] = Rules()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if earlier := [n for n in sorted(_EARLIER) if callable(vars(cls).get(n))]:
            now = ", ".join(f"{name} is now {_EARLIER[name]}" for name in earlier)
            raise TypeError(f"a policy is pure functions from records to records: {now}")

    def __new__(cls, *arguments: object, **named: object) -> Self:
        """Refuse hyper-parameters without a name where a policy has them by name alone, and names of none."""
        own = (
            [f for f in dataclasses.fields(cls) if f.init] if dataclasses.is_dataclass(cls) else []
        )
        free = [f.name for f in own if not f.kw_only]
        if own and len(arguments) > len(free) < len(own):
            got = ", ".join(map(repr, arguments))
            names = [f.name for f in own]
            first = ", ".join(free) + " first, and " if free else ""
            raise TypeError(
                f"{cls.__name__} takes {first}hyper-parameters by name, got {got}: "
                f"write {cls.__name__}({names[0]}=...); there are {', '.join(names)}"
            )
        takes = inspect.signature(cls.__init__).parameters
        wrong = sorted(named.keys() - takes.keys())
        if own and wrong and inspect.Parameter.VAR_KEYWORD not in {p.kind for p in takes.values()}:
            names = [f.name for f in own]
            hint = f" (is {near} meant?)" if (near := meant(wrong[0], names)) else ""
            raise TypeError(
                f"{cls.__name__} has no hyper-parameter {wrong[0]}{hint}; there are {', '.join(names)}"
            )
        return super().__new__(cls)

    def __getattr__(self, name: str) -> Any:
        if name in _NOW:
            raise AttributeError(f"a policy remembers nothing: read {_NOW[name]} instead")
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def settings(self) -> Group:
        """Return the hyper-parameters that a parameter group may change: by default, the fields."""
        return fields_of(self)

    def check(self, settings: Settings) -> None:
        """Refuse hyper-parameters that are out of range.

        Raises:
            ValueError: With the name, what is required and what came.
        """
        self.init(settings, self.init_shared())

    def init_shared(self) -> Any:
        """Return what is common to all layers before the first step: a frozen record, or None.

        Later ones are of the same class. States save fields that are numbers, strings, None, formats,
        ``ActivationFormats``, tuples of these, and dictionaries from strings to numbers; the
        constructor takes all of them.
        """
        return None

    def load_shared(self, values: Mapping[str, Any] | None) -> Any:
        """Return the shared record of a state, which ``dataclasses.asdict`` made ``values`` of.

        Raises:
            ValueError: ``values`` are not those of this policy's record.
        """
        return restored(self.init_shared(), values)

    @abstractmethod
    def init(self, settings: Settings, shared: Any) -> Any:
        """Return the record of a layer that has seen no step; of its fields see ``init_shared``."""

    def activation_formats(self, record: Any) -> ActivationFormats:
        """Return the formats of a layer's activations; by default, the weight's in and out."""
        return ActivationFormats(record.fmt, record.fmt)

    def measure(
        self, shared: Any, tensors: Sequence[Mapping[str, Tensor]], grads: Sequence[Tensor]
    ) -> Measured:
        """Look at the gradients of a group's layers, float32 and normalised where asked for.

        Args:
            shared: What is common to all layers.
            tensors: ``rules.tensors`` of the layers that have a gradient; not to be changed.
            grads: Their gradients; not to be changed, nor kept without a copy.
        """
        return Measured()

    def samples(self, settings: Settings, counted: int) -> int:
        """Return how many samples of a step this process saw.

        Args:
            settings: Hyper-parameters of the first group.
            counted: What ``marvin.quantize_activations`` counted; 0 without it.
        """
        return counted

    def observes(self, step: int, settings: Settings) -> bool:
        """Say whether to observe what layers' inputs are like in a step.

        Args:
            step: Of the optimizer, counted from 1.
            settings: Hyper-parameters of the first group.
        """
        return False

    def update(self, shared: Any, layers: Sequence[Layer], step: Step) -> Update:
        """Return new records after a step's gradients.

        Args:
            shared: What is common to the layers.
            layers: All layers that are trained, those without a gradient too, in parameter order.
            step: What is common to them in this step.
        """
        return Update(shared, layers)

    def after_move(self, shared: Any, layers: Sequence[Layer], step: Step) -> Update | None:
        """Return new records once a step has moved the masters; None where none is new.

        Weights are written anew in the formats that change. Tensors of layers stay as they are.

        Args:
            shared: What ``update`` made of it.
            layers: What ``update`` made of them, with masters that have moved.
            step: As of ``update``.
        """
        return None

    def end_epoch(self, shared: Any, layers: Sequence[Layer], step: Step) -> Update:
        """Return new records at the end of an epoch."""
        return Update(shared, layers)

    def lr_scale_at(self, shared: Any) -> float:
        """Return what the learning rates are to be multiplied by, all in all; before the first epoch ends, 1."""
        return 1.0

    def should_stop_at(self, shared: Any) -> bool:
        """Say whether the training is over as far as the policy is concerned."""
        return False


@dataclass(frozen=True)
class FixedPolicy(Policy):
    """One fixed-point format for all weights and activations, from the start to the end.

    A parameter group may have its own: settings that change take effect in the next step.

    Args:
        wl: Word length, bits, sign included.
        fl: Fractional length, bits.
        symmetric: Leave out the format's smallest code.

    Raises:
        TypeError: A number of bits is not a number, but a format, say.
        ValueError: There is no such format.
    """

    wl: int = 8
    fl: int = 4
    symmetric: bool = False

    def __post_init__(self) -> None:
        if isinstance(fmt := self.wl, FixedPoint):
            raise TypeError(f"wl must be bits, got {fmt}: write FixedPolicy({fmt.wl}, {fmt.fl})")
        if isinstance(fmt, Minifloat | BlockFloat):
            raise TypeError(
                f"wl must be bits of fixed point, got {fmt}: policies choose fixed point; "
                "marvin.Quantizer rounds activations to it, marvin.round_state momenta and masters"
            )
        self.check(self.settings())

    def init(self, settings: Settings, shared: None) -> LayerFormat:
        """See ``Policy``."""
        return LayerFormat(FixedPoint(settings["wl"], settings["fl"], settings["symmetric"]))

    def update(self, shared: None, layers: Sequence[Layer], step: Step) -> Update:
        """See ``Policy``: formats follow a group's settings that were changed."""
        records = {id(layer.settings): layer.settings for layer in layers}
        records = {key: self.init(settings, shared) for key, settings in records.items()}
        if all(layer.record == records[id(layer.settings)] for layer in layers):
            return Update(shared, layers)
        return Update(shared, [layer.but(record=records[id(layer.settings)]) for layer in layers])


def check_policy(policy: object) -> None:
    """Refuse what is no policy.

    Raises:
        TypeError: It is a class, an optimizer, or something else, its ``rules`` are no ``Rules``, or its
            ``settings()`` no dictionary.
    """
    if isinstance(policy, type):
        name = policy.__name__
        raise TypeError(f"policy must be an object, got the class {name}: write {name}()")
    if isinstance(policy, Optimizer):
        raise TypeError(
            f"the optimizer must come first, got {type(policy).__name__} as the policy: write "
            "Quantized(optimizer, policy)"
        )
    if not isinstance(policy, Policy):
        raise TypeError(
            f"policy must be one such as marvin.LossBudgetPolicy(), got {type(policy).__name__}"
        )
    if not isinstance(found := policy.settings(), dict):
        raise TypeError(
            f"settings() of {type(policy).__name__} must return a dictionary of hyper-parameters, got {found!r:.60}: "
            "write return {...}, or leave settings() out"
        )
    if not isinstance(policy.rules, Rules):
        raise TypeError(
            f"rules of {type(policy).__name__} must be Rules, got {policy.rules!r:.60}: write "
            "rules = marvin.policies.Rules(...) in the class"
        )
    check_remembers_nothing(policy)
    own = dataclasses.fields(policy) if dataclasses.is_dataclass(policy) else ()
    if wrong := [f.name for f in own if not f.init or not comes_back(getattr(policy, f.name))]:
        raise TypeError(
            f"hyper-parameters of {type(policy).__name__} must come back from a state as they are, got "
            f"{', '.join(wrong)}: write tuples for lists, .item() of NumPy's numbers, a property for what follows "
            "from other fields (init=False), and in dictionaries other keys than fmt, fl and wl"
        )


def check_remembers_nothing(policy: Policy) -> None:
    """Refuse a policy with values that no state would have.

    Raises:
        TypeError: It is a dataclass that is not frozen, or has attributes that are no fields.
    """
    cls, fields = type(policy), fields_of(policy)
    found = [
        name
        for name in vars(policy)
        if name not in fields and not isinstance(getattr(cls, name, None), cached_property)
    ]
    if found or not is_frozen(policy):
        got = ", ".join(found) or "a class that is not frozen"
        raise TypeError(
            f"{cls.__name__} must be a frozen dataclass whose fields are its hyper-parameters, for states save no "
            f"others, got {got}: write @dataclass(frozen=True) above the class, and return what it remembers in "
            "records: of each layer, or the shared one of init_shared()"
        )


def check_record(record: object) -> None:
    """Refuse a layer's record without a format that weights may have, or that a state would not give back.

    Raises:
        TypeError: With what is required and what came.
    """
    if not hasattr(record, "fmt"):
        raise TypeError(
            f"a layer's record must have a field fmt, got {type(record).__name__}: write for example "
            "marvin.policies.LayerFormat(FixedPoint(8, 4))"
        )
    fmt = getattr(record, "fmt", None)
    if fmt is not None and not isinstance(fmt, Format):
        raise TypeError(
            f"a record's fmt must be FixedPoint, BlockFloat or None, got {fmt}: policies choose fixed "
            "point; marvin.Quantizer rounds activations to others"
        )
    check_plain("a layer's record", record)


def check_shared(policy: Policy, shared: object) -> None:
    """Refuse a shared record that a state would not give back.

    Raises:
        TypeError: It is no dataclass, has a field that is no plain value, or is of another class than
            ``init_shared`` gives, of which the one of a state is made.
    """
    if shared is not None:
        check_plain("the shared record", shared)
    if type(policy).load_shared is Policy.load_shared:  # others may make it of anything
        _check_class("the shared record", shared, policy.init_shared(), "init_shared")


def check_lr_scale(policy: Policy, shared: object, *, is_first: bool = False) -> None:
    """Refuse what learning rates cannot be multiplied by.

    Args:
        policy: Whose ``lr_scale_at`` it is.
        shared: What is common to the layers.
        is_first: Whether no epoch has ended: the rates are the user's.

    Raises:
        ValueError: It is not a finite number above 0, or at first not 1.
    """
    scale, name = policy.lr_scale_at(shared), f"{type(policy).__name__}.lr_scale_at"
    if not isinstance(scale, Real) or not 0 < scale < math.inf:
        raise ValueError(f"{name} must be a finite number above 0, got {scale!r:.60}")
    if is_first and scale != 1:
        raise ValueError(
            f"{name} must be 1 before the first epoch ends, whose learning rate is the optimizer's, got "
            f"{scale}: give the optimizer that lr, and divide what later epochs have by {scale}"
        )


def _check_class(what: str, record: object, first: object, function: str) -> None:
    if type(record) is not type(first):
        raise TypeError(
            f"{what} must be of one class from the first step on, got {type(record).__name__} after "
            f"{type(first).__name__}: let {function} return {type(record).__name__} as well"
        )


def check_activation_formats(policy: Policy, record: object) -> None:
    """Refuse what is no formats of a layer's activations.

    Raises:
        TypeError: ``activation_formats`` gave no ``ActivationFormats``, or they have what no policy may
            choose.
    """
    name, found = type(policy).__name__, policy.activation_formats(record)
    if not isinstance(found, ActivationFormats):
        raise TypeError(
            f"{name}.activation_formats must return ActivationFormats, got {found!r:.60}: write "
            "ActivationFormats(inputs=..., outputs=..., gradients=...)"
        )
    for field, fmt in vars(found).items():
        if fmt is not None and not isinstance(fmt, Format):
            raise TypeError(
                f"{field} of {name}.activation_formats must be FixedPoint, BlockFloat or None, got "
                f"{fmt!r:.60}: policies choose fixed point; marvin.Quantizer rounds activations to others"
            )


def check_measured(policy: Policy, measured: object, count: int) -> None:
    """Refuse what is not measured of each of ``count`` layers.

    Raises:
        TypeError: It is no ``Measured``, or has values that are no tensors.
        ValueError: It has more or fewer values than there are layers, a tensor that ``rules`` does not
            name, or norms of several numbers.
    """
    name = type(policy).__name__
    if not isinstance(measured, Measured):
        raise TypeError(
            f"{name}.measure must return a Measured, got {type(measured).__name__}: "
            "write Measured(tensors, norms)"
        )
    if unknown := sorted(set(measured.tensors) - set(policy.rules.tensors)):
        raise ValueError(
            f"{name}.measure must give tensors that its rules name, "
            f"{', '.join(policy.rules.tensors) or 'which are none'}, got {', '.join(unknown)}: "
            "write rules = Rules(tensors=(...))"
        )
    for what, values in {**measured.tensors, "norms": measured.norms}.items():
        wanted = (0, count) if what == "norms" else (count,)
        if len(values) not in wanted:
            raise ValueError(
                f"{name}.measure must give {what} for each of {count} layers, got {len(values)}: "
                "write one for each of grads"
            )
        kinds = Tensor if what == "norms" else Tensor | Sum
        if wrong := [value for value in values if not isinstance(value, kinds)]:
            raise TypeError(
                f"{name}.measure must give {what} as tensors, got {wrong[0]!r:.60}: write for example "
                "Measured(norms=[grad.double().norm() for grad in grads])"
            )
    if several := [tuple(norm.shape) for norm in measured.norms if norm.dim()]:
        raise ValueError(
            f"{name}.measure must give norms as tensors of shape (), got {several[0]}: write for "
            "example Measured(norms=[grad.double().norm() for grad in grads])"
        )


_MISSING = object()


def completed(
    policy: Policy, update: Update, shared: object, before: Sequence[Layer], step: int
) -> Update:
    """Return an update with a switch for each layer whose formats change: policies may leave it out.

    What a state would not give back is refused in the first step, and with a new format.

    Args:
        policy: Whose update it is.
        update: What it made of a step.
        shared: What was common to the layers.
        before: The layers that it was given.
        step: Of the optimizer, from 1.

    Raises:
        TypeError: It is no update, has switches that are none, or a new record has no format that weights may have, or what no state
            gives back.
        ValueError: Its layers are not those that it was given, or a switch is of another layer.
    """
    if not isinstance(update, Update) or not isinstance(update.layers, Sequence):
        raise TypeError(
            f"{type(policy).__name__} must return an Update with a list of layers, got "
            f"{type(getattr(update, 'layers', update)).__name__}: write Update(shared, layers)"
        )
    if wrong := [layer for layer in update.layers if not isinstance(layer, Layer)]:
        raise TypeError(
            f"{type(policy).__name__} must return an Update with layers, got {wrong[0]!r:.60}: write "
            "Update(shared, [layer.but(record=...) for layer in layers])"
        )
    given, made = ([layer.index for layer in layers] for layers in (before, update.layers))
    if made != given:
        raise ValueError(
            f"{type(policy).__name__} must return the {len(given)} layers that it was given, in their "
            f"order, got {len(made)}: write Update(shared, [layer.but(record=...) for layer in layers])"
        )
    _check_switches(policy, update.switches, before)
    if step == 1 or type(update.shared) is not type(shared):
        check_shared(policy, update.shared)
    records = {layer.index: layer.record for layer in before}
    named, rows = {row.layer for row in update.switches}, []
    follows = type(policy).activation_formats is Policy.activation_formats  # the weight's format
    for layer in update.layers:
        old, new = records[layer.index], layer.record
        if new is old:
            continue
        is_other = getattr(new, "fmt", _MISSING) is not old.fmt
        if is_other or step == 1:
            check_record(new)
            _check_class("a layer's record", new, old, "init")
        if layer.name in named or (follows and not is_other):
            continue
        now = policy.activation_formats(new)
        if (is_other and new.fmt != old.fmt) or now != policy.activation_formats(old):
            check_activation_formats(policy, new)
            rows.append(_switch(layer.name, step, old.fmt, new.fmt, now))
    return dataclasses.replace(update, switches=[*update.switches, *rows]) if rows else update


def _check_switches(policy: Policy, switches: object, layers: Sequence[Layer]) -> None:
    if isinstance(switches, Sequence) and not switches:
        return
    if not isinstance(switches, Sequence) or not all(isinstance(x, Switch) for x in switches):
        raise TypeError(
            f"switches of {type(policy).__name__}'s Update must be a list of Switch, got {switches!r:.60}: leave "
            "them out, and the optimizer writes them"
        )
    names = {layer.name for layer in layers}
    if unknown := [row.layer for row in switches if row.layer not in names]:
        raise ValueError(
            f"switches of {type(policy).__name__}'s Update must be of layers that train, got {unknown[0]!r}: "
            "write layer.name"
        )


def _switch(
    name: str, step: int, before: Format | None, fmt: Format | None, now: ActivationFormats
) -> Switch:
    inputs, is_own = now.inputs, now.inputs != fmt
    return Switch(
        step=step,
        layer=name,
        wl=word_length(fmt),
        fl=fractional_length(fmt),
        wl_before=word_length(before),
        fl_before=fractional_length(before),
        input_wl=word_length(inputs) if is_own else 0,
        input_fl=fractional_length(inputs) if is_own else 0,
        input_signed=getattr(inputs, "signed", True),
    )


def fields_of(policy: Policy) -> dict[str, Any]:
    """Return a policy's fields: its hyper-parameters, all of them."""
    if not dataclasses.is_dataclass(policy):
        return {}
    return {f.name: getattr(policy, f.name) for f in dataclasses.fields(policy)}
