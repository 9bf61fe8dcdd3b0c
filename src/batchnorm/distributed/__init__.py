"""Statistics of a batch that is spread over processes: who takes part, what is exchanged, what went wrong."""
