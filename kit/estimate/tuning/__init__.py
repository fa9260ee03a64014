"""Bayesian search for a fast layout. Each trial evaluates a layout by the planner or by a run."""
