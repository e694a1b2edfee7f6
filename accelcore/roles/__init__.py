"""Contracts of a backend that have no folder of their own: the runtime and the compiler.

The other roles are in `precision`, `scaling`, `optim` and `jobs`.
"""
