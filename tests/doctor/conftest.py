"""The cases of the rules lie beside their tests: one file a rule, named as the rule's."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
