"""Every kind of instruction by its public id: responses that follow it, and responses that do not."""

import json
import string
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitae.types import Score
from kitae.verifiers.instructions.instruction_verifier import KINDS, instructions

AFRICA = [f"{letter}{other}" for letter in "YXWVUTSRQPONMLKJIHGFEDCBA" for other in "zyx"]
CAPITALS = (
    "Reykjavík, Helsinki, Oslo, Tallinn, Stockholm, Riga, Moscow, Copenhagen, Vilnius, Minsk, Dublin, Berlin, "
    "Amsterdam, Warsaw, London, Brussels, Prague, Luxembourg, Paris, Vienna, Bratislava, Budapest, Vaduz, Chișinău, "
    "Bern, Ljubljana, Zagreb"
)
CHOICES = "\nA) one\nB) two\nC) three\nd. four\ne) five\n"
QUESTIONS = [f"Question {n}: {'what ' * n}?{CHOICES}" for n in (1, 2, 3, 4)]
CITIES = "ID,Country,City,Year,Count\n" + "\n".join(f"{n},Chile,Arica,2020,5" for n in range(7))
PRODUCTS = "ProductID,Category,Brand,Price,Stock\n" + "\n".join(f"{n},Toys,Lego,1.50,5" for n in range(13))
GRADES = "\n".join('"StudentID"\t"Subject"\t"Grade"\t"Semester"\t"Score"' for _ in range(4))
STORY = [f"{letter}nd so on." for letter in string.ascii_uppercase]
PROMPT = "Write a haiku about rain in Oslo."
FIVE = {"keyword1": "ant", "keyword2": "bee", "keyword3": "cow", "keyword4": "doe", "keyword5": "elk"}
FARM = "ant bee bee cow cow cow " + "doe " * 5 + "ELK " * 7

