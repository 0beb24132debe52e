"""Sentences, tokens and first verbs as the public checkers count them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitae.verifiers.instructions.language import is_language, language_of
from kitae.verifiers.instructions.sentences import plain_words, sentences, words
from kitae.verifiers.instructions.verbs import starts_with_verb


@pytest.mark.parametrize(
    "parts",
    [
        ["One."],
        ["One.", "Two!", "Three?", "Four"],
        ["Mr. Smith met Dr. Jones.", "They left."],
        ["He lives in the U.S. with Prof. Lee.", "She does not."],
        ["It is 5 p.m.", "The sun sets."],  # "the" starts sentences
        ["It is 5 p.m. Oslo time."],  # "oslo" is never seen in lower case
        ["Well...", "However not."],
        ["Well... maybe not."],
        ["J. Smith wrote it."],
        ["J.K. Rowling met J.R.R. Tolkien.", "Both wrote."],
        ["Bye.", "P.S.", "Jean called.", "P.P.S.", "Oslo too."],
        ["It weighs 5 kg.", "Paris is 20 km.", "Add 3 oz.", "Stir 2 lbs.", "Rest."],
        ["It costs 3.50 dollars.", "A lot!"],
        ["We have plan B.", "The end."],
        ["See item 5.", "It is short."],
        ["See No.", "5, please.", "Thanks."],  # "no" is a word, not an abbreviation
        ["What?!", "No!!!", "Yes."],
        ['He said "no."', "She left."],
        ["(It rained.)", "We stayed."],
        ["He said “no.”", "She left."],
        ["First line\nsecond line.", "Third\n\nfourth."],
        ["no end here\n\nnor here"],
        ["1.", "Mix it.", "2.", "Bake it."],
        ["e.g.", "this one, i.e.", "that one."],
        ["Visit example.com today.", "It is free."],
        ["Été fini.", "Ça va?", "Oui."],
        ["雨が降る。風が吹く。"],  # only full stops with white space after them
        ["Он ушёл.", "Она осталась!"],
        ["Wait .", ".", ".", "what?"],
    ],
)
def test_sentences(parts: list[str]) -> None:
    assert sentences(" ".join(parts)) == tuple(parts)


@pytest.mark.parametrize(("text", "count"), [("", 0), (" \n ", 0), (".", 1), ("...", 1), ("!?", 2), (" a ", 1)])
def test_sentences_of_next_to_nothing(text: str, count: int) -> None:
    assert len(sentences(text)) == count


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("I can't, Mr. No.", "I ca n't , Mr. No ."),
        ("They'll say it's Bob's.", "They 'll say it 's Bob 's ."),
        ("You cannot and I'm gonna.", "You can not and I 'm gon na ."),
        ('He said "no" (twice).', "He said `` no '' ( twice ) ."),
        ("It costs $3.50, or 1,000 yen: cheap!", "It costs $ 3.50 , or 1,000 yen : cheap !"),
        ("'Tis rain--heavy rain...", "' Tis rain -- heavy rain ..."),
        ("well-known U.S. stars*", "well-known U.S. stars *"),
        ("‘So’ she said… “really”", "‘ So ’ she said… “ really ”"),
        ("One. Two.", "One . Two ."),
        ("```py x```", "`` ` py x `` `"),
        ("l'été ça", "l'été ça"),
        ("", ""),
    ],
)
def test_words(text: str, tokens: str) -> None:
    assert list(words(text)) == tokens.split()


@pytest.mark.parametrize(
    ("text", "count"), [("a-b c_d 5%", 4), ("don't", 2), ("हिंदी में", 2), ("日本語です", 1), ("é e\u0301", 2), ("...", 0)]
)
def test_plain_words(text: str, count: int) -> None:
    assert len(plain_words(text)) == count


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("This is a plain sentence in the English language.", "en"),
        ("Das ist ein ganz einfacher Satz in deutscher Sprache.", "de"),
        ("Это простое предложение на русском языке.", "ru"),
        ("Hii ni sentensi rahisi iliyoandikwa kwa lugha ya Kiswahili.", "sw"),
        ("这是一个用中文写的简单句子。", "zh-cn"),
        ("12345 !?", None),
        ("", None),
    ],
)
def test_language(text: str, code: str | None) -> None:
    assert language_of(text) == code
    assert is_language(text, code or "anything")


@pytest.mark.parametrize(
    ("text", "verb"),
    [
        ("Is it wet ?", True),
        ("Make a list", True),
        ("Running is fun", True),
        ("Given the rain", True),
        ("Rain is wet", False),
        ("The list", False),
        ("However , we", False),
        ("", False),
    ],
)
def test_first_verb(text: str, verb: bool) -> None:
    assert starts_with_verb(text.split()) == verb


@settings(max_examples=300, deadline=None)
@given(st.text(" .!?\n\"'()ab,AB1-*“”’\u3000é日", max_size=80))
def test_no_character_is_lost_between_sentences(text: str) -> None:
    found = sentences(text)
    assert "".join("".join(found).split()) == "".join(text.split())
    assert all(sentence == sentence.strip() or sentence == found[0] for sentence in found)
