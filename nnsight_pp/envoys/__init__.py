"""Touch: from an attribute path to a location, and the points in the model where it is served."""
