"""The real server on a real socket, asked as Tinker's client asks: what it computes, refuses and remembers."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from tinker_client import PROTO, Client, datum

from kitae.tinker import protobuf

TEXT = list(range(5, 25))
ONES = [1.0] * (len(TEXT) - 1)


@contextmanager
def program(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`kitae tinker tiny` and its address."""
    command = [
        sys.executable, "-c", "from kitae.cli.main import run; run()", "tinker", "tiny", "--folder", str(folder),
        "--port", "0", "model.device=cpu", "model.dtype=float32", "engine.memory_gb=0.05", *arguments,
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None, process.communicate()[1]
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield process, found[0]
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with program(tmp_path_factory.mktemp("server")) as (_, found):
        yield found


def test_a_model_learns_and_is_sampled(address: str) -> None:
    client = Client(address).open()
    losses = [client.train([datum(TEXT, weights=ONES)]) for _ in range(4)]
    assert losses[-1] < 0.7 * losses[0]
    sampler = client.sampler()
    passed = client.send_pass([datum(TEXT, weights=ONES)], forward=True)
    found = client.wait(passed)["loss_fn_outputs"][0]["logprobs"]
    assert found["shape"] == [len(TEXT) - 1]
    assert client.logprobs(sampler, TEXT) == pytest.approx(found["data"], abs=1e-5)
    asked = client.ask(sampler, TEXT[:5], num_samples=3, topk_sample_logprobs=2, topk_prompt_logprobs=2)
    assert len(asked.json()["sample_sequence_ids"]) == 3
    answers = client.wait(asked)["sequences"]
    assert [len(a["tokens"]) for a in answers] == [4, 4, 4] and all(a["stop_reason"] == "length" for a in answers)
    seeded = [client.wait(client.ask(sampler, TEXT[:5], params={"seed": 7})) for _ in range(2)]
    assert seeded[0] == seeded[1]


def test_answers_are_protobuf_for_who_accepts_it(address: str) -> None:
    client = Client(address).open()
    posted = client.send_pass([datum(TEXT, weights=ONES)]).json()["request_id"]
    plain, packed = client.fetch(posted), client.fetch(posted, PROTO)
    (record,) = protobuf.blobs(protobuf.read(packed)[2])
    entries = [protobuf.read(e) for e in protobuf.blobs(protobuf.read(record)[2])]
    tensors = {protobuf.text(e[1]): protobuf.read(protobuf.blob(e[2])) for e in entries}
    values = np.frombuffer(protobuf.blob(tensors["logprobs"][1]), np.float32)
    assert values.tolist() == plain["loss_fn_outputs"][0]["logprobs"]["data"]
    assert np.frombuffer(protobuf.blob(tensors["logprobs"][2]), np.int64).tolist() == [0, values.nbytes]


@pytest.mark.thorough
def test_json_bodies_of_passes_are_read_too(address: str) -> None:
    one, two = Client(address).open(), Client(address).open()
    inputs = {
        "target_tokens": {"data": TEXT[1:], "dtype": "int64", "shape": [19]},
        "weights": {"data": [1.0, 1.0], "dtype": "float32", "shape": [19, 1],
                    "sparse_crow_indices": [0, 1, 2, *[2] * 17], "sparse_col_indices": [0, 0]},
    }  # fmt: skip
    inputs["target_tokens"]["shape"] = [19, 1]
    given = {"model_input": {"chunks": [{"type": "encoded_text", "tokens": TEXT[:-1]}]}, "loss_fn_inputs": inputs}
    asked = {"data": [given], "loss_fn": "cross_entropy", "loss_fn_config": None}
    found = one.wait(one.send("forward_backward", forward_backward_input=asked))
    same = two.wait(two.send_pass([datum(TEXT, weights=[1.0, 1.0, *[0.0] * 17])]))
    assert found["metrics"]["loss:sum"] == pytest.approx(same["metrics"]["loss:sum"], rel=1e-6)
    forward = one.wait(one.send("forward", forward_input=asked))
    assert forward["metrics"] == found["metrics"]


@pytest.mark.thorough
def test_clients_at_once_get_what_each_gets_alone(address: str) -> None:
    texts = [TEXT, TEXT[::-1], [3, 4, 5, 6, 7, 8]]

    def run(i: int) -> list[float]:
        client = Client(address).open(rank=(2, 8, 3)[i], seed=i)
        for _ in range(3):
            client.train([datum(texts[i], weights=[1.0] * (len(texts[i]) - 1))])
        return client.logprobs(client.sampler(), TEXT)

    with ThreadPoolExecutor(3) as threads:
        together = list(threads.map(run, range(3)))
    for i, found in enumerate(together):
        assert found == pytest.approx(run(i), abs=1e-5)


def test_requests_are_computed_by_their_numbers_and_once(address: str) -> None:
    client, straight = Client(address).open(), Client(address).open()
    client.number = 1
    late = client.send("optim_step", adam_params={"learning_rate": 1e-2})  # number 2 comes first
    client.number = 0
    first = client.send_pass([datum(TEXT, weights=ONES)])
    client.number = 0
    again = client.send_pass([datum(TEXT, weights=[9.0] * len(ONES))])  # as a client that lost the answer repeats it
    assert first.json() == again.json()
    assert client.wait(late)["metrics"]["grad_norm:mean"] > 0
    client.number = 2
    straight.train([datum(TEXT, weights=ONES)])
    loss = client.wait(client.send_pass([datum(TEXT, weights=ONES)]))["metrics"]["loss:sum"]
    assert loss == pytest.approx(
        straight.wait(straight.send_pass([datum(TEXT, weights=ONES)]))["metrics"]["loss:sum"], rel=1e-6
    )


@pytest.mark.thorough
def test_weights_are_saved_found_and_deleted(address: str) -> None:
    client = Client(address).open()
    client.train([datum(TEXT, weights=ONES)])
    path = client.wait(client.send("save_weights", path="one", user_metadata={"a": "b"}))["path"]
    assert path == f"tinker://{client.model}/weights/one"
    twice = client.wait(client.send("save_weights", path="one"))
    assert "there are weights" in twice["error"] and twice["category"] == "user"
    for optimizer in (True, False):
        body = {"session_id": client.session, "model_seq_id": 5 + optimizer, "path": path, "optimizer": optimizer}
        loaded = client.wait(client.post("load_weights", **body))["model_id"]
        assert client.post("get_info", model_id=loaded).json()["lora_rank"] == 4
    listed = client.http.request("GET", f"/training_runs/{client.model}/checkpoints").json()["checkpoints"]
    assert [c["checkpoint_id"] for c in listed] == ["weights/one"] and listed[0]["user_metadata"] == {"a": "b"}
    assert client.post("weights_info", tinker_path=path).json()["lora_rank"] == 4
    assert client.http.request("GET", "/training_runs?limit=1").json()["cursor"]["total_count"] >= 3
    assert client.http.request("DELETE", f"/training_runs/{client.model}/checkpoints/weights/one").status_code == 200
    gone = client.wait(client.post("load_weights", **{**body, "model_seq_id": 9}))
    assert "there are no saved weights" in gone["error"]


def test_what_is_wrong_is_said_to_the_client(address: str) -> None:
    client = Client(address).open()

    def error(posted: str) -> str:
        found = client.fetch(posted)
        assert found["category"] == "user"
        return str(found["error"])

    assert "must be one of cross_entropy" in error(client.send_pass([datum(TEXT)], "mine").json()["request_id"])
    assert "needs logprobs and adv" in error(client.send_pass([datum(TEXT)], "ppo").json()["request_id"])
    assert "must be ids in" in error(client.send_pass([datum([1, 10**6, 2])]).json()["request_id"])
    assert "needs a datum at least" in error(client.send_pass([]).json()["request_id"])
    assert "a name of at most" in error(client.send("save_weights", path="../x").json()["request_id"])
    assert "AdamW alone" in error(
        client.send("optim_step", optimizer_params={"type": "dimuon", "learning_rate": 1}).json()["request_id"]
    )
    assert client.train([datum(TEXT, weights=ONES)]) > 0  # the model is well
    assert client.post("forward_backward", model_id="none", seq_id=1).status_code == 404
    assert client.post("retrieve_future", request_id="none").status_code == 404
    assert client.post("create_sampling_session", session_id="none", sampling_session_seq_id=0).status_code == 404
    assert (
        client.http.request(
            "POST", "/create_session", content=b"{}", headers={"Content-Type": "text/plain"}
        ).status_code
        == 415
    )
    assert (
        client.http.request("POST", "/create_session", content=b"[", headers={"Content-Type": PROTO}).status_code == 415
    )
    other = {"session_id": client.session, "model_seq_id": 3, "base_model": "other", "lora_config": {"rank": 2}}
    assert "the base model 'tiny'" in error(client.post("create_model", **other).json()["request_id"])
    whole = {"session_id": client.session, "model_seq_id": 4, "base_model": "tiny"}
    assert "LoRA adapters" in error(client.post("create_model", **whole).json()["request_id"])
    head = {**other, "model_seq_id": 6, "base_model": "tiny", "lora_config": {
        "rank": 2, "train_mlp": False, "train_attn": False}}  # fmt: skip
    assert "the head takes none" in error(client.post("create_model", **head).json()["request_id"])


@pytest.mark.thorough
def test_of_snapshots_without_a_name_the_last_are_kept(address: str) -> None:
    client = Client(address).open(rank=1)
    first = client.sampler()
    assert client.logprobs(first, TEXT)
    for _ in range(8):
        last = client.sampler()
    assert client.logprobs(last, TEXT)
    gone = client.fetch(client.ask(first, TEXT).json()["request_id"])
    assert "the last 8 of a model are kept" in gone["error"]


def test_after_kill_9_clients_go_on(tmp_path: Path) -> None:
    """What was computed and not saved is computed again, and what was asked and not answered is answered."""
    data = [datum(TEXT, weights=ONES)]
    with program(tmp_path / "calm") as (_, address):
        calm = Client(address).open(seed=3)
        expected = [calm.train(data) for _ in range(5)]
        wanted = calm.logprobs(calm.sampler(), TEXT)
    with program(tmp_path / "rough") as (process, address):
        client = Client(address).open(seed=3)
        losses = [client.train(data) for _ in range(2)]
        sampler = client.sampler()
        before = client.logprobs(sampler, TEXT)
        drawn = client.wait(client.ask(sampler, TEXT[:5], num_samples=2))
        asked = f"{sampler}/{client.asked}"
        pending = client.send_pass(data).json()["request_id"]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    with program(tmp_path / "rough") as (_, address):
        again = Client(address)
        again.__dict__.update({k: v for k, v in client.__dict__.items() if k != "http"})
        losses.append(again.fetch(pending)["metrics"]["loss:sum"])
        again.wait(again.send("optim_step", adam_params={"learning_rate": 1e-2}))
        losses += [again.train(data) for _ in range(2)]
        assert again.fetch(asked) == drawn
        assert again.logprobs(sampler, TEXT) == pytest.approx(before, abs=1e-6)
        assert again.logprobs(again.sampler(), TEXT) == pytest.approx(wanted, abs=1e-5)
    assert losses == pytest.approx(expected, rel=1e-5)


def test_beyond_this_machine_a_key_is_needed(tmp_path: Path) -> None:
    def refused(*arguments: str) -> str:
        command = [sys.executable, "-c", "from kitae.cli.main import run; run()", "tinker", "tiny", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=120).stderr

    assert "needs a key" in refused("--host", "0.0.0.0")
    assert "begin with 'tml-'" in refused("--api-key", "secret")
    assert "takes settings of model and engine" in refused("training.lr=1")


@pytest.mark.thorough
def test_a_key_is_asked_for(tmp_path: Path) -> None:
    with program(tmp_path, "--api-key", "tml-secret") as (_, address):
        assert Client(address, "tml-other").post("create_session").status_code == 401
        assert Client(address, "tml-secret").open().model
