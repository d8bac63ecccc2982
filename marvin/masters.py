"""Float32 masters, and the weights that are rounded from them."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from threading import RLock
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from fixedpoint_kernels import FixedPoint
from fixedpoint_kernels.compact import Codes, Row, flattened
from fixedpoint_kernels.compact import Moves as CompactMoves
from fixedpoint_kernels.compact import Targets as CompactTargets
from fixedpoint_kernels.compact import step_many as step_compact
from fixedpoint_kernels.sgd import Moves, Targets, step_many
from marvin.channels import ChannelFormat
from marvin.compact import (
    codes_of,
    is_compact,
    master_of,
    names_of_master,
    placeholder,
)
from marvin.compact_moves import Moved
from marvin.inner_optimizer import OwnStep
from marvin.layers import ParameterTable
from marvin.marks import Mark, marks_of
from marvin.noise import Purpose, stream
from marvin.plans import Members, Plans, Rounding, Trained
from marvin.policies.base import Policy
from marvin.policies.records import ActivationFormats, Layer
from marvin.policies.trace import Switch
from marvin.rounding import Format, round_many
from marvin.shards import local, locals_of
from marvin.state import KEPT
from marvin.warned import listed
from marvin.wrappers import for_wrappers

__all__ = ["Counts", "WithMasters", "pieces"]

_PIECE = 1 << 24  # numbers that are rounded again at once, for a look: 64 MiB


@dataclass
class Counts:
    """Steps done, and steps left out."""

    step: int = 0
    skipped: int = 0


class Stored(Protocol):
    """Has codes in the place of weights' values; see ``marvin.store_codes``."""

    def restore(self) -> None:
        """Give the weights their values."""
        ...

    def store(self) -> None:
        """Take them away again."""
        ...


