"""Each sentence of SECURITY.md that is marked has tests, here or where the part is tested."""

import ast
import asyncio
import inspect
import os
import re
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import run_toy

from kitae.cli.serve import serve, ui
from kitae.envs.command import command_world
from kitae.envs.command.command_world import CommandWorld
from kitae.observe.config import ObserveConfig
from kitae.observe.prometheus import MetricsServer
from kitae.serving.server_settings import ServerSettings
from kitae.weights.bucket_server import ChunkServer, Shop
from kitae.weights.process_group import BroadcastGroup, host_store, join_store

ROOT = Path(__file__).parents[2]
HERE = "tests/integration/test_security.py"
ATTACKS = "tests/integration/test_sandbox_attacks.py"
FORGED = "tests/unit/envs/command/test_forged_rewards.py"

TESTS = {
    "An agent program finds neither the reference nor a way to post a reward, unless the recipe gives it one.": (
        f"{FORGED}::test_a_child_finds_neither_reference_nor_reward",
        f"{FORGED}::test_a_claim_without_a_reference_shows_none",
    ),
    "A program that gives the reward claims a token before the model says anything; nothing that it starts finds the "
    "token.": (f"{FORGED}::test_a_child_finds_neither_reference_nor_reward",),
    "The data and the run folder are hidden from agent programs and what they start.": (
        f"{FORGED}::test_a_child_finds_neither_reference_nor_reward",
        f"{HERE}::test_links_and_folders_around_do_not_show_what_is_hidden",
    ),
    "An agent program and what it starts reach the endpoint of their episode alone, unless the recipe says "
    "otherwise.": (f"{FORGED}::test_a_program_reaches_its_endpoint_alone",),
    "What an agent program or one of its children leaves behind ends with the episode: processes, files, modules.": (
        f"{FORGED}::test_a_child_that_leaves_something_for_the_next_episode",
        "tests/unit/envs/command/test_command_world.py::test_nothing_is_left_behind",
    ),
    "Agent programs and MCP servers get an allow-list of variables, without keys and tokens.": (
        f"{FORGED}::test_variables_that_the_recipe_names_are_passed_on",
        "tests/unit/envs/test_mcp.py::test_a_server_finds_what_is_allowed_of_our_environment",
    ),
    "Programs that the code verifier or the tool `python` runs have no network, none of your files, and another "
    "user.": (
        f"{ATTACKS}::test_loopback_of_the_machine_is_out_of_reach",
        f"{ATTACKS}::test_files_of_the_user_are_not_there",
        f"{ATTACKS}::test_nothing_gets_out",
    ),
    "Nothing that Kitae starts listens beyond this machine by itself: not `ui`, `serve`, `/metrics`, episodes, "
    "weights, nor where ranks and engines meet.": (
        f"{HERE}::test_what_listens_does_so_on_this_machine_alone",
        f"{HERE}::test_members_of_a_broadcast_on_one_machine_listen_on_it_alone",
        f"{HERE}::test_defaults_of_addresses",
    ),
    "A server that others can reach has a secret: `serve` a key, `ui` a token, `/metrics` a key; without one it is "
    "refused.": (
        "tests/unit/ui/test_guard.py::test_a_server_that_others_reach_needs_a_token",
        "tests/unit/serving/test_serving_server.py::test_what_is_wrong_is_said_before_a_model_loads",
        "tests/unit/observe/test_prometheus.py::test_a_server_for_others_has_a_key",
    ),
    "Without its key, a server answers nothing but that it is alive.": (
        "tests/unit/serving/test_serving_server.py::test_with_a_key_nothing_is_answered_without_it",
        "tests/unit/observe/test_prometheus.py::test_a_key_keeps_others_out",
    ),
    "A page of another site cannot use a server on this machine: a request must name this machine.": (
        "tests/unit/ui/test_guard.py::test_a_local_server_answers_to_local_names_alone",
        "tests/unit/serving/test_serving_server.py::test_without_a_key_only_this_machine_is_answered_to",
    ),
    "A worker process on another machine comes in with a secret that lets one connection in, once.": (
        "tests/unit/workers/test_listener.py::test_the_secret_lets_one_in",
    ),
    "Buckets of weights are given to those who know the secret of the run.": (
        "tests/unit/weights/test_downloads.py::test_without_the_secret_nothing_is_given",
    ),
    "A run folder is readable by its user alone, unless `run.shared` says otherwise.": (
        f"{HERE}::test_a_run_folder_is_private_unless_shared",
    ),
    "Python code that comes with a model runs only with `model.trust_remote_code`, and nobody is asked.": (
        "tests/unit/models/test_load.py::test_code_that_comes_with_a_model_runs_only_if_it_is_trusted",
    ),
    "What a model says cannot steer the terminal on which it is shown, nor show in another order than it has.": (
        "tests/unit/cli/test_show.py::test_what_a_model_says_cannot_steer_the_terminal",
        "tests/unit/observe/test_plain_output.py::test_what_steers_is_spelled_out",
    ),
    "What a model says is text in the pages of `kitae ui`: no script but the page's own runs there.": (
        "tests/unit/ui/test_guard.py::test_every_answer_has_the_headers",
    ),
}


def test_every_marked_sentence_has_a_test_that_exists() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    marked = [" ".join(found.split()) for found in re.findall(r"^- ✓ (.*?)(?=\n- |\n\n|\Z)", text, re.S | re.M)]
    assert text.count("✓") - 1 == len(marked), "one is in the sentence that explains the mark"
    assert set(marked) == set(TESTS) and len(marked) == len(TESTS)
    for place in {place for places in TESTS.values() for place in places}:
        path, name = place.split("::")
        tree = ast.parse((ROOT / path).read_text())
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, place


