"""The figure of `adasim plot`: curves of one run, or of several together. `adasim.plot` is `writing.plot`."""
