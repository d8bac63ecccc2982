"""``Any`` stands only where others give no type; here is each place, with its reason.

``ctx`` of an autograd Function and what ``__getattr__`` returns are ``Any`` everywhere: torch and
Python know no better type.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
QUOTED = re.compile(r"[\w.\[\], |]*\bAny\b[\w.\[\], |]*")  # a type in quotes
PACKAGES = "fixedpoint_kernels", "marvin", "perfmodel", "train"
FENCED = "fixedpoint_kernels/llvm/"  # values of llvmlite, which has no types
ALLOWED = {
    "numba, llvmlite and triton have no types for what a kernel and an intrinsic take": {
        "fixedpoint_kernels/few_bit/cpu.py": 4,
        "fixedpoint_kernels/fused/by_images.py": 1,
        "fixedpoint_kernels/fused/cpu.py": 2,
        "fixedpoint_kernels/fused/inference.py": 1,
        "fixedpoint_kernels/philox/cpu.py": 8,
        "fixedpoint_kernels/philox/gpu.py": 1,
        "fixedpoint_kernels/products/by_outputs.py": 1,
        "fixedpoint_kernels/products/cpu.py": 1,
        "fixedpoint_kernels/products/instructions.py": 7,
        "fixedpoint_kernels/products/jobs.py": 1,
        "fixedpoint_kernels/products/weight_jobs.py": 1,
        "fixedpoint_kernels/threads.py": 11,
        "fixedpoint_kernels/tokens/cpu.py": 5,
    },
    "torch gives no type to attributes of modules, and what a user's forward takes may be anything": {
        "fixedpoint_kernels/_torch_private/modes.py": 1,
        "fixedpoint_kernels/_torch_private/modules.py": 5,
        "fixedpoint_kernels/few_bit/functional.py": 4,
        "fixedpoint_kernels/forward_save/activations.py": 3,
        "fixedpoint_kernels/forward_save/calls.py": 11,
        "fixedpoint_kernels/forward_save/checkpoint.py": 11,
        "fixedpoint_kernels/forward_save/choices.py": 4,
        "fixedpoint_kernels/forward_save/handlers.py": 3,
        "fixedpoint_kernels/forward_save/offload.py": 6,
        "fixedpoint_kernels/forward_save/peak.py": 5,
        "fixedpoint_kernels/forward_save/settings.py": 1,
        "fixedpoint_kernels/forward_save/swap.py": 6,
        "fixedpoint_kernels/watch.py": 5,
        "marvin/attention.py": 2,
        "marvin/export/frontend/activations.py": 1,
        "marvin/export/frontend/call.py": 7,
        "marvin/export/frontend/follow.py": 7,
        "marvin/export/frontend/functions.py": 2,
        "marvin/export/frontend/layers.py": 3,
        "marvin/export/frontend/load.py": 5,
        "marvin/export/frontend/observe.py": 6,
        "marvin/export/frontend/sizes.py": 11,
        "marvin/export/frontend/trace.py": 20,
        "marvin/export/frontend/transformers.py": 4,
        "marvin/freezing.py": 8,
        "marvin/hooks.py": 5,
        "marvin/integer/chain_run.py": 4,
        "marvin/integer/token_autograd.py": 2,
        "marvin/integer/fusion.py": 7,
        "marvin/integer/graph_code.py": 1,
        "marvin/integer/graph.py": 16,
        "marvin/integer/layers.py": 9,
        "marvin/integer/lone_run.py": 3,
        "marvin/integer/nodes.py": 1,
        "marvin/integer/pools.py": 3,
        "marvin/integer/seen.py": 1,
        "marvin/nested.py": 4,
        "marvin/rounder.py": 2,
        "marvin/proxies.py": 22,
        "marvin/tracing.py": 7,
        "perfmodel/counting.py": 10,
        "perfmodel/layers.py": 1,
        "perfmodel/operators.py": 3,
        "perfmodel/skeleton.py": 3,
    },
    "torch gives no type to what a Function's or an operator's implementation takes": {
        "fixedpoint_kernels/division/operators.py": 3,
        "fixedpoint_kernels/few_bit/autograd.py": 5,
        "fixedpoint_kernels/few_bit/operators.py": 6,
        "fixedpoint_kernels/forward_save/exact.py": 18,
        "fixedpoint_kernels/forward_save/layers.py": 16,
        "fixedpoint_kernels/forward_save/maps.py": 1,
        "fixedpoint_kernels/forward_save/norm_functions.py": 11,
        "fixedpoint_kernels/forward_save/norms.py": 8,
        "fixedpoint_kernels/forward_save/recompute.py": 4,
        "fixedpoint_kernels/products/operators.py": 2,
        "fixedpoint_kernels/products/reference.py": 1,
        "marvin/integer/autograd.py": 1,
        "marvin/straight_through.py": 5,
    },
    "parameter groups and states are dict[str, Any] in torch": {
        "marvin/checkpoint.py": 3,
        "marvin/settings.py": 3,
        "marvin/state.py": 16,
        "train/alike.py": 3,
        "train/checkpoint.py": 17,
        "train/training.py": 2,
    },
    "torch.distributed's types exist only where it is built, and are slow to import": {
        "marvin/shards.py": 9,
    },
    "a policy's records are of the policy's own types": {
        "marvin/masters.py": 1,
        "marvin/policies/base.py": 13,
        "marvin/policies/muppet.py": 2,
        "marvin/policies/range_policy.py": 1,
        "marvin/policies/records.py": 6,
        "perfmodel/trace.py": 3,
    },
    "what json, pickle and torch.load read is checked field by field": {
        "marvin/export/targets/packed.py": 2,
        "marvin/export/targets/safetensors.py": 3,
        "perfmodel/files.py": 4,
        "perfmodel/run.py": 3,
        "train/demo.py": 3,
        "train/records.py": 4,
        "train/table.py": 1,
    },
    "numpy, onnx and hls4ml give no type to arrays of objects, element types and attributes": {
        "fixedpoint_kernels/formats.py": 4,
        "marvin/export/errors.py": 1,
        "marvin/export/execute/arithmetic.py": 2,
        "marvin/export/execute/verify.py": 2,
        "marvin/export/graph/bounds.py": 1,
        "marvin/export/passes/fold.py": 1,
        "marvin/export/targets/hls4ml/__init__.py": 5,
        "marvin/export/targets/hls4ml/layers.py": 6,
        "marvin/export/targets/onnx/float64.py": 2,
        "marvin/export/targets/onnx/graph.py": 5,
        "marvin/export/targets/onnx/int8.py": 6,
        "marvin/export/targets/onnx/transformers.py": 3,
        "marvin/export/targets/write.py": 1,
        "train/monitor.py": 1,
    },
    "fields of a dataclass, and command-line options, each have a type of their own": {
        "perfmodel/arguments.py": 3,
        "train/arguments.py": 4,
        "train/checks.py": 3,
        "train/config.py": 3,
        "train/export.py": 1,
        "train/main.py": 2,
        "train/optimizers.py": 2,
    },
}


def count(code):
    """Return how often ``Any`` stands in a file's code."""
    tree = ast.parse(code)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    free = [f.returns for f in functions if f.name == "__getattr__"]
    free += [arg.annotation for f in functions for arg in f.args.args if arg.arg == "ctx"]
    places = [node for node in ast.walk(tree) if is_any(node)]
    texts = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)]
    quoted = [text for text in texts if isinstance(text, str) and QUOTED.fullmatch(text)]
    return len(quoted) + sum(all(place is not other for other in free) for place in places)


