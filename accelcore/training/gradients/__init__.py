"""Gradients of one training: per tensor, flat, with fp32 masters, or sharded.

Each kind owns its trainable parameters. Reducing over ranks is in `training/parallel`.
"""