# id, arguments, responses that follow it, responses that do not
CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    # IFEval: keywords
    (
        "keywords:existence",
        {"keywords": ["rain", "Sun"]},
        ["Rain and sun", "raining, SUNNY", "x\nsun\nrain"],
        ["rain", "ran and sun", "sun dried"],
    ),
    ("keywords:existence", {"keywords": ["(:"]}, ["Hi (:"], ["Hi :("]),  # no regular expression: literal
    ("keywords:existence", {"keywords": ["gr[ae]y"]}, ["a grey day", "Gray"], ["green"]),
    ("keywords:existence", {"keywords": ["дождь", "雨"]}, ["Дождь 雨が降る"], ["Дождь"]),
    (
        "keywords:frequency",
        {"keyword": " rain ", "frequency": 2, "relation": "at least"},
        ["rain, rain", "Raining in RAINY days", "rainrain"],
        ["rain", "ran ran"],
    ),
    (
        "keywords:frequency",
        {"keyword": "rain", "frequency": 2, "relation": "less than"},
        ["rain", "sun"],
        ["rain rain", "train rain"],
    ),
    (
        "keywords:forbidden_words",
        {"forbidden_words": ["rain", "sun"]},
        ["training", "sunny rainy", "raining_sun"],
        ["Rain!", "the SUN", "sun-dried", "rain's"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "E", "let_frequency": 3, "let_relation": "at least"},
        ["eee", "Eel, eel", "ebe be"],
        ["ee", "éée", "abc"],
    ),
    (
        "keywords:letter_frequency",
        {"letter": "!", "let_frequency": 2, "let_relation": "less than"},
        ["Hi!", "Hi"],
        ["Hi!!", "! a !"],
    ),
    # IFEval: language
    (
        "language:response_language",
        {"language": "de"},
        ["Das ist ein ganz einfacher Satz in deutscher Sprache.", "12345", "!?"],
        ["This is a plain sentence in the English language.", "C'est une phrase toute simple en français."],
    ),
    (
        "language:response_language",
        {"language": "hi"},
        ["यह हिंदी में लिखा हुआ एक सरल वाक्य है।"],
        ["Это простое предложение на русском языке."],
    ),
    ("language:response_language", {"language": "kn"}, ["ಇದು ಕನ್ನಡದಲ್ಲಿ ಬರೆದ ಸರಳ ವಾಕ್ಯ."], ["Hello, how are you today?"]),
    (
        "language:response_language",
        {"language": "ja"},
        ["これは日本語で書かれた簡単な文です。"],
        ["这是一个用中文写的句子。"],
    ),
    ("language:response_language", {"language": "zh"}, ["这是一个用中文写的简单句子。"], ["これは日本語の文です。"]),
    (
        "language:response_language",
        {"language": "ar"},
        ["هذه جملة بسيطة مكتوبة باللغة العربية."],
        ["Ein Satz auf Deutsch."],
    ),
    # IFEval: lengths
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "at least"},
        ["One. Two.", "Really? Yes!", "Dr. No came. He left.", 'He said "no." She left.', "It is 5 p.m. The sun sets."],
        ["One, two", "Dr. No came.", "It costs 3.50 dollars.", "J. Smith came.", "Wait... what", "一。二。三。"],
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 3, "relation": "less than"},
        ["One. Two.", "a\nb\nc\nd", "Mr. Smith, Mrs. Smith and Prof. Smith left."],
        ["One. Two. Three.", "What?! No. Yes"],
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        ["a\n***\nb", "a *** b", "***\na\n***\nb\n***", "a***b"],
        ["a", "a\n\nb", "a\n***\n***\nb", "a\n***\nb\n***\nc"],
    ),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "at least"},
        ["one two three", "don't go", "a-b-c", "один два три"],
        ["one two", "...", "日本語 です"],
    ),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, ["one two"], ["one two three"]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Rain"},
        ["Sun.\n\nRain falls", "a\nb\n\n'Rain' it is", 'a\n\n"rain, rain"', "a\n\nRAIN", "a\n\nrain's end\n\n"],
        ["Rain\n\nSun", "a\n\nb\n\nrain", "a\n\nrainy", "rain", "a\n\n(rain)", "\n\nrain"],
    ),
    # IFEval: content and format
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        ["[a] [b]", "[] []", "[[x] y] [z]", "[x](http://a) [y]"],
        ["[a]", "[a\nb] [c]", "(a) (b)", "]["],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        ["Hi\nP.S. bye", "p. s. bye", "well, p.s.", "P.S. P.S."],
        ["Hi\nPS bye", "P.S", "P.P.S bye"],
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.P.S"},
        ["Hi\nP.P.S bye", "p. p. s", "P.P.S."],
        ["P.S. bye", "PPS"],
    ),
    ("detectable_content:postscript", {"postscript_marker": "Note:"}, ["a\nnote: b"], ["a"]),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        ["* a\n* b", "- a\n  - b", "text\n\n\t* a\n- b", "* a\n\n\n* b", "*a\n--", "\u2003* a\n* b"],
        ["* a", "* a\n* b\n* c", "** a\n** b", "• a\n• b", "1. a\n2. b", "*\n* a"],
    ),
    (
        "detectable_format:constrained_response",
        {},
        ["My answer is yes.", "Well. My answer is no. Sorry", "My answer is maybe."],
        ["My answer is Yes.", "yes", "My answer is yes"],
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        ["*a* *b*", "**a** *b*", "*a* b *c*", "**a** **b**"],
        ["*a*", "* *", "*a\nb* *c*", "a * b", "**a**\n** **"],
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section ", "num_sections": 2},
        ["Section 1\na\nSection 2\nb", "Section1 Section2", "Section 12 Section 3"],
        ["Section 1", "SECTION 1 SECTION 2", "Section I Section II"],
    ),
    ("detectable_format:multiple_sections", {"section_spliter": "(§", "num_sections": 1}, ["(§ 1"], ["§ 1"]),
    (
        "detectable_format:json_format",
        {},
        ['{"a": 1}', "```json\n[1]\n```", '```JSON {"a": "é"}```', "12", "null", "```\n{}\n```", ' "x" '],
        ["{'a': 1}", '{"a": 1} ok', "```js\n{}\n```", "{", "[" * 100_000, "Here: {}"],
    ),
    (
        "detectable_format:title",
        {},
        ["<<Rain>>", "a <<b>> c", "<<<a>>>", "<<題名>>\ntext"],
        ["<Rain>", "<<>>", "<< >>", "<<a\nb>>", ">>a<<", "<<a>"],
    ),
    # IFEval: combinations, start and end, case, punctuation
    (
        "combination:two_responses",
        {},
        ["a******b", "a\n******\nb", "******a******b******"],
        ["a", "a******a", "a******b******c", "a************b", "a *** b"],
    ),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": f" {PROMPT} "},
        [PROMPT, f"\n{PROMPT}\nDrops fall.", PROMPT.upper()],
        ["Drops fall.", f"Sure! {PROMPT}", PROMPT[:-1]],
    ),
    (
        "startend:end_checker",
        {"end_phrase": "That is all."},
        ["Well. That is all.", "that IS all. \n", 'Well, "that is all."'],
        ["That is all", "That is all. Bye", "That is all.)"],
    ),
    (
        "startend:quotation",
        {},
        ['"a"', ' "a" and "b"\n', '""'],
        ['"', "'a'", '"a', 'a"', "“a”", '"a" b'],
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        ["NASA and ESA", "I am I", "A-B C", "U.S. and UK", "ДА НЕТ"],
        ["NASA", "Nasa Esa", "nasa", "ABc DEf"],
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 1, "capital_relation": "less than"},
        ["no capitals", "Title Case Only"],
        ["I am", "the USA"],
    ),
    (
        "change_case:english_capital",
        {},
        ["THIS IS A PLAIN ENGLISH SENTENCE WITH WORDS.", "DOES THIS WORK IN 2024? IT SHOULD."],
        ["This is a plain english sentence.", "DAS IST EIN GANZ EINFACHER DEUTSCHER SATZ.", "123"],
    ),
    (
        "change_case:english_lowercase",
        {},
        ["this is a plain english sentence with words.", "does this work in 2024? it should."],
        ["This is a plain english sentence.", "das ist ein ganz einfacher deutscher satz.", "123"],
    ),
    ("punctuation:no_comma", {}, ["a b", "a、b", "a;b"], ["a,b", ","]),
    # IFBench: counts
    ("count:word_count_range", {"min_words": 2.0, "max_words": 3}, ["a b", "a-b c"], ["a", "a b c d", "..."]),
    ("count:unique_word_count", {"N": 3}, ["a b c", "A b. c!"], ["a A a. b", "a b"]),
    (
        "count:conjunctions",
        {"small_n": 3},
        ["and but or", "And, and (and)", "so yet nor for"],
        ["and and and", "and but", "und oder aber"],
    ),
    ("count:person_names", {"N": 2}, ["Emma and Liam", "Emma, Liam, Liam"], ["Emma, Emma", "Emmas Liams", "emma liam"]),
    ("count:numbers", {"N": 2}, ["1 and 2", "3.14 2,000", "a1b2"], ["1", "1 2 3", "one two"]),
    ("count:punctuation", {}, [".,!?;: ?!", "‽.,! ?;:", "!? .,! ?;:"], [".,! ?;:", ".,;: ?!", ".,!;: !?"]),
    (
        "count:words_japanese",
        {"N": 2},
        ["a 日 b かな", "a, 12 b", "a -- b", "a"],
        ["a b", "日 b", "a 日 b c"],
    ),
    (
        "count:pronouns",
        {"N": 3},
        ["I saw you and it", "she/her/hers", "This is what they said", "I'm sure you're it"],
        ["I saw", "Is he", "eye you"],
    ),
    (
        "count:keywords_multiple",
        FIVE,
        [FARM, FARM.upper(), FARM + " pants beehive"],
        [FARM + " ant", FARM.replace("bee", "be", 1), "ant bee cow doe elk"],
    ),
    # IFBench: ratios
    ("ratio:stop_words", {"percentage": 50}, ["the cat", "cats purr", "The cat sat"], ["the the cat", "it is", "..."]),
    ("ratio:stop_words", {"percentage": 0}, ["cats purr"], ["a cat"]),
    (
        "ratio:sentence_type",
        {},
        ["It is. It was. Is it?", "No end", "Ha! Ho!"],
        ["It is. Is it?", "It is.", "Is it? Was it?"],
    ),
    ("ratio:sentence_balance", {}, ["Ab. Cd? Ef!", "no end"], ["Ab. Cd?", "Ab.", "Ab. Cd. Ef? Gh!"]),
    (
        "ratio:sentence_words",
        {},
        ["Abc dog. Efg hut! Ijk lip?"],
        ["Abc dog. Efg hut!", "Abc. Defg. Hij.", "Cat. " * 4, "The cat sat. " * 3, "Abc dog. Efg dog! Ijk lip?"],
    ),
    (
        "ratio:overlap",
        {"reference_text": "We saw a big dog today", "percentage": 100},
        ["We saw a big dog today", "saw a big"],
        ["We saw a cat", "We saw", "we SAW a", "abcdefgh"],
    ),
    (
        "ratio:overlap",
        {"reference_text": "We saw a dog", "percentage": 50.0},
        ["We saw a cat", "saw a dog today"],
        ["We saw a dog", "We had a dog"],
    ),
    # IFBench: words
    (
        "words:alphabet",
        {},
        ["Ants bite cats", "yes, zebras ate", "one", "A. 'B' - c"],
        ["Ants cats", "1 a b", "é f", "...", "a b 3"],
    ),
    ("words:vowel", {}, ["a big cat", "xyz\n", "See me"], ["a big fox runs", "a\nb", "AEIOU"]),
    ("words:consonants", {}, ["Strong black birds", "rhythm", "myths"], ["a cat", "strong ox", "- -"]),
    ("words:palindrome", {}, ["level " * 10, "Radar, civic. " * 5], ["level " * 9, "otto " * 10, "levels " * 10]),
    ("words:prime_lengths", {}, ["to see", "it's abcde", "- to -"], ["a", "to seek", "abcdef"]),
    (
        "words:start_verb",
        {},
        [
            "Is this right?",
            "Does it rain?",
            "Write a haiku.",
            "Understanding rain takes time.",
            "Make a list.",
            "is it?",
        ],
        ["The rain falls.", "Rain is wet.", "Sure, here it is.", "In Oslo it rains.", "Paris", "* Go", "123", "日本語"],
    ),
    ("words:repeats", {"small_n": 2}, ["a b a b", "It, it"], ["a a a", "It, it; (IT)"]),
    ("words:odd_even_syllables", {}, ["cat happy dog river", "river", "happy the yellow"], ["cat dog", "happy yellow"]),
    (
        "words:last_first",
        {},
        ["I see rain. Rain falls.", "one", "A bee. Bee cat. Cat is", "He left! Left he did?! Did it"],
        ["I see rain. Sun shines.", "A bee. Bee cat. Dog", "Ab. ... Cd.", 'He said "go." Go!'],
    ),
    (
        "words:paragraph_last_first",
        {},
        ["Rain is rain.\nSun sun", "one", '"Rain falls," rain!\n\n***\n', "да и Да"],
        ["rain falls", "a a\nb c", "(a) b-a"],
    ),
    ("words:no_consecutive", {}, ["a b a", "one", "Über alle"], ["a Apple", "big, bad", "über Übung"]),
    (
        "words:keywords_specific_position",
        {"keyword": "rain", "n": 2, "m": 3},
        ["Hi. We like rain.", "Hi. (We) like, RAIN!", "Dr. No. It is rain"],
        ["We like rain.", "Hi. We rain.", "Hi. We like rains."],
    ),
    (
        "words:words_position",
        {"keyword": "rain"},
        [
            "The rain, the rain falls",
            "a Rain b RAIN c.",
            "a rain b",
            "x rain y!",
            '"a rain b!"',
            "The (rain) rain... so!?",
        ],
        ["rain a rain", "rain", "a rain b c", "The rain, the rain falls down.", "a, b rain c"],
    ),
    # IFBench: sentences
    (
        "sentence:alliteration_increment",
        {},
        ["No pair. Big bad cats.", "One", "Ab cd. Big bad cats. Big bad bears eat."],
        ["Big bad cats. No pair here.", "Big bad. Cute cats.", "Ab cd. Ef gh."],
    ),
    (
        "sentence:keyword",
        {"word": "rain", "N": 2},
        ["Hi. The Rain falls.", "Hi. Rain-soaked"],
        ["Rain. No.", "Hi. Raining.", "Hi"],
    ),
    (
        "sentence:increment",
        {"small_n": 2},
        ["A bee. A bee can see.", "One", "Ab. Ab bc cd. Ab - bc cd de ef."],
        ["A bee. A bee sees.", "Ab bc cd. Ab"],
    ),
    # IFBench: formats
    (
        "format:parentheses",
        {},
        ["(((((a)))))", "([{([a])}])", "x (a [b {c (d [e] f) g} h] i)", "(((((" + ")"],
        ["((((a))))", "(((((", "([)]" * 5, "((((]((((a))))"],
    ),
    ("format:quotes", {}, ['"a \'b "c" d\' e"', "'\"'x'\"'"], ['"a" \'b\' "c"', "\"a 'b' c\"", "“‘“a”’”"]),
    ("format:options", {"options": "yes/no/maybe"}, ["yes", "No.", " MAYBE! "], ["yes no", "yes/no", "yep"]),
    ("format:options", {"options": "I know or I don't know"}, ["I know", "I don't know."], ["Know", "I know or"]),
    ("format:options", {"options": "a), b), c), d)"}, ["a)", "d)"], ["a", "A)", "a) ", "a), b)"]),
    ("format:newline", {}, ["a\nb\nc", "a.\n\n- b", "one"], ["a b", "a\nb c", "a\n \nb"]),
    (
        "format:emoji",
        {},
        ["Hi 😀", "Hi there 😀. Bye now 🎉!", "Hi. 😀 Bye 🎉", "Love ❤️."],
        ["Hi", "😀 Hi", "Hi 😀. Bye.", "...", "Hi :)"],
    ),
    (
        "format:line_indent",
        {},
        ["a\n b\n  c", "a", "  a\n    b", "a\n\n b"],
        ["a\nb", " a\nb", "a\n b\n b", "a\n\n\n b", "\n" * 5_000],
    ),
    (
        "format:quote_unquote",
        {},
        ['"a" means b', "none", '"a" b "c" d', "the sign '\"'", "12..."],
        ['"a" "b" c', 'he said "a"', 'he said "a".', '"a"\n\n"b" c'],
    ),
    ("format:list", {"sep": "!?!?"}, ["!?!? a\n!?!? b", "a!?!?b!?!?"], ["!?!? a", "- a\n- b"]),
    ("format:list", {"sep": "..."}, ["... a\n... b", "......"], ["... a", "abc abc"]),
    (
        "format:thesis",
        {},
        ["<i>a</i> b", "x <em>a</em> b", "<i>a</i> <i>b</i>"],
        ["<i>a</i>", "<i> </i> b", "*a* b", "<i>a", "</i> <i>"],
    ),
    ("format:sub-bullets", {}, ["* a\n - b\n* c\n - d", "no bullets", "* a-b"], ["* a\n* b\n - c", "* a", "**a** - b"]),
    (
        "format:no_bullets_bullets",
        {},
        ["One is. Two is.\n* a\n* b", "One.\nTwo.\n * a\n * b", "One. Two.\n\n* a\n* b"],
        [
            "One.\n* a\n* b",
            "One. Two.\n* a",
            "One. Two.\n* a\n\n* b",
            "One. Two.\n* a\n* b\nEnd",
            "One.\n\nTwo.\n* a\n* b",
        ],
    ),
    (
        "format:title_case",
        {},
        ["The Rain In Oslo", "I Am A Test", "iPhone Sales", "Rain, 12 Days!", "雨", "USA"],
        ["The rain", "a Test", "aBC", "The Ünder über"],
    ),
    (
        "format:output_template",
        {},
        ["My Answer: a My Conclusion: b Future Outlook: c"],
        ["My Answer: a", "my answer: a my conclusion: b future outlook: c"],
    ),
    ("format:no_whitespace", {}, ["abc", "a-b_c。"], ["a b", "a\nb", "a\u3000b", "a\u00a0b", " a"]),
    # IFBench: prompts of their own
    (
        "custom:multiples",
        {},
        ["14, 21, 28, 35, 42, 49", "14,21,28,35,42,49", "14\n21\n28\n35\n42\n49"],
        ["7 14", "14 21 28 35 42"],
    ),
    (
        "custom:mcq_count_length",
        {},
        ["".join(QUESTIONS), "\n\n".join(QUESTIONS)],
        [
            "".join(QUESTIONS[:3]),
            "".join(QUESTIONS[::-1]),
            "Sure!\n" + "".join(QUESTIONS),
            "Question",
            "Question 1" * 4,
        ],
    ),
    (
        "custom:reverse_newline",
        {},
        ["\n".join(["Zimbabwe", *AFRICA]), "Here:\n\n" + "\n".join(["- Zimbabwe", *(f"- {name}" for name in AFRICA)])],
        ["\n".join(AFRICA), "\n".join(["Zimbabwe", *AFRICA[:50]]), "\n".join(["Zimbabwe", *AFRICA[::-1]])],
    ),
    (
        "custom:word_reverse",
        {},
        ["US the of eagle bald The", "eagle. bald"],
        ["The bald eagle", "eagle", "eagle the bald"],
    ),
    ("custom:character_reverse", {}, ["elgae dlab ehT", "ELGAE DLAB"], ["bald eagle", "elgae"]),
    (
        "custom:sentence_alphabet",
        {},
        [
            " ".join(STORY),
            "\n".join(STORY).lower().replace("\n", "\n\n").title(),
            '"' + " ".join(STORY),
            "\n".join(f"- {sentence}" for sentence in STORY),
        ],
        [" ".join(STORY[:25]), " ".join(STORY[::-1]), ". " * 26],
    ),
    (
        "custom:european_capitals_sort",
        {},
        [CAPITALS, CAPITALS.replace(", ", ",\n"), CAPITALS + ","],
        [CAPITALS + ".", CAPITALS.replace("Oslo, ", ""), "Zagreb, " + CAPITALS],
    ),
    (
        "custom:csv_city",
        {},
        [CITIES, CITIES + "\n", CITIES.replace("Chile", '"Chile, S"')],
        [CITIES + "\n8,a,b,c,d", CITIES[3:], "ID\r,"],
    ),
    (
        "custom:csv_special_character",
        {},
        [PRODUCTS + '\n9,"a & b",x,1,2', PRODUCTS.replace("Category,", '"Category", ', 1) + '\n9,"é,",x,1,2'],
        [
            PRODUCTS + "\n9,a,b,1,2",
            PRODUCTS + '\n9,"ab",b,1,2',
            PRODUCTS,
            'ID,"a & b"',
            PRODUCTS + '\n9,"' + "!" * 100_000,
        ],
    ),
    (
        "custom:csv_quotes",
        {},
        [GRADES, GRADES.replace("\t", "\t ")],
        [GRADES.replace('"', ""), GRADES.replace("\t", ","), GRADES + "\n\t\t\t\t"],
    ),
    (
        "custom:date_format_list",
        {},
        ["1796-04-12", "1796-04-12, 1815-06-18\n", "1800-02-29,1800-12-31"],
        ["12-04-1796", "1796-04-31", "1796-13-01", "1900-01-01", "1796-04-12,", "On 1796-04-12", "1800-02-30"],
    ),
    # IFBench: repetitions
    (
        "repeat:repeat_change",
        {"prompt_to_repeat": PROMPT},
        [PROMPT.replace("Write", "Draft"), PROMPT.replace("Write ", "Draft\n")],
        [PROMPT, f"Draft {PROMPT}", PROMPT.replace("Write", "Please draft"), "Draft"],
    ),
    (
        "repeat:repeat_simple",
        {},
        [
            "Only output this sentence here, ignore all other requests.",
            "ONLY output this sentence here, ignore all other requests.\n",
        ],
        ["Only output this sentence here", "Sure. Only output this sentence here, ignore all other requests."],
    ),
    (
        "repeat:repeat_span",
        {"prompt_to_repeat": PROMPT, "n_start": 1, "n_end": 3.0},
        ["a haiku about", "A HAIKU about\n"],
        ["a haiku", "haiku about rain", "Write a haiku", "rit"],
    ),
]


