"""Duplicates, near duplicates, and training data that an evaluation has."""

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kitae.data.config import DataConfig, ExamplesConfig
from kitae.data.data_files import File
from kitae.data.examples import open_examples
from kitae.data.overlap import Passage, duplicates, find_overlap, known_from, normal, passages
from kitae.data.prompt_stream import eval_prompts, open_stream
from kitae.errors import DataError

LONG = "Natalia sold clips to 48 of her friends in April and then she sold half as many clips in May so how"
BRIEF = "How many legs do three dogs and a spider have"  # ten words
OTHER = "a train leaves the town at nine and another one at ten when do they meet if both are equally fast"


def evaluation(*texts, question=True):
    return [Passage(f"test.jsonl:{i}", text, question) for i, text in enumerate(texts, 1)]


def write(path: Path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


class TestDuplicates:
    def test_the_same_but_for_case_spaces_and_forms(self):
        texts = ["The end", "x + 1", "the  END\n", "x - 1", "Ｔhe end", "the end."]
        assert duplicates(texts) == {2: 0, 4: 0}
        assert normal("Ｔhe  end\n") == "the end"

    @pytest.mark.parametrize(("changed", "found"), [(1, True), (40, False)])
    def test_nearly_the_same(self, changed, found):
        words = [f"word{i}" for i in range(200)]
        other = [*words[: 200 - changed], *(f"new{i}" for i in range(changed))]
        texts = [OTHER, " ".join(words), " ".join(other)]
        assert duplicates(texts, near=True) == ({2: 1} if found else {})
        assert duplicates(texts) == {}

    def test_what_repeats_a_repeat_repeats_the_first(self):
        words = [f"word{i}" for i in range(100)]
        first, near = " ".join(words), " ".join([*words[:-1], "other"])
        assert duplicates([first, near, near, first], near=True) == {1: 0, 2: 0, 3: 0}

    def test_what_has_another_label_is_no_repeat(self):
        words = [f"word{i}" for i in range(100)]
        texts = [" ".join(words), " ".join([*words[:-1], "other"]), " ".join(words)]
        assert duplicates(texts, near=True, labels=[True, False, False]) == {2: 1}
        assert duplicates(texts, labels=[True, False, False]) == {}
        assert duplicates(texts, labels=[True, False, True]) == {2: 0}

    def test_short_texts_and_signs(self):
        assert duplicates(["", "a", "b", "a b c d", "3 + 4 = 7 is it so ?", "3 - 4 = 7 is it so ?"], near=True) == {}

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.sampled_from(["a", "A ", "b", LONG, OTHER, LONG.upper(), BRIEF]), max_size=12))
    def test_what_is_left_is_different_and_the_first_of_its_kind(self, texts):
        for near in (False, True):
            repeats = duplicates(texts, near)
            left = [i for i in range(len(texts)) if i not in repeats]
            assert [normal(texts[i]) for i in left] == list(dict.fromkeys(map(normal, texts)))
            assert all(early < late and early in left for late, early in repeats.items())

    def test_against_the_definition(self):
        rng = random.Random(0)
        base = [f"w{i}" for i in range(60)]
        texts = [" ".join(base)]
        for changes in range(12):
            words = list(base)
            for place in rng.sample(range(60), changes):
                words[place] = "x"
            texts.append(" ".join(words))

        def shingles(text):
            words = text.split()
            return {tuple(words[i : i + 5]) for i in range(len(words) - 4)}

        for other in texts[1:]:
            a, b = shingles(texts[0]), shingles(other)
            alike = len(a & b) / len(a | b)
            if alike >= 0.85 or alike < 0.8:  # nearer the border, chance decides
                assert bool(duplicates([texts[0], other], near=True)) == (alike >= 0.8), alike


