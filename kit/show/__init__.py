"""Figures in one style, tables, and text in a terminal."""
