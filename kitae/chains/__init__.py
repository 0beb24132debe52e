"""Runs after each other, each from the model of the one before."""
