"""Flat memory for optimizers: parameters and gradients in one piece each, and formulas over stretches of it.

`training/stages/parameters.py` decides when parameters lie flat. The formulas themselves are in `formulas`.
"""
