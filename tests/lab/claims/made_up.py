"""Results of contests that were made up."""

CURVE = {"steps": [10, 20], "median": [0.5, 0.9], "low": [0.4, 0.8], "high": [0.6, 0.95]}
SWEEP = [{"rate": rate, "accuracies": [0.9, 0.8, 0.9], "diverged": 0} for rate in (0.1, 1.0)]


def contest(*accuracies):
    """What a claim keeps of one arm: the accuracies of its fresh seeds are given."""
    return {"rate": 0.1, "sweep": SWEEP, "accuracies": list(accuracies), "diverged": 0, "curve": CURVE}


def around(middle, spread=0.01):
    """Return five accuracies around one."""
    return [middle + spread * step for step in (-2, -1, 0, 1, 2)]
