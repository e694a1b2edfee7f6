"""Stands in for matplotlib where that is not installed: nothing is drawn."""