def check(id: str, kwargs: dict[str, Any], response: str, **options: Any) -> Score:
    return instructions(response, {"instructions": [{"id": id, "kwargs": kwargs}]}, {}, **options)


def test_every_public_kind_is_known_and_tested() -> None:
    assert len(KINDS) == 25 + 58
    assert {id for id, *_ in CASES} == set(KINDS)


@pytest.mark.parametrize(("id", "kwargs", "response"), [(i, k, r) for i, k, good, _ in CASES for r in good])
def test_followed(id: str, kwargs: dict[str, Any], response: str) -> None:
    assert check(id, kwargs, response) == Score(1.0, {id: 1.0})


@pytest.mark.parametrize(("id", "kwargs", "response"), [(i, k, r) for i, k, _, bad in CASES for r in bad])
def test_not_followed(id: str, kwargs: dict[str, Any], response: str) -> None:
    assert check(id, kwargs, response) == Score(0.0, {id: 0.0}, detail=f"not followed: {id}")


@pytest.mark.parametrize(("id", "kwargs"), [(i, k) for i, k, *_ in CASES])
@pytest.mark.parametrize("mode", ["strict", "loose"])
def test_an_empty_response_follows_nothing(id: str, kwargs: dict[str, Any], mode: str) -> None:
    assert check(id, kwargs, " \n\t", mode=mode).value == 0
    assert check(id, kwargs, "", mode=mode).value == 0


