"""What a run leaves on disk: its folder, checkpoints, metrics. Shared by training and evaluation."""
