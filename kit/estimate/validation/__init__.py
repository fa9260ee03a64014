"""Errors of the planner's estimates, computed on published runs or on runs of the user."""
