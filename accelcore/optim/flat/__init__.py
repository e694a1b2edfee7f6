"""Flat memory for optimizers: parameters and gradients in one piece each, and formulas over stretches of it."""