def is_any(node):
    return getattr(node, "id", getattr(node, "attr", "")) == "Any"


@pytest.mark.parametrize("package", PACKAGES)
def test_no_new_any(package):
    allowed = {path: number for places in ALLOWED.values() for path, number in places.items()}
    paths = sorted((ROOT / package).rglob("*.py"))
    assert paths
    found = {path.relative_to(ROOT).as_posix(): count(path.read_text()) for path in paths}
    more = {path: n for path, n in found.items() if n > allowed.get(path, 0)}
    more = {path: n for path, n in more.items() if not path.startswith(FENCED)}
    assert more == {}, "write the type; only where others give none, add the place and its reason"


def test_every_place_is_there():
    paths = [path for places in ALLOWED.values() for path in places]
    assert len(set(paths)) == len(paths)
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("code", "number"),
    [
        ("def f(x: Any): ...", 1),
        ("def f(x: 'int') -> dict[str, Any]: ...", 1),
        ("x: typing.Any = 0", 1),
        ("def f(x: 'dict[str, Any]'): ...", 1),
        ("A = np.ndarray[Any, Any]", 2),
        ("def forward(ctx: Any, x: Any) -> Any: ...", 2),
        ("def __getattr__(name: str) -> Any: ...", 0),
        ("from typing import Any", 0),
        ("'''Any module!'''", 0),
    ],
)
def test_places_are_counted(code, number):
    assert count(code) == number
