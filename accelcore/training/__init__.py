"""What makes a training step right and fast on any backend."""
