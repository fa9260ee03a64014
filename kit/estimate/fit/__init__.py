"""The equations fitted to measured and published runs."""
