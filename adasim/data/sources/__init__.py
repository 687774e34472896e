"""Where images come from: folders, .npz files, Hugging Face, Python; what was found; is it still the same?"""
