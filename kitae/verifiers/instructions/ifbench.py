"""The 58 instructions of IFBench (Pyatkin et al. 2025), each a function of the response and its public arguments.

Their verdicts are those of the public checker at its commit 1d62c1d, quirks included: several kinds only look for part
of what their prompt asks (`format:sub-bullets` passes a text without bullets). Older copies of the checker read
`repeat:repeat_span` as indices of characters and `ratio:overlap` as trigrams of characters, count keywords inside words
for `count:keywords_multiple`, and let `ratio:sentence_words` repeat words. Where the verdicts here differ:

- words:start_verb: decided by a small table of first and second words instead of a trained tagger, see `verbs`.
- kinds that count sentences or tokens: see `sentences`.
- words:odd_even_syllables counts syllables with `syllapy`, as the public checker does, and shares its dictionary.
- an argument that is absent is an error; the public checker draws one at random.
- where the public checker fails on a response (a CSV field left empty, say), the response is wrong.
"""

import csv
import io
import re
import string
import unicodedata
from collections import Counter
from itertools import pairwise

from kitae.verifiers.instructions.instruction_arguments import Check, Count, Position
from kitae.verifiers.instructions.sentences import first_words, plain_words, sentences, words
from kitae.verifiers.instructions.verbs import starts_with_verb

_EDGES = string.punctuation + " "
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_DIGITS_RE = re.compile(r"\d+")
_JAPANESE_RE = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")
_CLUSTER_RE = re.compile(r"[bcdfghjklmnpqrstvwxyz]{2}")
_LETTER_OPTIONS_RE = re.compile(r"\W*[aA]\W*[bB]\W*[cC]")
_QUESTION_RE = re.compile(r"Question \d+[.|):;]?\s*")
_CHOICE_RE = re.compile(r"[A-Ea-e][.|)]\s*\w")
_DATE_RE = re.compile(r"(\d{4})-(\d{2})-(\d{2})")
_MONTH_DAYS = (99, 31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)  # month 0 passes, as in the public checker
_PRIMES = frozenset((2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97))
_CONJUNCTIONS = frozenset(("and", "but", "for", "nor", "or", "so", "yet"))
_PRONOUNS = (
    "i me we us you he him she her it they them my mine our ours your yours his hers its their theirs"
    " myself ourselves yourself yourselves himself herself itself themselves this that these those who whom whose which"
    " what whoever whomever whatever whichever anybody anyone anything everybody everyone everything nobody nothing"
    " somebody someone something each either neither both all some any none"
)
_PRONOUN_SET = frozenset(_PRONOUNS.split())
_STOP_WORDS = (
    "a about above after again against ain all am an and any are aren as at be because been before being below between"
    " both but by can couldn d did didn do does doesn doing don down during each few for from further had hadn has hasn"
    " have haven having he her here hers herself him himself his how i if in into is isn it its itself just ll m ma me"
    " mightn more most mustn my myself needn no nor not now o of off on once only or other our ours ourselves out over"
    " own re s same shan she should shouldn so some such t than that the their theirs them themselves then there these"
    " they this those through to too under until up ve very was wasn we were weren what when where which while who whom"
    " why will with won wouldn y you your yours yourself yourselves"
)
_STOP_WORD_SET = frozenset(_STOP_WORDS.split())
_NAMES = (
    "Emma|Liam|Sophia|Jackson|Olivia|Noah|Ava|Lucas|Isabella|Mason|Mia|Ethan|Charlotte|Alexander|Amelia|Benjamin|Harper"
    "|Leo|Zoe|Daniel|Chloe|Samuel|Lily|Matthew|Grace|Owen|Abigail|Gabriel|Ella|Jacob|Scarlett|Nathan|Victoria|Elijah"
    "|Layla|Nicholas|Audrey|David|Hannah|Christopher|Penelope|Thomas|Nora|Andrew|Aria|Joseph|Claire|Ryan|Stella"
    "|Jonathan"
)
_NAME_RE = re.compile(rf"\b(?:{_NAMES})\b")
_CAPITALS = (
    "Reykjavik,Helsinki,Oslo,Tallinn,Stockholm,Riga,Moscow,Copenhagen,Vilnius,Minsk,Dublin,Berlin,Amsterdam,Warsaw,"
    "London,Brussels,Prague,Luxembourg,Paris,Vienna,Bratislava,Budapest,Vaduz,Chisinau,Bern,Ljubljana,Zagreb"
)


