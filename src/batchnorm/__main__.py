"""``python -m batchnorm``."""

from __future__ import annotations

from batchnorm.cli import main

if __name__ == "__main__":
    main()
