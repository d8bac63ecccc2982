"""What others did to the weights since an optimizer wrote them, and masters that cannot be right."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.linalg import vector_norm

from fixedpoint_kernels import FixedPoint
from fixedpoint_kernels._torch_private import left_uncompiled
from marvin.compact import master_of, put_master
from marvin.display import listed
from marvin.marks import marks_of
from marvin.masters import WithMasters, pieces
from marvin.noise import Purpose
from marvin.rounder import FLOATS
from marvin.shards import local, locals_of
from marvin.warned import warn_user
from marvin.wrappers import for_wrappers

__all__ = ["WatchesWeights"]


@for_wrappers
class WatchesWeights(WithMasters):
    """An optimizer that takes weights which others changed as masters, and names what else they did; see ``Quantized``."""

    _names_unseen: bool = False  # whether ``_name_unseen`` has warned
    _runaways: frozenset[str] = frozenset()  # layers that ``_name_runaways`` has warned of
    _taken: "tuple[str, frozenset[Tensor]] | None" = None  # whose rounded weights are masters
    _unsaid: tuple[str, ...] = ()  # whose changed weights are masters, without a word so far

    @left_uncompiled
    @torch.no_grad()
    def adopt_weights(self) -> None:
        """Take the model's weights as the new masters, and quantise the model again.

        Call this after writing into the model's weights through ``.data``; other changes are seen.
        Formats, momentum and windows stay.

        Raises:
            FloatingPointError: A weight is not finite; nothing was changed.
            ValueError: A weight has got another shape.
        """
        self._check_shapes()
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
        told = _told([is_finite for _, is_finite in found])
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
        for (p, own, fmt), most in zip(rows, torch.stack(largest).tolist(), strict=True):
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
        params = list(self._layout.names)
        now = marks_of(locals_of(params))
        changed = [
            i
            for i, mark in self._marks.items()
            if now[i] != mark
            and (own := local(params[i])).dtype in FLOATS  # others are refused by name,
            and own.device == master_of(self.state[params[i]]).device  # or compared when back
        ]
        wrong = self._not_finite((p, local(p)) for p in (params[i] for i in changed))
        adopted = []
        for i in [] if wrong else changed:
            own, p = local(params[i]), params[i]
            self._marks[i], (weight,) = now[i], self._rounded([p])
            if weight is not None and (differs := own != weight).any():
                master, numbers = master_of(self.state[p]), weight != 0
                if 2 * int((differs & numbers).sum()) > int(numbers.sum()):
                    master = own.float()  # all are new; some are what the old ones were rounded to
                put_master(self.state[p], torch.where(differs, own.float(), master))
                adopted.append(p)
        return adopted, wrong

    def _name_unseen(self) -> None:
        """Warn once of weights that others wrote to without a trace, as ``weight.data.clamp_()`` does."""
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
            told = _told([differs.any() for _, differs in pairs])
            for (p, _), differs in zip(pairs, told, strict=True):
                if differs and master_of(self.state[p]).isfinite().all():  # else it is refused
                    found.append(self._layout.names[p])
        if found and not self._names_unseen:
            self._names_unseen = True
            warn_user(
                f"what is written into weight.data is lost at the next step: {listed(found)}; write to "
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
        """Warn of weights that others have changed and that were taken as masters, if no state came over them."""
        names, self._unsaid = list(dict.fromkeys(self._unsaid)), ()
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


def _told(answers: Sequence[Tensor]) -> list[bool]:
    """Bring answers to the host, in one go: they go to the device of the first."""
    return torch.stack([x.to(answers[0].device) for x in answers]).tolist() if answers else []