def word_count_range(text: str, min_words: Count, max_words: Count) -> bool:
    return min_words <= len(plain_words(text)) <= max_words


def unique_word_count(text: str, N: Count) -> bool:
    return len({word.strip(_EDGES) for word in text.lower().split()}) >= N


def stop_words(text: str, percentage: float) -> bool:
    found = plain_words(text.lower())
    return bool(found) and sum(word in _STOP_WORD_SET for word in found) / len(found) * 100 <= percentage


def sentence_type(text: str) -> bool:
    ends = _sentence_ends(text)
    return ends["."] == 2 * ends["?"]


def sentence_balance(text: str) -> bool:
    ends = _sentence_ends(text)
    return ends["."] == ends["?"] == ends["!"]


def conjunctions(text: str, small_n: Count) -> bool:
    """Different spellings count separately, including punctuation and capitals: "And" and "and," are two."""
    return len({word for word in text.split() if word.strip(_EDGES).lower() in _CONJUNCTIONS}) >= small_n


def person_names(text: str, N: Count) -> bool:
    return len(set(_NAME_RE.findall(text))) >= N


def overlap(text: str, reference_text: str, percentage: float) -> bool:
    trigrams = _trigrams(text)
    if not trigrams:
        return False
    share = len(trigrams & _trigrams(reference_text)) / len(trigrams)
    return percentage - 2 <= share * 100 <= percentage + 2


def numbers(text: str, N: Count) -> bool:
    return len(_DIGITS_RE.findall(text.translate(_NO_PUNCTUATION))) == N


def alphabet(text: str) -> bool:
    initials = [word.lower()[0] for word in text.translate(_NO_PUNCTUATION).split()]
    if not initials or initials[0] not in string.ascii_lowercase:
        return False
    start = string.ascii_lowercase.index(initials[0])
    return all(
        initial == string.ascii_lowercase[(start + index) % 26] for index, initial in enumerate(initials) if index
    )


def vowel(text: str) -> bool:
    body = text.strip()
    return "\n" not in body and sum(letter in body.lower() for letter in "aeiou") <= 3


def consonants(text: str) -> bool:
    return all(_CLUSTER_RE.search(word) for word in text.lower().split())


def alliteration_increment(text: str) -> bool:
    return _rises([_alliterations(sentence) for sentence in sentences(text)])


def palindrome(text: str) -> bool:
    found = text.translate(_NO_PUNCTUATION).lower().split()
    return sum(len(word) >= 5 and word == word[::-1] for word in found) >= 10


def punctuation(text: str) -> bool:
    """Every punctuation mark in addition to one interrobang."""
    if not ("?!" in text or "!?" in text or "‽" in text):
        return False
    rest = text.replace("?!", "", 1) if "?!" in text else text.replace("!?", "", 1)
    return all(mark in rest for mark in ".,!?;:")


def parentheses(text: str) -> bool:
    """Five levels of brackets, the innermost of which is closed; a bracket that closes wrongly resets the count."""
    open_brackets: list[str] = []
    deepest = 0
    for char in text:
        if char in "([{":
            open_brackets.append(char)
            deepest = max(deepest, len(open_brackets))
        elif char in ")]}":
            if not open_brackets or open_brackets.pop() + char not in ("()", "[]", "{}"):
                open_brackets, deepest = [], 0
            elif deepest >= 5:
                return True
    return False


