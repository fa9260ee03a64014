"""Fits of the step-time equations to measured and published runs."""
