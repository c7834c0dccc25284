"""What a run writes down, how it is judged, and what must not be in it."""
