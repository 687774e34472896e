"""The paper's galleries: images with their ranked support and a bar for each probability, and the same as tables.

opening.py   from a run to its images and their supports; any encoder's come by way of adasim/explore/opening.py
picking.py   which images: random ones, those whose gate is shut, those matched with another class, named ones
figure.py    the picture, PNG or PDF
tables.py    ids, files, classes and probabilities as CSV and LaTeX
"""

KINDS = ("random", "intriguing", "other-class")
"""What --pick knows by name; anything else is a list of images."""
FORMATS = ("png", "pdf")
"""Of the picture."""
