"""Observers that show and record a training. `records` and `plot` do not import torch: the command line uses them.

The events are in `training/observers.py`. Comparing two runs belongs to `parity`.
"""
