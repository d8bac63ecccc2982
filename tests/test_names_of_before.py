"""What was public before models carried their formats works, warns with its new name, or is told.

The table is what commit 453cc9f exported in its ``__init__`` files and named in its documentation.
"""

import dataclasses
import importlib
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import marvin
from train.config import Config

ROOT = Path(__file__).parents[1]
NAMES = {
    "fixedpoint_kernels": """BlockFloat FixedPoint decode division encode few_bit forward_save
        histogram histogram_candidates pack packing philox quantize quantize_block quantize_many
        quantize_with_mask rounding unpack""",
    "fixedpoint_kernels.division": "Compressed Layout compress decompress",
    "fixedpoint_kernels.few_bit": """Activation CELU ELU GELU Hardshrink Hardsigmoid Hardswish
        Hardtanh LeakyReLU LogSigmoid Mish NAMES ReLU ReLU6 SELU SiLU Sigmoid Softplus Softshrink
        Softsign Table Tanh Tanhshrink Threshold celu elu gelu hardshrink hardsigmoid hardswish
        hardtanh leaky_relu logsigmoid mish relu relu6 selu sigmoid silu softplus softshrink
        softsign solve tanh tanhshrink threshold""",
    "fixedpoint_kernels.forward_save": """Call Division FewBit Kept LEVELS METHODS Plan
        PlannedLayer Replaced Report convert load_state plan revert state""",
    "fixedpoint_kernels.histogram": """Bins Grid bins_between bins_of grid_histogram
        histogram_candidates sampled_histogram""",
    "fixedpoint_kernels.packing": "pack unpack",
    "fixedpoint_kernels.philox": "Key uniform words",
    "fixedpoint_kernels.rounding": """Rounding decode encode quantize quantize_many
        quantize_with_mask""",
    "marvin": """FixedPolicy LossBudgetPolicy MSGD MarvinPolicy MuppetPolicy Policy Quantized
        QuantizedActivations StaticPolicy StoredCodes Switch export fake_quantize load_sharded
        quantize_activations save_sharded store_codes tensorboard tnvs_""",
    "marvin.export": """ExportError Formats Network calibrate compare describe formats_of_weights
        integer masters_of nearest_weights round_sums verify""",
    "marvin.export.hls4ml": "write",
    "marvin.export.integer": "run",
    "marvin.export.onnx": "original save",
    "marvin.export.packed": "load save",
    "marvin.export.qonnx": "save",
    "marvin.tensorboard": "log_formats",
    "perfmodel": "Layer UnknownLayerError cost layers memory zoo",
    "perfmodel.memory": "saved_bytes",
    "perfmodel.zoo": "Entry MODELS NewGELU",
    "train": "alexnet demo plot resnet20 table vit",
}
RENAMED = {
    "marvin.QuantizingOptimizer": "marvin.Quantized",
    "fixedpoint_kernels.survey.MAGNITUDES": "fixedpoint_kernels.observer.MAGNITUDES",
    "fixedpoint_kernels.survey.mask_and_survey": "fixedpoint_kernels.observer.mask_and_observe",
    "fixedpoint_kernels.survey.round_and_survey": "fixedpoint_kernels.observer.round_and_observe",
    "marvin.export.onnx.spelling_of": "marvin.export.onnx.container_of",
    "marvin.policy.Policy": "marvin.policies.Policy",
    "marvin.push_down.push_down": "marvin.policies.push_down.push_down",
    "marvin.push_up.push_up": "marvin.policies.push_up.push_up",
    "perfmodel.memory.Kept": "perfmodel.memory.SavedStorage",
}
OPTIMIZER = """activation_formats add_param_group adopt_weights end_epoch format_of formats
    input_formats layers load_state_dict mean_input_word_length mean_word_length policy
    skipped_steps state_dict step trace zero_grad"""
