"""An optimizer's state as plain values: packing, checking, and what earlier versions saved."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import StateDict

from marvin.compact import SUFFIXES, check_saved
from marvin.policies.base import Policy, check_remembers_nothing, fields_of
from marvin.policies.records import check_plain, plain_value, restored, restored_value
from marvin.sgd import SGD
from marvin.shards import Shard, is_sharded, laid_as, local
from marvin.warned import listed

__all__ = [
    "KEPT",
    "VERSION",
    "checked",
    "complete",
    "float_masters",
    "kept_dtypes",
    "lay_out",
    "of_wrapped",
    "packed",
    "packed_groups",
    "packed_policy",
    "policy_of",
    "refusing",
    "restored_groups",
    "spread_state",
    "unpacked",
]

VERSION = 2  # of what ``Quantized.state_dict`` returns under "marvin"
_CODES = "master_codes"  # saved as pairs of bytes
# of torch's optimizers; others' may have any shape
_MOMENTS = "momentum_buffer", "exp_avg", "exp_avg_sq"
_ADAM = "step", "exp_avg", "exp_avg_sq"
_NEEDED: Mapping[
    type, tuple[str, ...]
] = {  # what optimizers keep of each parameter they have moved
    SGD: (),
    torch.optim.SGD: (),
    torch.optim.Adam: _ADAM,
    torch.optim.AdamW: _ADAM,
    torch.optim.NAdam: (*_ADAM, "mu_product"),
    torch.optim.RAdam: _ADAM,
    torch.optim.Adamax: ("step", "exp_avg", "exp_inf"),
    torch.optim.RMSprop: ("step", "square_avg"),
    torch.optim.Adagrad: ("step", "sum"),
    torch.optim.Adadelta: ("step", "square_avg", "acc_delta"),
}
_NEEDED_BY_OPTION = {  # of these optimizers
    "momentum": "momentum_buffer",
    "amsgrad": "max_exp_avg_sq",
    "centered": "grad_avg",
}
# what a state has, and what it has under "marvin", by version
_KEYS = {1: ("state", "param_groups"), VERSION: ("state", "param_groups", "optimizer")}
_COMMON_KEYS = {
    1: ("step", "skipped", "forwards", "trace"),
    VERSION: ("step", "skipped", "forwards", "trace", "policy", "wrapped"),
}
KEPT = "fmt"
"""In the state of a parameter that is frozen: its format, where that of its layer has changed since."""
_RECORDS = "layer", KEPT  # of a parameter
_EARLIER_SHARED = "level", "losses", "loss_sum"  # were beside the trace


def packed(state: StateDict, shard: Shard) -> dict[str, Any]:
    """Return one parameter's state as plain values, and tensors as spread as the parameter.

    Raises:
        TypeError: The layer's record has what would not come back.
    """
    if "layer" in state:
        check_plain("a layer's record", state["layer"])
    tensors = {name: v for name, v in state.items() if isinstance(v, Tensor)}
    if _CODES in tensors:  # 16-bit integers have no collectives
        tensors[_CODES] = tensors[_CODES].view(torch.int8)
    wrapped = {name: shard.to_dtensor(v) for name, v in tensors.items()}
    records = {name: asdict(state[name]) for name in _RECORDS if state.get(name) is not None}
    return {**state, **wrapped, **records}


def unpacked(
    values: Mapping[str, Any], shard: Shard, device: torch.device, record: Any
) -> dict[str, Any]:
    """Return one parameter's state from plain values; tensors as they were saved, on its device.

    Args:
        values: What ``packed`` gave, or an earlier version.
        shard: What this process holds of the parameter.
        device: Of the parameter.
        record: A new record of the layer, whose values are replaced.
    """
    own: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            own[name] = shard.to_local(value.detach()).to(device, copy=True)
            if name == _CODES:
                own[name] = own[name].view(torch.int16)
        else:
            own[name] = restored(record, value) if name == "layer" else value
            if name == KEPT:
                own[name] = restored_value(value)
    own.pop("momentum_buffer", None)  # of earlier versions: the wrapped optimizer has it
    return own


def packed_groups(state_dict: StateDict) -> StateDict:
    """Return a state whose groups have their formats as plain values."""
    groups = [
        {name: plain_value(value) for name, value in group.items()}
        for group in state_dict["param_groups"]
    ]
    return {**state_dict, "param_groups": groups}


def restored_groups(state_dict: StateDict) -> StateDict:
    """Return a state, the wrapped optimizer's in it too, whose groups have formats again."""
    groups = [
        {
            name: restored_value(value) if isinstance(value, Mapping | tuple) else value
            for name, value in group.items()
        }
        for group in state_dict["param_groups"]
    ]
    found = {**state_dict, "param_groups": groups}
    if "optimizer" in state_dict:
        found["optimizer"] = restored_groups(state_dict["optimizer"])
    return found


