"""Kernels of optimizers in C++, for many tensors in one call: their source, and how it is built and loaded."""
