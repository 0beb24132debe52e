"""The 25 instructions of IFEval (Zhou et al. 2023), each a function of the response and its public arguments.

Their verdicts are those of the public checker, quirks included: a keyword is a regular expression and matches inside
words, `**bold**` counts as two highlights, bullets may be indented, any JSON value is JSON. Where they differ:

- language:response_language, change_case:english_*: detection is seeded, the public checker's is not; short texts in
  mixed languages can differ from one run of it to the next.
- length_constraints:number_sentences, change_case:capital_word_frequency: see `sentences`.
- a keyword that is no valid regular expression is taken literally; the public checker fails.
- an argument that is absent is an error; the public checker draws one at random.

All are linear in the length of the response, keywords that backtrack aside.
"""

import json
import re
import warnings
from functools import lru_cache

from kitae.verifiers.instructions.instruction_arguments import BadArgument, Check, Count, Letter, Position, Relation
from kitae.verifiers.instructions.language import is_language, known_languages
from kitae.verifiers.instructions.sentences import plain_words, sentences, words

_STAR_BULLET_RE = re.compile(r"^[^\S\n]*\*[^*].*$", re.MULTILINE)
_DASH_BULLET_RE = re.compile(r"^[^\S\n]*-", re.MULTILINE)
_HIGHLIGHT_RE = re.compile(r"\*([^\n*]*)\*")
_DOUBLE_HIGHLIGHT_RE = re.compile(r"\*\*([^\n*]*)\*\*")
_DIVIDER_RE = re.compile(r"\s?\*\*\*\s?")
_POSTSCRIPTS = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
_FENCES = ("```json", "```Json", "```JSON", "```")
_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def existence(text: str, keywords: list[str]) -> bool:
    return all(_pattern(keyword).search(text) for keyword in keywords)


def frequency(text: str, keyword: str, frequency: Count, relation: Relation) -> bool:
    return _holds(len(_pattern(keyword.strip()).findall(text)), relation, frequency)


def forbidden_words(text: str, forbidden_words: list[str]) -> bool:
    return not any(_pattern(word, r"\b{}\b").search(text) for word in forbidden_words)


def letter_frequency(text: str, letter: Letter, let_frequency: Count, let_relation: Relation) -> bool:
    return _holds(text.lower().count(letter.lower()), let_relation, let_frequency)


def response_language(text: str, language: str) -> bool:
    if language not in known_languages():
        raise BadArgument(f"language must be one of {', '.join(sorted(known_languages()))}, got {language!r}")
    return is_language(text, language)


def number_sentences(text: str, num_sentences: Count, relation: Relation) -> bool:
    return _holds(len(sentences(text)), relation, num_sentences)


def number_paragraphs(text: str, num_paragraphs: Count) -> bool:
    """Paragraphs between dividers of three asterisks; an empty one is allowed only at either end."""
    parts = _DIVIDER_RE.split(text)
    empty = [index for index, part in enumerate(parts) if not part.strip()]
    return set(empty) <= {0, len(parts) - 1} and len(parts) - len(empty) == num_paragraphs


def number_words(text: str, num_words: Count, relation: Relation) -> bool:
    return _holds(len(plain_words(text)), relation, num_words)


def nth_paragraph_first_word(text: str, num_paragraphs: Count, nth_paragraph: Position, first_word: str) -> bool:
    """Empty paragraphs do not count in the number of paragraphs, but they count in the position."""
    if nth_paragraph > num_paragraphs:
        raise BadArgument(f"nth_paragraph must be at most num_paragraphs, got {nth_paragraph} of {num_paragraphs}")
    paragraphs = text.split("\n\n")
    if sum(bool(paragraph.strip()) for paragraph in paragraphs) != num_paragraphs:
        return False
    paragraph = paragraphs[nth_paragraph - 1].split(maxsplit=1)
    if not paragraph:
        return False
    word = paragraph[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", word, maxsplit=1)[0].lower() == first_word.lower()


def number_placeholders(text: str, num_placeholders: Count) -> bool:
    return sum(_count_brackets(line) for line in text.split("\n")) >= num_placeholders


def postscript(text: str, postscript_marker: str) -> bool:
    marker = postscript_marker.strip()
    return bool(_pattern(_POSTSCRIPTS.get(marker, marker.lower())).search(text.lower()))


def number_bullet_lists(text: str, num_bullets: Count) -> bool:
    return len(_STAR_BULLET_RE.findall(text)) + len(_DASH_BULLET_RE.findall(text)) == num_bullets


def constrained_response(text: str) -> bool:
    return any(answer in text for answer in _ANSWERS)


def number_highlighted_sections(text: str, num_highlights: Count) -> bool:
    found = _HIGHLIGHT_RE.findall(text) + _DOUBLE_HIGHLIGHT_RE.findall(text)
    return sum(bool(highlight.strip()) for highlight in found) >= num_highlights


def multiple_sections(text: str, section_spliter: str, num_sections: Count) -> bool:
    marks = _pattern(section_spliter.strip(), r"\s?{}\s?\d+\s?", re.NOFLAG)
    return sum(1 for _ in marks.finditer(text)) >= num_sections


def json_format(text: str) -> bool:
    body = text.strip()
    for fence in _FENCES:
        body = body.removeprefix(fence)
    try:
        json.loads(body.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str) -> bool:
    return any(_has_title(line) for line in text.split("\n"))


def two_responses(text: str) -> bool:
    """Two different texts with six asterisks between them; an empty one is allowed only at either end."""
    parts = [part.strip() for part in text.split("******")]
    answers = [part for part in parts if part]
    return all(parts[1:-1]) and len(answers) == 2 and answers[0] != answers[1]


def repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def capital_word_frequency(text: str, capital_frequency: Count, capital_relation: Relation) -> bool:
    return _holds(sum(map(str.isupper, words(text))), capital_relation, capital_frequency)


def english_capital(text: str) -> bool:
    return text.isupper() and is_language(text, "en")


def english_lowercase(text: str) -> bool:
    return text.islower() and is_language(text, "en")


def no_comma(text: str) -> bool:
    return "," not in text


def quotation(text: str) -> bool:
    body = text.strip()
    return len(body) > 1 and body[0] == body[-1] == '"'


def _holds(count: int, relation: Relation, threshold: int) -> bool:
    return count < threshold if relation == "less than" else count >= threshold


@lru_cache(maxsize=1024)
def _pattern(keyword: str, frame: str = "{}", flags: re.RegexFlag = re.IGNORECASE) -> re.Pattern[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of "[[", which Python may read otherwise one day
        try:
            return re.compile(frame.format(keyword), flags)
        except (re.error, RecursionError, OverflowError):
            return re.compile(frame.format(re.escape(keyword)), flags)


def _count_brackets(line: str) -> int:
    """Pairs of square brackets, each opening one closed by the next closing one: 2 in "[a[b] [c]"."""
    count, at = 0, line.find("[")
    while at >= 0 and (end := line.find("]", at)) >= 0:
        count, at = count + 1, line.find("[", end)
    return count


def _has_title(line: str) -> bool:
    start, end = line.find("<<"), line.rfind(">>")
    return 0 <= start <= end - 3 and bool(line[start:end].lstrip("<").rstrip(">").strip())


IFEVAL: dict[str, Check] = {
    "keywords:existence": existence,
    "keywords:frequency": frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
}
