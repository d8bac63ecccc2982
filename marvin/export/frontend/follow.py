"""The exported network beside the model it was made of, module by module.

The model runs once on a sample. Each module's own inputs go through the operations that are
exported in its place, so the first module that differs is where the fault is. What the export
rounds and training does not is taken out: batch normalisation, biases and averages are computed
with the model's own numbers here, and ``check_numbers`` bounds how far the exported ones
are from these. What is left is float32's rounding, which has a bound too.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fixedpoint_kernels import FixedPoint
from fixedpoint_kernels.undo import all_or_nothing
from marvin.export.errors import ExportError
from marvin.export.execute.simulate import apply, mean, products
from marvin.export.execute.verify import evaluating
from marvin.export.frontend.builder import Whole
from marvin.export.graph.functions import Clip, Mul, Table
from marvin.export.graph.nodes import (
    FLOAT32_BITS,
    Add,
    Affine,
    AveragePool,
    Network,
    Operation,
    Round,
    Value,
    Weighted,
)
from marvin.export.graph.transformers import Constant, Norm
from marvin.export.passes.batch_norm import exact_norm

__all__ = ["Follower", "Step", "check_numbers"]

_UNIT = 2.0**-24  # float32 rounds to within this share of a result
_TF32_UNIT = 2.0**-11  # as accelerators may multiply
_FUNCTION_ROUNDINGS = 16  # of an activation function
_NORM_ROUNDINGS = 8  # of statistics, of the scale, of the offset, and of the result

_Bounds = tuple[Tensor, Tensor]  # smallest and largest value that is explained, float64


@dataclass(frozen=True)
class Step:
    """A call of the model, and what is exported in its place.

    Args:
        module: Name of the module; None of a function.
        sources: Names of the values it takes.
        result: Name of the value it gives.
        operations: Names of the operations that compute it.
        waiting: Operations that are added when something rounds their result, as they would be for
            some format.
        input_fmt: What the module rounds its input to; None where it does not.
        output_fmt: What it rounds its result to; None where it does not.
        exact: What an activation function computes, for float64.
        call: What a function gives, for the tensors of ``sources``.
        whole: What all operations together compute, where they are compared as one.
    """

    module: str | None
    sources: tuple[str, ...]
    result: str
    operations: tuple[str, ...]
    waiting: tuple[Operation, ...] = ()
    input_fmt: FixedPoint | None = None
    output_fmt: FixedPoint | None = None
    exact: Callable[[Tensor], Tensor] | None = None
    call: Callable[[Sequence[Tensor]], Tensor] | None = None
    whole: Whole | None = None


@dataclass
class Follower:
    """Compares a network with its model, step by step while the model runs.

    Args:
        network: What is exported.
        steps: The calls of the model, in order.
        rounds: Whether the model rounds by itself; else it is run with the formats of ``steps``.
        results: Name of the value of each output, by its label.
        origins: What a rounded value was before, where the model does not round it.
        values: What the model computes, float32, by name of the exported value; while needed.
        position: Of the next step.
    """

    network: Network
    steps: Sequence[Step]
    rounds: bool
    results: Mapping[str, str]
    origins: Mapping[str, str]
    values: dict[str, Tensor] = field(default_factory=dict)
    position: int = 0
    _input: Tensor = field(default_factory=lambda: torch.empty(0))

    def __post_init__(self) -> None:
        self._kept = {op.name for op in self.network.operations}
        self._last = {name: i for i, step in enumerate(self.steps) for name in step.sources}
        self._last |= dict.fromkeys(self.results.values(), len(self.steps))

    @torch.no_grad()
    def follow(self, model: nn.Module, sample: Tensor) -> None:
        """Compare a network with its model on a sample.

        Args:
            model: What was exported.
            sample: What the model takes, shape ``(n, *network.input.shape)``, float32.

        Raises:
            ExportError: They differ by more than roundings explain; names the first module that does,
                and the size of the gap.
        """
        self.values[self.network.input.name] = sample
        modules = [step.module for step in self.steps if step.module is not None]
        with all_or_nothing(model.modules()), contextlib.ExitStack() as stack:
            stack.enter_context(evaluating(model))
            for name in dict.fromkeys(modules):
                self._watch(stack, name, model.get_submodule(name))
            output = model(sample.clone())
        self._end(output)

    def _watch(self, stack: contextlib.ExitStack, name: str, module: nn.Module) -> None:
        """Compare a module whenever it is called, behind all its other hooks."""

        def before(_module: nn.Module, inputs: tuple[Tensor, ...]) -> object:
            step = self._reach(name)
            x = inputs[0] if self.rounds else _rounded(inputs[0], step.input_fmt)
            self._input = x.clone()  # which the module may change
            return None if self.rounds else (x, *inputs[1:])

        def after(module: nn.Module, _inputs: object, output: Tensor) -> object:
            step = self.steps[self.position]
            y = output if self.rounds else _rounded(output, step.output_fmt)
            self._compare(step, module, self._input, y)
            # a copy, which the model cannot change, of the same strides: see ``Call.replay``
            self.values[step.result] = deepcopy(y.detach())
            self._forget()
            return None if self.rounds else y

        for handle in (
            module.register_forward_pre_hook(before),
            module.register_forward_hook(after),
        ):
            stack.callback(handle.remove)

    def _end(self, output: object) -> None:
        """Compare what the model gives."""
        self._compute()
        found = dict(_tensors(output, ""))
        if set(found) != set(self.results):
            raise ExportError(
                f"the model must give {', '.join(self.results)}, got {', '.join(found)}"
            )
        for label, name in self.results.items():
            if name not in self.values:
                left = [s.module for s in self.steps[self.position :] if s.module is not None]
                missed = f": {left[0]} is never called" if left else ""
                raise ExportError(
                    f"forward must go one way, and goes another when it is traced{missed}; write it without a "
                    "branch on what a tracer changes, such as torch.is_grad_enabled()"
                )
            wanted = self.values[name].double()
            what = f"the model gives something else than its last call as {label}"
            _refuse(what, (wanted, wanted), found[label])

    def _reach(self, name: str) -> Step:
        """Return the step at which a module is called."""
        self._compute()
        step = self.steps[self.position] if self.position < len(self.steps) else None
        if step is None or step.module != name:
            raise ExportError(f"{name} is not called in the order of the model's trace")
        return step

    def _compute(self) -> None:
        """Compute functions until a module comes."""
        while self.position < len(self.steps) and self.steps[self.position].module is None:
            step = self.steps[self.position]
            sources = [self.values.get(name) for name in step.sources]
            given = [x for x in sources if x is not None]
            if step.call is not None and len(given) == len(sources):
                y = step.call(given)
                if all(name in self._kept for name in step.operations):
                    bounds = self._explained(step, None, [x.double() for x in given])
                    _refuse(f"{step.result} is something else than its call gives", bounds, y)
                self.values[step.result] = y
            self._forget()

    def _forget(self) -> None:
        """Go on to the next step, without the values that no other takes."""
        for name in [n for n in self.values if self._last.get(n, -1) <= self.position]:
            del self.values[name]
        self.position += 1

    def _compare(self, step: Step, module: nn.Module, x: Tensor, y: Tensor) -> None:
        """Compare one call of a module: what it takes, then what it makes of it."""
        if not all(name in self._kept for name in step.operations):
            return  # nothing uses it
        source = self.values.get(step.sources[0])
        if source is None:
            return
        wanted = _rounded(source, step.input_fmt).double()
        _refuse(f"{step.module} takes something else than {step.sources[0]}", (wanted, wanted), x)
        bounds = self._explained(step, module, [x.double()])
        _refuse(f"{step.module} computes something else than what is exported for it", bounds, y)

    def _explained(self, step: Step, module: Any, inputs: Sequence[Tensor]) -> _Bounds:
        """Return what the operations of a step may give, in float32 and with the model's numbers."""
        if step.whole is not None:
            y, size = step.whole(inputs)
            low, high = _around(y, size, max(x.shape[-1] for x in inputs) + _FUNCTION_ROUNDINGS)
            return _rounded(low, step.output_fmt), _rounded(high, step.output_fmt)
        found: dict[str, _Bounds] = {
            name: (x, x) for name, x in zip(step.sources, inputs, strict=True)
        }
        result = found[step.sources[0]]
        for op in (*map(self.network.operation, step.operations), *step.waiting):
            taken = [self._taken(name, found) for name in op.inputs]
            result = found[op.name] = self._bounds(step, op, module, taken)
        if not step.waiting and not self._is_in(step.result, step.output_fmt):
            return result
        low, high = result
        return _rounded(low, step.output_fmt), _rounded(high, step.output_fmt)

    def _is_in(self, name: str, fmt: FixedPoint | None) -> bool:
        """Say whether a format has all codes of a value: then the export leaves out the rounding.

        The model's own sums, with a bias in floats, do have to be rounded.
        """
        value = self.network.values.get(name)
        return fmt is not None and value is not None and value.is_in(fmt)

    def _taken(self, name: str, found: Mapping[str, _Bounds]) -> _Bounds:
        while name not in found:
            name = self.origins[name]
        return found[name]

    def _bounds(self, step: Step, op: Operation, module: Any, taken: Sequence[_Bounds]) -> _Bounds:
        """Return the bounds of one operation.

        Sums, batch normalisation, averages and tables take exact values, which have gone through
        roundings and orders alone. The others keep the order of values: they take bounds to bounds.
        """
        if isinstance(op, Constant):
            y, half = apply(op), op.codes_fmt.lsb / 2
            return y - half, y + half
        x = taken[0][0]
        if isinstance(op, Weighted):
            return self._sums(op, module, x)
        if isinstance(op, Affine):
            return _norm(module, x)
        if isinstance(op, AveragePool):
            return _around(mean(op, x), mean(op, x.abs()), _product(op.kernel) + 2)
        if isinstance(op, Clip | Table):
            assert step.exact is not None
            y = step.exact(x)
            return _around(y, y.abs() + x.abs() + 1, _FUNCTION_ROUNDINGS)
        if isinstance(op, Mul):
            y = apply(op, x, taken[1][0])
            return _around(y, y.abs(), 2)
        lows, highs = zip(*taken, strict=True)
        if isinstance(op, Add):
            size = lows[0].abs() + lows[1].abs()
            low, high = apply(op, *lows), apply(op, *highs)
            return _around(low, size, 2)[0], _around(high, size, 2)[1]
        return apply(op, *lows), apply(op, *highs)

    def _has_codes(self, name: str, x: Tensor) -> bool:
        """Say whether what the model computed has codes of the exported value: its own may be longer."""
        value = self.network.values[name]
        codes = x * 2.0**value.fl
        is_inside = value.low <= float(codes.min()) and float(codes.max()) <= value.high
        return is_inside and bool((codes == codes.round()).all())

    def _sums(self, op: Weighted, module: Any, x: Tensor) -> _Bounds:
        weight = (op.weight.double() * op.weight_fmt.lsb).to(x.device)
        bias = None if module.bias is None else module.bias.detach().double()
        total = products(op, x, weight, bias)
        is_same = bias is None or (
            op.bias is not None and torch.equal(bias.cpu(), op.bias.double() * op.bias_fmt.lsb)
        )
        is_short = self.network.values[op.name].is_exact(FLOAT32_BITS)
        if x.is_cpu and is_same and is_short and self._has_codes(op.inputs[0], x):
            return total, total
        size = products(op, x.abs(), weight.abs(), None if bias is None else bias.abs())
        return _around(total, size, weight[0].numel() + 2)