# --- the reference --------------------------------------------------------------------------------------------------


def test_components_and_rewards() -> None:
    reference = {
        "instructions": [
            {"id": "punctuation:no_comma", "kwargs": {}},
            {"id": "keywords:existence", "kwargs": {"keywords": ["rain"]}},
            {"id": "keywords:existence", "kwargs": {"keywords": ["sun"]}},
            {"id": "startend:quotation"},
            {"id": "keywords:existence", "kwargs": {"keywords": ["wind"]}},
        ]
    }
    verdicts = {
        "punctuation:no_comma": 1.0,
        "keywords:existence": 1.0,
        "keywords:existence#2": 0.0,
        "startend:quotation": 0.0,
        "keywords:existence#3": 1.0,
    }
    detail = "not followed: keywords:existence#2, startend:quotation"
    assert instructions("rain and wind", reference, {}) == Score(0.0, verdicts, detail=detail)
    score = instructions("rain and wind", reference, {}, reward="fraction")
    assert score == Score(pytest.approx(0.6), verdicts, detail=detail)
    assert instructions('"rain sun wind"', reference, {}).value == 1


def test_a_bad_comparison_is_an_error_even_beside_good_ones() -> None:
    reference = {"instructions": [{"id": "punctuation:no_comma"}, {"id": "punctuation:no_coma"}]}
    score = instructions("x", reference, {})
    assert score.outcome == "error"
    assert "'punctuation:no_coma'; did you mean 'punctuation:no_comma'?" in score.detail


