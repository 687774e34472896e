"""The one error a person may see: a sentence that says what was wrong, where, and what to do."""


class UserError(Exception):
    """Bad input. The command line prints the message alone and exits with code 2."""

    exit_code = 2
    shared = False
    """Whether every process of a run raises it, so that the first may speak for all."""


class MissingSplitError(UserError):
    """A source has no such split: not a mistake where the split is not needed."""
