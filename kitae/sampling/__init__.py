"""Answers of a model, verified, as data: rejection sampling."""
