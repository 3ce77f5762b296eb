"""Puts this folder's helper modules on the path, so that tests import them by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
