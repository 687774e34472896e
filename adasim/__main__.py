"""`adasim`, `python -m adasim`, and what torchrun starts."""

from __future__ import annotations

import os

from adasim.interrupts import Interrupts, Stopped


def main() -> None:
    """Run the command line, with signals answered from here on: the imports alone take seconds."""
    for handle in range(3):  # a standard stream that was closed would lend its number to the next file opened
        try:
            os.fstat(handle)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    # Never left: a second Ctrl-C must still work while Python tidies up.
    interrupts = Interrupts("Interrupted, leaving. Once more leaves at once.").__enter__()
    try:
        from adasim.cli import main as run

        run()
    except Exception:
        if interrupts.received is None:
            raise
        raise Stopped(interrupts.received) from None  # whatever broke, the signal broke it


if __name__ == "__main__":
    main()
