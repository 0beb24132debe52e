"""Pictures in chats: as data: URLs, and nothing that names what the server or others have."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from seeing import asked, folder_of, load, picture, source
from served import post, refusal, serving

from kitae.data.chat import Chat
from kitae.data.pictures import SHELF, Shelf, name_of

CHAT = "/v1/chat/completions"


def shown(url: Any, kind: str = "image_url") -> list[dict[str, Any]]:
    given = {"url": url} if kind == "image_url" else url
    return [{"role": "user", "content": [{"type": kind, kind: given}, {"type": "text", "text": "Hm?"}]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of("smolvlm", tmp_path_factory.mktemp("served"))


def test_a_chat_sees_what_it_is_sent(folder: Path) -> None:
    policy = load(folder)

    async def use() -> None:
        async with serving(policy) as (client, _):
            found = await post(
                client, CHAT, model="tiny", messages=shown(source(3)), max_tokens=6, seed=1, return_token_ids=True
            )
            expected = Chat(policy.tokenizer).encode_prompt((asked("Hm?", source(3)),))
            assert tuple(found["prompt_token_ids"]) == expected
            (choice,) = found["choices"]
            row = torch.tensor([*expected, *choice["token_ids"]])
            assert policy.score(row)[len(expected) - 1 :].isfinite().all()
            again = await post(client, CHAT, model="tiny", messages=shown(source(4)), max_tokens=6, seed=1)
            assert again["usage"]["prompt_tokens"] == len(expected)

    asyncio.run(asyncio.wait_for(use(), 60))


def test_places_of_the_server_are_refused(folder: Path, tmp_path: Path) -> None:
    picture(3).save(tmp_path / "own.png")
    kept = name_of(SHELF.put(source(3)))
    places = [str(tmp_path / "own.png"), f"file://{tmp_path}/own.png", "https://example.org/a.png", kept, None]

    async def use() -> None:
        async with serving(load(folder)) as (client, _):
            for place in places:
                for kind in ("image_url", "image"):
                    error = await refusal(client, CHAT, 400, model="tiny", messages=shown(place, kind))
                    assert "data: URL" in error["message"], (place, kind, error)
            error = await refusal(client, CHAT, 400, model="tiny", messages=shown("data:image/png;base64,AAAA"))
            assert "PIL reads" in error["message"]

    asyncio.run(asyncio.wait_for(use(), 60))


def test_a_model_of_text_refuses_pictures(tiny_policy: Any) -> None:
    async def use() -> None:
        async with serving(tiny_policy("llama")) as (client, _):
            error = await refusal(client, CHAT, 400, model="tiny", messages=shown(source(3)))
            assert "no processor of pictures" in error["message"]

    asyncio.run(asyncio.wait_for(use(), 60))


def test_a_server_forgets_the_oldest_pictures() -> None:
    shelf = Shelf()
    shelf.most_bytes = 2 * len(shelf.content(shelf.put(source(0))))
    tokens = [shelf.put(source(seed)) for seed in range(6)]
    assert shelf.content(tokens[-1]) and tokens[0] not in shelf._contents
