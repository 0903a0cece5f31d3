"""Errors that a user can fix."""


class UserError(Exception):
    """The input or the environment is wrong; the message is a sentence that says what is wrong and what to do."""


class DivergedError(UserError):
    """Training stopped because the loss, the gradient or too many updates in a row were not finite."""