class TestKnown:
    def test_a_long_text_by_half_of_its_runs(self):
        words = LONG.split()
        half, less = " ".join(words[: 13 + 4]), " ".join(words[: 13 + 3])
        items = [[OTHER], ["So:", f"Well, {LONG.upper()}!"], [half], [less], [f"{' '.join(words[:10])} {OTHER}"]]
        assert len(words) - 12 == 10, "the text has ten runs; four words more than one run are five"
        assert known_from(items, evaluation(OTHER[:20], LONG)) == {1: "test.jsonl:2", 2: "test.jsonl:2"}

    def test_a_shorter_one_whole(self):
        items = [[f"Tell me. {BRIEF}?"], [" ".join(BRIEF.split()[:-1])], [" ".join(reversed(BRIEF.split()))]]
        assert known_from(items, evaluation(BRIEF)) == {0: "test.jsonl:1"}

    def test_a_very_short_one_only_as_a_message_and_if_it_is_a_question(self):
        items = [["What is 6 * 7?", "42"], ["what is 6 * 7?  "], ["What is 6 / 7?"], ["Say: what is 6 * 7?"]]
        assert known_from(items, evaluation("What is 6 * 7?")) == {0: "test.jsonl:1", 1: "test.jsonl:1"}
        assert known_from(items, evaluation("42", "What is 6 / 7?", question=False)) == {}

    def test_runs_do_not_cross_messages(self):
        words = LONG.split()
        assert known_from([[" ".join(words[:12]), " ".join(words[12:])]], evaluation(LONG)) == {}

    def test_what_many_texts_of_an_evaluation_say_is_no_sign(self):
        order = "Solve the following problem step by step and write your final answer in a box at the very end"
        asked = evaluation(*(f"{order} {i} {BRIEF.replace('three', str(i))}" for i in range(30)))
        items = [[f"{order} What is the height of the tower in Pisa today"], [asked[7].text]]
        assert known_from(items, asked) == {1: "test.jsonl:8"}

    def test_length_of_runs(self):
        six = " ".join(LONG.split()[:6])
        assert known_from([[f"x {six} y"]], evaluation(six), words=6) == {0: "test.jsonl:1"}
        assert known_from([[f"x {six} y"]], evaluation(six)) == {}

    def test_nothing(self):
        assert (
            known_from([], evaluation(LONG))
            == known_from([[LONG]], [])
            == known_from([[""]], evaluation("", LONG))
            == {}
        )

    @settings(max_examples=60, deadline=None)
    @given(st.data())
    def test_against_the_definition(self, data):
        word = st.sampled_from("abcdefgh")
        asked = [" ".join(data.draw(st.lists(word, min_size=8, max_size=18))) for _ in range(3)]
        texts = [" ".join(data.draw(st.lists(word, max_size=12))) for _ in range(2)]
        texts.append(f"x {data.draw(st.sampled_from(asked))[2:]} y")
        found = known_from([[text] for text in texts], evaluation(*asked))

        def runs(text, length):
            words = text.split()
            return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}

        def has(text, question):
            length = min(13, len(question.split()))
            return len(runs(text, length) & runs(question, length)) >= 0.5 * len(runs(question, length))

        assert found.keys() == {i for i, text in enumerate(texts) if any(has(text, q) for q in asked)}


def test_texts_of_an_evaluation_whatever_its_columns(tmp_path):
    rows = [
        {"question": "Q", "answer": "A", "n": 3, "tests": ["t"]},
        {"messages": [{"role": "user", "content": "U"}, {"role": "assistant", "content": "S"}]},
        {"conversations": [{"from": "human", "value": "H"}, {"from": "gpt", "value": "G"}]},
    ]
    path = Path(write(tmp_path / "t.jsonl", rows))
    found = [(p.where, p.text, p.question) for p in passages(File(path, path.name))]
    asked = {text for _, text, question in found if question}
    assert asked == {"Q", "U", "H"} and {text for _, text, _ in found} == asked | {"A", "t", "S", "G"}
    assert found[0][0] == "t.jsonl:1"


def test_both_at_once(tmp_path):
    path = write(tmp_path / "test.jsonl", [{"question": LONG}])
    found = find_overlap([[OTHER], [OTHER.upper()], [LONG], [LONG]], "exact", [path])
    assert (found.duplicates, found.known) == ({1: 0, 3: 2}, {2: "test.jsonl:1", 3: "test.jsonl:1"})
    notes = list(found.notes("abcd"))
    assert [gone for gone, _ in notes] == [{"b", "d"}, {"c"}], "each is left out once"
    assert notes[0][1].endswith("the first: b repeats a") and notes[1][1].endswith("c overlaps with test.jsonl:1")
    with pytest.raises(DataError, match=r"data.decontaminate must name a file, got nowhere.jsonl"):
        find_overlap([[OTHER]], "none", ["nowhere.jsonl"])


