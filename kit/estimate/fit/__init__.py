"""Fits of the coefficients in the step time equations to measured and published runs."""
