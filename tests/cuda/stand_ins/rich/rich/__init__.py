"""Stands in for rich where that is not installed: nothing is drawn."""
