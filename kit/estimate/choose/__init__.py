"""The search for a layout, and why it is the one."""