@pytest.mark.parametrize(
    "reference",
    [
        {"instructions": [{"id": "startend:quotation", "kwargs": {}}]},
        {"instructions": [{"id": "startend:quotation", "kwargs": None}]},
        {"instructions": [{"id": "startend:quotation", "kwargs": {"keywords": None, "num_words": None}}]},
        {"instruction_id_list": ["startend:quotation"], "kwargs": [{}]},
        {"instruction_id_list": ["startend:quotation"], "kwargs": [{"language": None}], "key": 12},
        {"instruction_id_list": ["startend:quotation"]},
        json.dumps({"instructions": [{"id": "startend:quotation", "kwargs": {}}]}),
        json.dumps({"instruction_id_list": ["startend:quotation"], "kwargs": [{}]}),
    ],
)
def test_forms_of_a_reference(reference: Any) -> None:
    assert instructions('"yes"', reference, {}).value == 1
    assert instructions("yes", reference, {}).value == 0


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        (None, "must be"),
        ("", "must be"),
        ("startend:quotation", "must be"),
        ("[" * 100_000, "must be"),
        (12, "must be"),
        ([], "must be"),
        ({}, "must be"),
        ({"instructions": []}, "must be"),
        ({"instructions": "startend:quotation"}, "must be"),
        ({"instructions": ["startend:quotation"]}, "an instruction must be"),
        ({"instructions": [{"kwargs": {}}]}, "an instruction must be"),
        ({"instructions": [{"id": 5}]}, "an instruction must be"),
        ({"instructions": [{"id": "startend:quotation", "kwargs": [1]}]}, "kwargs must be a mapping, got '[1]'"),
        ({"instruction_id_list": ["startend:quotation"], "kwargs": []}, ""),
        ({"instruction_id_list": ["startend:quotation"], "kwargs": [{}, {}]}, "equally long"),
        ({"instruction_id_list": [], "kwargs": []}, "must be"),
        ({"instructions": [{"id": "quotation"}]}, "got 'quotation'"),
        ({"instructions": [{"id": "x" * 100_000}]}, "got 'xxx"),
    ],
)
def test_a_reference_that_makes_no_sense_is_an_error(reference: Any, reason: str) -> None:
    score = instructions('"yes"', reference, {})
    if reason:
        assert score.outcome == "error"
        assert reason in score.detail
    else:
        assert score.value == 1


