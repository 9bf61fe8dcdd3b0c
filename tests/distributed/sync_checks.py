"""Everything that every rank checks. Run by torchrun (see `ranks.launch`); each rank writes what it found."""

import sys
import warnings

import astray_checks
import convert_checks
import exact_checks
import shuffle_checks
import use_checks
from rank_checks import CHECKS, main

__all__ = ["CHECKS", "astray_checks", "convert_checks", "exact_checks", "shuffle_checks", "use_checks"]

if __name__ == "__main__":
    warnings.simplefilter("error")
    main(sys.argv[1])