MEMBERS = {  # methods and attributes of what the table names
    "marvin.MSGD": f"{OPTIMIZER} strategy",
    "marvin.Quantized": OPTIMIZER,
    "marvin.QuantizedActivations": "layers remove saturation",
    "marvin.Switch": """bits diversity first fl fl_before fl_min input_fl input_gradient
        input_signed input_wl kl layer lookback note resolution saturated second step strategy
        weight_gradient window wl wl_before wl_min""",
    "fixedpoint_kernels.FixedPoint": """fl from_qtorch il lsb max max_code min min_code scale
        signed symmetric to_qtorch wl""",
}
POLICY = [
    "activation_rounding",
    "load_state_dict",
    "lr_scale",
    "observations",
    "one_dim",
    "owns_lr",
    "quantizes_gradients",
    "quantizes_input",
    "quantizes_norms",
    "quantizes_pools",
    "should_stop",
    "state_dict",
    "takes_shards",
    "tensors",
    "weight_rounding",
    "word_length",
]
METHODS = ["start", "on_step", "on_epoch_end", "load_record"]  # that a policy of one's own defined
REMOVED = [
    "Quantized.activation_noise",
    "Quantized.observed",
    "QuantizedActivations.attach",
    "QuantizedActivations.attach_input",
    "Policy.on_skip",
]
FLAGS = [
    "model",
    "dataset",
    "run",
    "device",
    "epochs",
    "batch_size",
    "lr",
    "momentum",
    "weight_decay",
    "l1",
    "l1_params",
    "init_wl",
    "init_fl",
    "max_wl",
    "min_fl",
    "buffer_bits",
    "resolution",
    "lookback",
    "lookback_momentum",
    "lookback_rounding",
    "strategy",
    "strategy_loss",
    "strategy_margin",
    "kl_eps",
    "kl_smoothing",
    "kl_direction",
    "kl_counts",
    "pushdown_range",
    "pushup",
    "normalize_gradients",
    "quantize_gradients",
    "one_dim",
    "master_init",
    "symmetric",
    "nonfinite",
    "quantize_activations",
    "ste",
    "width",
    "activation",
    "forward_save",
    "bits",
    "block",
    "division_bits",
    "division_method",
    "data_dir",
    "validation_share",
    "limit",
    "resume",
    "checkpoint_steps",
    "seed",
    "accumulation_steps",
    "plateau_patience",
    "plateau_factor",
    "plateau_threshold",
    "optimizer",
    "policy",
    "kappa",
    "max_noise",
    "policy_bits",
    "per_channel",
    "ends_bits",
    "init_scale",
]
COMMANDS = [
    "train.resnet20",
    "train.alexnet",
    "train.vit",
    "train.plot",
    "train.table",
    "train.demo",
    "perfmodel",
    "fixedpoint_kernels.few_bit",
    "marvin.export",
    "benchmarks.run",
    "benchmarks.gpu",
    "benchmarks.reproduce",
    "benchmarks.soak",
]


def found(path):
    """Return what a dotted name means."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError:
        return importlib.import_module(path)


@pytest.mark.parametrize(
    "path", [f"{module}.{name}" for module, names in NAMES.items() for name in names.split()]
)
def test_a_name_works(path):
    assert found(path) is not None  # a warning is an error here


@pytest.mark.parametrize("path", RENAMED)
def test_an_earlier_name_warns_with_the_new_one(path):
    module, _, name = path.rpartition(".")
    with pytest.warns(DeprecationWarning, match="is now"):
        got = getattr(importlib.import_module(module), name)
    new = found(RENAMED[path])
    assert got is new or got == new


@pytest.mark.parametrize("path", MEMBERS)
def test_members_are_there(path):
    owner = found(path)
    model = nn.Linear(2, 2)
    objects = {
        "marvin.MSGD": lambda: marvin.MSGD(model.parameters()),
        "marvin.Quantized": lambda: marvin.Quantized(
            torch.optim.SGD(model.parameters(), lr=0.1), marvin.FixedPolicy(8, 4)
        ),
    }
    if path in objects:
        owner = objects[path]()
    known = {*dir(owner), *getattr(owner, "__annotations__", ())}
    assert [name for name in MEMBERS[path].split() if name not in known] == []


@pytest.mark.parametrize("name", POLICY)
def test_what_a_policy_had_is_told(name):
    with pytest.raises(AttributeError, match=r"read (optimizer|policy)\."):
        getattr(marvin.MuppetPolicy(), name)


@pytest.mark.parametrize("name", METHODS)
def test_a_policy_with_a_memory_is_refused_with_the_new_names(name):
    with pytest.raises(TypeError, match=f"{name} is now"):
        type("Own", (marvin.Policy,), {name: lambda self: None})


@pytest.mark.parametrize("name", REMOVED)
def test_the_changelog_says_what_to_write_instead(name):
    text = (ROOT / "CHANGELOG.md").read_text()
    removed = re.search(r"^### Removed\n(.*?)(?:^##|\Z)", text, re.DOTALL | re.MULTILINE)
    assert removed
    assert f"`{name}`" in removed[1]
    owner, _, member = name.partition(".")
    assert not hasattr(getattr(marvin, owner), member)


def test_flags_of_the_trainers_are_there():
    assert {*FLAGS} <= {field.name for field in dataclasses.fields(Config)}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_are_there(name):
    path = ROOT.joinpath(*name.split("."))
    assert path.with_suffix(".py").exists() or (path / "__main__.py").exists()
