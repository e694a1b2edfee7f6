"""Optimizers that are the same on every device."""
