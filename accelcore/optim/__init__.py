"""Optimizers: their formulas, their routes, and flat memory for parameters. Nothing here names a device.

A device's own kernels belong to its plugin; the registry of a backend is in `accelcore.optim.registry`.
"""
