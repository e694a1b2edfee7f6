"""Observers that show and record a training. `records` does not import torch: the command line uses it.

The events are in `training/observers.py`. Comparing two runs belongs to `parity`.
"""
