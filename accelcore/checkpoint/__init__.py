"""Checkpoints on disk: files, manifest, atomic writes, reading, export.

`training/saving` decides what is in the files.
"""