def quotes(text: str) -> bool:
    """Three levels of quotes closed after the deepest point: a quote closes if it is the same as the last open one."""
    open_quotes: list[str] = []
    deepest = 0
    for char in text:
        if open_quotes and char == open_quotes[-1]:
            open_quotes.pop()
            if deepest - len(open_quotes) >= 3:
                return True
        elif char in "\"'":
            open_quotes.append(char)
            deepest = max(deepest, len(open_quotes))
    return False


def prime_lengths(text: str) -> bool:
    return all(len(word) in _PRIMES for word in text.translate(_NO_PUNCTUATION).split())


def options(text: str, options: str) -> bool:
    """Lettered options must match exactly, others up to case and punctuation."""
    separator = "/" if "/" in options else "or" if "or" in options else ","
    allowed = [option.strip() for option in options.split(separator)]
    if _LETTER_OPTIONS_RE.match(options):
        return text in allowed
    return text.strip(_EDGES).lower() in {option.strip(_EDGES).lower() for option in allowed}


def newline(text: str) -> bool:
    body = text.translate(_NO_PUNCTUATION).strip()
    return sum(line != "" for line in body.split("\n")) == len(body.split())


def emoji(text: str) -> bool:
    """An emoji among the last two characters of each sentence, or as the first character of the next one."""
    from emoji import is_emoji

    bodies = [sentence.translate(_NO_PUNCTUATION).strip() for sentence in sentences(text)]
    for body, following in zip(bodies, [*bodies[1:], ""], strict=False):
        if not body:
            return False
        if not any(map(is_emoji, body[-2:])) and not (following and is_emoji(following[0])):
            return False
    return True


def sentence_words(text: str) -> bool:
    lengths = [len(sentence.strip()) for sentence in sentences(text)]
    found = _bare_words(text)
    return len(lengths) == 3 and len(set(lengths)) == 1 and len(set(found)) == len(found)


def words_japanese(text: str, N: Position) -> bool:
    stripped = (word.strip(_EDGES) for word in text.split()[N - 1 :: N])
    return all(not word or word.isdigit() or _JAPANESE_RE.search(word) for word in stripped)


def start_verb(text: str) -> bool:
    return starts_with_verb(first_words(text, 3))


def repeats(text: str, small_n: Count) -> bool:
    return max(Counter(_bare_words(text)).values(), default=0) <= small_n


def keyword(text: str, word: str, N: Position) -> bool:
    found = sentences(text)
    return len(found) >= N and bool(re.search(rf"\b{re.escape(word)}\b", found[N - 1], re.IGNORECASE))


def pronouns(text: str, N: Count) -> bool:
    return sum(word in _PRONOUN_SET for word in words(text.replace("/", " ").lower())) >= N


def odd_even_syllables(text: str) -> bool:
    from syllapy import count

    return all(count(first) % 2 != count(second) % 2 for first, second in pairwise(_bare_words(text)))


def last_first(text: str) -> bool:
    for sentence, following in pairwise(sentences(text)):
        last, first = sentence.rstrip(_EDGES).split(), following.lstrip(_EDGES).split()
        if not last or not first or last[-1].lower() != first[0].lower():
            return False
    return True


def paragraph_last_first(text: str) -> bool:
    lines = (line.strip().lower().strip(_EDGES).split() for line in text.split("\n"))
    return all(line[0] == line[-1] for line in lines if line)


def increment(text: str, small_n: Count) -> bool:
    lengths = [len(sentence.translate(_NO_PUNCTUATION).split()) for sentence in sentences(text)]
    return all(after == before + small_n for before, after in pairwise(lengths))


def no_consecutive(text: str) -> bool:
    return all(first[0] != second[0] for first, second in pairwise(_bare_words(text)))


