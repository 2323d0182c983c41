"""Clients that others wrote, against a running server: one script each, and the runner that makes a table."""
