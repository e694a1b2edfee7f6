"""`accelcore doctor`: ask plugins in separate processes, diagnose, and print."""
