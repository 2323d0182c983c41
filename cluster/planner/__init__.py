"""The planner: which worker has which role, and how many there are."""
