r"""The rule for hedges, of all verifiers that look for one answer in prose: an answer that names more than was asked,
denies what it names, or only bounds it, is no answer.

    is_hedged("it is 3, or maybe 4", 6, 7, re.compile(r"[0-9]+"))  → True: 4 is offered as well
    is_hedged("5 is wrong", 0, 1, …)           → True
    is_hedged("it is 5 apples for 2", 6, 7, …) → False

A value is joined to another one if only signs and words that join stand between them. Not covered: a doubt that names
nothing else ("perhaps 5"), which is an answer.
"""

import re

_JOINING = (
    "or and nor xor but be versus vs maybe perhaps possibly probably also even though although alternatively"
    " alternative otherwise else resp respectively possibility possible candidate guess to through thru till until"
    " plus both either too again unless if could might may be likely option choice answer the a an value number"
    " first second other up down then say nearly almost wait actually sorry correction hmm oops"
    " oder und ou et o y aut или и 或 和 或者 または"
)
_PHRASES = (
    r"(?:if|unless)\s+(?:that|this|it)(?:['’]s|\s+is)?(?:\s+(?:wrong|right|false|incorrect))?|(?:along|together)\s+with"
    r"|as\s+well\s+as|just\s+kidding|or\s+so|it\s+(?:may|might|could)\s+(?:also\s+)?be|or\s+(?:is|was)\s+it"
    r"|i\s+mean|(?:make|scratch)\s+that|failing\s+that|in\s+case|second\s+guess|no,?\s+wait"
)
_WORD = f"{_PHRASES}|{'|'.join(sorted(map(re.escape, _JOINING.split()), key=len, reverse=True))}"
_COMMAND = r"\\(?:[,;:! ()\[\]{}]|(?:text|textbf|mathrm|mathbf|boxed|quad|qquad|lor|vee|land|wedge|to"
_COMMAND += r"|mid|[lr]?dots|cdots|ne|neq|implies|iff|(?:long)?(?:left)?rightarrow|Rightarrow)(?![A-Za-z])\s*\{?)"
_JOINT_RE = re.compile(
    rf"(?:{_COMMAND}|[A-Za-z]\s*=|°\s?[CFK]?(?![^\W_])|[\s,;:∨∧⊕/|&?!.…~()\[\]{{}}$*_\"'`’<>≠≥≤→⇒–—-]|(?<![^\W_])(?:{_WORD})(?![^\W_]))*",
    re.IGNORECASE,
)
_JOINING_WORD_RE = re.compile(
    rf"(?<![^\W_])(?:{_WORD})(?![^\W_])|[/|&?!;~(\[…→⇒–—∨∧⊕-]|\.\.|\\[a-z]{{2,}}", re.IGNORECASE
)
_MAX_JOINT = 48  # characters between two values that are joined
_FILLER = (
    r"(?:\s+(?:be|is|it|its|equal|to|just|only|the|an?|actually|really|exactly|simply|possibly|number|value|answer"
)
_FILLER += r"|option|choice))*"
_OPENING = r"(?:(?:(?<=answer)|(?<=option)|(?<=choice))\s*:)?"
_OPENING += r"[\s*_\"'`$({\[]*(?:\\(?:text|mathrm|textbf|mathbf|boxed)\s*\{\s*|\\[(\[]\s*)*"
_DENIED_BEFORE_RE = re.compile(
    rf"(?:(?<![^\W_])(?:not|never|neither|nor|cannot|none(?:\s+of\s+(?:them|these|those|the\s+above))?,?|nicht|pas|nie"
    r"|(?:any|every|all|some|no)(?:thing|one|body|\s+numbers?|\s+values?|\s+options?|\s+letters?)?(?:\s+else)?\s+(?:but|except"
    r"|besides|other\s+than|save)|except(?:\s+for)?|excluding|besides|without|other\s+than|instead\s+of|unlike"
    r"|minus|negative|hardly|scarcely|barely|far\s+from|different\s+from|twice|thrice|double"
    r"|half(?:\s+of)?|divisible\s+by|(?:multiple|factor|divisor|power|square|cube|root|negative|inverse|reciprocal|fraction"
    r"|part|percent|%)\s+of|opposite\s+of|negation\s+of"
    r"|(?:rul|exclud|reject|eliminat|discard|dismiss|avoid)(?:e|es|ed|ing|s)?(?:\s+out)?"
    r"|rather\s+(?:[^\s.;]+\s+)?than|if\s+not\s+[^\s;]+\s+then|wrong(?:\s+answer)?|non-?|un-)"
    rf"|n['’]t){_FILLER}{_OPENING}\Z|(?:(?<![\w)])!|≠|¬|\\(?:neq?|neg|lnot)(?![A-Za-z]))\s*\Z",
    re.IGNORECASE,
)
_MAY_DENY_RE = re.compile(  # in lower case; far faster than the rule itself, and true wherever that may be
    "n['\u2019]t|not|nev|nei|nor|cann|none|nich|pas|nie|but|exc|besid|other|save|without|inst|unlike|hard|scarc|bare|far|diff"
    "|twi|thri|doub|half|divis|mult|fact|pow|squ|cube|root|nega|inver|reci|frac|part|perc|%|oppo|rul|rej|elim|disc|dism"
    "|min|avo|rath|if|wron|non|un-|!|\u2260|\u00ac|\\\\n|\\\\l"
)
_WEAKENED_AFTER_RE = re.compile(
    r"[\s*_\"'`$)}\]]*(?:(?:(?:is|was|are|seems|looks|sounds|would\s+be|must\s+be|might\s+be|may\s+be|has\s+to\s+be)\s+(?:\w+ly\s+)?"
    r"(?:not(?!\s+(?:only|just))|never|wrong|incorrect|false|untrue|excluded|impossible|out|eliminated|no\s+answer|un\w+)\b)"
    r"|(?:is|was|are|ca|wo|could|should|would|do|does)n['’]t\b|cannot\b"
    r"|[,;.…\s(]*or\s+(?:something|more|less|fewer|higher|lower|greater|larger|smaller|above|below|over|under|up|upwards?"
    r"|whatever|another|others?|else|not|none|all|neither|both|anything|any)\b"
    r"|[\s*_\"'`$)}\].,;!?]+no\s*[,.;!](?!\s*\\boxed)"
    r"|[,\s]*and\s+(?:up|upwards?|above|below|over|more|less)\b(?!\s+[a-z])"
    r"|\s*[:=]\s*(?:false|wrong|incorrect|no)\b|[,\s]+(?:negated|negative|in\s+no\s+case|below\s+zero)\b|-?ish\b|\s+(?:mod|modulo)\s|\s+(?:squared|cubed|factorial)\b(?!\s+[a-z])"
    r"|\s*\+(?!\s*[\w(\\.])|\s+give\s+or\s+take\b|\s+(?:less|more|fewer|times|short|off)\s+(?:than|of|from|as)\s+[$\\]*[0-9]"
    r"|\s*\\?%\s+of\s+[0-9]|[,;\s(]*(?:unless|if\b(?=[^.\n]*\b(?:else|otherwise)\b)|±|\+/-|plus\s+or\s+minus|\\pm(?![A-Za-z])))",
    re.IGNORECASE,
)
_BOUND_BEFORE_RE = re.compile(
    rf"(?<![^\W_])(?:at\s+(?:the\s+)?(?:least|most)|up\s+to|(?:(?:no|not)\s+)?(?:more|less|fewer|greater|larger|smaller|bigger|higher|lower)"
    r"\s+than|above|below|under|over|beyond|exceeds?|(?:any|some|a|an|every)?(?:thing|\s*numbers?|\s*values?|\s*letters?)\s+"
    rf"(?:like|near|around|close\s+to|from|after|before|in)){_OPENING}\Z|[<>≤≥]\s*\Z|\\[lg]eq?\s*\Z",
    re.IGNORECASE,
)
LETTER = re.compile(r"(?<![A-Za-z0-9$\\{^_'’])[A-J](?![A-Za-z0-9'’])")
_INTRODUCED_RE = re.compile(
    r"(?:(?<![^\W_])(?:is|are|be|get|equals?|answers?|either|(?:one|any|some|all|both|each)\s+of)|[=:({\[])\s*\Z",
    re.IGNORECASE,
)
_BUT_RE = re.compile(r"\b(?:but|rather)\b")
_SHARE_RE = re.compile(r"\s+of\s+[$\\]*[0-9]")
_FACTOR_BEFORE_RE = re.compile(r"[/^*×·_]\s?\Z")
_FACTOR_AFTER_RE = re.compile(r"\s*[+*×·^=]|/")


