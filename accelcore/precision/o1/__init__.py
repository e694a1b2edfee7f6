"""Table O1 of autocast: its operators, their kernels in torch's dispatcher, and the regions in which it holds."""
