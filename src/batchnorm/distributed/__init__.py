"""Batch statistics over several processes: process groups, exchanges, and errors that name the rank."""