@for_wrappers
class WithMasters(Optimizer):
    """An optimizer whose parameters are rounded from masters; see ``Quantized``.

    Attributes:
        policy: Decides the formats.
        shared: What the policy knows that is common to all layers.
    """

    optimizer: Optimizer  # the wrapped one
    policy: Policy
    shared: Any
    trace: list[Switch]
    _counts: Counts
    _layout: ParameterTable
    _masters: dict[Tensor, Tensor]  # as the wrapped optimizer sees them
    _marks: dict[int, Mark | None]  # of weights, as they were last written, by position
    _plans: Plans
    _is_made = True  # but while it is
    _turn: RLock  # of who changes it, or reads its state; see ``marvin.turns``
    _own_step: OwnStep  # open while groups of the wrapped one hold masters
    _lent: Sequence[list[Tensor]] = ()  # parameters of the groups, while these hold masters
    stored: tuple[Stored, ...] = ()  # have the weights' values between two steps
    _claims: int  # of all optimizers, when this one last owned its parameters; see ``owners``

    def __contains__(self, parameter: object) -> bool:
        """Say whether ``parameter`` is one of this optimizer's."""
        return parameter in self._layout.owners

    def name_of(self, parameter: Tensor) -> str:
        """Return the name of one parameter, or its position (``"0"``, ``"1"``, ...) if it has none."""
        return self._layout.names[parameter]

    def format_of(self, parameter: Tensor) -> Format | None:
        """Return the format of one parameter; None if it stays float."""
        owner = self._layout.owners[parameter]
        if owner is None or parameter not in self._masters:
            return None
        if KEPT in (own := self.state[parameter]):
            return own[KEPT]
        if (record := self.state[owner].get("layer")) is None:
            return None
        fmt = record.fmt
        is_other = owner is not parameter  # whose channels may be others
        return fmt.fmt if is_other and isinstance(fmt, ChannelFormat) else fmt

    def layer_of(self, parameter: Tensor) -> Tensor | None:
        """Return the layer whose format one parameter takes; None if it stays float."""
        return self._layout.owners[parameter]

    def activation_formats(self, parameter: Tensor) -> ActivationFormats | None:
        """Return the formats of activations beside a parameter; None if it stays float."""
        owner = self._layout.owners[parameter]
        if owner is None or owner not in self._masters:
            return None
        return self.policy.activation_formats(self.state[owner]["layer"])

    @contextmanager
    def with_values(self) -> Iterator[None]:
        """Let the weights have their values, where ``marvin.store_codes`` keeps codes in their place."""
        for own in self.stored:
            own.restore()
        try:
            yield
        finally:
            for own in self.stored:
                own.store()

    def _trained(self) -> list[tuple[int, Tensor]]:
        """Return position and weight of each layer that has been trained."""
        return [(index, p) for index, p in self._layout.layers if p in self._masters]

    def _show_masters(self, params: Iterable[Tensor]) -> None:
        shards = self._layout.shards
        self._masters |= {p: shards[p].to_dtensor(placeholder(self.state[p])) for p in params}
        self._plans = Plans()  # others were made without these

    @contextmanager
    def _on_masters(self) -> Iterator[None]:
        """Let the wrapped optimizer's groups hold the masters in the parameters' place."""
        params = [group["params"] for group in self.param_groups]
        masters = [list(self._members(own).masters) for own in params]
        self._lent = params
        try:
            for group, own in zip(self.optimizer.param_groups, masters, strict=True):
                group["params"] = own
            self._own_step.is_open = True
            yield
        finally:
            self._take_groups_back()

    def _take_groups_back(self) -> None:
        """Let groups hold the parameters, also where an interrupt kept ``_on_masters`` from it."""
        for group, own in zip(self.optimizer.param_groups, self._lent, strict=False):
            group["params"] = own
        self._own_step.is_open = False
        self._lent = ()

    def _write(self, params: Sequence[Tensor], purpose: Purpose) -> None:
        """Round the masters of ``params`` into the model, all in one launch."""
        plan, first = self._rounding(params), stream(purpose, self._counts.step)
        if purpose is Purpose.INITIAL and params:  # others may be written at the same step
            first += self._layout.positions[params[0]]
        for p, own in plan.floats:
            local(p).copy_(master_of(own))
        round_many(
            [master_of(own) for own in plan.states],
            plan.formats,
            rounding=self.policy.rules.weight_rounding,
            seed=self._seed,
            stream=first,
            offsets=plan.offsets,
            out=locals_of(plan.rounded),
        )
        self._note_written(plan, first, locals_of(params))

    def _write_moved(self, params: Sequence[Tensor], moved: Sequence[Tensor], moves: Moves) -> bool:
        """Move masters and round those of ``params`` in one pass; say whether that was done.

        Args:
            params: What to write.
            moved: Those of them that move.
            moves: How these do; its rows are their positions.
        """
        plan, first = self._rounding(params), stream(Purpose.WEIGHTS, self._counts.step)
        if plan.targets is None:
            return False
        moves = moves._replace(rows=_rows_among(params, moved, moves.rows))
        rounding = self.policy.rules.weight_rounding
        done = step_many(plan.targets, moves, rounding=rounding, seed=self._seed, stream=first)
        if done:
            self._note_written(plan, first, locals_of(params))
        return done

    def _write_compact(
        self, params: Sequence[Tensor], moved: Sequence[Tensor], moves: Moved
    ) -> None:
        """Move masters and round those of ``params`` in one pass, where states are compact.

        Args:
            params: What to write.
            moved: Those of them that have a gradient.
            moves: How these move; its rows are their positions.
        """
        plan, first = self._rounding(params), stream(Purpose.WEIGHTS, self._counts.step)
        rows = _rows_among(params, moved, moves.rows)
        moments: list[tuple[Codes | Tensor, ...]] = [()] * len(params)
        for row, more in zip(rows, moves.moments, strict=True):
            moments[row] = more
        step_compact(
            self._compact_targets(params, moments),
            CompactMoves(rows, moves.grads, moves.moves),
            seed=self._seed,
            rounding=self.policy.rules.weight_rounding,
            stream=first,
            noise=stream(Purpose.STATES, self._counts.step),
        )
        self._note_written(plan, first, locals_of(params))

    def _compact_targets(
        self, params: Sequence[Tensor], moments: Sequence[tuple[Codes | Tensor, ...]]
    ) -> CompactTargets:
        """Return what a step writes, where states are compact; ``moments``: of each that moves."""
        plan, known, weights = self._rounding(params), self._known, locals_of(params)
        if known.compact is not None and known.compact[0] is plan:
            tensors = [own[name] for own, name in plan.masters]
            tensors += weights
            tensors += flattened(x for more in moments for x in more)
            if known.compact[1].holds(tensors):
                return known.compact[1]
        masters = [
            codes_of(own, "master") if is_compact(own) else own["master"] for own in plan.own
        ]
        streams = {id(p): i for i, p in enumerate(plan.rounded)}
        rows = zip(params, masters, weights, moments, plan.positions, strict=True)
        fmts = {
            id(p): fmt
            for p, fmt in zip(plan.rounded, plan.formats, strict=True)
            if isinstance(fmt, FixedPoint)
        }
        targets = CompactTargets(
            [
                Row(
                    master=own,
                    weight=weight,
                    fmt=fmts.get(id(p)),
                    stream=streams.get(id(p), 0),
                    offset=self._layout.shards[p].offset,
                    moments=more,
                    noise=2 * index,
                )
                for p, own, weight, more, index in rows
            ]
        )
        known.compact = plan, targets
        return targets

    def _note_written(self, plan: Rounding, first: int, weights: Sequence[Tensor]) -> None:
        """Remember the noise of what was rounded, and that the weights are this optimizer's."""
        for i, own in enumerate(plan.states):
            own["stream"] = first + i
        self._marks.update(zip(plan.positions, marks_of(weights), strict=True))

    @property
    def _known(self) -> Plans:
        """What was looked up and still holds."""
        if not self._plans.hold(self.state):
            self._plans = Plans(list(self.state.values()))
        return self._plans

    def _members(self, params: Sequence[Tensor]) -> Members:
        """Return what belongs to some parameters of a group."""
        known, key = self._known.members, tuple(map(id, params))
        if key not in known:
            layers = [i for i, p in enumerate(params) if "layer" in self.state.get(p, {})]
            known[key] = Members(
                compact=[is_compact(self.state.get(p, {})) for p in params],
                params=list(params),
                shards=[self._layout.shards[p] for p in params],
                masters=[self._masters.get(p, p) for p in params],
                layers=layers,
                positions=[self._layout.positions[params[i]] for i in layers],
                states=[self.state[params[i]] for i in layers],
            )
        return known[key]

    def _trained_layers(self) -> dict[int, Trained]:
        """Return the layers that have been trained, by position; records and tensors are not kept."""
        known, layout = self._known, self._layout
        if known.trained is None:
            known.trained = {
                index: Trained(
                    p,
                    own := self.state[p],
                    _layer_of(
                        Layer(
                            index=index,
                            name=layout.names[p],
                            settings=layout.groups[p],
                            record=None,
                            tensors={},
                            master=p,
                            shard=layout.shards[p],
                        ),
                        own,
                    ),
                )
                for index, p in self._trained()
            }
        return known.trained

    def _rounding(self, params: Sequence[Tensor]) -> Rounding:
        """Return how to round some parameters."""
        known, key = self._known.rounding, tuple(map(id, params))
        if key not in known:
            found = [(p, self.state[p], self.format_of(p)) for p in params]
            rounded = [(p, own, fmt) for p, own, fmt in found if fmt is not None]
            known[key] = Rounding(
                positions=[self._layout.positions[p] for p in params],
                own=[own for _, own, _ in found],
                masters=[(own, name) for _, own, _ in found for name in names_of_master(own)],
                floats=[(p, own) for p, own, fmt in found if fmt is None],
                rounded=[p for p, _, _ in rounded],
                states=[own for _, own, _ in rounded],
                formats=[fmt for _, _, fmt in rounded],
                offsets=[self._layout.shards[p].offset for p, _, _ in rounded],
                is_fixed=all(isinstance(fmt, FixedPoint | None) for _, _, fmt in found),
                targets=self._targets(found),
            )
        return known[key]

    def _targets(self, found: Sequence[tuple[Tensor, StateDict, Format | None]]) -> Targets | None:
        """Return parameters, with their states and formats, for moving and rounding in one pass."""
        fmts = [fmt for _, _, fmt in found]
        fixed = [fmt if isinstance(fmt, FixedPoint) else None for fmt in fmts]
        if fixed != fmts or any(is_compact(own) for _, own, _ in found):
            return None
        return Targets(
            [own["master"] for _, own, _ in found],
            locals_of([p for p, _, _ in found]),
            fixed,
            [self._layout.shards[p].offset for p, _, _ in found],
        )

    def _rounded(self, params: Sequence[Tensor]) -> list[Tensor | None]:
        """Return what ``_write`` last wrote to each; None where that is not known."""
        fmts = [self.format_of(p) for p in params]
        found: list[Tensor | None] = [
            master_of(self.state[p]).to(p.dtype) if fmt is None else None
            for p, fmt in zip(params, fmts, strict=True)
        ]
        places = [
            (place, self.state[p]["stream"], fmt)
            for place, (p, fmt) in enumerate(zip(params, fmts, strict=True))
            if fmt is not None and "stream" in self.state[p]
        ]
        for _, numbered in groupby(enumerate(places), lambda item: item[1][1] - item[0]):
            rows = [row for _, row in numbered]  # written in one go: their streams are in order
            own = [params[place] for place, *_ in rows]
            rounded = round_many(
                [master_of(self.state[p]) for p in own],
                [fmt for *_, fmt in rows],
                rounding=self.policy.rules.weight_rounding,
                seed=self._seed,
                stream=rows[0][1],
                offsets=[self._layout.shards[p].offset for p in own],
                out=[torch.empty_like(local(p)) for p in own],
            )
            for (place, *_), y in zip(rows, rounded, strict=True):
                found[place] = y
        return found

    def _write_as_saved(self) -> None:
        """Give the model the weights that it had when the state was saved."""
        for piece in pieces(self._masters):
            for p, weight in zip(piece, self._rounded(piece), strict=True):
                if weight is not None:
                    local(p).copy_(weight)
        now = marks_of(locals_of(list(self._layout.names)))
        self._marks = {i: now[i] for i, p in enumerate(self._layout.names) if p in self._masters}

    def _check_shapes(self) -> None:
        """Refuse parameters that got values of another shape (``weight.data = x``)."""
        for p, shard in self._layout.shards.items():
            if p.shape != shard.shape:
                raise ValueError(
                    f"a parameter must keep its shape {tuple(shard.shape)}, got {tuple(p.shape)} of "
                    f"{self._layout.names[p]}: put a new layer in the place of the old one, and give its "
                    "parameters to optimizer.add_param_group"
                )

    def _check_state(self) -> None:
        """Refuse to go on without masters (``optimizer.state.clear()``)."""
        if lost := [self._layout.names[p] for p in self._masters if not self.state.get(p)]:
            raise RuntimeError(
                f"optimizer.state must keep the masters, got none of {listed(lost)}: to forget momenta "
                "write optimizer.optimizer.state.clear(), to begin anew make a new optimizer, to go on "
                "load a state"
            )

    @property
    def _seed(self) -> int:
        return self.param_groups[0]["seed"]


