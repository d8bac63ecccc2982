"""Models whose modules round by an optimizer's formats: writing them, and asking what came in."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from fixedpoint_kernels import FixedPoint
from fixedpoint_kernels._torch_private.compiling import is_compiling_known
from fixedpoint_kernels._torch_private.modules import AdaptiveAvgPoolBase, AvgPoolBase, NormBase
from fixedpoint_kernels.undo import all_or_nothing
from marvin.activations import FROZEN, Entry, QuantizedActivations
from marvin.hooks import exchange, rounders_of
from marvin.layers import (
    carried_parameters,
    computed_weights,
    is_layer,
    parameters_of,
    parametrisations_of,
)
from marvin.masters import WithMasters
from marvin.model_formats import ModuleFormats
from marvin.owners import owner_of
from marvin.policies.observer import Observer, Sums
from marvin.policies.records import ActivationFormats
from marvin.rounder import BUFFER, ForwardState
from marvin.settings import Group, Settings
from marvin.straight_through import Tally
from marvin.warned import listed, warn_user

__all__ = ["EXCLUDED", "FOLLOWERS", "OTHERS", "Carriers", "assign", "decides", "others_of"]

# without parameters of their own, these take the format of the layer before them
_NORMS = NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm
_POOLS = AvgPoolBase, AdaptiveAvgPoolBase
FOLLOWERS = *_NORMS, *_POOLS

EXCLUDED = "excluded"
"""Why a module does not round that the user left out."""

_MUCH, _OF_OUTPUTS, _OF_DATA = 0.9, 0.5, 0.25  # shares of clamped values that a warning names
OTHERS = "rounds by the formats of another optimizer or of a loaded state"
"""Why a module does not round by an optimizer that does not have its weight."""
_NO_LAYER = "no layer of the optimizer gives it a format"


class Carriers:
    """The models that carry an optimizer's formats.

    Attributes:
        handles: Of ``marvin.quantize_activations``.
        observers: Of the layers whose inputs the next step wants to know, by position.
        gone: Parameters that left their models.
        before: Handles of optimizers that had the same parameters, until the first step.
        uncalled: Names of modules whose weights a model uses without calling them.
    """

    before: tuple[QuantizedActivations, ...] = ()
    gone: frozenset[Tensor] = frozenset()
    uncalled: frozenset[str] = frozenset()
    named: frozenset[str] = frozenset()  # what ``_name_changes`` has warned of
    clamped: frozenset[str] = frozenset()  # what ``name_clamped`` has warned of
    unseen: frozenset[str] = frozenset()  # what ``name_unseen`` has warned of
    waits: bool = False  # for quantize_activations, until the next step: parameters came

    def __init__(self) -> None:
        self.handles: list[QuantizedActivations] = []
        self.observers: dict[int, Observer] = {}

    @contextmanager
    def all_or_nothing(
        self,
        things: Iterable[object],
        groups: Iterable[Group] = (),
        tensors: Iterable[Tensor] = (),
    ) -> Iterator[None]:
        """Put this, its models but for their weights, and what is given back if this block raises.

        Args:
            things: See ``fixedpoint_kernels.undo.all_or_nothing``; modules with the formats that they carry.
            groups: Parameter groups.
            tensors: As of ``things``.
        """
        entries = [entry for handle in self.handles for entry in handle.entries]
        objects = [self, *self.handles, *(entry.module for entry in entries), *things]
        modules = [module for module in objects if isinstance(module, nn.Module)]
        rounders = [rounder for module in modules for rounder in rounders_of(module)]
        formats = [
            own
            for m in modules
            if (own := getattr(m, BUFFER, None)) is not None and not own.is_meta
        ]
        every = {id(x): x for x in (*objects, *rounders, *(entry.rounder for entry in entries))}
        with all_or_nothing(every.values(), groups, [*tensors, *formats]):
            yield

    def add(self, handle: QuantizedActivations) -> None:
        """Take a model, and let go of those that were freed."""
        self._find_gone([h for h in self.handles if _root(h) is _root(handle)])
        self.handles = [h for h in self.handles if h.is_attached] + [handle]
        self._count_samples()

    def widen(self, optimizer: WithMasters) -> None:
        """Let modules round whose parameters the optimizer has got since."""
        attached = [handle for handle in self.handles if handle.is_attached]
        self._find_gone(attached)
        for handle in attached:
            _take_over(handle, optimizer)
            assign(handle, optimizer)
            self.waits = True
        self._count_samples()

    def _count_samples(self) -> None:
        """Let the first module of the first model tell the size of the batch; see ``ForwardState.counted``."""
        rounders = [e.rounder for handle in self.handles for e in handle.entries if e.parameters]
        for rounder in rounders:
            rounder.counts_samples = rounder is rounders[0]

    def publish(self, optimizer: WithMasters) -> None:
        """Let the models carry the formats that hold now."""
        attached = [handle for handle in self.handles if handle.is_attached]
        self._find_gone(attached)
        for handle in self.handles:
            if handle.is_attached and not self.waits:
                self._name_changes(handle, optimizer)
            for entry in handle.entries:
                formats = _formats_for(entry, handle, optimizer)
                if not entry.rounder.has(entry.module, formats) and entry.is_live:
                    entry.rounder.write(entry.module, formats)
            _write_elsewhere(handle, optimizer)

    def _find_gone(self, handles: Sequence[QuantizedActivations]) -> None:
        """Remember parameters that modules of these models had, and no module has any more."""
        there = {p for handle in handles for p in _root(handle).parameters()}
        self.gone = self.gone.union(*map(_parameters_of, handles)) - there

    def name_late(self, optimizer: WithMasters) -> None:
        """Warn of what ``publish`` left to the first step after ``add_param_group``."""
        if self.waits:
            self.waits = False
            for handle in self.handles:
                if handle.is_attached:
                    self._name_changes(handle, optimizer)

    def _name_changes(self, handle: QuantizedActivations, optimizer: WithMasters) -> None:
        """Warn of parameters that left a model, and of modules that came since hooks were put on it."""
        model = _root(handle)
        away = [p for p in _parameters_of(handle) if p in self.gone]
        if gone := sorted({*map(optimizer.name_of, away)} - self.named):
            warn_user(
                f"parameters that left the model are trained in vain, and what took their place is "
                f"not trained: {listed(gone)}; load states without assign=True, make a new optimizer after "
                "to_empty(), or give new layers to add_param_group and call marvin.quantize_activations again"
            )
        came = [
            name
            for name, module in model.named_modules()
            if not rounders_of(module)
            and name not in handle.left
            and any(p in optimizer for p in module.parameters(recurse=False))
        ]
        if came := [name for name in came if name not in self.named]:
            warn_user(
                f"modules that came since marvin.quantize_activations do not round: {listed(came)}; "
                "call it again"
            )
        self.named |= {*gone, *came}

    def rounded(self) -> set[Tensor]:
        """Return the parameters of modules that round their inputs and were called."""
        return {
            p
            for handle in self.handles
            for entry in handle.entries
            if entry.parameters
            and entry.is_live
            and entry.rounder.name not in self.uncalled | handle.state.waiting
            for name, p in parameters_of(entry.module).items()
            # others of a recurrent layer multiply its state
            if not isinstance(entry.module, nn.RNNBase) or "_ih_l0" in name
        }

    def observe(self, layers: Sequence[tuple[int, Tensor]]) -> None:
        """Let modules show what comes into these layers, and no others; forget what they saw."""
        if not layers and not self.observers:
            return
        self.observers = {}
        for entry in (entry for handle in self.handles for entry in handle.entries):
            own = {id(p) for p in entry.parameters}
            layer = next((index for index, p in layers if id(p) in own), None)
            entry.rounder.observer = None
            if layer is not None:
                entry.rounder.observer = self.observers.setdefault(layer, Observer())

    def take_sums(self) -> dict[int, Sums]:
        """Return what observers saw, by position, and let them begin anew."""
        found = {i: own.sums for i, own in self.observers.items() if own.sums is not None}
        for index in found:
            self.observers[index].sums = None
        return found

    def name_uncalled(self, waiting: set[str]) -> None:
        """Warn of weights that have a gradient though their module was never called.

        Args:
            waiting: Names of modules that were not called yet; those that are named leave it.
        """
        if not waiting:
            return
        names = {
            entry.rounder.name
            for handle in self.handles
            for entry in handle.entries
            if entry.rounder.name in waiting
            and entry.is_live
            and any(p.grad is not None for p in parameters_of(entry.module).values())
        }
        waiting -= names
        if names:
            self.uncalled |= names
            compiled = (
                "; where its compiled code has no guards that tell models that round from others, call "
                "torch.compiler.reset() after marvin.quantize_activations"
            )
            warn_user(
                "activations are not rounded where a model uses a weight without calling its "
                f"module: {', '.join(sorted(names))}{compiled if is_compiling_known() else ''}"
            )

    def name_unseen(self) -> None:
        """Warn once of layers whose inputs stay float32 because they are trained in eval mode."""
        found = {
            entry.rounder.name or "the model"
            for handle in self.handles
            for entry in handle.entries
            if (observer := entry.rounder.observer) is not None
            and observer.sums is None
            and not entry.module.training
            and any(p.grad is not None for p in parameters_of(entry.module).values())
        }
        if found := found - self.unseen:
            self.unseen |= found
            warn_user(
                "inputs of layers in eval mode are not observed, so their formats do not change, and "
                f"before they have one they stay float32: {listed(sorted(found))}; call model.train()"
            )

    def name_clamped(self, settings: Settings, *, is_dead: bool = False) -> None:
        """Warn once of modules that clamp most of what they give, or see, or much of the data; data are counted anew.

        Args:
            settings: Of the first parameter group.
            is_dead: Whether all gradients are 0: then modules are named that clamp any of their outputs, such as losses.
        """
        found: dict[str, float] = {}
        for entry in (e for handle in self.handles for e in handle.entries if e.is_live):
            own, formats = entry.rounder, entry.rounder.formats(entry.module)
            is_much = own.tally.fresh() > _MUCH or own.data.share() > _OF_DATA
            own.data = Tally()
            rows = (
                ("inputs", is_much, formats.inputs),
                (
                    "outputs",
                    own.outputs.fresh() > (0.0 if is_dead else _OF_OUTPUTS),
                    formats.outputs,
                ),
            )
            for what, is_named, fmt in rows:
                if is_named and isinstance(fmt, FixedPoint):
                    found[f"{what} of {own.name or 'the model'}"] = 2.0**fmt.il
        if new := [name for name in found if name not in self.clamped]:
            self.clamped |= {*new}
            remedy = "choose a format with more integer bits"
            if (bits := settings.get("buffer_bits")) is not None:
                remedy = f"write buffer_bits={bits + 4}, which reaches {2 ** (bits + 3)}"
            reach = f"{listed(new)}, which reach {found[new[0]]:g} at most"
            if is_dead:
                warn_user(
                    f"all gradients are 0, and clamped values pass none: {reach}; {remedy}, or scale data "
                    "and targets; return the mean of losses, or give quantize_activations(exclude=...) "
                    "their module"
                )
                return
            warn_user(
                f"values are clamped, and clamped ones pass no gradient: {reach} and are mostly beyond; "
                f"{remedy}, or scale data and targets; of a classifier's logits this may cost nothing"
            )

    def name_stale(self) -> None:
        """Warn of a model that goes on rounding by the formats of an optimizer that another replaced."""
        if not self.before:
            return
        stale = any(handle.is_attached for handle in self.before)
        self.before = ()
        if stale and not any(handle.is_attached for handle in self.handles):
            warn_user(
                "layers round by the formats of the optimizer that had these parameters before, which "
                "change no more: call marvin.quantize_activations(model, optimizer) with this one"
            )


def _parameters_of(handle: QuantizedActivations) -> Iterator[Tensor]:
    return (p for entry in handle.entries for p in entry.parameters)


def _root(handle: QuantizedActivations) -> nn.Module:
    return next(entry.module for entry in handle.entries if entry.rounder.is_root)


def _formats_for(
    entry: Entry, handle: QuantizedActivations, optimizer: WithMasters
) -> ModuleFormats:
    """Return what a module is to carry."""

    def first(parameters: Iterable[Tensor]) -> ActivationFormats:
        found = (optimizer.activation_formats(p) for p in parameters if p in optimizer)
        return next((formats for formats in found if formats is not None), ActivationFormats())

    takes_samples = entry.rounder.is_root and optimizer.policy.rules.quantizes_input
    own = first(entry.parameters)
    return ModuleFormats(
        inputs=own.inputs,
        outputs=own.outputs,
        gradients=own.gradients,
        samples=first(entry.module.parameters()).outputs if takes_samples else None,
        weights=tuple(
            own.format_of(p) if (own := _optimizer_of(p, optimizer)) else None
            for _, p in carried_parameters(entry.module)
        ),
        ste=handle.ste,
        eval_rounding=handle.eval_rounding,
    )


def _optimizer_of(p: Tensor, first: WithMasters) -> WithMasters | None:
    return first if p in first else owner_of(p)


def _write_elsewhere(handle: QuantizedActivations, optimizer: WithMasters) -> None:
    """Let modules that round by another optimizer's formats carry those of their other parameters, too."""
    for module in _root(handle).modules():
        for rounder in rounders_of(module):
            params = [p for _, p in carried_parameters(module)]
            if rounder.state is handle.state or all(owner_of(p) is not optimizer for p in params):
                continue
            formats = rounder.formats(module)
            weights = tuple(
                optimizer.format_of(p) if owner_of(p) is optimizer else own
                for p, own in zip(params, formats.weights, strict=True)
            )
            if weights != formats.weights:
                rounder.write(module, replace(formats, weights=weights))