def _tensors(output: object, label: str) -> Iterator[tuple[str, object]]:
    """Yield label and tensor of each output."""
    if isinstance(output, tuple | list | dict):
        pairs = output.items() if isinstance(output, dict) else enumerate(output)
        for key, inner in pairs:
            own = str(key) if isinstance(output, dict) else f"output{key}"
            yield from _tensors(inner, f"{label}.{own}".lstrip("."))
    else:
        yield label or "output", output


def _product(sides: Sequence[int]) -> int:
    return int(torch.Size(sides).numel())


def _norm(module: Any, x: Tensor) -> _Bounds:
    shape = -1, *[1] * (x.ndim - 2)
    scale, offset = (n.to(x.device).view(shape) for n in exact_norm(module))
    mean = module.running_mean.double().view(shape)
    size = scale.abs() * (x.abs() + mean.abs())
    if module.bias is not None:
        size = size + module.bias.detach().double().abs().view(shape)
    return _around(x * scale + offset, size, _NORM_ROUNDINGS)


def _around(total: Tensor, size: Tensor, roundings: int) -> _Bounds:
    """Return bounds of a sum in floats, in any order, of numbers whose sizes add up to ``size``."""
    most = roundings * (_UNIT if total.is_cpu else _TF32_UNIT)
    error = size * (most / max(1 - most, 0.5))
    return total - error, total + error


