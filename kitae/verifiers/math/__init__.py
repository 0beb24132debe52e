r"""The `math` verifier: is the final answer of a response the same mathematics as the reference?

    response ─► find_answers ─► the same text? ─► two plain numbers? ─► read both ─► compare part by part
                (answers.py)     (no parsing)      (exact fractions)       │   (at random points, exact or 30 digits)
                                                                       └─► cannot be read: math-verify, cross-checked

Each module imports only from those before it:

    cleanup     the text without decoration          numbers      the value of a tree at a point
    tree        an answer as a tree                  equality     equal numbers and functions
    units       units and their sizes                sets         intervals and their unions
    tokens      text → tokens                        comparison   the rules for each kind of answer
    parser      tokens → tree                        fallback     math-verify
    reading     text → the trees it may mean         verifier     `math` and `same_answer`

Decisions, where usage differs:

- percent: 50% is 50% and 0.5 and 50, but 0.5 is not 50. Degrees: 60° is 60 and π/3.
- units, currency and names of things may be left out; where both sides have one that we know, it is converted, so that
  5 m is not 5 cm, and 1 h is 60 min.
- a decimal of six or more significant digits stands for every number within one unit of its last digit
  (0.333333 is 1/3, 0.333 is not); all other numbers are exact. `tolerance` widens this, relative to the reference.
- (1, 2) is ordered and its brackets count; {1, 2} and a bare "1, 2" are not ordered; a bare list also matches a tuple
  in its order. A column vector matches a tuple.
- x = 5 matches 5, and x > 3 matches (3, ∞), but x = 5 does not match y = 5. Of an answer "a = b = c", the last counts.
- functions are compared on real points where both are real, so that √(x²) is |x| and not x.
- "1,234" is a number, "1, 2" a list. log without a base is natural or decimal, whichever makes both sides equal.

Size is checked before anything is evaluated: towers of powers, factorials of large numbers, deep nesting and long texts
are wrong answers at once. What math-verify does with the rest has no limit in here: the worker's deadline is the one.
Not covered: answers that must be solved to be compared (x² = 4 for ±2), differential forms, dates in other spellings.
"""

from kitae.verifiers.math.verifier import math, same_answer

__all__ = ["math", "same_answer"]
