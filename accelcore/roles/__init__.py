"""The six roles a backend is composed of: each file holds one contract and its default on plain torch."""
