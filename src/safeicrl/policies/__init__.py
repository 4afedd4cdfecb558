"""Released policies: loaded, played, exported."""