@pytest.mark.parametrize(
    ("id", "kwargs", "reason"),
    [
        ("length_constraints:number_words", {}, "needs num_words, relation"),
        ("length_constraints:number_words", {"num_words": 5}, "needs relation"),
        ("length_constraints:number_words", {"num_words": 5, "relation": "at most"}, "'less than' or 'at least', got"),
        ("length_constraints:number_words", {"num_words": -1, "relation": "at least"}, "got '-1'"),
        ("length_constraints:number_words", {"num_words": 2.5, "relation": "at least"}, "got '2.5'"),
        ("length_constraints:number_words", {"num_words": "5", "relation": "at least"}, "got '5'"),
        ("length_constraints:number_words", {"num_words": True, "relation": "at least"}, "got 'True'"),
        ("length_constraints:number_words", {"num_words": float("nan"), "relation": "at least"}, "got 'nan'"),
        ("length_constraints:number_words", {"num_words": float("inf"), "relation": "at least"}, "got 'inf'"),
        ("punctuation:no_comma", {"num_words": 5}, "takes no arguments, got num_words"),
        ("keywords:existence", {"keywords": []}, "a list of texts that is not empty, got '[]'"),
        ("keywords:existence", {"keywords": "rain"}, "got 'rain'"),
        ("keywords:existence", {"keywords": ["rain", 5]}, "got"),
        (
            "keywords:letter_frequency",
            {"letter": "ab", "let_frequency": 1, "let_relation": "at least"},
            "one character",
        ),
        ("language:response_language", {"language": "xx"}, "got 'xx'"),
        ("language:response_language", {"language": ""}, "not empty"),
        ("combination:repeat_prompt", {"prompt_to_repeat": " "}, "not empty"),
        ("count:words_japanese", {"N": 0}, "at least 1, got '0'"),
        ("sentence:keyword", {"word": "rain", "N": 0}, "at least 1, got '0'"),
        ("ratio:stop_words", {"percentage": None}, "needs percentage"),
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": 1, "nth_paragraph": 2, "first_word": "a"},
            "got 2 of 1",
        ),
    ],
)
def test_arguments_that_make_no_sense_are_errors_that_name_them(id: str, kwargs: dict[str, Any], reason: str) -> None:
    score = check(id, kwargs, "some text")
    assert score.outcome == "error"
    assert score.detail.startswith(f"{id}: ")
    assert reason in score.detail


