"""Stands in for scikit-learn where that is not installed: other images, alike for every device."""
