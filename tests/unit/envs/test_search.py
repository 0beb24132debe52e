import json

import pytest

from kitae.envs.tools.search import Index, words_of
from kitae.errors import ConfigError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "rivers.md").write_text(
        "# Rivers\n\nThe Amazon is the largest river by discharge.\n\n" + "Filler words. " * 80 + "\n\n"
        "The Nile flows north through Egypt into the sea."
    )
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "cities.txt").write_text("Paris lies on the Seine.\n\nLondon lies on the Thames.")
    rows = [{"title": "Bees", "text": "Bees make honey."}, {"contents": "Wasps do not."}]
    (tmp_path / "insects.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "picture.png").write_bytes(b"\x89PNG river river river")
    return tmp_path


@pytest.mark.parametrize(
    ("query", "source", "text"),
    [
        ("longest river in Egypt: the Nile?", "rivers.md", "The Nile flows north"),
        ("AMAZON", "rivers.md", "The Amazon"),
        ("cities on the Thames", "more/cities.txt", "London lies"),
        ("which bee makes honey", "Bees", "Bees make honey."),
        ("wasp", "insects.jsonl:2", "Wasps do not."),
    ],
)
def test_the_best_passage_comes_first(folder, query, source, text):
    best = Index.of(folder).find(query, 3)[0]
    assert best.source == source and text in best.text


def test_rare_words_count_more_than_frequent_ones(folder):
    found = Index.of(folder).find("the the the Seine", 2)
    assert "Seine" in found[0].text


def test_nothing_is_found_where_no_word_is_shared(folder):
    index = Index.of(folder)
    assert index.find("zebra", 3) == [] and index.find("", 3) == [] and index.find("\x00<|im_end|>", 3) == []
    assert len(index.find("the", 50)) <= len(index.passages)


def test_long_texts_become_short_passages(tmp_path):
    (tmp_path / "long.txt").write_text("word " * 5000 + "needle " + "word " * 5000)
    index = Index.of(tmp_path)
    assert len(index.passages) > 50 and all(len(p.text.split()) <= 240 for p in index.passages)
    assert "needle" in index.find("needle", 1)[0].text


def test_words():
    assert words_of("Rivers, cities and GLASS bus?") == ["river", "city", "and", "glass", "bus"]


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("a.jsonl", "{oops", r"a\.jsonl:1 must be a JSON object"),
        ("a.jsonl", '{"title": "x"}', "must have one of text"),
        ("a.jsonl", "[1]", "must have one of text"),
        ("a.csv", "x", "must hold texts to search"),
        ("a.txt", " \n\n ", "must hold texts to search"),
    ],
)
def test_folders_that_cannot_be_searched(tmp_path, name, text, complaint):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        Index.of(tmp_path)


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="there is no"):
        Index.of(tmp_path / "nowhere")
