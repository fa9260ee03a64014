"""Errors of the estimates on measured runs, published runs or the user's."""
