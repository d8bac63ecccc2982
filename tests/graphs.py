"""What autograd has noted."""

__all__ = ["nodes_of"]


def nodes_of(y):
    """Return the nodes of the graph that ends in ``y``."""
    seen, waiting = set(), [y.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [own for own, _ in node.next_functions]
    return seen
