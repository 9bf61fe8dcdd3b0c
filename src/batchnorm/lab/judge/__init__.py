"""How a claim is run and judged: its parts as runs, statistics, verdicts, the table and the page of all claims."""
