"""MSGD: stochastic gradient descent that finds each layer's fixed-point format as it trains."""
