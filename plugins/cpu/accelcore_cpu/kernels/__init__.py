"""Optimizer kernels in C++, which update many tensors in one call: source, build and loading."""