def decides(optimizer: WithMasters, module: nn.Module) -> bool:
    """Say whether an optimizer's formats are those of a module's activations: it has the module's layer."""
    own = [*parameters_of(module).values()]
    layer = next(filter(is_layer, own), None)
    if layer is not None and layer not in optimizer and owner_of(layer) is not None:
        return False
    return any(p in optimizer for p in own)


def others_of(model: nn.Module, optimizer: WithMasters, state: ForwardState) -> set[nn.Module]:
    """Return modules that round by another's formats: an optimizer's that has their layer, or those of a loaded state.

    Args:
        model: Has them.
        optimizer: Whose modules are left out.
        state: What these share.
    """
    found, is_other, inside = set[nn.Module](), False, parametrisations_of(model)
    for module in (own for own in model.modules() if own not in inside):
        has_own = bool(parameters_of(module))
        rounds = any(r.state is not state for r in rounders_of(module))
        if has_own:
            is_other = rounds and not decides(optimizer, module)
        if is_other and rounds and (has_own or isinstance(module, FOLLOWERS)):
            found.add(module)
    return found


def _take_over(handle: QuantizedActivations, optimizer: WithMasters) -> None:
    """Let modules round by this optimizer's formats that rounded by another's until it got their layer."""
    others = others_of(_root(handle), optimizer, handle.state)
    for entry in handle.entries:
        module, name = entry.module, entry.rounder.name
        if handle.left.get(name) == OTHERS and module not in others and rounders_of(module):
            del handle.left[name]
            exchange(module, entry.rounder)


