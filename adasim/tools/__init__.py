"""A pretrained encoder in use: features of a folder, the images most similar to one, and other libraries' formats."""