def is_hedged(
    text: str, start: int, end: int, value: re.Pattern[str], *, bounds: bool = True, commas: bool = True
) -> bool:
    """Whether the value at start:end of a sentence is denied, bounded, or joined to another one.

    value: what a value looks like. bounds, commas: whether "at least 5" and "3, 5" are hedges; they are in an answer,
    and need not be in the last sentence of a text.
    """
    before, after = text[max(0, start - 80) : start], text[end : end + 120]
    if not before.strip() and not after.strip(" ."):
        return False
    if _is_denied(before) or _WEAKENED_AFTER_RE.match(after):
        return True
    if bounds and _BOUND_BEFORE_RE.search(before, max(0, len(before) - 48)):
        return True
    own = text[start:end]
    if own.endswith("%") and _SHARE_RE.match(after):
        return True
    for other in _nearest(value, text, end):
        if joins(text[end : other.start()], commas=commas) and _is_another(own, other, text):
            return True
    for other in _nearest(value, text, max(0, start - 80), start):
        listed = commas or _INTRODUCED_RE.search(text, max(0, other.start() - 20), other.start()) is not None
        between = text[other.end() : start]
        turned = _BUT_RE.search(between) and _is_denied(text[max(0, other.start() - 80) : other.start()])  # not 3 but 4
        if joins(between, commas=listed) and not turned and _is_another(own, other, text):
            return True
    return False


