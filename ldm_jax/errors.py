"""Errors that the user can fix."""


class UserError(Exception):
    """Wrong input, or an environment that fails. The message says in sentences what is wrong and what to do."""


class DivergedError(UserError):
    """Training stopped because the loss, the gradient or too many updates in a row were not finite."""