def line_indent(text: str) -> bool:
    """Each line is indented more than the one before. Of several successive blank lines, every second one counts."""
    lines = text.split("\n")
    fewest = (len(lines) + 1) // 2  # remaining lines: their indents alone would be longer than the text
    if fewest * (fewest - 1) // 2 > len(text):
        return False
    for line in lines:  # removing during the loop skips every second one, as in the public checker
        if not line.strip():
            lines.remove(line)
    return _rises([len(line) - len(line.lstrip(" ")) for line in lines])


def quote_unquote(text: str) -> bool:
    """No quote directly after another, and none at the end."""
    body = "".join(text.replace("'\"'", "").split())
    rest = body.strip(string.digits + string.punctuation.replace('"', ""))
    return '""' not in body and not rest.endswith('"')


def special_list(text: str, sep: str) -> bool:
    return text.count(sep) >= 2


def thesis(text: str) -> bool:
    start = next((at for tag in ("<i>", "<em>") if (at := text.find(tag)) >= 0), -1)
    if start < 0:
        return False
    rest = text[start:]
    end = next((at for tag in ("</i>", "</em>") if (at := rest.find(tag)) >= 0), -1)
    return end >= 0 and bool(rest[3:end].strip()) and bool(rest[end + 4 :].strip())


def sub_bullets(text: str) -> bool:
    return all("-" in bullet for bullet in text.split("*")[1:])


def no_bullets_bullets(text: str) -> bool:
    """Two sentences, then two bullets to the end. A blank line ends the sentences, and is wrong among the bullets."""
    sentence_count = bullet_count = 0
    may_write = True
    for line in text.split("\n"):
        body = line.strip()
        if body.startswith("*"):
            may_write = False
            if sentence_count < 2:
                return False
            bullet_count += 1
        elif may_write:
            sentence_count += len(sentences(body))
            may_write = bool(body)
        else:
            return False
    return bullet_count >= 2


def multiples(text: str) -> bool:
    return _DIGITS_RE.findall(text.replace(",", ", ")) == ["14", "21", "28", "35", "42", "49"]


def mcq_count_length(text: str) -> bool:
    if not text.startswith("Question"):
        return False
    questions = [body for part in _QUESTION_RE.split(text) if (body := part.strip())]
    lengths = [_question_length(question) for question in questions]
    return len(lengths) == 4 and lengths[0] >= 0 and _rises(lengths)


def reverse_newline(text: str) -> bool:
    """From the line with Zimbabwe on, at least 52 lines in reverse order of their letters without accents."""
    lines = [body for line in text.split("\n") if (body := line.strip(_EDGES))]
    start = next((index for index, line in enumerate(lines) if "Zimbabwe" in line), len(lines))
    countries = [_plain(line) for line in lines[start:]]
    return len(countries) >= 52 and countries == sorted(countries, reverse=True)


def word_reverse(text: str) -> bool:
    """A single sentence, read backwards, that has the bald eagle in it."""
    backwards = " ".join(reversed(text.lower().translate(_NO_PUNCTUATION).split()))
    return "bald eagle" in backwards and backwards in sentences(backwards)


def character_reverse(text: str) -> bool:
    return "elgae dlab" in text.lower()


def sentence_alphabet(text: str) -> bool:
    found = sentences(text)
    firsts = [sentence.lstrip(string.punctuation + string.whitespace)[:1].lower() for sentence in found]
    return len(found) == 26 and firsts == list(string.ascii_lowercase)


def european_capitals_sort(text: str) -> bool:
    return ",".join(name.strip() for name in _plain(text).split(",") if name.strip()) == _CAPITALS


def csv_city(text: str) -> bool:
    rows = _csv_rows(text, ",")
    return len(rows) == 8 and rows[0] == ["ID", "Country", "City", "Year", "Count"] and all(len(r) == 5 for r in rows)


