"""Folder for a script's path. It contains only a module with the name apex."""
