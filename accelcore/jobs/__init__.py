"""Jobs of several ranks: launchers, the process group, `Job` for scripts, and errors that name missing ranks.

How ranks share a training is in `training/parallel`.
"""