def _rounded(x: Tensor, fmt: FixedPoint | None) -> Tensor:
    return x if fmt is None else apply(Round("", (), fmt), x)


def _refuse(what: str, bounds: _Bounds, got: object) -> None:
    """Refuse values outside what is explained."""
    low, high = bounds
    if isinstance(got, Tensor) and got.dtype is torch.bool:
        got = got.double()
    if not isinstance(got, Tensor) or got.shape != low.shape:
        came = tuple(got.shape) if isinstance(got, Tensor) else type(got).__name__
        raise ExportError(f"{what}: shape must be {tuple(low.shape)}, got {came}")
    gap = torch.maximum(_float32(low, -torch.inf) - got, got - _float32(high, torch.inf))
    wrong = ~(gap <= 0)  # of NaN too
    if wrong.any():
        most = float(gap[wrong].max())
        raise ExportError(
            f"{what}: {int(wrong.sum())} of {gap.numel()} values are up to {most:.3g} from what "
            f"roundings explain, the largest value is {float(got.abs().max()):.3g}"
        )


def _float32(x: Tensor, end: float) -> Tensor:
    """Return the nearest number of a float32 towards ``end``: a format may have more digits."""
    near = x.float()
    is_inside = near.double() > x if end < 0 else near.double() < x
    return torch.where(is_inside, torch.nextafter(near, near.new_tensor(end)), near).double()


