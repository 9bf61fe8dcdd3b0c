"""The networks the lab trains."""
