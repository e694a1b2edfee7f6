"""Table O1 of autocast: its operators, their kernels in torch's dispatcher, and the regions in which it holds.

A trainer enters a region for each forward pass and loss (`precision/role.py`); apex's O1 enters one for the whole
program (`apex/state.py`). How any set of kernels gets into the dispatcher is in `precision/dispatcher.py`.
"""
