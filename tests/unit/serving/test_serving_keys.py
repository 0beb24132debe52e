"""Keys, what each of them may ask for, and what the metrics tell of them."""

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from served import serving

from kitae.errors import ConfigError
from kitae.models.policy import Policy
from kitae.serving import api_keys
from kitae.serving.api_keys import Account, ApiKey, KeyLimits, KeyRing, check_keys, read_keys
from kitae.serving.refusals import Refused

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "ignore_eos": True}


def test_every_key_is_compared_in_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = KeyRing([ApiKey("a", "secret-a"), ApiKey("b", "secret-b"), ApiKey("c", "secret-c")])
    compared: list[bool] = []
    whole = api_keys.hmac.compare_digest

    def compare(known: bytes, given: bytes) -> bool:
        assert len(known) == len(given)
        compared.append(whole(known, given))
        return compared[-1]

    monkeypatch.setattr(api_keys.hmac, "compare_digest", compare)
    for given, name in (("secret-b", "b"), ("secret-", None), ("", None), ("secret-b ", None), ("\udcff€", None)):
        compared.clear()
        found = ring.account(given)
        assert (found and found.name) == name and len(compared) == 3


def test_a_file_of_keys(tmp_path: Path) -> None:
    file, usual = tmp_path / "keys.toml", KeyLimits(in_flight=2, requests_per_minute=9)
    file.write_text('[a]\nkey = "k-a"\n[b]\nkey = "k-b"\nin_flight = 7\ntokens_per_minute = 1_000\n')
    a, b = read_keys(file, usual)
    assert (a.name, a.key, a.limits) == ("a", "k-a", usual)
    assert b.limits == KeyLimits(in_flight=7, requests_per_minute=9, tokens_per_minute=1000)
    for text, complaint in (
        ("", "must have a key at least"),
        ("a = 1", "a must be a table with a key"),
        ("[a]", r"a\.key: Field required"),
        ('[a]\nkey = "k-secret"\nin_flight = -1', r"a\.in_flight: Input should be greater than or equal to 0"),
        ('[a]\nkey = "k-secret"\nlimit = 1', r"a\.limit: Extra inputs are not permitted"),
        ('[a]\nkey = ["k-secret"]', r"a\.key"),
        ('[a]\nkey = "k-secret', "cannot be read"),
        ('["k-secret"', "cannot be read"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=complaint) as caught:
            read_keys(file, usual)
        assert "k-secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path / "none", usual)


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ([("a", "")], "'a' must be printable ASCII and not empty, got none"),
        ([("$NAME", " ")], "the key in \\$NAME must be"),
        ([("a", "schlüssel")], "got other"),
        ([("a", "x\ny")], "got other"),
        ([("a", "one"), ("a", "two")], "names of their own"),
        ([("anyone", "one")], "names of their own"),
        ([("a", "one"), ("b", "one")], "must differ"),
    ],
)
def test_keys_can_be_sent_and_told_apart(keys: list[tuple[str, str]], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        check_keys([ApiKey(*key) for key in keys])
    assert "'one'" not in str(caught.value) and "two" not in str(caught.value)


def test_what_is_used_up_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    account = Account("a", KeyLimits(requests_per_minute=6, tokens_per_minute=600, in_flight=3))

    def enter() -> Any:
        return account.entered()

    for _ in range(6):
        with enter():
            assert account.in_flight == 1
    with pytest.raises(
        Refused, match="the key 'a' may have 6 requests a minute, and has them; try again in 10 s"
    ) as no:
        enter().__enter__()
    assert no.value.status == 429 and no.value.seconds == 10
    now[0] += 10
    with enter():
        account.spend(1200)  # an answer may be longer than what is left
    now[0] += 59
    with pytest.raises(Refused, match="600 tokens a minute"):
        enter().__enter__()
    now[0] += 2
    held = [enter() for _ in range(3)]
    for one in held:
        one.__enter__()
    with pytest.raises(Refused, match="3 requests at the same time"):
        enter().__enter__()
    held[0].__exit__(None, None, None)
    with enter():
        pass
    now[0] += 3600
    with enter():
        assert account.refused == 3


def test_limits_and_metrics_of_each_key(tiny_policy: Callable[..., Policy]) -> None:
    keys = (
        ApiKey("team-a", "secret-a", KeyLimits(in_flight=1)),
        ApiKey("team-b", "secret-b", KeyLimits(requests_per_minute=3)),
        ApiKey("team-c", "secret-c", KeyLimits(tokens_per_minute=3)),
    )

    async def run() -> None:
        async with serving(tiny_policy(), keys=keys, host="0.0.0.0") as (client, engine):

            def post(key: str, **more: Any) -> Any:
                return client.post(CHAT, json={**HELLO, **more}, headers={"authorization": f"Bearer secret-{key}"})

            await engine.pause()
            waiting = asyncio.create_task(post("a"))
            while engine.stats().waiting < 1:
                await asyncio.sleep(0.01)
            refused = await post("a")
            assert refused.status_code == 429 and "'team-a' may have 1 requests at the same time" in refused.text
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "rate_limit_exceeded"
            await engine.resume()
            assert (await waiting).status_code == 200
            assert (await post("a", stream=True)).status_code == 200
            assert [(await post("b")).status_code for _ in range(4)] == [200, 200, 200, 429]
            assert [(await post("c")).status_code for _ in range(2)] == [200, 429]
            assert (await post("d")).status_code == 401
            assert (await client.get("/health")).status_code == 200
            page = (await client.get("/metrics", headers={"authorization": "Bearer secret-a"})).text
            assert "secret" not in page
            for line in (
                'kitae_key_requests_total{key="team-a",status="200"} 2',
                'kitae_key_refused_total{key="team-a"} 1',
                'kitae_key_refused_total{key="team-b"} 1',
                'kitae_key_refused_total{key="team-c"} 1',
                'kitae_key_in_flight{key="team-a"} 0',
                'kitae_answer_tokens_bucket{key="team-b",le="4"} 0',
                'kitae_answer_tokens_bucket{key="team-b",le="16"} 3',
                'kitae_answer_tokens_sum{key="team-b"} 15.0',
                'kitae_answer_tokens_count{key="team-c"} 1',
                "# TYPE kitae_time_to_first_token_seconds histogram",
                'kitae_time_to_first_token_seconds_count{key="team-a"} 2',
                'kitae_time_per_token_seconds_count{key="team-b"} 3',
                'kitae_queue_seconds_bucket{key="team-b",le="+Inf"} 3',
                'kitae_answer_seconds_count{key="team-a"} 2',
                'kitae_prompt_tokens_count{key="team-a"} 2',
            ):
                assert f"{line}\n" in page, line
            check_prometheus(page)

    asyncio.run(asyncio.wait_for(run(), 60))


def check_prometheus(page: str) -> None:
    """Each family once, in one piece, with its type first; buckets grow, and the last is the count."""
    seen: list[str] = []
    buckets: dict[str, float] = {}
    for line in page.splitlines():
        if named := re.fullmatch(r"# TYPE (\w+) (counter|gauge|histogram)", line):
            assert named[1] not in seen
            seen.append(named[1])
            continue
        found = re.fullmatch(r'(\w+)(\{(?:\w+="[^"]*",?)*\})? (\S+)', line)
        assert found and re.sub("_(bucket|sum|count)$", "", found[1]) in (seen[-1], found[1]), line
        value = float(found[3])
        if found[1].endswith("_bucket"):
            series = re.sub(r'le="[^"]*"', "", line.rpartition(" ")[0])
            assert value >= buckets.get(series, 0.0)
            buckets[series] = value
        elif found[1].endswith("_count") and found[1].removesuffix("_count") == seen[-1]:
            assert value == buckets[line.rpartition(" ")[0].replace("_count{", "_bucket{").replace("}", ",}")]
