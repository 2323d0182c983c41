"""Load tests: Locust users, outcomes against targets, one report."""
