"""What every check of the start raises."""


class PreflightError(ValueError):
    """The service can't start here; says what is wrong, what was found and what to do."""
