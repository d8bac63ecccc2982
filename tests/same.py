"""Values compared to the bit."""

import torch
from torch import Tensor


def assert_same(got: object, want: object, where: str = "") -> None:
    """Compare tensors, numbers and text, in dictionaries and lists; NaN equals NaN.

    Args:
        got: What came.
        want: What must have come.
        where: What to call it.
    """
    assert type(got) is type(want), where
    if isinstance(got, Tensor):
        torch.testing.assert_close(
            got, want, rtol=0, atol=0, equal_nan=True, msg=lambda text: where + text
        )
    elif isinstance(got, dict) and isinstance(want, dict):
        assert got.keys() == want.keys(), where
        for name in want:
            assert_same(got[name], want[name], f"{where}/{name}")
    elif isinstance(got, list | tuple) and isinstance(want, list | tuple):
        assert len(got) == len(want), where
        for i, pair in enumerate(zip(got, want, strict=True)):
            assert_same(*pair, f"{where}/{i}")
    else:
        assert repr(got) == repr(want), where  # NaN too
