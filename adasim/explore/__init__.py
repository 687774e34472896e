"""The explorer: neighbours, duplicates, wrong labels and outliers of any images, as one page to go through.

    support.py      every image's neighbours and their probabilities: from a run, an encoder, or features
    duplicates.py   equal and nearly equal images
    labels.py       suspicious labels, and which class is taken for which
    outliers.py     surprising and lonely images
    looks.py        thumbnails, sizes and hashes of the pixels
    collection.py   training and test images under one numbering
    findings.py     all hunts together, as tables
    opening.py      from what a person names to all of the above
    outputs.py      where these may be written
    writing.py      the page, CSV files, Embedding Atlas
    page/           the page's own HTML, CSS and JavaScript

The hunts are functions of tensors; docs/explore.md says what each computes and what it misses.
"""
