"""What to write instead of what cannot be exported, by the name of the layer or function."""

from torch import nn

__all__ = ["of_call", "of_error", "of_layer"]

_SPELL = "call marvin.spell_attention(model) before it is calibrated or trained"
_NORM = "use BatchNorm2d"
_DECODER = "decoders have no integers yet: use encoders"
_RECURRENT = "use Conv1d or attention over the sequence"
_SIDES = "use one or two dimensions: flatten one of three into channels"
_REPEAT = "repeat columns by torch.cat([x[..., None]] * 2, -1).flatten(-2), rows likewise"
_SPREAD = "leave it out where a product takes it, which repeats sides of 1; for a sum, write torch.cat([v] * n, dim)"
_PAD = "put zeros around it: F.pad(x, sides) or padding= of the layer behind it"
_MODULE = "use the module, such as nn.Linear or nn.Conv2d: its weight has a format"
_MAX = "use nn.AdaptiveMaxPool2d(1), or max pooling in one dimension"
_VIEWS = "use view, permute and flatten"
_GATE = "use chunk, a sigmoid and a product"
_OUTSIDE = "compute it behind the network, from its output"

_LAYERS: dict[type[nn.Module], str] = {
    nn.GroupNorm: _NORM,
    nn.InstanceNorm2d: _NORM,
    nn.MultiheadAttention: _SPELL,
    nn.TransformerEncoderLayer: _SPELL,
    nn.TransformerEncoder: _SPELL,
    nn.TransformerDecoderLayer: _DECODER,
    nn.Transformer: _DECODER,
    nn.EmbeddingBag: "use Embedding and a mean",
    nn.ConvTranspose1d: "use Conv1d behind a repetition: " + _REPEAT,
    nn.ConvTranspose2d: "use Conv2d behind a repetition of pixels: " + _REPEAT,
    nn.LogSoftmax: "leave it out: the largest output is the same",
    nn.RNNBase: _RECURRENT,
    nn.RNNCellBase: _RECURRENT,
    nn.Conv3d: _SIDES,
    nn.Upsample: _REPEAT,
    nn.PixelShuffle: _VIEWS,
    nn.ReflectionPad2d: _PAD,
    nn.ReplicationPad2d: _PAD,
    nn.CircularPad2d: _PAD,
    nn.GLU: _GATE,
}
_CALLS = {
    "sub": "two values, or a value and a number or constant, can be subtracted; for alpha=, write a - b * alpha",
    "rsub": "write b - a",
    "add": "two values, or a value and a number or constant, can be added; for alpha=, write a + b * alpha",
    "neg": "write x * -1",
    "abs": "write torch.relu(x) + torch.relu(x * -1)",
    "pow": "write x * x",
    "square": "write x * x",
    "sum": "use a mean, and multiply by the number of values",
    "max": _MAX,
    "amax": _MAX,
    "argmax": _OUTSIDE,
    "topk": _OUTSIDE,
    "sort": _OUTSIDE,
    "log_softmax": "leave it out: the largest output is the same",
    "interpolate": _REPEAT,
    "repeat_interleave": _REPEAT,
    "expand": f"{_SPREAD}; else {_REPEAT}",
    "expand_as": _SPREAD,
    "addcmul": "write a + b * c",
    "addcdiv": "write a + b / c",
    "to": "values are float32 on a CPU: leave it out",
    "type_as": "values are float32: leave it out",
    "pixel_shuffle": _VIEWS,
    "glu": _GATE,
    "stack": "use torch.cat of values with a dimension more: x[:, None]",
    "pad": _PAD,
    "max_pool1d_with_indices": "leave out return_indices=True",
    "max_pool2d_with_indices": "leave out return_indices=True",
    "zeros_like": "write F.pad(x, sides), which puts zeros around x",
    "new_zeros": "write F.pad(x, sides), which puts zeros around x",
    "linear": _MODULE,
    "conv1d": _MODULE,
    "conv2d": _MODULE,
    "layer_norm": "use nn.LayerNorm",
    "batch_norm": "use nn.BatchNorm1d or nn.BatchNorm2d",
    "embedding": "use nn.Embedding",
    "einsum": "use nn.Linear or nn.Conv2d, or torch.matmul of two values",
    "dropout": "use nn.Dropout, or training=self.training",
}
_BATCH = (
    "; a size must not be the number of samples: leave it 1, which is repeated for each sample, or put zeros "
    "around a value, F.pad(x, sides)"
)
_ERRORS = {
    "item assignment": "; write torch.cat of the parts",
    **{f"{name}()": _BATCH for name in ("zeros", "ones", "full", "empty")},
}  # of what torch and Python say of what stands for values
_ELSE = "the documentation, 'Deploy: Which networks', lists what can"


def of_layer(module: nn.Module) -> str:
    """Return what to use instead of a layer."""
    return next((text for kind, text in _LAYERS.items() if isinstance(module, kind)), _ELSE)


def of_call(name: str) -> str:
    """Return what to write instead of a function or a method."""
    return _CALLS.get(name.strip("_"), _ELSE)


def of_error(text: str) -> str:
    """Return what to write instead of code that cannot be traced, behind ``"; "``; nothing where that is not known."""
    return next((instead for part, instead in _ERRORS.items() if part in text), "")
