"""A run as one file for somebody else: HTML without scripts, which asks for nothing and needs nothing."""
