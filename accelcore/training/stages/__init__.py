"""Stages that prepare a model and an optimizer. All are checked before one is applied; `order` has their order."""
