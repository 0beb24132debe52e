"""Games that a model plays: one of our own, and those of other packages."""
