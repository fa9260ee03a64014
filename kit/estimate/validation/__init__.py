"""How far the estimates are from what was measured."""
