"""`python -m adasim`, and what torchrun starts."""

from adasim.cli import main

main()
