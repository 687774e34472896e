"""Training: the loop, its optimiser and schedules, checkpoints, the run folder, what is watched and shown."""
