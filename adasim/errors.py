"""The one error a person may see: a sentence that says what was wrong, where, and what to do."""


class UserError(Exception):
    """Bad input. The command line prints the message alone and exits with code 2."""
