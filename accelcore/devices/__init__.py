"""Choosing a device: the request, the plugins that answer it, and the backend that is created.

Nothing here imports torch before a plugin has said that its device works.
"""
