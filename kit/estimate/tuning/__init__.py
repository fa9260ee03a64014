"""Bayesian search over layouts by trials."""