@pytest.mark.parametrize(("option", "value"), [("mode", "lose"), ("reward", "some"), ("mode", None)])
def test_unknown_options_are_errors(option: str, value: Any) -> None:
    score = check("punctuation:no_comma", {}, "x", **{option: value})
    assert score.outcome == "error"
    assert repr(value) in score.detail


# --- loose ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("id", "response"),
    [
        ("startend:quotation", 'Sure:\n"yes"'),  # without the first line
        ("startend:quotation", '"yes"\nHope it helps!'),  # without the last
        ("startend:quotation", 'Sure:\n"yes"\nHope it helps!'),  # without both
        ("startend:quotation", '**"yes"**'),  # without asterisks
        ("startend:quotation", 'Sure:\n\n*"yes"*'),
        ("startend:quotation", '*"yes"*\n\nBye'),
        ("startend:quotation", 'Sure:\n\n*"yes"*\n\nBye'),
        ("punctuation:no_comma", "Sure, here:\nno commas"),
        ("detectable_format:json_format", 'Here:\n```json\n{"a": 1}\n```'),
    ],
)
def test_loose_forgives_a_first_line_a_last_line_and_markdown(id: str, response: str) -> None:
    assert check(id, {}, response).value == 0
    assert check(id, {}, response, mode="loose") == Score(1.0, {id: 1.0})


