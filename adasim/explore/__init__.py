"""The explorer: neighbours, duplicates, wrong labels and outliers of any images as one page; the paper's galleries.

    collection.py   training and test images under one numbering; features that somebody else made
    support.py      every image's neighbours and their probabilities: from a memory, or from features
    open.py         from what a person names (a run, an encoder, features) to images and their supports
    looks.py        thumbnails, sizes and hashes of the pixels
    align.py        two pictures laid over each other
    duplicates.py   equal and nearly equal images
    labels.py       suspicious labels
    map.py          all images in two dimensions
    hunts.py        surprising and lonely images; all hunts together
    gallery.py      which images a gallery shows, and the picture
    lists.py        findings and galleries as tables: CSV, LaTeX
    exports.py      findings for Embedding Atlas, FiftyOne and cleanlab
    apply.py        a folder of images written anew by verdicts
    page.py         `explore`, and its page, of which page/ holds the HTML, CSS and JavaScript

The hunts are functions of tensors; docs/explore.md says what each computes and what it misses.
"""

KINDS = ("random", "intriguing", "other-class")
"""What `adasim gallery --pick` knows by name; anything else is a list of images."""
