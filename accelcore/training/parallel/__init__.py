"""Strategies by which ranks share a training, one file each, named by the backend's declaration."""