def assign(handle: QuantizedActivations, optimizer: WithMasters) -> None:
    """Say which modules of a model round, by the formats of which parameters, and why others do not."""
    model = _root(handle)
    sources = dict(zip(model.modules(), _sources(model, optimizer), strict=True))
    before, inside = handle.layers(), parametrisations_of(model)
    handle.left = {name: why for name, why in handle.left.items() if why in (EXCLUDED, OTHERS)}
    handle.entries = [e for e in handle.entries if e.module in sources]  # others were replaced
    for place, entry in enumerate(handle.entries):
        module, name, source = entry.module, entry.rounder.name, sources[entry.module]
        owners = dict.fromkeys(
            owner for p in source if (owner := optimizer.layer_of(p)) is not None
        )
        reason = _reason(module, source, optimizer) or ("" if owners else _NO_LAYER)
        is_left = name in handle.left
        chosen = () if reason or is_left else source
        handle.entries[place] = replace(entry, parameters=chosen, layers=[*owners])
        if is_left or module in inside:
            continue
        if reason and (parameters_of(module) or isinstance(module, FOLLOWERS)):
            handle.left[name] = reason
        if not reason and all(optimizer.activation_formats(p) is None for p in owners):
            handle.left[name] = FROZEN
        if computed := computed_weights(module):
            how = "a parametrisation" if is_parametrized(module) else "a hook"
            handle.left[name] = (
                f"{how} computes its {' and '.join(computed)} from rounded parameters; no export takes it"
            )
    handle.state.waiting = handle.state.waiting | (handle.with_weights() - {*before})


def _sources(model: nn.Module, optimizer: WithMasters) -> Iterator[Sequence[Tensor]]:
    """Yield for each module the parameters of which the first with a format gives its own.

    Those that it has, its parametrisations' among them; for normalisation and pooling then those of the layer before.
    """
    before: list[Tensor] = []
    inside = parametrisations_of(model)
    for module in model.modules():
        if module in inside:  # the layer rounds, by their parameters
            yield []
            continue
        own = [p for p in parameters_of(module).values() if p in optimizer]
        if not decides(optimizer, module):
            own = []
        yield own + before if isinstance(module, FOLLOWERS) else own
        before = [p for p in own if is_layer(p)] or before


def _reason(module: nn.Module, source: Sequence[Tensor], optimizer: WithMasters) -> str:
    """Say why a module does not round; "" where it does."""
    rules = optimizer.policy.rules
    if isinstance(module, _NORMS) and not rules.quantizes_norms:
        return "the policy leaves normalisation in float32"
    if isinstance(module, _POOLS) and not rules.quantizes_pools:
        return "the policy leaves pooling in float32"
    if not source and any(p in optimizer for p in parameters_of(module).values()):
        return OTHERS
    return "" if source else "neither it nor a layer before it has a parameter of the optimizer"
