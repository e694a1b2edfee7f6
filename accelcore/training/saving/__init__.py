"""Saving and restoring a training in two phases: one part for each kind of state, all checked before any is restored.

`TrainerState` lists the parts. Files and their format are in `checkpoint`.
"""
