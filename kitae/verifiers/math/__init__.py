r"""The `math` verifier: whether the final answer of a response is mathematically the same as the reference.

    response ─► find_answers ─► the same text? ─► two plain numbers? ─► read both ─► compare part by part
                (final_answer)   (no parsing)      (exact fractions)       │   (at random points, exact or 30 digits)
                                                                       └─► cannot be read: math-verify, cross-checked

Each module imports only from those before it:

    cleanup       the text without decoration         numbers        the value of a tree at a point
    tree          an answer as a tree                 equality       equal numbers and functions
    units         units and their sizes               sets           intervals and their unions
    lexer         text → tokens                       comparison     the rules for each kind of answer
    parser        tokens → tree                       fallback       math-verify
    number_words  number words → digits               math_verifier  `math` and `same_answer`
    reading       text → the trees it may mean

Decisions, where usage differs:

- percent: 50% is 50% and 0.5 and 50, but 0.5 is not 50, and 0.25% is not 0.25. Degrees: 60° is 60 and π/3.
- units, currency and names of things may be left out on one side. Where both sides have them, known units are
  converted (1 h is 60 min, 36 km/h is 10 m/s) and other words must be the same: 5 m is not 5 cm, 3 boys are not 3
  girls; one side may say more (5 feet, 5 feet tall). 3 feet 4 inches are added up, and nothing else is: a number after
  a unit is never a factor. Million and dozen are factors. One letter is a unit only after a plain number ("5 m").
- a decimal of six or more significant digits stands for every number within one unit of its last digit, unless that is
  a decimal itself (0.333333 is 1/3, 0.333 is not); all other numbers are exact. `tolerance` widens this, relative to
  the reference. Of "a = b ≈ c", b counts, and c if it is b rounded; an "=" that is not true makes it no answer.
- (1, 2) is ordered and its brackets count; {1, 2} and a bare "1, 2" are not ordered; a bare list also matches a tuple
  in its order, and y = 2, x = 1 the tuple (1, 2). A column vector matches a tuple.
- x = 5 matches 5, and x > 3 matches (3, ∞), but x = 5 does not match y = 5. The references AB/CD = 2, a:b = 2:3,
  sin A = 1/2 and a + b = 5 match their values; 2x + 1 = 7 and x + y = 5 are answers as they stand.
- functions are compared at real points: around zero, next to it, and far away where they have corners. They must have
  the same domain, so that √(x²) is |x| and not x, and neither ln x is ln|x| nor e^(ln x) is x. For a function of
  several variables, only their signs are varied for that, one at a time; i to n, N and C are assumed to be positive.
  f(2x) is not 2f(x).
- "1,234" is a number, "1, 2" a list, 0,125 is 0.125, and 3,5 may be 3.5. log without a base is natural or decimal,
  whichever makes both sides equal. The reference 12:30 may be a time and is no ratio. 17 mod 5 is 2, and 17 (mod 5) a
  class. Letters in a row are a product, but "tea" is not "eat".

Size is checked before anything is evaluated: towers of powers, factorials of large numbers, deep nesting and long texts
are wrong answers at once. math-verify reads integrals, limits and infinite sums; it has two seconds of processor
time, and its results are compared numerically.
Not covered: answers that must be solved to be compared (x² = 4 for ±2), differential forms, numbers in another base
than the reference has, dates in other spellings.
"""

from kitae.verifiers.math.math_verifier import math, same_answer

__all__ = ["math", "same_answer"]