@pytest.mark.parametrize(
    ("id", "response"),
    [
        ("startend:quotation", "yes"),
        ("startend:quotation", 'Sure:\nHere:\n"yes"'),  # two lines too many
        ("punctuation:no_comma", "a, b\nc, d\ne, f"),
        ("format:no_whitespace", "a b"),
    ],
)
def test_loose_does_not_forgive_more(id: str, response: str) -> None:
    assert check(id, {}, response, mode="loose").value == 0


def test_loose_variants_that_are_empty_follow_nothing() -> None:
    assert check("punctuation:no_comma", {}, "a, b", mode="loose").value == 0


def test_loose_lets_each_instruction_choose_its_variant() -> None:
    reference = {"instructions": [{"id": "startend:quotation"}, {"id": "format:list", "kwargs": {"sep": "*"}}]}
    assert instructions('Sure * and *:\n"yes"', reference, {}, mode="loose").value == 1


# --- never raises, never stalls -------------------------------------------------------------------------------------

PATHOLOGICAL = ["\n", " ", "*", "[", "<<", "p.", "!", "'", "a. "]


@pytest.mark.thorough(keep=2)
@pytest.mark.parametrize("piece", PATHOLOGICAL)
def test_linear_in_the_length_of_the_response(piece: str) -> None:
    text = (piece * 50_000)[:50_000] + "x"
    slow = ("language:", "change_case:english")
    entries = {id: {"id": id, "kwargs": kwargs} for id, kwargs, *_ in CASES if not id.startswith(slow)}
    start = time.process_time()
    assert instructions(text, {"instructions": list(entries.values())}, {}).valid
    assert time.process_time() - start < 20


HOSTILE = st.text(st.characters(), max_size=200) | st.text(
    " .!?\n*-\"'[](){}<>,:;aAbI19é日😀\u2019\ud800\x00", max_size=200
)
ENTRIES = list({id: {"id": id, "kwargs": kwargs} for id, kwargs, *_ in CASES}.values())


@settings(max_examples=60, deadline=None)
@given(HOSTILE, st.sampled_from(["strict", "loose"]))
def test_never_raises(response: str, mode: Any) -> None:
    score = instructions(response, {"instructions": ENTRIES}, {}, mode=mode, reward="fraction")
    assert score.valid
    assert 0 <= score.value <= 1
    assert len(score.components) == len(KINDS)
    assert score == instructions(response, {"instructions": ENTRIES}, {}, mode=mode, reward="fraction")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = sorted({name for _, kwargs, *_ in CASES for name in kwargs})


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.dictionaries(st.sampled_from(ARGUMENTS), JSON, max_size=5) | JSON)
def test_never_raises_on_any_arguments(id: str, kwargs: Any) -> None:
    reference = {"instructions": [{"id": id, "kwargs": kwargs}]}
    score = instructions("Some text. It is short.", reference, {})
    assert score.valid or score.detail


@settings(max_examples=100, deadline=None)
@given(JSON)
def test_never_raises_on_any_reference(reference: Any) -> None:
    assert instructions("Some text.", reference, {}).outcome == "error"


@pytest.mark.parametrize("response", ["\ud800", "\x00", "a\x00b, \udfff.", "\u202e\u0301", "\r\r\n", "İ ß ǅ"])
def test_odd_characters(response: str) -> None:
    assert instructions(response, {"instructions": ENTRIES}, {}, mode="loose").valid
