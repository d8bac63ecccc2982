"""What an optimizer on masters saves, loads, copies and pickles."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from threading import RLock

import torch
from torch.optim.optimizer import StateDict

from fixedpoint_kernels._torch_private.compiling import left_uncompiled
from marvin import state as states
from marvin.compact import is_compact, master_of, size_bytes
from marvin.groups import FollowsGroups
from marvin.inner_optimizer import guard_step
from marvin.layers import layout_of
from marvin.masters import Counts
from marvin.owners import claim, give_back, other_owners, owners_of
from marvin.plans import Plans
from marvin.policies.base import Policy
from marvin.policies.trace import Switch
from marvin.refused import check_dtypes
from marvin.shards import local, locals_of
from marvin.turns import in_turn
from marvin.wrappers import for_wrappers

__all__ = ["SavesState"]

_DROPS = "torch.distributed.checkpoint.state_dict"
"""Keeps ``state`` and ``param_groups`` of what it asks for, and nothing else."""


@for_wrappers
class SavesState(FollowsGroups):
    """An optimizer whose state decides its future, to the bit; see ``Quantized``."""

    @left_uncompiled
    @in_turn
    def state_dict(self) -> StateDict:
        """Return everything that decides the future, and the trace, as plain values.

        ``"optimizer"`` is the wrapped one's state. Another thread that calls this waits for the end of a step.

        Raises:
            RuntimeError: The wrapped optimizer got parameter groups of its own; ``state`` lost masters; a handler of
                signals or a hook calls this inside of ``step``; or ``torch.distributed.checkpoint.state_dict``
                asks, which would drop the formats.
            TypeError: A setting of groups that were put in place of others must be a number, and is none.
            ValueError: A parameter has got another shape, or groups have other parameters.
        """
        _check_caller()
        self._check_groups()
        self._check_state()
        with self.with_values():
            if not other_owners(self):  # else they are another's, and no new masters
                self._adopt_changed()
        packed = states.packed_groups(super().state_dict())
        shards = list(self._layout.shards.values())
        for p in self._masters.keys() & self.optimizer.state.keys():
            if not self.optimizer.state[p]:  # made by looking there: its moments are the master's
                del self.optimizer.state[p]
        packed["state"] = {
            index: states.packed(own, shards[index]) for index, own in packed["state"].items()
        }
        packed["marvin"] = {
            "version": states.VERSION,
            **asdict(self._counts),
            "forwards": self.forward_state.forwards,
            "gradients": self.forward_state.gradients,
            "policy": states.packed_policy(self.policy, self.shared),
            "wrapped": type(self.optimizer).__name__,
            "trace": [asdict(row) for row in self.trace],
        }
        with self._on_masters():
            packed["optimizer"] = states.packed_groups(self.optimizer.state_dict())
        return packed

    @left_uncompiled
    @torch.no_grad()
    @in_turn
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Continue from a state, its policy's hyper-parameters included.

        The model gets the weights and formats that it had when the state was saved, whether its
        own state is loaded before or after. Tensors keep the dtype that they were saved with
        (torch casts them to the parameter's). Where processes share parameters, tensors of a state
        are spread as these are; a state of whole tensors, as one process has it, loads too.

        States of version 1, which earlier releases saved, load; they leave the model's weights as
        they are: load them with the model's own state.

        Where a state does not load, or an interrupt comes, optimizer and model stay as they were. For
        that their weights are copied while it loads.

        Raises:
            RuntimeError: The wrapped optimizer got parameter groups of its own, or a handler of signals or a
                hook calls this inside of ``step``.
            TypeError: The model was made float64.
            ValueError: ``state_dict`` is not of this kind, policy or wrapped optimizer, lacks a key, has a
                value of another kind, or its parameters differ.
        """
        self._check_groups()
        check_dtypes(self._layout.names, type(self).__name__)
        shapes = [(name, p.shape) for p, name in self._layout.names.items()]
        with states.refusing(type(self).__name__):
            saved = states.checked(state_dict, self.policy, type(self.optimizer), shapes)
            policy, values = states.policy_of(self.policy, state_dict["marvin"])
            shared = policy.load_shared(values)
            state_dict = states.restored_groups(state_dict)
        with states.refusing(type(self).__name__), self.with_values(), self._all_or_nothing():
            self._load(state_dict, saved, policy, shared)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Put this optimizer, the wrapped one and what they have written to models back if this block raises."""
        things = [self, self.optimizer, self.forward_state]
        groups = [*self.param_groups, *self.optimizer.param_groups]
        tensors = locals_of(list(self._layout.names))
        owners = owners_of(self)
        try:
            with self._carriers.all_or_nothing(things, groups, tensors):
                yield
        except BaseException:
            give_back(owners)
            raise

    def _load(
        self,
        state_dict: StateDict,
        saved: Sequence[StateDict],
        policy: Policy,
        shared: object,
    ) -> None:
        """Continue from a state that was checked; ``saved``: of each parameter."""
        common = state_dict["marvin"]
        frozen = {p for p, own in zip(self._layout.names, saved, strict=False) if not own}
        for p in frozen & self._masters.keys():  # in float; what others wrote since stays
            (weight,) = self._rounded([p])
            if weight is None or torch.equal(local(p), weight):
                local(p).copy_(master_of(self.state[p]))
        super().load_state_dict(state_dict)
        vars(self)["policy"], self.shared = policy, shared
        self._masters = {}
        for p, values in zip(self._layout.names, saved, strict=True):
            self.state.pop(p, None)
            if values:
                record = self.policy.init(self._layout.groups[p], shared)
                self.state[p] = states.unpacked(values, self._layout.shards[p], p.device, record)
                self._show_masters([p])
        self._taken, self._unsaid = None, ()
        self.trace = [Switch(**row) for row in common["trace"]]
        self._counts = Counts(common["step"], common["skipped"])
        wrapped = states.spread_state(
            states.of_wrapped(state_dict), list(self._layout.shards.values())
        )
        pairs = zip(wrapped["param_groups"], self.param_groups, strict=True)
        wrapped["param_groups"] = [  # hooks may have changed them
            {n: value if n == "params" else own.get(n, value) for n, value in group.items()}
            for group, own in pairs
        ]
        with self._on_masters():
            self.optimizer.load_state_dict(wrapped)
            states.complete(self.optimizer)
        for index, p in enumerate(self._layout.names):
            master = self._masters.get(p, p)
            own = self.optimizer.state.get(master, {})
            states.kept_dtypes(own, wrapped["state"].get(index, {}))
            if not is_compact(self.state.get(p, {})):
                states.lay_out(own, master, self._layout.shards[p])
        self.__setstate__({"param_groups": list(self.optimizer.param_groups)})
        self._conform()
        self.forward_state.forwards, self.forward_state.seed = common["forwards"], self._seed
        self.forward_state.gradients = common.get("gradients", 0)  # older states have none
        self._write_as_saved()
        self._carriers.publish(self)
        self._observe_next()

    def __getstate__(self) -> StateDict:
        names = "optimizer", "policy", "shared", "trace", "forward_state", "_counts", "_masters"
        own = {name: getattr(self, name) for name in (*names, "_carriers")}
        marks = dict.fromkeys(self._marks)  # a copy has other memory
        return {**super().__getstate__(), **own, "_marks": marks}

    def __setstate__(self, state: StateDict) -> None:
        own = dict(state.get("defaults", self.__dict__.get("defaults", {})))
        super().__setstate__(state)
        self.defaults = own  # torch adds "differentiable": then only loaded states would have it
        for group in self.param_groups:
            if "differentiable" not in own:  # which earlier versions saved
                group.pop("differentiable", None)
            for name, value in own.items():  # options that an older state lacks
                group.setdefault(name, value)
        self._layout, self._plans = layout_of(self.param_groups), Plans()
        claim(self)
        self._own_step = guard_step(self, self.optimizer)
        if "_turn" not in vars(self):  # of copies
            self._turn = RLock()

    def state_bytes(self) -> dict[str, int]:
        """Return the bytes of the state of each parameter, by name, as this process holds it.

        Masters, the policy's tensors and those of the wrapped optimizer; the weights are the model's.
        """
        found = self._layout.names.items()
        moments = self.optimizer.state
        return {
            name: size_bytes(self.state.get(p, {}), moments.get(self._masters.get(p, p), {}))
            for p, name in found
        }

    def _adopt_changed(self) -> list[str]:
        """Take weights that others have changed since they were written as the new ones."""
        raise NotImplementedError

    def _observe_next(self) -> None:
        """Forget what went forward, and let modules show their inputs if the next step wants that."""
        raise NotImplementedError


def _check_caller() -> None:
    """Refuse to give a state to torch's functions that would drop the formats: nobody could go on from it."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == _DROPS:
            raise RuntimeError(
                f"a state must be saved whole, got a call by {_DROPS} (get_optimizer_state_dict, which Lightning's "
                "ModelParallelStrategy and composer's save_folder call, too): it would drop the formats; write "
                "marvin.save_sharded(folder, model, optimizer), or in one process "
                "torch.save(optimizer.state_dict(), path)"
            )
        frame = frame.f_back