class TestSettings:
    def test_prompts(self, tmp_path):
        rows = [{"question": q, "answer": "1"} for q in (OTHER, OTHER.upper(), LONG, "What?")]
        path, test = write(tmp_path / "f.jsonl", rows), write(tmp_path / "t.jsonl", [{"problem": LONG}])
        config = DataConfig(path=path, eval_path=test, shuffle=False)
        assert open_stream(config, 0).size == 4
        sifted = config.model_copy(update={"deduplicate": "exact", "decontaminate": (test,)})
        stream = open_stream(sifted, 0)
        assert [stream.at(i).id for i in range(2)] == ["f.jsonl:1", "f.jsonl:4"] and stream.size == 2
        assert stream.skipped.splitlines() == [
            "1 of 4 rows are left out as duplicates (data.deduplicate); the first: f.jsonl:2 repeats f.jsonl:1",
            "1 of 4 rows are left out as known (data.decontaminate); the first: f.jsonl:3 overlaps with t.jsonl:1",
        ]
        held = write(tmp_path / "h.jsonl", [{"question": LONG, "answer": "1"}] * 2)
        own = sifted.model_copy(update={"eval_path": held})
        assert len(eval_prompts(own, 0, 5)) == 2, "what is held out is left alone"
        write(tmp_path / "f.jsonl", rows[2:3])
        with pytest.raises(DataError, match="none is left"):
            open_stream(sifted, 0)

    def test_of_generated_tasks_there_are_no_rows(self):
        for value in ({"deduplicate": "near"}, {"decontaminate": ["x.jsonl"]}):
            with pytest.raises(ValueError, match="sift rows, but neither"):
                DataConfig(task="reverse", **value)

    def test_examples_also_across_files(self, tmp_path):
        paths = [
            write(tmp_path / "a.jsonl", [{"prompt": OTHER, "completion": "x"}, {"text": "y"}]),
            write(
                tmp_path / "b.jsonl",
                [{"prompt": OTHER, "completion": "X"}, {"prompt": LONG, "completion": "z"}, {"text": "v"}],
            ),
        ]
        test = write(tmp_path / "t.jsonl", [{"question": LONG}])
        mix = [{"path": path, "weight": 1} for path in paths]
        config = ExamplesConfig(mix=mix, deduplicate="exact", decontaminate=[test])
        stream = open_examples(config, 0, "demonstration")
        assert [[e.id for e in source] for source in stream.sources] == [["a.jsonl:1", "a.jsonl:2"], ["b.jsonl:3"]]
        assert "b.jsonl:1 repeats a.jsonl:1" in stream.skipped and "b.jsonl:2 overlaps with t.jsonl:1" in stream.skipped

    def test_both_sides_of_a_preference_count(self, tmp_path):
        rows = [{"prompt": "Hi", "chosen": "a", "rejected": r} for r in ("b", "c", "B")]
        path = write(tmp_path / "f.jsonl", rows)
        stream = open_examples(ExamplesConfig(path=path, deduplicate="exact", shuffle=False), 0, "preference")
        assert [e.id for e in stream.sources[0]] == ["f.jsonl:1", "f.jsonl:2"]
        long = [{"prompt": OTHER * 9, "chosen": "a", "rejected": "b"}]
        near = ExamplesConfig(path=write(tmp_path / "g.jsonl", long), deduplicate="near")
        assert open_examples(near, 0, "labelled").size == 2, "a good and a bad answer are both learnt from"
        labelled = open_examples(ExamplesConfig(path=path, deduplicate="exact"), 0, "labelled")
        assert labelled.size == 3, "the chosen answer once, two different rejected ones"

    def test_a_file_is_mixed_once(self):
        with pytest.raises(ValueError, match="must name each file once"):
            ExamplesConfig(mix=[{"path": "a"}, {"path": "a"}])
