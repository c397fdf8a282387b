"""Where the checkout lies that is tested, whichever room of the tests asks."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
VECTORS = ROOT / "tests" / "vectors"