class _CompactLayer(Layer):
    """A layer whose master is decoded when a policy asks for it; see ``_layer_of``."""

    @property
    def master(self) -> Tensor:
        """The float32 weight."""
        own = vars(self)["master"]
        return own if isinstance(own, Tensor) else master_of(own)

    @master.setter
    def master(self, value: Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        vars(self)["master"] = value  # ``dataclasses.replace`` brings what it has read


def _layer_of(layer: Layer, own: StateDict) -> Layer:
    """Return a layer that finds its master in its state, where that is compact."""
    if not is_compact(own):
        return layer.but(master=own["master"])
    found = object.__new__(_CompactLayer)
    vars(found).update(vars(layer), master=own)
    return found


def _rows_among(
    params: Sequence[Tensor], moved: Sequence[Tensor], rows: Sequence[int]
) -> Sequence[int]:
    """Return where ``rows`` of ``moved`` are among ``params``, of which others change their format alone."""
    if list(map(id, params)) == list(map(id, moved)):
        return rows
    own = {id(p): row for row, p in enumerate(params)}
    return [own[id(moved[row])] for row in rows]


def pieces(params: Iterable[Tensor]) -> list[list[Tensor]]:
    """Split parameters into lists on one device, of ``_PIECE`` numbers or of one parameter."""
    pieces: list[list[Tensor]] = []
    left, device = 0, None
    for p in params:
        own = local(p)
        if own.numel() > left or own.device != device:
            pieces.append([])
            left, device = _PIECE, own.device
        left -= own.numel()
        pieces[-1].append(p)
    return pieces
