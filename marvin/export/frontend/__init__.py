"""From a model to a network, and the comparison of both."""
