"""Progress bars: in a terminal, in a notebook, and none in a log file."""

from tqdm.auto import tqdm

__all__ = ["HIDDEN", "tqdm"]

# tqdm's word for "where the output is no terminal", which it is not in a notebook
HIDDEN = False if any(c.__module__ == "tqdm.notebook" for c in tqdm.__mro__) else None
