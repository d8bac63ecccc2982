"""What others did to the weights since an optimizer wrote them, and masters that cannot be right."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from fixedpoint_kernels import BlockFloat, FixedPoint
from fixedpoint_kernels._torch_private.compiling import left_uncompiled
from marvin.channels import ChannelFormat, scale_of
from marvin.compact import master_of, put_master
from marvin.marks import marks_of, on_host
from marvin.masters import WithMasters, pieces
from marvin.noise import Purpose
from marvin.owners import check_owner
from marvin.rounder import FLOATS
from marvin.shards import local, locals_of
from marvin.turns import in_turn
from marvin.warned import listed, warn_user
from marvin.wrappers import for_wrappers

__all__ = ["WatchesWeights"]

_ULPS = 2
"""Of the largest weight: what adding a number up to twice as large and taking it back leaves."""


class _Change(NamedTuple):
    """What others made of a weight."""

    master: Tensor
    is_none: bool  # but for rounding
    is_small: bool  # so that nobody need know


@for_wrappers
class WatchesWeights(WithMasters):
    """An optimizer that takes weights which others changed as masters, and names what else they did; see ``Quantized``."""

    _names_unseen: bool = False  # whether ``_name_unseen`` has warned
    _runaways: frozenset[str] = frozenset()  # layers that ``_name_runaways`` has warned of
    _taken: "tuple[str, frozenset[Tensor]] | None" = None  # whose rounded weights are masters
    _said: frozenset[str] = frozenset()  # whose changed weights ``_name_adopted`` has warned of
    _unsaid: tuple[str, ...] = ()  # whose changed weights are masters, without a word so far

    @left_uncompiled
    @torch.no_grad()
    @in_turn
    def adopt_weights(self) -> None:
        """Take the model's weights as the new masters, and quantise the model again.

        Call this after writing into the model's weights through ``.data``; other changes are seen.
        Formats, momentum and windows stay.

        Raises:
            FloatingPointError: A weight is not finite; nothing was changed.
            RuntimeError: A handler of signals or a hook calls this inside of ``step``, another optimizer was made for
                the same parameters since, or ``state`` lost masters.
            ValueError: A weight has got another shape.
        """
        self._check_shapes()
        self._check_state()
        check_owner(self)
        with self.with_values():
            if wrong := self._not_finite((p, local(p)) for p in self._masters):
                raise FloatingPointError(
                    f"weights must be finite to be new masters, got others in {listed(wrong)}; nothing "
                    "was changed"
                )
            for p in self._masters:
                put_master(self.state[p], local(p))
            self._write([*self._masters], Purpose.INITIAL)

    def _broken_masters(self) -> list[str]:
        """Return what an error says of masters that are not finite; on integer units the loss need not tell."""
        wrong = self._not_finite((p, master_of(self.state[p])) for p in self._masters)
        return [f"masters of {listed(wrong)} (load an earlier state)"] if wrong else []

    def _not_finite(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> list[str]:
        """Return the names of the parameters whose second tensors are not finite."""
        found = [(self._layout.names[p], own.isfinite().all()) for p, own in pairs]
        told = on_host([is_finite for _, is_finite in found])
        return [name for (name, _), is_finite in zip(found, told, strict=True) if not is_finite]

    def _name_runaways(self) -> None:
        """Warn once of layers most of whose masters are beyond their format, which clamps them."""
        rows = [
            (p, self.state[p], fmt)
            for _, p in self._trained()
            if isinstance(fmt := self.format_of(p), FixedPoint) and local(p).numel()
        ]
        if not rows:
            return
        found = []
        largest = [vector_norm(master_of(own), float("inf")) for _, own, _ in rows]
        for (p, own, fmt), most in zip(rows, on_host(largest), strict=True):
            name, reach = self._layout.names[p], 2.0**fmt.il
            if most < 2 * reach or name in self._runaways:
                continue
            if float((master_of(own).abs() >= reach).double().mean()) > 0.5:
                self._runaways |= {name}
                found.append((name, reach, most, self._layout.groups[p].get("lr")))
        if not found:
            return
        names = [name for name, *_ in found]
        _, reach, most, rate = found[0]
        given = "" if rate is None else f", which is {float(rate):g}"
        warn_user(
            f"most weights are clamped: {listed(names)}, whose format reaches {reach:g} and whose "
            f"masters reach {most:g}; lower the learning rate{given}, or scale the weights"
        )

    def _adopted(self) -> tuple[list[Tensor], list[str]]:
        """Take weights that others have changed since they were written as masters.

        Returns:
            Those that were taken, and the names of those that are not finite: then none was taken.
        """
        params, is_first = list(self._layout.names), not self._counts.step
        now = marks_of(locals_of(params))
        changed = [  # first of all, a forward may have written through ``.data``
            i
            for i, mark in self._marks.items()
            if (now[i] != mark or is_first)
            and (own := local(params[i])).dtype in FLOATS  # others are refused by name,
            and own.device == master_of(self.state[params[i]]).device  # or compared when back
        ]
        wrong = self._not_finite((p, local(p)) for p in (params[i] for i in changed))
        adopted = []
        for i in [] if wrong else changed:
            own, p, is_seen = local(params[i]), params[i], now[i] != self._marks[i]
            self._marks[i], (weight,) = now[i], self._rounded([p])
            if weight is None or torch.equal(own, weight):
                continue
            if not (is_seen or weight.isfinite().all()):  # a master that is not is refused
                continue
            change = self._change(p, weight)
            if change.is_none:
                own.copy_(weight)
                (self._marks[i],) = marks_of([own])
                continue
            put_master(self.state[p], change.master)
            adopted.append(p)
            if not change.is_small:
                self._unsaid = (*self._unsaid, self._layout.names[p])
        return adopted, wrong

    def _change(self, p: Tensor, weight: Tensor) -> "_Change":
        """Return what others made of ``weight``.

        What is added and taken back (a perturbation of SAM) leaves the rounding of the weight's dtype: in
        float32 that is no change. In bfloat16 and float16 it may be as large as a change: it is added to the
        master, which keeps its fraction. So is what is far below a step of the format.
        """
        values, master, step = local(p).float(), master_of(self.state[p]), self._step_of(p, weight)
        off = values - weight
        size, largest = off.abs(), values.abs().max()
        near = size <= (step / 256).maximum(_ULPS * torch.finfo(p.dtype).eps * largest)
        same = (size < step) & (size <= _ULPS * torch.finfo(torch.float32).eps * largest)
        new, numbers = (off != 0) & ~(near & (size < step)), weight != 0
        if 2 * int((new & numbers).sum()) > int(numbers.sum()):
            master = values  # all are new; some are what the old ones were rounded to
        else:
            master = values.where(new, master + off)
        return _Change(master, bool((same | (off == 0)).all()), bool(near.all()))

    def _step_of(self, p: Tensor, weight: Tensor) -> Tensor:
        """Return how far each number of ``weight`` is from the next one; 0 where it is the master."""
        fmt = self.format_of(p)
        if fmt is None and p.dtype == torch.float32:
            return torch.zeros_like(weight)
        own = weight.float().abs() * torch.finfo(p.dtype).eps
        if isinstance(fmt, ChannelFormat):
            return own.maximum(fmt.fmt.lsb / scale_of(fmt, weight, self._layout.shards[p].offset))
        if isinstance(fmt, BlockFloat):
            fmt = FixedPoint(fmt.wl, fmt.fl(float(weight.min()), float(weight.max())))
        return own if fmt is None else own.clamp_min(fmt.lsb)

    def _name_unseen(self) -> None:
        """Warn once of weights that others wrote to without a trace, as ``weight.data.clamp_()`` does, or other processes."""
        params = list(self._layout.names)
        now = marks_of(locals_of(params))
        as_left = [
            p
            for i, mark in self._marks.items()
            if now[i] == mark  # others are seen
            and local(p := params[i]).device == master_of(self.state[p]).device
        ]
        found = []
        for piece in pieces(as_left):
            pairs = [
                (p, local(p) != weight)
                for p, weight in zip(piece, self._rounded(piece), strict=True)
                if weight is not None and weight.dtype == p.dtype
            ]
            told = on_host([differs.any() for _, differs in pairs])
            for (p, _), differs in zip(pairs, told, strict=True):
                if differs and master_of(self.state[p]).isfinite().all():  # else it is refused
                    found.append(p)
        if not found or self._names_unseen:
            return
        self._names_unseen = True
        names = listed([self._layout.names[p] for p in found])
        if any(own.device.type == "cpu" and own.is_shared() for own in locals_of(found)):
            warn_user(
                "weights in memory that processes share must be trained by one of them, got others' values (or what "
                f"was written into weight.data), which are lost at the next step: {names}; let each process have a "
                "model, and train them together by DistributedDataParallel"
            )
            return
        warn_user(
            f"what is written into weight.data is lost at the next step: {names}; write to "
            "the weights under torch.no_grad() (weight.clamp_(-1, 1)), or call "
            "optimizer.adopt_weights() after"
        )

    def _take(self, before: "WithMasters", params: Iterable[Tensor]) -> None:
        """Note which parameters have the weights that another optimizer rounded, not its masters."""
        if not before._counts.step or before.stored:
            return
        found: set[Tensor] = set()
        for p in params:
            own, master = local(p), before._masters.get(p)
            if master is None or own.dtype not in FLOATS or own.device != local(master).device:
                continue
            (weight,), master = before._rounded([p]), master_of(before.state[p])
            if weight is not None and torch.equal(weight, own) and not torch.equal(master, own):
                found.add(p)
        if found:
            _, known = self._taken or ("", frozenset[Tensor]())
            self._taken = type(before).__name__, known | found

    def _name_adopted(self) -> None:
        """Warn once of weights that others have changed and that were taken as masters, if no state came over them."""
        names = [name for name in dict.fromkeys(self._unsaid) if name not in self._said]
        self._said, self._unsaid = self._said.union(names), ()
        if names:
            warn_user(
                f"weights changed outside of {type(self).__name__} are the new masters, rounded: "
                f"{listed(names)}"
            )

    def _name_taken(self) -> None:
        """Warn once of masters that are weights which another optimizer has rounded."""
        if self._taken is None:
            return
        (name, found), self._taken = self._taken, None
        if found:
            names = [own for p, own in self._layout.names.items() if p in found]
            warn_user(
                f"weights that {name} has rounded are the masters of the new optimizer: "
                f"{listed(names)}; to go on from the float32 masters write "
                "optimizer.load_state_dict(before.state_dict()), or give the same optimizer to the "
                "next fit"
            )
