"""Formats of findings: one a file. Each has a function `write(findings)` that returns the text."""
