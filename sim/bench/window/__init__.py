"""`umbel bench window`: the self-tuned window against a static rule."""
