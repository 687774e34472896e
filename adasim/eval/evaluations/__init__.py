"""See adasim.eval."""