def packed_policy(policy: Policy, shared: object) -> dict[str, Any]:
    """Return a policy's name, hyper-parameters and shared record as plain values.

    Raises:
        TypeError: The shared record has what would not come back, or the policy has what no field of it is.
    """
    check_remembers_nothing(policy)
    if shared is not None:
        check_plain("the shared record", shared)
    return {
        "name": type(policy).__name__,
        "settings": {name: plain_value(value) for name, value in fields_of(policy).items()},
        "shared": asdict(shared) if is_dataclass(shared) and not isinstance(shared, type) else None,
    }


def policy_of(policy: Policy, saved: Mapping[str, Any]) -> tuple[Policy, Mapping[str, Any] | None]:
    """Return a policy with the hyper-parameters of a state, and its shared record's values.

    Args:
        policy: Of the same class; where earlier versions saved no hyper-parameters, it stays.
        saved: What the state has under ``"marvin"``.
    """
    values = saved.get("policy", "MarvinPolicy")  # the first states name none
    if isinstance(values, str):
        if "muppet" in saved:
            return policy, saved["muppet"]
        return policy, {name: saved[name] for name in _EARLIER_SHARED if name in saved} or None
    settings = {name: restored_value(value) for name, value in values["settings"].items()}
    own: Any = policy
    return (replace(own, **settings) if settings else policy), values["shared"]


@contextmanager
def refusing(who: str) -> Iterator[None]:
    """Let errors of values that are not what a state has say so.

    Args:
        who: Class of the optimizer that loads it.

    Raises:
        ValueError: In place of Python's own errors, and of torch's.
    """
    try:
        yield
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"the state must be one that {who}.state_dict() returned, got one that does not load "
            f"({type(error).__name__}: {error}); nothing was changed: load a whole state"
        ) from error


def checked(
    state_dict: Mapping[str, Any],
    policy: Policy,
    wrapped: type,
    names: Sequence[tuple[str, torch.Size]],
) -> list[dict[str, Any]]:
    """Return the saved state of each parameter, in parameter order.

    Args:
        state_dict: Of ``Quantized``, or of an earlier ``MSGD``.
        policy: Of which it must be.
        wrapped: Class of the wrapped optimizer, of which it must be.
        names: Name and shape of each parameter of the optimizer that is to load it.

    Raises:
        ValueError: It is not of this kind or policy, lacks a key, or its parameters differ.
    """
    _check_common(state_dict)
    common = state_dict["marvin"]
    saved = common.get("policy", "MarvinPolicy")
    name = saved if isinstance(saved, str) else saved["name"]
    if name != type(policy).__name__:
        raise ValueError(f"the state must be of {type(policy).__name__}, got {name}")
    kind = wrapped.__name__
    saved = common.get("wrapped", kind if "optimizer" in state_dict else "SGD")
    if saved != kind:
        raise ValueError(f"the state must be of {kind} on masters, got {saved}")
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    _check_keys(state_dict["state"], set(indices))
    states = [state_dict["state"].get(index, {}) for index in indices]
    moments = of_wrapped(state_dict)["state"]
    _check_groups(state_dict["param_groups"], of_wrapped(state_dict)["param_groups"])
    _check_moments(of_wrapped(state_dict), wrapped, [name for name, _ in names])
    _check_order(state_dict["param_groups"], [name for name, _ in names])
    for (parameter, shape), index, values in zip(names, indices, states, strict=False):
        master = _whole(values[_CODES]) if _CODES in values else values.get("master")
        if values and (not isinstance(master, Tensor) or master.shape != shape):
            got = tuple(master.shape) if isinstance(master, Tensor) else "none"
            raise ValueError(f"the state of {parameter} must have shape {tuple(shape)}, got {got}")
        if values and len(shape) > 1:  # as ``is_layer`` has it
            _check_layer(parameter, values, policy)
        _check_shapes(parameter, shape, values, policy.rules.tensors)
        if wrapped is SGD or wrapped.__module__.startswith("torch.optim."):
            _check_shapes(parameter, shape, moments.get(index, {}), _MOMENTS)
        own = {**values, _CODES: master} if _CODES in values else values
        try:
            check_saved(own, moments.get(index, {}), shape)
        except ValueError as error:
            raise ValueError(f"the state of {parameter} does not fit: {error}") from None
    return states


def _check_keys(state: Mapping[object, object], indices: Collection[int]) -> None:
    """Refuse keys of no parameter: what they have would be left out."""
    if foreign := [repr(key) for key in state if key not in indices]:
        raise ValueError(
            "the keys of the state must be the integers that its groups have for parameters, got "
            f"{listed(foreign)}: torch.distributed.checkpoint makes such keys, and has written its tensors into "
            "this optimizer by then; use marvin.save_sharded and marvin.load_sharded, and make a new optimizer or "
            "load a whole state"
        )


