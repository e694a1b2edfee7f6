"""Stages that prepare a model and an optimizer. All are checked before one is applied; `plan.py` has their order."""
