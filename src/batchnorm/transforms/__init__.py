"""Verbs on whole models: each returns a changed copy and says what it changed."""
