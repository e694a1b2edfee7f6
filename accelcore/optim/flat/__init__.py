"""Flat memory for optimizers: parameters and gradients in one piece each, and sums over the parameters in it.

`training/stages/parameters.py` decides when parameters lie flat. The formulas are in `formulas`.
"""
