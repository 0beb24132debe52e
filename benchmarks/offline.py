"""Kitae's offline stages and TRL's on the same rows: losses of every step, final weights, seconds and memory.

    python benchmarks/offline.py make --work /tmp/offline                 tiny model, teacher and rows
    python benchmarks/offline.py train --work /tmp/offline --kind dpo     Kitae's side
    PEER/bin/python benchmarks/peers/trl_stages.py --work /tmp/offline --kind dpo --save /tmp/offline/trl-dpo > dpo.json
    python benchmarks/offline.py compare …

This is a sketch.
"""
