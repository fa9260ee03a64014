"""Estimates of memory and step time for any layout, their calibration, and the search over layouts. NumPy, no torch."""
