"""Parameter groups that an optimizer and the one it wraps have in common, and parameters that come later."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import fields
from operator import is_, itemgetter

import torch
from torch import Tensor
from torch.optim import Optimizer

from fixedpoint_kernels._torch_private.compiling import left_uncompiled
from marvin import state as states
from marvin.carriers import Carriers
from marvin.compact import conform, is_compact, put_master, wants_compact
from marvin.inner_optimizer import check_groups
from marvin.layers import count_known, held_by, is_layer, layout_of
from marvin.noise import Purpose
from marvin.owners import claim, give_back, other_owners, owners_of
from marvin.plans import Plans
from marvin.policies import (
    FixedPolicy,
    LossBudgetPolicy,
    MarvinPolicy,
    MuppetPolicy,
    StaticPolicy,
)
from marvin.policies.base import check_activation_formats, check_record
from marvin.refused import check_dtypes
from marvin.rounder import ForwardState
from marvin.settings import OPTIONS, Group, check_settings, unread
from marvin.shards import is_sharded, local, locals_of
from marvin.turns import in_turn
from marvin.warned import listed, warn_user
from marvin.watched import WatchesWeights
from marvin.wrappers import for_wrappers

__all__ = ["FollowsGroups"]

_SETTINGS = {
    policy.__name__: {f.name for f in fields(policy)}
    for policy in (FixedPolicy, LossBudgetPolicy, MarvinPolicy, MuppetPolicy, StaticPolicy)
}
_OWNERS = {  # of each setting: the policies that have it
    name: " and ".join(policy for policy, own in _SETTINGS.items() if name in own)
    for name in set[str]().union(*_SETTINGS.values())
}


@for_wrappers
class FollowsGroups(WatchesWeights):
    """An optimizer whose groups are those of the wrapped one, too, and whose parameters get masters; see ``Quantized``."""

    _carriers: Carriers
    forward_state: ForwardState
    _unread: frozenset[str] = frozenset()  # what ``_name_unread`` has warned of
    _checked: Sequence[tuple[object, ...]] = ()  # settings of each group that were found right

    @left_uncompiled
    @in_turn
    def add_param_group(self, param_group: Group) -> None:
        """Add parameters to both optimizers, and quantise them.

        A call that is refused or interrupted changes nothing.

        Raises:
            RuntimeError: The wrapped optimizer got other groups of its own, or a handler of signals or a hook
                calls this inside of ``step``.
            TypeError: A parameter is not float32, bfloat16 or float16, or the policy gives no record.
            ValueError: A setting is out of range, or is read from the first group and differs from it.
        """
        self._add(param_group)

    def _add(self, param_group: Group) -> None:
        """See ``add_param_group``."""
        self._check_groups(param_group)
        own, wrapped = self.param_groups, self.optimizer.param_groups
        counts = len(own), len(wrapped)
        things = [self, self.optimizer, self.forward_state]
        try:
            with self._taking() as keep, self._carriers.all_or_nothing(things):
                if len(wrapped) == len(own):
                    self.optimizer.add_param_group(param_group)
                self._check_common(param_group)
                super().add_param_group(param_group)
                self._check(own[-1])
                self._name_unread(param_group)
                self._layout = layout_of(own)
                if self._is_made:
                    new = own[-1]["params"]
                    waiting = [p for p in self._masters if not is_layer(p)]  # some for a layer
                    keep([*new, *waiting])
                    self._follow(new)
                    claim(self)
                    self._carriers.widen(self)
                    self._begin(new)
        except BaseException:
            del own[counts[0] :], wrapped[counts[1] :]
            raise

    @contextmanager
    def _taking(self) -> Iterator[Callable[[Sequence[Tensor]], None]]:
        """Give parameters their values and optimizers back where this block raises, once it was told which."""
        kept: list[tuple[Tensor, Tensor]] = []
        owners: dict[int, Optimizer] = {}

        def keep(params: Sequence[Tensor]) -> None:
            kept[:] = [(x, x.detach().clone()) for x in locals_of(params)]
            owners.update(owners_of(self))

        try:
            yield keep
        except BaseException:
            give_back(owners)
            with torch.no_grad():
                for x, value in kept:
                    x.copy_(value)
            raise

    def _follow(self, params: Sequence[Tensor]) -> None:
        """Note what the optimizers leave behind that had these parameters until now."""
        for before in other_owners(self):
            if isinstance(before, FollowsGroups):
                self._carriers.before += tuple(before._carriers.handles)
                self._take(before, params)

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
                check_record(own["layer"])
                check_activation_formats(self.policy, own["layer"])
        self._show_masters(new)
        for p in new:
            if p in self.optimizer.state:  # some make it in their constructor
                made = states.float_masters(self.optimizer.state.pop(p), p)
                states.lay_out(made, self._masters[p], self._layout.shards[p])
                self.optimizer.state[self._masters[p]] = made
        self._conform()
        fresh = {*new}
        waited = [p for p in self._masters if p not in fresh and self._layout.owners[p] in fresh]
        self._write([*new, *waited], Purpose.INITIAL)
        for p in new:
            if self._layout.groups[p]["master_init"] == "quantized":
                put_master(self.state[p], local(p))
        self._carriers.publish(self)

    def _conform(self) -> None:
        """Make states compact or float32, as the groups say: older ones know nothing of that."""
        for p, master in list(self._masters.items()):
            wanted = wants_compact(self._layout.groups[p], p)
            if is_compact(self.state[p]) != wanted:
                moments = self.optimizer.state.get(master, {})
                conform(self.state[p], moments, self._layout.shards[p], wanted)
                self._show_masters([p])
                if master in self.optimizer.state:
                    self.optimizer.state[self._masters[p]] = self.optimizer.state.pop(master)

    def _check_groups(self, new: Group | None = None) -> None:
        """Refuse groups of the wrapped optimizer's own, and other shapes; ``new``: what comes as a group now."""
        if self._lent:
            self._take_groups_back()
        if self._is_made:
            self._follow_groups()
            self._check_shapes()
            self._check_changed()
        check_groups(self, self.optimizer, new)

    def _follow_groups(self) -> None:
        """Take over groups that somebody put in the place of this optimizer's, or of the wrapped one's."""
        own, wrapped = self.param_groups, self.optimizer.param_groups
        is_known = held_by(own) == self._layout.held
        if is_known and len(wrapped) >= len(own) and all(map(is_, own, wrapped)):
            return
        groups = list(wrapped if is_known else own)
        count = count_known(groups, self._layout.names)
        known, new = groups[:count], groups[count:]
        for group in known:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
            self._check(group)
        layout = layout_of(known)
        self.param_groups, self.optimizer.param_groups[:] = known, known
        self._layout, self._plans = layout, Plans()
        try:
            for group in new:
                self._add(group)
        except (TypeError, ValueError):  # it is refused again at the next step
            self.param_groups = groups
            raise

    def _check_changed(self) -> None:
        """Refuse settings that somebody changed in a group; those of the wrapped optimizer are its own."""
        names = [name for name in self.defaults if name not in self.optimizer.defaults]
        try:
            now = [*map(itemgetter(*names), self.param_groups)]
        except KeyError as error:
            raise ValueError(
                f"parameter groups must have all settings of {type(self).__name__}, got one without {error}: "
                f"write group[{error}] = optimizer.defaults[{error}]"
            ) from None
        if _is_same(now, self._checked):
            return
        for group in self.param_groups:
            self._check(group)
        if self._seed != self.forward_state.seed:
            raise ValueError(
                f"the seed must stay {self.forward_state.seed}, whose noise the weights have, got "
                f"seed={self._seed!r}: make a new optimizer with that"
            )
        for values, before in zip(now[1:], self._checked[1:], strict=False):
            pairs = zip(names, values, before, strict=True)
            self._check_common({name: new for name, new, old in pairs if not _is_same(new, old)})
        # lists and tensors may be changed in place
        self._checked = [
            tuple(x.tolist() if isinstance(x, Tensor) else deepcopy(x) for x in values)
            for values in now
        ]

    def _check(self, group: Group) -> None:
        """Refuse a parameter group; subclasses add checks of their own."""
        self.policy.check(group)
        check_settings(group, OPTIONS)
        check_dtypes(group["params"], type(self).__name__)
        if not self.policy.rules.takes_shards and any(map(is_sharded, group["params"])):
            raise ValueError(
                f"{type(self.policy).__name__} needs whole parameters, got sharded ones: train on "
                "several processes with DistributedDataParallel"
            )

    def _name_unread(self, group: Group) -> None:
        """Warn once of what a group has that looks like a setting and that nothing reads."""
        settings = self.defaults.keys() - self.optimizer.defaults.keys()
        found = unread(group, self.defaults, settings, _OWNERS)
        new = [f"{name} ({remark})" for name, remark in found.items() if name not in self._unread]
        self._unread |= found.keys()
        if new:
            warn_user(
                f"parameter groups must have settings of {type(self).__name__}, its "
                f"{type(self.policy).__name__} and {type(self.optimizer).__name__} by their names, got "
                f"{listed(new)}, which nothing reads"
            )

    def _check_common(self, param_group: Group) -> None:
        """Refuse settings of a later group that are read from the first one."""
        for name in ("nonfinite", "seed", *self.policy.rules.common) if self.param_groups else ():
            first = self.param_groups[0][name]
            if (value := param_group.get(name, first)) != first:
                raise ValueError(
                    f"{name} is read from the first parameter group and must be {first!r} in others, "
                    f"got {name}={value!r}: give it to the first group"
                )


def _is_same(now: object, before: object) -> bool:
    """Say whether settings are as they were; arrays of several numbers never are."""
    try:
        return bool(now == before)
    except (RuntimeError, ValueError):  # such an array is neither true nor false
        return False
