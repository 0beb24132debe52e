"""The instruction verifier: 25 IFEval and 58 IFBench kinds of instruction, checked by their public ids."""
