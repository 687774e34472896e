"""Training: the loop, its state and optimiser, and what is watched and shown while it runs."""
