from torch import nn
from torch.nn.utils import parametrizations

from marvin.layers import owners_of


def owner_names(model, *, named=True):
    parameters = list(model.named_parameters())
    names = {p: name for name, p in parameters}
    owners = owners_of([(name if named else None, p) for name, p in parameters])
    return {names[p]: None if o is None else names[o] for p, o in owners.items()}


def test_same_module_else_the_layer_before():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Linear(4, 2))
    expected = {"0.weight": "0.weight", "0.bias": "0.weight"}
    expected |= {"1.weight": "0.weight", "1.bias": "0.weight"}
    expected |= {"2.weight": "2.weight", "2.bias": "2.weight"}
    assert owner_names(model) == expected
    assert owner_names(model, named=False) == expected


def test_bias_before_its_weight():
    class BiasFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(nn.init.zeros_(nn.Linear(1, 3).bias))
            self.weight = nn.Linear(2, 3).weight

    model = nn.Sequential(nn.Linear(2, 2), BiasFirst())
    assert owner_names(model)["1.bias"] == "1.weight"
    assert owner_names(model, named=False)["1.bias"] == "0.weight"


def test_before_the_first_layer_and_without_any():
    assert owner_names(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)))["0.bias"] == "1.weight"
    assert set(owner_names(nn.BatchNorm1d(2)).values()) == {None}


def test_a_bias_beside_a_parametrisation_takes_the_format_of_its_layer():
    model = nn.Sequential(*(parametrizations.weight_norm(nn.Linear(4, 4)) for _ in range(2)))
    owners = owners_of([*model.named_parameters()])
    for layer in model:
        assert owners[layer.bias] is layer.parametrizations.weight.original0
