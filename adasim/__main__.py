"""`adasim`, `python -m adasim`, and what torchrun starts."""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder
from typing import Any

from adasim.util.interrupts import Interrupts, Stopped


class TimmWithoutWandb(MetaPathFinder):
    """Answers timm, while it is being imported, that wandb is not installed, which it is prepared for.

    timm wants it for a function that nobody calls here. To import it takes time, and leaves two folders among the
    temporary files if the process is killed. `--log wandb` imports it later, unhindered.
    """

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        wanting = sys.modules.get("timm.utils.summary")
        if name == "wandb" and wanting is not None and not hasattr(wanting, "update_summary"):
            raise ModuleNotFoundError(f"No module named {name!r} for timm", name=name)


def main() -> None:
    """Run the command line, with signals answered from here on: the imports alone take seconds."""
    for handle in range(3):  # a standard stream that was closed would lend its number to the next file opened
        try:
            os.fstat(handle)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.meta_path.insert(0, TimmWithoutWandb())
    # Never left: a second Ctrl-C must still work while Python tidies up.
    interrupts = Interrupts("Interrupted, leaving. Once more leaves at once.").__enter__()
    try:
        from adasim.cli.main import main as run

        run()
    except SystemExit as error:
        code = error.code
    except Exception:
        if interrupts.received is None or not interrupts.raised:
            raise
        code = Stopped(interrupts.received).code  # whatever broke, the signal broke it
    else:
        if interrupts.received is None:
            return
        code = Stopped(interrupts.received).code  # the exception was lost in some destructor
    # The exception above holds the frames of the run, and with them networks and threads: they must go before
    # Python does, or torch may abort on its way out.
    sys.exit(code)


if __name__ == "__main__":
    main()
