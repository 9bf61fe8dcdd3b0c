"""The color and the dash of each arm, the same in every chart."""

from __future__ import annotations

LOOKS = {
    "without BN": ("ink", "dash"),
    "BN x1": ("sky", "solid"),
    "BN x5": ("blue", "longdash"),
    "BN x30": ("green", "dashdot"),
    "SkipInit": ("orange", "solid"),
    "clipping": ("purple", "dot"),
    "BN x5, sigmoid": ("vermillion", "longdash"),
}