def addresses_of(port: int) -> set[str]:
    """Where this machine listens at a port, as the kernel says it; each must be a loopback address."""
    found = set()
    for kind, size in (("tcp", 8), ("tcp6", 32)):
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            place, state = line.split()[1], line.split()[3]
            address, _, number = place.partition(":")
            if state == "0A" and int(number, 16) == port:
                raw = bytes.fromhex(address)
                words = b"".join(raw[i : i + 4][::-1] for i in range(0, size // 2, 4))
                found.add(socket.inet_ntop(socket.AF_INET if size == 8 else socket.AF_INET6, words))
    return found


def _listens() -> list[tuple[str, Callable[[], tuple[int, Callable[[], object]]]]]:
    def metrics() -> tuple[int, Callable[[], object]]:
        server = MetricsServer(Path("runs/x"), ObserveConfig().metrics_host, 0)
        return server.port, server.close

    def weights() -> tuple[int, Callable[[], object]]:
        server = ChunkServer(Shop(), "secret")
        return server.port, server.close

    def meeting() -> tuple[int, Callable[[], object]]:
        store = host_store("127.0.0.1", 10.0)
        return store.port, lambda: store

    return [("metrics", metrics), ("weights", weights), ("meeting", meeting)]


@pytest.mark.parametrize(("name", "start"), _listens())
def test_what_listens_does_so_on_this_machine_alone(
    name: str, start: Callable[[], tuple[int, Callable[[], object]]]
) -> None:
    port, close = start()
    try:
        assert addresses_of(port) == {"127.0.0.1"}, name
    finally:
        close()


def test_members_of_a_broadcast_on_one_machine_listen_on_it_alone() -> None:
    before = _all_listening()
    store = host_store("127.0.0.1", 20.0)
    made: list[BroadcastGroup] = []
    other = join_store("127.0.0.1", store.port, 20.0)

    async def meet() -> None:
        def join(rank: int) -> BroadcastGroup:
            return BroadcastGroup.make((store, other)[rank], "k", rank, 2, backend="gloo", deadline=20.0)

        made.extend(await asyncio.gather(*(asyncio.to_thread(join, rank) for rank in range(2))))

    asyncio.run(meet())
    try:
        assert _all_listening() - before <= {"127.0.0.1"}
    finally:
        for group in made:
            group.close()


def _all_listening() -> set[str]:
    ports = {
        int(line.split()[1].rpartition(":")[2], 16)
        for kind in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]
        if line.split()[3] == "0A"
    }
    return {f"{address}" for port in ports for address in addresses_of(port)}


def test_defaults_of_addresses() -> None:
    """Of the commands and of settings; episodes have no setting for it."""
    for command in (serve, ui):
        assert inspect.signature(command).parameters["host"].default == "127.0.0.1"
    assert ServerSettings("name").host == command_world._HOST == ObserveConfig().metrics_host == "127.0.0.1"


@pytest.mark.parametrize("shared", [False, True])
def test_a_run_folder_is_private_unless_shared(tmp_path: Path, shared: bool) -> None:
    before = os.umask(0o022)
    try:
        settings = ("training.steps=1", "training.prompts_per_step=2", "training.group_size=2", "eval.prompts=0")
        run = run_toy(tmp_path / "runs", *settings, f"run.shared={str(shared).lower()}").folder
    finally:
        os.umask(before)
    found = {path: path.stat().st_mode & 0o777 for path in (run, *run.rglob("*")) if not path.is_symlink()}
    assert len(found) > 10
    if shared:
        assert found[run] == 0o755 and found[run / "journal.sqlite"] == 0o644
    else:
        assert not {str(path): oct(mode) for path, mode in found.items() if mode & 0o077}


def test_links_and_folders_around_do_not_show_what_is_hidden(tmp_path: Path) -> None:
    """Data in the program's folder and beside it, by links to files and folders, a folder of runs that holds the
    program's own."""
    agent, elsewhere = tmp_path / "runs" / "agent", tmp_path / "elsewhere"
    for folder in (agent, elsewhere, tmp_path / "runs" / "toy-001"):
        folder.mkdir(parents=True)
    data = elsewhere / "train.jsonl"
    for file in (data, tmp_path / "runs" / "toy-001" / "journal.sqlite", agent / "own.jsonl"):
        file.write_text("SECRET")
    (agent / "linked.jsonl").symlink_to(data)
    (agent / "linked").symlink_to(elsewhere)
    (agent / "runs").symlink_to(tmp_path / "runs")
    (tmp_path / "door").symlink_to(agent)
    (agent / "open.txt").write_text("OPEN")
    for folder in (agent, tmp_path / "door"):
        params = {"command": "sh", "folder": str(folder), "readable": [str(tmp_path)]}
        world = CommandWorld(params, [tmp_path / "runs", data, agent / "linked.jsonl", agent / "own.jsonl"])
        script = f"cat *.txt *.jsonl linked/* runs/*/* {tmp_path}/*/* {tmp_path}/*/*/* 2>/dev/null; true"
        shown = subprocess.run(world.command(["sh", "-c", script]), capture_output=True, text=True, check=True).stdout
        assert "OPEN" in shown and "SECRET" not in shown, shown
