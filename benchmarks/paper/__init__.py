"""The paper's claims on trial at desk scale: `python -m benchmarks.paper --help`."""
