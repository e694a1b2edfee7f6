"""Checkpoints: atomic, verified, independent of the device, and free of pickle."""