def _check_groups(groups: Sequence[StateDict], wrapped: Sequence[StateDict]) -> None:
    """Refuse a wrapped optimizer's state of other groups: torch would, when half is loaded."""
    wanted, got = ([len(group["params"]) for group in own] for own in (groups, wrapped))
    if got != wanted:
        raise ValueError(
            f"optimizer, in the state, must have groups of {wanted} parameters, as the state has, got "
            f"{got}: load a whole state"
        )


def _check_order(groups: Sequence[StateDict], names: Sequence[str]) -> None:
    """Refuse parameters in another order. Others names may be of the same model, wrapped otherwise."""
    saved = [name for group in groups for name in group.get("param_names", ())]
    if len(saved) != len(names):
        return
    for own, name in zip(names, saved, strict=True):
        if own != name and name in names:
            raise ValueError(
                f"the state's parameters must be in the order of this optimizer's, got {name} in the "
                f"place of {own}: make its groups in the order in which they were saved"
            )


def _check_common(state_dict: Mapping[str, object]) -> None:
    """Refuse a state that lacks a part of what all parameters have in common."""
    if "marvin" not in state_dict:
        own = state_dict.get("state")
        rows = own.values() if isinstance(own, Mapping) else ()
        why = ""
        if any(isinstance(row, Mapping) and {"master", _CODES} & row.keys() for row in rows):
            why = (
                ", without the formats: torch.distributed.checkpoint.state_dict (Lightning's ModelParallelStrategy) "
                "drops them; write marvin.save_sharded and marvin.load_sharded"
            )
        elif set(_KEYS[1]) == state_dict.keys():
            why = (
                ", as a float optimizer has: load it into that one, and then write "
                "optimizer = marvin.Quantized(...)"
            )
        raise ValueError(
            "the state must be of marvin.Quantized or marvin.MSGD, got one with "
            f"{sorted(map(str, state_dict))}{why}"
        )
    version = _table("marvin, in the state,", state_dict["marvin"]).get("version", 1)
    if not isinstance(version, int) or version not in _KEYS:
        raise ValueError(f"the state must be of version 1 or {VERSION}, got version {version!r}")
    _table("the state", state_dict, _KEYS[version])
    common = _table("marvin, in the state,", state_dict["marvin"], _COMMON_KEYS[version])
    if not isinstance(policy := common.get("policy", ""), str):
        _table("the policy of the state", policy, ("name", "settings", "shared"))
    if "optimizer" in state_dict:
        _table("optimizer, in the state,", state_dict["optimizer"], _KEYS[1])
    if isinstance(trace := common["trace"], Sequence):
        for row in trace:
            _table("a row of the state's trace", row, ("step", "layer", "wl"))


def _table(what: str, found: object, wanted: Sequence[str] = ()) -> Mapping[str, object]:
    """Return a table of a state, if it is one and has all ``wanted`` keys."""
    if not isinstance(found, Mapping):
        raise ValueError(f"{what} must be a table, got {type(found).__name__}")
    if missing := [key for key in wanted if key not in found]:
        raise ValueError(f"{what} must have {', '.join(missing)}, got {sorted(map(str, found))}")
    return found


def _check_layer(parameter: str, values: Mapping[str, object], policy: Policy) -> None:
    """Refuse a layer without its record, its format, or what its policy keeps of it."""
    own = [name for name in policy.rules.tensors if name + SUFFIXES[0] not in values]
    _table(f"the state of {parameter}", values, ["layer", *own])
    for name, value in _table(f"the layer of {parameter}", values["layer"], ("fmt",)).items():
        try:
            restored_value(value)
        except TypeError as error:
            raise ValueError(
                f"{name} of {parameter} must be a whole format, got {value}"
            ) from error


def _check_shapes(
    parameter: str, shape: torch.Size, values: Mapping[str, object], names: Sequence[str]
) -> None:
    """Refuse tensors that sums would spread over others, or that kernels would take for flat ones."""
    for name in names:
        value = values.get(name)
        if isinstance(value, Tensor) and value.shape != shape:
            raise ValueError(
                f"the state of {parameter} must have {name} of shape {tuple(shape)}, got "
                f"{tuple(value.shape)}"
            )


def _check_moments(state: StateDict, wrapped: type, names: Sequence[str]) -> None:
    """Refuse a state of a wrapped optimizer that lacks what the next step reads, or would begin anew."""
    if wrapped not in _NEEDED:
        return
    groups = [(index, group) for group in state["param_groups"] for index in group["params"]]
    for parameter, (index, group) in zip(names, groups, strict=False):
        own = state["state"].get(index)
        if own is None:  # it had no gradient yet
            continue
        needed = [*_NEEDED[wrapped], *(n for o, n in _NEEDED_BY_OPTION.items() if group.get(o))]
        missing = [n for n in needed if not {n, n + SUFFIXES[0]} & own.keys()]
        if missing:
            raise ValueError(
                f"{wrapped.__name__}'s state of {parameter} must have {', '.join(missing)}, got "
                f"{sorted(own)}: load a whole state, or begin its moments anew by del "
                f'state["optimizer"]["state"][{index!r}]'
            )


