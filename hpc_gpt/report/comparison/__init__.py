"""Whether one run is faster than another, and what the two do not share."""
