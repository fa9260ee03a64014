"""Equations for the memory and the step time of layouts."""
