"""What Tinker's client puts on the wire, in a few lines: requests as it sends them, and futures as it fetches them."""

from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np

from kitae.tinker import protobuf

KEY = "tml-test"
PROTO = "application/x-protobuf"


def tensor(values: Sequence[float], dtype: type = np.float32) -> bytes:
    numbers: np.ndarray[Any, Any] = np.array(values, dtype)
    return protobuf.write([(1, numbers.tobytes()), (3, 1 if dtype is np.float32 else 2), (4, len(values))])


def datum(tokens: Sequence[int], **inputs: Sequence[float]) -> bytes:
    text = protobuf.write([(1, protobuf.write([(1, np.array(tokens[:-1], np.int32).tobytes())]))])
    targets = protobuf.write([(1, "target_tokens"), (2, tensor(tokens[1:], np.int64))])
    others = (protobuf.write([(1, name), (2, tensor(values))]) for name, values in inputs.items())
    return protobuf.write([(1, text), (2, targets), *((2, other) for other in others)])


class Http:
    """A connection for each request, which is closed after it."""

    def __init__(self, base: str, key: str) -> None:
        self._base, self._headers = base, {"X-API-Key": key}

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        headers = self._headers | more.pop("headers", {})
        return httpx.request(method, self._base + path, headers=headers, timeout=60, **more)


class Client:
    """A session with one model, asked synchronously."""

    def __init__(self, address: str, key: str = KEY) -> None:
        self.http = Http(f"{address}/api/v1", key)
        self.session, self.model, self.number, self.samplers, self.asked = "", "", 0, 0, 0

    def post(self, path: str, /, **body: Any) -> httpx.Response:
        return self.http.request("POST", f"/{path}", json=body)

    def open(self, rank: int = 4, seed: int = 1, **config: Any) -> "Client":
        made = self.post("create_session", tags=[], user_metadata={}, sdk_version="0.38.0", type="create_session")
        self.session = made.json()["session_id"]
        lora = {"rank": rank, "seed": seed, "train_mlp": True, "train_attn": True, "train_unembed": True, **config}
        base = {"session_id": self.session, "model_seq_id": 0, "base_model": "tiny", "lora_config": lora}
        self.model = self.wait(self.post("create_model", **base))["model_id"]
        return self

    def wait(self, posted: httpx.Response) -> Any:
        assert posted.status_code == 200, posted.text
        return self.fetch(posted.json()["request_id"])

    def fetch(self, request: str, accept: str = "application/json") -> Any:
        while True:
            found = self.http.request(
                "POST", "/retrieve_future", json={"request_id": request}, headers={"Accept": accept}
            )
            if found.status_code != 408:
                break
        assert found.status_code == 200, found.text
        return found.content if found.headers["content-type"] == PROTO else found.json()

    def send(self, path: str, /, **body: Any) -> httpx.Response:
        """The next request of the model."""
        self.number += 1
        return self.post(path, model_id=self.model, seq_id=self.number, **body)

    def send_pass(self, data: Sequence[bytes], loss: str = "cross_entropy", *, forward: bool = False) -> httpx.Response:
        self.number += 1
        fields: list[tuple[int, protobuf.Value | str]] = [(1, self.model), (2, self.number), (4, loss)]
        body = protobuf.write([*fields, *((3, d) for d in data), (6, int(forward))])
        return self.http.request("POST", "/forward_backward", content=body, headers={"Content-Type": PROTO})

    def train(self, data: Sequence[bytes], rate: float = 1e-2) -> float:
        """The loss before the update."""
        passed = self.send_pass(data)
        updated = self.send("optim_step", adam_params={"learning_rate": rate})
        loss: float = self.wait(passed)["metrics"]["loss:sum"]
        self.wait(updated)
        return loss

    def sampler(self) -> str:
        self.samplers += 1
        found = self.wait(self.send("save_weights_for_sampler", sampling_session_seq_id=self.samplers))
        return str(found["sampling_session_id"])

    def ask(self, sampler: str, prompt: Sequence[int], **more: Any) -> httpx.Response:
        self.asked += 1
        params = {"max_tokens": 4, **more.pop("params", {})}
        chunks = {"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]}
        return self.post(
            "asample", sampling_session_id=sampler, seq_id=self.asked, prompt=chunks, sampling_params=params, **more
        )

    def logprobs(self, sampler: str, prompt: Sequence[int]) -> list[float]:
        return list(self.wait(self.ask(sampler, prompt, prompt_logprobs=True))["prompt_logprobs"][1:])