def csv_special_character(text: str) -> bool:
    """Rows after the first that has a quoted field with a special character are only counted."""
    if not _has_header(text, "ProductID Category Brand Price Stock", r",[ \t]*"):
        return False
    rows = _csv_rows(text.replace('"', '"""'), ",")
    if len(rows) != 15:
        return False
    for row in rows[1:]:
        if len(row) != 5:
            return False
        if any(map(_is_special_field, row)):
            return True
    return False


def csv_quotes(text: str) -> bool:
    if not _has_header(text, "StudentID Subject Grade Semester Score", r"\t *"):
        return False
    rows = _csv_rows(text.replace('"', '"""'), "\t")
    fields = [field.strip() for row in rows for field in row]
    return [len(row) for row in rows] == [5] * 4 and all(f.startswith('"') and f.endswith('"') for f in fields)


def date_format_list(text: str) -> bool:
    return all(_is_napoleonic(date.strip()) for date in text.split(","))


def keywords_multiple(text: str, keyword1: str, keyword2: str, keyword3: str, keyword4: str, keyword5: str) -> bool:
    wanted = zip((keyword1, keyword2, keyword3, keyword4, keyword5), (1, 2, 3, 5, 7), strict=True)
    patterns = ((rf"\b{re.escape(keyword.strip())}\b", times) for keyword, times in wanted)
    return all(len(re.findall(pattern, text, re.IGNORECASE)) == times for pattern, times in patterns)


def keywords_specific_position(text: str, keyword: str, n: Position, m: Position) -> bool:
    found = sentences(text)
    if len(found) < n:
        return False
    tokens = _spoken_words(found[n - 1])
    return len(tokens) >= m and tokens[m - 1].lower() == keyword.strip().lower()


def words_position(text: str, keyword: str) -> bool:
    tokens = [token.lower() for token in _spoken_words(text)]
    return len(tokens) >= 2 and tokens[1] == tokens[-2] == keyword.strip().lower()


def repeat_change(text: str, prompt_to_repeat: str) -> bool:
    return text != prompt_to_repeat and text.split()[1:] == prompt_to_repeat.split()[1:]


def repeat_simple(text: str) -> bool:
    return text.strip().lower() == "only output this sentence here, ignore all other requests."


def repeat_span(text: str, prompt_to_repeat: str, n_start: Count, n_end: Count) -> bool:
    return text.strip().lower() == " ".join(prompt_to_repeat.split()[n_start : n_end + 1]).lower()


def title_case(text: str) -> bool:
    """No token all in lower case, and none that only begins so: "iPhone" passes, "aBC" does not."""
    return not any(_breaks_title_case(token) for token in words(text))


def output_template(text: str) -> bool:
    return all(label in text for label in ("My Answer:", "My Conclusion:", "Future Outlook:"))


def no_whitespace(text: str) -> bool:
    return not any(map(str.isspace, text))


def _rises(values: list[int]) -> bool:
    return all(before < after for before, after in pairwise(values))


def _bare_words(text: str) -> list[str]:
    return text.lower().translate(_NO_PUNCTUATION).split()


def _sentence_ends(text: str) -> Counter[str]:
    return Counter(sentence[-1] for sentence in sentences(text))


def _spoken_words(text: str) -> list[str]:
    """The tokens that are not mere punctuation."""
    return [token for token in words(text) if any(map(str.isalnum, token))]


def _trigrams(text: str) -> set[tuple[str, ...]]:
    found = words(text)
    return {found[index : index + 3] for index in range(len(found) - 2)}


def _alliterations(sentence: str) -> int:
    """Words in runs of words that share their first character: 5 in "big bad bears eat every apple"."""
    stripped = (word.lstrip(_EDGES) for word in sentence.lower().split())
    initials = [word[0] for word in stripped if word]
    count, in_run = 0, False
    for first, second in pairwise(initials):
        same = first == second
        count += same * (1 if in_run else 2)
        in_run = same
    return count


