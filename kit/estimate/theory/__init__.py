"""Equations for the memory per device and the step time of training layouts."""
