"""Verbs on whole models: each returns a changed copy and a report of the changes."""
