"""How things look: figures in one style, tables, the terminal."""
