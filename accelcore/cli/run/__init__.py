"""`accelcore run`: prepare a script's environment, start its ranks, and run it in each of them."""
