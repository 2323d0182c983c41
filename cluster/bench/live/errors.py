"""What can be wrong with a live comparison."""


class LiveBenchError(Exception):
    """The comparison, or one cell of it, cannot be made. The message says what to do next."""
