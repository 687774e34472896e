"""Where images come from: folders, .npz files, Hugging Face; what was found, and whether it is still the same."""
