"""What is decided about the numbers of a network, so that integers compute it."""
