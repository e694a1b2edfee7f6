"""Training on any backend: the trainer, its step, and the stages that prepare a model and an optimizer.

Only capabilities of a backend are asked for here, never its name. Files on disk are in `checkpoint`.
"""
