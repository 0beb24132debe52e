"""The environment `games`."""

import asyncio
import importlib.util
import random
from collections import Counter

import pytest

from kitae.envs.games.game_world import Games, seed_of
from kitae.envs.games.guess import Guess
from kitae.errors import ConfigError
from kitae.types import Message, Prompt, Turn


def has(package):
    return importlib.util.find_spec(package) is not None


def prompt(seed):
    return Prompt(f"episodes/train/{seed}", (Message("user", f"Episode {seed}"),), str(seed))


def play(params, moves, seeds=(1,)):
    """What each game said first, and what became of the moves in it."""

    async def one(world, seed):
        episode = world.make(prompt(seed))
        try:
            opening = await episode.start()
            found = []
            for move in moves:
                found.append(await episode.step(Turn(move, move)))
                if found[-1].done:
                    break
            return opening, found
        finally:
            await episode.close()

    async def run():
        async with Games(params) as world:
            return await asyncio.gather(*(one(world, seed) for seed in seeds))

    return asyncio.run(run())


class TestGuess:
    def test_halving_wins_always(self):
        for seed in range(200):
            game, low, high = Guess(seed, {"high": 15, "guesses": 4}), 1, 15
            game.start()
            while True:
                middle = (low + high) // 2
                move = game.move(f"I say {middle}")
                if move.done:
                    break
                low, high = (middle + 1, high) if move.text == "Too low." else (low, middle - 1)
            assert move.reward == 1.0 and move.text == "Right!"

    def test_numbers_depend_on_the_seed_and_are_spread_evenly(self):
        numbers = Counter(Guess(seed, {"high": 4})._number for seed in range(400))
        assert set(numbers) == {1, 2, 3, 4} and min(numbers.values()) > 60
        assert Guess(7, {})._number == Guess(7, {})._number

    def test_the_last_guess_ends_it(self):
        game = Guess(1, {"high": 16, "guesses": 3})
        wrong = str(game._number + 1)
        assert game.move("dunno").text == "That is no number." and game.move(wrong).text == "Too high."
        last = game.move("9" * 30)
        assert last.done and last.reward == 0.0 and str(game._number) in last.text

    def test_the_global_generator_is_left_alone(self):
        random.seed(1)
        before = random.getstate()
        Guess(3, {}).start()
        assert random.getstate() == before


def test_an_episode_shows_examples_and_rewards_every_move():
    params = {
        "game": "guess",
        "options": {"high": 9, "guesses": 2},
        "system": "Numbers only.",
        "examples": [["Guess.", "5", "Right!"]],
    }
    ((opening, found),) = play(params, ["100", "100"])
    assert [m.role for m in opening.messages] == ["system", "user", "assistant", "user", "user"]
    assert opening.messages[-1].content == "Guess my number, from 1 to 9. You have 2 guesses."
    assert [o.reward for o in found] == [0.0, 0.0] and [o.done for o in found] == [False, True]


def test_seeds():
    assert seed_of(prompt(17)) == 17
    assert seed_of(Prompt("x", (), None, {"seed": 5})) == 5
    other = seed_of(Prompt("x", (), "an answer"))
    assert other == seed_of(Prompt("x", (), "an answer")) != seed_of(Prompt("y", (), "an answer"))


@pytest.mark.parametrize(
    ("params", "complaint"),
    [
        ({}, "env.params.game: the environment 'games' needs it"),
        ({"game": "chess"}, "must be guess, lake, keys, kuhn, textarena:NAME or gymnasium:NAME, got 'chess'"),
        ({"game": "textarena:"}, "must be guess, lake, keys, kuhn, textarena:NAME"),
        ({"game": "guess", "options": {"high": 1}}, "env.params.options.high"),
        ({"game": "guess", "options": {"hihg": 9}}, "did you mean 'high'"),
    ],
)
def test_params_are_checked(params, complaint):
    with pytest.raises(ConfigError, match=complaint):
        Games(params)


@pytest.mark.skipif(has("gymnasium"), reason="the package is installed")
def test_a_missing_package_is_named():
    with pytest.raises(ConfigError, match=r"pip install 'kitae\[games\]'"):
        play({"game": "gymnasium:FrozenLake-v1"}, [])


@pytest.mark.skipif(not has("gymnasium"), reason="gymnasium is not installed")
class TestGymnasium:
    def test_frozen_lake(self):
        params = {"game": "gymnasium:FrozenLake-v1", "options": {"is_slippery": False}}
        moves = ["down", "DOWN!", "let us go right", "hm", "1", "2", "2"]
        ((opening, found),) = play(params, moves)
        assert opening.messages[-1].content.startswith("[S]FFF\nFHFH") and "left, down, right, up" in str(opening)
        assert "Name one of" in found[3].messages[0].content
        assert found[-1].done and sum(o.reward for o in found) == 1.0

    def test_the_same_seed_is_the_same_game(self):
        starts = play({"game": "gymnasium:Taxi-v4"}, [], seeds=(1, 1, 2, 3, 4))
        texts = [opening.messages[-1].content for opening, _ in starts]
        assert texts[0] == texts[1] and len(set(texts)) > 2

    def test_unknown_names_and_actions_without_names(self):
        with pytest.raises(ConfigError, match=r"gymnasium:NoSuchLake-v1' cannot be played"):
            play({"game": "gymnasium:NoSuchLake-v1"}, [])
        with pytest.raises(ConfigError, match="must have actions that can be named"):
            play({"game": "gymnasium:Pendulum-v1"}, [])


@pytest.mark.skipif(not has("textarena"), reason="textarena is not installed")
class TestTextArena:
    def test_guess_the_number(self):
        moves = [f"[{n}]" for n in range(1, 21)]
        ((opening, found),) = play({"game": "textarena:GuessTheNumber-v0"}, moves)
        assert "Guess The Number" in opening.messages[-1].content
        assert found[0].messages[0].content.startswith("[GAME] The target number is")  # what is new alone
        assert found[-1].done and 0.0 <= found[-1].reward <= 1.0

    def test_games_at_once_do_not_share_their_generators(self):
        alone = play({"game": "textarena:GuessTheNumber-v0"}, ["[10]", "[5]"], seeds=(3,))
        many = play({"game": "textarena:GuessTheNumber-v0"}, ["[10]", "[5]"], seeds=(1, 3, 2))
        assert many[1] == alone[0]

    def test_a_game_for_two_is_refused(self):
        with pytest.raises(ConfigError, match="cannot be played"):
            play({"game": "textarena:TicTacToe-v0"}, [])
