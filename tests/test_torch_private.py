"""Torch's private names are in one folder, and torch still has them."""

import ast
from pathlib import Path

import pytest
import torch
import torch.optim.optimizer as torch_optimizer
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.modules import module as torch_module

ROOT = Path(__file__).parents[1]
PACKAGES = "fixedpoint_kernels", "marvin", "perfmodel", "train"
FOLDER = ROOT / "fixedpoint_kernels/_torch_private"
FILES = sorted(FOLDER.glob("*.py"))
MODULE = nn.Conv2d(1, 1, 1)
AN_OBJECT = torch.empty(0)
SGD = torch.optim.SGD(MODULE.parameters())
ABSTRACT = dict.fromkeys(Joinable.__abstractmethods__)
JOINABLE = type(
    "Own", (Joinable,), {**ABSTRACT, "__init__": lambda self: Joinable.__init__(self)}
)()
OWNERS = [  # who must have which private names
    (
        torch,
        "_C _foreach_abs _foreach_add _foreach_add_ _foreach_mul_ _foreach_clamp_min_ _foreach_div _foreach_norm",
    ),
    (torch, "_assert _foreach_sub _int_mm _ops _subclasses"),
    (torch._C, "_are_functorch_transforms_active _len_torch_dispatch_stack"),
    (torch._C, "_functorch"),
    (torch.utils, "_python_dispatch _pytree"),
    (torch.utils._python_dispatch, "_disable_current_modes"),
    (torch.ops.aten, "_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward"),
    (torch.ops.aten, "_native_batch_norm_legit"),
    (torch.nn.modules.batchnorm, "_BatchNorm _NormBase"),
    (torch.nn.modules.pooling, "_AdaptiveAvgPoolNd _AvgPoolNd"),
    (torch_module, "_WrappedHook _global_forward_hooks _global_forward_pre_hooks"),
    (torch._C, "_autograd"),
    (torch.ops.aten, "_local_scalar_dense"),
    (torch.ops.aten.add_.Tensor, "_schema"),
    (torch._C._autograd, "_top_saved_tensors_default_hooks"),
    (AN_OBJECT, "_base _version"),
    (AN_OBJECT.untyped_storage(), "_cdata"),
    (MODULE, "_backward_hooks _backward_pre_hooks _buffers _conv_forward _forward_hooks"),
    (MODULE, "_forward_hooks_always_called _forward_hooks_with_kwargs _forward_pre_hooks"),
    (MODULE, "_forward_pre_hooks_with_kwargs _load_state_dict_pre_hooks _modules _parameters"),
    (MODULE, "_load_state_dict_post_hooks _state_dict_hooks _state_dict_pre_hooks"),
    (MODULE, "_save_to_state_dict"),
    (MODULE, "_call_impl _compiled_call_impl _reversed_padding_repeated_twice"),
    (torch, "_dynamo"),
    (torch.compile(MODULE), "_orig_mod"),
    (JOINABLE, "_join_config"),
    (SGD, "_optimizer_step_pre_hooks _optimizer_step_post_hooks"),
    (torch.optim.SGD(MODULE.parameters(), fused=True), "_step_supports_amp_scaling"),
    (torch.utils.checkpoint, "_recomputation_hook"),
    (torch_optimizer, "_global_optimizer_pre_hooks _global_optimizer_post_hooks"),
    (torch.compiler.assume_constant_result(lambda: 0), "_dynamo_marked_constant"),
]
NAMES = {name: owner for owner, names in OWNERS for name in names.split()}
# what counts as torch's on any object: names of our own must be others
TORCHS = {*dir(AN_OBJECT), *dir(MODULE), *NAMES} - {"_apply", "_get_name"}  # common words


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def private_names(code):
    """Yield line and name of each private name of torch: attributes, imports, and as strings."""
    for node in ast.walk(ast.parse(code)):
        found = []
        if isinstance(node, ast.Attribute):
            is_torchs = ast.unparse(node).split(".")[0] in ("torch", "aten") or node.attr in TORCHS
            found = [node.attr] if is_torchs else []
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            found = [
                n for a in node.names if a.name.startswith("torch.") for n in a.name.split(".")
            ]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_operator = hasattr(torch.ops.aten, node.value)  # tables name these
            found = [node.value] if node.value in TORCHS and not is_operator else []
        elif isinstance(node, ast.ClassDef):  # whose methods torch would call
            methods = [n.name for n in node.body if isinstance(n, ast.FunctionDef)]
            found = [name for name in methods if name in TORCHS]
        yield from ((node.lineno, name) for name in found if is_private(name))


def own_names(path):
    """Return the private names that a file itself defines."""
    tree = ast.parse(path.read_text())
    defined = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    return defined | {
        ast.unparse(t) for n in tree.body if isinstance(n, ast.Assign) for t in n.targets
    }


@pytest.mark.parametrize("name", NAMES)
def test_torch_still_has(name):
    assert hasattr(NAMES[name], name)


def test_every_private_name_of_the_folder_is_looked_for():
    used = [
        {name for _, name in private_names(path.read_text())} - own_names(path) for path in FILES
    ]
    assert {*NAMES} == set().union(*used)


@pytest.mark.parametrize("package", PACKAGES)
def test_nobody_else_uses_private_names(package):
    paths = sorted((ROOT / package).rglob("*.py"))
    assert paths
    found = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path in paths
        if path not in FILES
        for line, name in private_names(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "torch._foreach_add(xs, ys)",
        "torch._C._len_torch_dispatch_stack()",
        "from torch._ops import OpOverload",
        "from torch.nn.modules.batchnorm import _NormBase",
        "import torch._subclasses.fake_tensor",
        "self._weight._version",
        "aten._native_batch_norm_legit(x)",
        "getattr(module, '_forward_hooks')",
        "module._buffers",
        "class A(nn.Conv2d):\n    def _conv_forward(self, x): pass",
    ],
)
def test_a_private_name_is_seen_however_it_is_written(code):
    assert [*private_names(code)]


@pytest.mark.parametrize("code", ["self._weights", "torch.__version__", "x.version", "'_int_mm'"])
def test_what_is_not_private_is_left_alone(code):
    assert [*private_names(code)] == []
