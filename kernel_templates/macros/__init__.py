"""Device-code helpers that templates share."""