def _is_denied(before: str) -> bool:
    return bool(_MAY_DENY_RE.search(before.lower()) and _DENIED_BEFORE_RE.search(before))


def _nearest(value: re.Pattern[str], text: str, start: int, end: int | None = None) -> list[re.Match[str]]:
    """The first match after a place, or the last one before `end`."""
    if end is None:
        found = value.search(text, start, start + 120)
        return [found] if found else []
    return list(value.finditer(text, start, end))[-1:]


def _is_another(own: str, other: re.Match[str], text: str) -> bool:
    """Whether a value is not the same one, as 60% is 0.6, nor a part of a formula."""
    if _FACTOR_BEFORE_RE.search(text, max(0, other.start() - 3), other.start()) or _FACTOR_AFTER_RE.match(
        text, other.end()
    ):
        return False
    left, right = _plain(own), _plain(other[0])
    try:
        sizes = sorted((abs(float(left)), abs(float(right))))
    except ValueError:
        return left != right
    return sizes[0] != sizes[1] and not ("%" in text and abs(sizes[0] * 100 - sizes[1]) <= sizes[1] * 1e-9)


def _plain(value: str) -> str:
    return re.sub(r"[\s,$*_%()\[\]{}\\]", "", value).casefold().rstrip(".")


def joins(between: str, *, commas: bool = True) -> bool:
    """Whether a text between two values makes them a list or alternatives: ", or maybe "."""
    if len(between) > _MAX_JOINT or not _JOINT_RE.fullmatch(between):
        return False
    return commas or bool(_JOINING_WORD_RE.search(between))
