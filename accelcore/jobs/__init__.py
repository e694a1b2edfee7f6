"""Jobs of several ranks: who started them, the process group, the words of a script, and messages about missing ranks.

How ranks share a training is in `training/parallel`.
"""
