"""The error that a user can mend."""


class UserError(Exception):
    """Something outside this package is wrong; the message is a sentence that says what, and what to do."""
