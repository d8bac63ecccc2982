"""The activation functions a model can be built with."""

from torch import nn

__all__ = ["ACTIVATIONS"]

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "celu": nn.CELU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "hardswish": nn.Hardswish,
    "hardtanh": nn.Hardtanh,
    "leaky_relu": nn.LeakyReLU,
    "mish": nn.Mish,
    "relu6": nn.ReLU6,
    "selu": nn.SELU,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "softplus": nn.Softplus,
    "softsign": nn.Softsign,
    "tanh": nn.Tanh,
}
