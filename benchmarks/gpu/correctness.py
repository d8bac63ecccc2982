"""Every kernel against the reference on the CPU: bit for bit."""

import importlib
from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.gpu.kernels import JOBS, Job
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.work import Work

__all__ = ["check", "difference", "implementation", "rows", "units_between"]

INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
POISON = 113


def rows(device: torch.device, sizes: Sizes, jobs: Sequence[Job] = JOBS) -> list[dict[str, object]]:
    """Return each kernel with what is wrong with it, or nothing; a failure stops no other."""
    found: list[dict[str, object]] = []
    for job in jobs:
        try:
            wrong = next(filter(None, (check(job, n, device) for n in sizes.checked)), "")
        except Exception as error:  # what a compiler or a driver raises is not known
            wrong = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        found.append({"group": job.group, "kernel": job.name, "wrong": wrong})
    return found


def implementation(job: Job, name: str) -> object:
    """Return ``gpu`` or ``reference`` of a kernel's package."""
    return importlib.import_module(f"fixedpoint_kernels.{job.group}.{name}")


def check(job: Job, n: int, device: torch.device) -> str:
    """Return what is wrong on ``n`` elements, ``""`` if nothing."""
    work = job.make(n, device)
    inputs = [x.cpu() for x in work.inputs]
    if job.reference is None:
        outputs = [torch.empty_like(y, device="cpu") for y in work.outputs]
        expected = work.run(implementation(job, "reference"), inputs, outputs)
    else:
        expected = job.reference(inputs)
    got = _poisoned(work).run(implementation(job, "gpu"), work.inputs, work.outputs)
    for number, (a, b) in enumerate(zip(got, expected, strict=True)):
        is_value = not job.is_exact and number == 0
        wrong = _far(a.cpu(), b, inputs[0], job) if is_value else difference(a.cpu(), b)
        if wrong:
            return f"{n} elements, output {number}: {wrong}"
    return ""


def _poisoned(work: Work) -> Work:
    """Return ``work`` with outputs that show what is not written."""
    for y in work.outputs:
        y.fill_(float("nan") if y.dtype.is_floating_point else POISON)
    return work


def difference(got: Tensor, expected: Tensor) -> str:
    """Say where two tensors are not the same: NaN is like NaN, and -0 is not like 0."""
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return f"{got.dtype} {tuple(got.shape)}, not {expected.dtype} {tuple(expected.shape)}"
    same = got == expected
    if got.dtype.is_floating_point:
        same = same & (got.signbit() == expected.signbit()) | (got.isnan() & expected.isnan())
    return _first(~same, got, expected)


def _far(got: Tensor, expected: Tensor, x: Tensor, job: Job) -> str:
    """Say where values are more than 2 units off; of GELU, 2 units of ``x / 2`` from exact."""
    is_near = (units_between(got, expected) <= 2) | (got == expected)
    is_near |= got.isnan() & expected.isnan()
    if job.name.startswith("gelu"):  # 1 + erf loses digits below 0, in torch's own too
        error = (got.double() - torch.nn.functional.gelu(x.double())).abs()
        is_near |= error <= torch.finfo(x.dtype).eps * x.double().abs()
    return _first(~is_near, got, expected)


def units_between(a: Tensor, b: Tensor) -> Tensor:
    """Return how many numbers of their dtype lie between two tensors, element by element."""
    kind = INTEGERS[a.dtype]
    least = torch.iinfo(kind).min
    a, b = (t.contiguous().view(kind).long() for t in (a, b))
    a, b = (torch.where(t < 0, least - t, t) for t in (a, b))
    return (a - b).abs()


def _first(is_wrong: Tensor, got: Tensor, expected: Tensor) -> str:
    at = is_wrong.flatten().nonzero()
    if not len(at):
        return ""
    i = int(at[0])
    a, b = got.flatten()[i].item(), expected.flatten()[i].item()
    return f"{len(at)} differ, the first at {i}: {a!r}, not {b!r}"