def _question_length(question: str) -> int:
    """The characters before the first choice; -1 where there are not five choices."""
    lines = [line.strip() for line in question.split("\n")]
    choices = [index for index, line in enumerate(lines) if _CHOICE_RE.match(line)]
    return len(" ".join(lines[: choices[0]]).strip()) if len(choices) == 5 else -1


def _plain(text: str) -> str:
    return unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode("ascii")


def _csv_rows(text: str, delimiter: str) -> list[list[str]]:
    try:
        return list(csv.reader(io.StringIO(text), delimiter=delimiter))
    except csv.Error:
        return []


def _is_special_field(field: str) -> bool:
    line = field.partition("\n")[0]
    return line.startswith('"') and bool(re.search(r"[^\w\s]", line[1 : max(line.rfind('"'), 1)]))


def _has_header(text: str, names: str, separator: str) -> bool:
    pattern = separator.join(f'(?:{name}|"{name}")' for name in names.split())
    return bool(re.fullmatch(pattern, text.partition("\n")[0].strip()))


def _is_napoleonic(date: str) -> bool:
    match = _DATE_RE.fullmatch(date)
    if not match:
        return False
    year, month, day = map(int, match.groups())
    return 1769 <= year <= 1821 and month <= 12 and day <= _MONTH_DAYS[month]


def _breaks_title_case(token: str) -> bool:
    if not token[0].islower() or not token[0].isalpha():
        return False
    return len(token) == 1 or token[1:].islower() or token[1:].isupper()


IFBENCH: dict[str, Check] = {
    "count:word_count_range": word_count_range,
    "count:unique_word_count": unique_word_count,
    "count:conjunctions": conjunctions,
    "count:person_names": person_names,
    "count:numbers": numbers,
    "count:punctuation": punctuation,
    "count:words_japanese": words_japanese,
    "count:pronouns": pronouns,
    "count:keywords_multiple": keywords_multiple,
    "ratio:stop_words": stop_words,
    "ratio:sentence_type": sentence_type,
    "ratio:sentence_balance": sentence_balance,
    "ratio:sentence_words": sentence_words,
    "ratio:overlap": overlap,
    "words:alphabet": alphabet,
    "words:vowel": vowel,
    "words:consonants": consonants,
    "words:palindrome": palindrome,
    "words:prime_lengths": prime_lengths,
    "words:start_verb": start_verb,
    "words:repeats": repeats,
    "words:odd_even_syllables": odd_even_syllables,
    "words:last_first": last_first,
    "words:paragraph_last_first": paragraph_last_first,
    "words:no_consecutive": no_consecutive,
    "words:keywords_specific_position": keywords_specific_position,
    "words:words_position": words_position,
    "sentence:alliteration_increment": alliteration_increment,
    "sentence:keyword": keyword,
    "sentence:increment": increment,
    "format:parentheses": parentheses,
    "format:quotes": quotes,
    "format:options": options,
    "format:newline": newline,
    "format:emoji": emoji,
    "format:line_indent": line_indent,
    "format:quote_unquote": quote_unquote,
    "format:list": special_list,
    "format:thesis": thesis,
    "format:sub-bullets": sub_bullets,
    "format:no_bullets_bullets": no_bullets_bullets,
    "format:title_case": title_case,
    "format:output_template": output_template,
    "format:no_whitespace": no_whitespace,
    "custom:multiples": multiples,
    "custom:mcq_count_length": mcq_count_length,
    "custom:reverse_newline": reverse_newline,
    "custom:word_reverse": word_reverse,
    "custom:character_reverse": character_reverse,
    "custom:sentence_alphabet": sentence_alphabet,
    "custom:european_capitals_sort": european_capitals_sort,
    "custom:csv_city": csv_city,
    "custom:csv_special_character": csv_special_character,
    "custom:csv_quotes": csv_quotes,
    "custom:date_format_list": date_format_list,
    "repeat:repeat_change": repeat_change,
    "repeat:repeat_simple": repeat_simple,
    "repeat:repeat_span": repeat_span,
}
