"""Imports and exports weights in the formats of other projects, and imports the logs of other
trainers.
"""
