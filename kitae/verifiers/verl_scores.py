"""The scores that verl gives by itself, by the `data_source` of a row, from the verifiers that are here.

`openai/gsm8k` is scored as there, to the letter. For mathematics the answer is found in the same place, and compared by
Kitae's verifier, which knows more notations. What has no counterpart is an error that names the way out.
"""

import re
from typing import Any

from kitae.errors import VerifierError
from kitae.verifiers.math import math

_REACH = 300  # characters at the end of a solution
_FINAL_RE = re.compile(r"#### (-?[0-9.,]+)")
_MATH = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500")
_DAPO = ("math_dapo", "math", "math_dapo_reasoning")
_NUMINA = "numina_"
_CODE = ("codecontests", "apps", "codeforces", "taco")


def score_by_source(data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Any:
    """1 or 0; of the DAPO and AIME sources 1 or -1."""
    source = str(data_source)
    if source == "openai/gsm8k":
        found = _FINAL_RE.findall(solution_str[-_REACH:])
        return float(bool(found) and found[-1].replace(",", "") == str(ground_truth))
    if source in _MATH or source.startswith(_NUMINA):
        return math(solution_str, ground_truth, {}, extract="boxed")
    if source in _DAPO or source.startswith("aime"):
        right = math(solution_str[-_REACH:], str(ground_truth), {}, extract="boxed,phrase")
        return {"score": 1.0 if right.value == 1 else -1.0, "acc": right.value}
    if source in _CODE:
        raise VerifierError(f"programs of {source!r} are judged by verifier.name = 'code' with data.format = 'apps'")
    raise VerifierError(
        f"there is no usual score for data_source {source!r}: name your own, verifier.name = 'file.py:compute_score' "
        f"with "
        "verifier.style = 'verl'"
    )
