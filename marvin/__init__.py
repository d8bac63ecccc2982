"""MSGD: stochastic gradient descent that finds each layer's fixed-point format as it trains."""

from marvin.init import tnvs_
from marvin.optimizer import MSGD
from marvin.trace import Switch

__all__ = ["MSGD", "Switch", "tnvs_"]
