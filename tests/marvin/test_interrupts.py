"""What is interrupted leaves everything as it was."""

import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

import marvin
from fixedpoint_kernels import forward_save
from fixedpoint_kernels.forward_save import conversion as saving
from fixedpoint_kernels.forward_save import swap
from marvin import stored
from marvin.integer import conversion, fusion


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)
    )


def attributes(thing):
    """Return an object's class, attributes and hooks, as the very objects that they are."""
    own = vars(thing)
    inner = {name: list(map(id, x.values())) for name, x in own.items() if isinstance(x, dict)}
    return type(thing), {name: id(value) for name, value in own.items()}, inner


def everything(model, optimizer):
    weights = [(p.data_ptr(), p.stride(), p.detach().clone()) for p in model.parameters()]
    return [attributes(thing) for thing in (*model.modules(), optimizer)], weights


def interrupted(call: Callable[[], object], files: set[str], line: int) -> bool:
    """Say whether ``call`` was interrupted before the n-th line that it runs in some files."""
    left = line

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def to_convert(model, optimizer):
    return lambda: marvin.integer.convert(model)


def to_revert(model, optimizer):
    marvin.integer.convert(model)
    return lambda: marvin.integer.revert(model)


def to_store(model, optimizer):
    return lambda: marvin.store_codes(model, optimizer)


def to_save(model, optimizer):
    return lambda: forward_save.convert(model, few_bit=3, division=True)


def to_save_no_more(model, optimizer):
    forward_save.convert(model, few_bit=3, division=True)
    return lambda: forward_save.revert(model)


@pytest.mark.parametrize(
    ("prepared", "modules"),
    [
        (to_convert, (conversion, fusion)),
        (to_revert, (conversion,)),
        (to_store, (stored,)),
        (to_save, (saving, swap)),
        (to_save_no_more, (saving, swap)),
    ],
)
def test_an_interrupt_at_any_line_leaves_all_as_it_was(prepared, modules):
    model = net()
    optimizer = marvin.MSGD(model.named_parameters())
    marvin.quantize_activations(model, optimizer)
    call = prepared(model, optimizer)
    before, weights = everything(model, optimizer)
    line, files = 1, {module.__file__ for module in modules}
    while interrupted(call, files, line):
        line += 1
        after, now = everything(model, optimizer)
        assert after == before, line
        for (address, stride, x), (other, own, y) in zip(weights, now, strict=True):
            assert (address, stride) == (other, own), line
            torch.testing.assert_close(x, y, rtol=0, atol=0)
    assert line > 10
    assert everything(model, optimizer)[0] != before  # the last call was done


def test_a_sample_that_fails_leaves_the_model_as_it_was():
    class TooLarge(nn.Sequential):
        def forward(self, x):
            if any(map(swap.is_converted, self)):
                raise RuntimeError("no memory")
            return super().forward(x)

    model = TooLarge(*net())
    before = [attributes(module) for module in model.modules()]
    with pytest.raises(RuntimeError, match="no memory"):
        forward_save.convert(model, division=True, sample_input=torch.zeros(2, 1, 8, 8))
    assert [attributes(module) for module in model.modules()] == before
