"""How a Plan is applied to the model: one parallel axis per file, `apply.py` puts them together."""
