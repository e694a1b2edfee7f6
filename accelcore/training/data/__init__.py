"""Data of a training: streams of batches with a position, their division among ranks, evaluation.

Moving a batch to the device belongs to the role `runtime`; saving a position, to `training/saving`.
"""
