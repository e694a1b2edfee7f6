"""Table O1 of autocast: its operators, their kernels in torch's dispatcher, and the regions in which it holds.

How any set of kernels gets into the dispatcher is in `precision/dispatcher.py`.
"""
