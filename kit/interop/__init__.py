"""Imports and exports weights of other projects, and imports their logs."""