def check_numbers(model: nn.Module, network: Network, steps: Sequence[Step]) -> None:
    """Compare weights, biases, and scales and offsets of batch normalisation with the model's.

    Args:
        model: What was exported.
        network: As what.
        steps: The calls of the model.

    Raises:
        ExportError: A number is farther from the model's than rounding it explains; named, with
            both distances.
    """
    kept = {op.name for op in network.operations}
    for step in steps:
        for op in step.waiting:
            if isinstance(op, Norm):
                _check_rows(op, model.get_submodule(str(step.module)))
        for name in step.operations:
            op = network.operation(name) if name in kept else None
            if step.module is None:
                continue
            if isinstance(op, Weighted):
                _check_layer(op, model.get_submodule(step.module), network.values[op.inputs[0]])
            elif isinstance(op, Affine):
                _check_norm(op, model.get_submodule(step.module), network.values[op.inputs[0]])


def _check_layer(op: Weighted, module: Any, x: Value) -> None:
    weight = op.weight.double() * op.weight_fmt.lsb
    if weight.numel() == module.weight.numel():  # of a linear layer over positions, too
        weight = weight.view(module.weight.shape)
    own = tuple(
        slice(before - side, None)
        for before, side in zip(weight.shape, module.weight.shape, strict=True)
    )  # behind taps of 0
    if weight.count_nonzero() != weight[own].count_nonzero():
        raise ExportError(f"{op.name}.weight has taps that the model has not")
    _check(f"{op.name}.weight", weight[own], module.weight, torch.zeros(()))
    if op.bias is not None:
        products = _step(x.fl + op.weight_fmt.fl) * _powers(op.trailing_zeros)
        half = torch.clamp(products, min=op.bias_fmt.lsb) / 2
        _check(f"{op.name}.bias", op.bias.double() * op.bias_fmt.lsb, module.bias, half)


def _check_rows(op: Norm, module: Any) -> None:
    for what, codes, fmt in (("weight", op.gain, op.gain_fmt), ("bias", op.bias, op.bias_fmt)):
        own = getattr(module, what, None)
        if own is not None and codes is not None:
            half = torch.tensor(fmt.lsb / 2, dtype=torch.float64)
            _check(f"{op.name}.{what}", codes.double() * fmt.lsb, own, half)


def _check_norm(op: Affine, module: Any, x: Value) -> None:
    scale, offset = (n.cpu() for n in exact_norm(module))
    zeros = (op.scale & -op.scale).clamp(min=1).double()  # of bits that may have been cut off
    cut = zeros * op.scale_fmt.lsb
    is_zero = op.scale == 0  # too short for what rounds it: the report tells the accuracy
    most = torch.where(is_zero, op.scale_fmt.max_code * op.scale_fmt.lsb, cut)
    _check(f"{op.name}.scale", op.scale.double() * op.scale_fmt.lsb, scale, most)
    sums = _step(x.fl) * _powers([x.channel(i).trailing_zeros for i in range(len(scale))])
    steps = torch.clamp(sums, min=_step(op.offset_fmt.fl - op.scale_fmt.fl))
    most = (scale.abs() + cut) * steps + offset.abs() * _UNIT + op.offset_fmt.lsb
    _check(f"{op.name}.offset", op.offset.double() * op.offset_fmt.lsb, offset, most)


def _check(name: str, got: Tensor, want: Tensor, most: Tensor) -> None:
    gap = (got - want.detach().cpu().double()).abs()
    wrong = gap > most
    if wrong.any():
        raise ExportError(
            f"{name}: {int(wrong.sum())} of {gap.numel()} exported numbers are up to "
            f"{float(gap[wrong].max()):.3g} from the model's, rounding explains "
            f"{float(most.max()):.3g}"
        )


def _step(fl: int) -> float:
    return 2.0**-fl


def _powers(exponents: Sequence[int]) -> Tensor:
    return 2.0 ** torch.tensor(exponents, dtype=torch.float64)
