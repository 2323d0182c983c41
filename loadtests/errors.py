"""What can be wrong with a load test before it has begun."""


class LoadError(Exception):
    """The test cannot be made as asked; the message says what to change."""