def _whole(codes: object) -> object:
    """Return codes of a master as they will be, without their values: they are saved as pairs of bytes."""
    if not isinstance(codes, Tensor) or codes.layout is not torch.strided:
        return codes
    if codes.dtype is not torch.int8 or codes.shape[-1] % 2 or not codes.is_contiguous():
        return codes
    shape = (*codes.shape[:-1], codes.shape[-1] // 2)
    return torch.empty(shape, dtype=torch.int16, device="meta")


def of_wrapped(state_dict: Mapping[str, Any]) -> StateDict:
    """Return the state of the wrapped optimizer; earlier versions of MSGD had none."""
    if "optimizer" in state_dict:
        return state_dict["optimizer"]
    state = {
        index: {"momentum_buffer": values["momentum_buffer"]}
        for index, values in state_dict["state"].items()
        if "momentum_buffer" in values
    }
    return {"state": state, "param_groups": state_dict["param_groups"]}


def spread_state(state_dict: Mapping[str, Any], shards: Sequence[Shard]) -> dict[str, Any]:
    """Return a copy of the wrapped optimizer's state, its tensors as spread as the parameters are.

    torch would go on with the tensors of the state that it is given, and change them.
    """
    states = {
        index: {name: _copied(v) if isinstance(v, Tensor) else v for name, v in own.items()}
        for index, own in state_dict["state"].items()
    }
    for index, shard in enumerate(shards):
        if index in states:
            states[index] = {
                name: shard.to_dtensor(shard.to_local(value))
                if isinstance(value, Tensor) and _is_spread(name, value, shard)
                else value
                for name, value in states[index].items()
            }
    return {**state_dict, "state": states}


def _copied(x: Tensor) -> Tensor:
    """Return a copy; of a tensor that is made of others one of copies: not all can be cloned, as torchao's low-bit states."""
    flatten, unflatten = (getattr(x, f"__tensor_{way}flatten__", None) for way in ("", "un"))
    if flatten is None or unflatten is None or is_sharded(x):
        return x.clone()
    names, context = flatten()
    parts = {name: _copied(getattr(x, name)) for name in names}
    return unflatten(parts, context, x.shape, x.stride())


def _is_spread(name: str, value: Tensor, shard: Shard) -> bool:
    """Say whether a tensor of a state has the rows of its parameter."""
    return value.shape == shard.shape or name.endswith(SUFFIXES[1])


def complete(optimizer: Optimizer) -> None:
    """Make the states that Adagrad lacks as it does itself: up to torch 2.11 it makes none later."""
    if not isinstance(optimizer, torch.optim.Adagrad):
        return
    for group in optimizer.param_groups:
        missing = [p for p in group["params"] if not optimizer.state.get(p)]
        if missing:
            first = group["initial_accumulator_value"]
            own = torch.optim.Adagrad(
                missing, initial_accumulator_value=first, fused=group["fused"]
            )
            optimizer.state.update(own.state)


def kept_dtypes(loaded: dict[str, Any], saved: Mapping[str, object]) -> None:
    """Give tensors of a loaded state the dtypes that they were saved with: torch casts them."""
    for name, value in saved.items():
        own = loaded.get(name)
        if isinstance(value, Tensor) and isinstance(own, Tensor) and own.dtype != value.dtype:
            loaded[name] = value.to(own.device, copy=True)


def lay_out(moments: StateDict, master: Tensor, shard: Shard) -> None:
    """Give what an optimizer remembers of a parameter the memory order of its master.

    Args:
        moments: Changed in place.
        master: As the wrapped optimizer knows it.
        shard: What this process holds.
    """
    like = local(master)
    for name, value in moments.items():
        if isinstance(value, Tensor) and (own := local(value)).shape == like.shape:
            laid = laid_as(own, like)
            if laid is not own:
                moments[name] = shard.to_dtensor(laid)


def float_masters(state: Mapping[str, object], parameter: Tensor) -> dict[str, Any]:
    """Return what an optimizer remembers of a low-precision parameter, for its float32 master.

    Some make their state in their constructor, in the dtype of the parameter: in bfloat16, sums
    stop to grow.
    """
    return {
        name: value.float()
        if isinstance(value, Tensor)
        and value.dtype == parameter.dtype
        and value.shape == parameter.shape
        else value
        for name, value in state.items()
    }
