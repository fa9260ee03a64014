"""The search for the fastest layout that fits in memory, and explanations of its result."""
