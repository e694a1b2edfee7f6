"""Checkpoints on disk: manifest, tensors, atomic writes, reading, export.

The parts of a checkpoint are in `training/saving`.
"""
