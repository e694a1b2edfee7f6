"""Checkpoints on disk: atomic, verified, independent of the device, without pickle."""
