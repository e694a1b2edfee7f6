"""Data parallelism: how the ranks' gradients become one. One file a strategy, over torch's own engines."""
