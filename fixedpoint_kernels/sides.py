"""Numbers of windows, which PyTorch takes as one for all sides too."""

__all__ = ["for_each_side"]


def for_each_side(numbers: int | tuple[int, ...] | list[int], sides: int) -> tuple[int, ...]:
    """Return a number for each side, of one number, a tuple or a list; one in these is for all."""
    if isinstance(numbers, (tuple, list)):  # torch 2.9's compiler knows no unions
        found = tuple(int(n) for n in numbers)
    else:
        found = (int(numbers),)
    return found * sides if len(found) == 1 else found
