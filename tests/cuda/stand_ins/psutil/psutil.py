"""Stands in for psutil where that is not installed: the CPU backend imports it, for memory figures."""
