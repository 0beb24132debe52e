"""Offline stages of post-training, each a kind of run: demonstrations, preferences, labels in; a trained model out."""
