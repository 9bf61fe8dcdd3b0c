"""The lab: the papers' claims, run on the user's own machine."""
