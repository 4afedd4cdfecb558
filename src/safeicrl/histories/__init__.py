"""Learning histories: made, stored, cut into windows."""
