"""Optimizers by name: the registry and its routes, engines, formulas, state, and flat memory for parameters.

A device's own kernels belong to its plugin, and what a training does around an update to `training`. Nothing here names
a device.
"""
