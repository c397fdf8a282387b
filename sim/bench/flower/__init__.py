"""`umbel bench flower`: one Flower app in umbel's simulator, in Flower's own simulation engine, and in a plain loop."""
