"""The network that is exported: operations, what their values can be, and formats."""
