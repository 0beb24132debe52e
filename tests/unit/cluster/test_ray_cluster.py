"""What only a Ray cluster does: find places, refuse what cannot be, lose nodes, let nobody in without a secret."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from test_posts import alive, duty, gone, greeting, opened

from kitae.cluster.base import PostError
from kitae.cluster.config import ClusterConfig
from kitae.cluster.ray.keeper import environment_of
from kitae.cluster.ray.nodes import NODE_LABEL
from kitae.cluster.start import open_cluster
from kitae.errors import ConfigError


def ray_config(nodes: Any, engines: int = 1, patience: float = 30.0, **pool: Any) -> ClusterConfig:
    settings = {"backend": "ray", "address": nodes.address, "engines": engines, "patience": patience}
    return ClusterConfig.model_validate({**settings, "pools": {"engines": pool}})


def test_without_ray() -> None:
    """All else must work, and the one thing that does not says how to help it."""
    program = (
        "import asyncio, sys; sys.modules['ray'] = None; import kitae.pipeline.session, kitae.cli.main\n"
        "from kitae.cluster.start import open_cluster; from kitae.cluster.config import ClusterConfig\n"
        "asyncio.run(open_cluster(ClusterConfig(backend='ray')))"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert "ConfigError: cluster.backend = 'ray' needs the package ray: pip install 'kitae[cluster]'" in ended.stderr


def test_gpus_are_not_hidden_from_a_process_that_was_assigned_none() -> None:
    assert environment_of({"CUDA_VISIBLE_DEVICES": "", "RAY_JOB_ID": "1", "HOME": "/"}, []) == {"HOME": "/"}
    for shown in ({"CUDA_VISIBLE_DEVICES": "2,3"}, {}):
        assert environment_of(shown, []) == shown
    assert environment_of({"CUDA_VISIBLE_DEVICES": "1"}, [1]) == {"CUDA_VISIBLE_DEVICES": "1"}


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1:1", "no Ray cluster answers at '127.0.0.1:1'"),
        ("somewhere", "must be auto or HOST:PORT, got 'somewhere'"),
        ("ray://a:1", "must be auto or HOST:PORT of a cluster that this machine is a node of, got 'ray://a:1'"),
    ],
)
def test_an_address_where_nobody_is(address: str, why: str) -> None:
    if find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install 'kitae[cluster]'")
    with pytest.raises(ConfigError, match=why):
        asyncio.run(open_cluster(ClusterConfig(backend="ray", address=address)))


@pytest.mark.parametrize(
    ("engines", "pool", "why"),
    [
        (1, {"cpus": 500}, "no machine has 500 CPUs"),
        (1, {"gpus": 1}, "no machine has 1 CPUs, 1 GPUs"),
        (1, {"labels": {"accelerator": "b200"}}, "no machine has the labels accelerator=b200"),
        (4, {"place": "strict-spread", "cpus": 0.1}, "asks for 4 machines, 3 of 3"),
    ],
)
def test_what_cannot_be_met_is_refused_in_time(nodes: Any, engines: int, pool: dict[str, Any], why: str) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError, match="the cluster cannot give what is asked for") as caught:
        asyncio.run(open_cluster(ray_config(nodes, engines, 2.0, **pool), {"engines": engines}))
    assert time.monotonic() - began < 12
    assert why in str(caught.value) and f"labels {NODE_LABEL}=2" in str(caught.value)


def test_what_is_taken_already_is_refused_too(nodes: Any) -> None:
    """By those who ask for their places first, and for one more process than was foreseen."""
    cores = len(os.sched_getaffinity(0))

    async def body() -> None:
        async with opened(ray_config(nodes, 3, 8.0, cpus=cores)) as cluster:
            with pytest.raises(PostError, match=r"too little of it is free, within 8 s(.|\n)*\(free: 0 CPUs"):
                await asyncio.gather(*(cluster.start(duty()) for _ in range(4)))

    asyncio.run(body())


def test_labels_and_spreading(nodes: Any) -> None:
    async def spread() -> set[str]:
        async with opened(ray_config(nodes, 3, place="strict-spread")) as cluster:
            return {post.where for post in await asyncio.gather(*(cluster.start(duty()) for _ in range(3)))}

    async def labelled() -> list[str]:
        async with opened(ray_config(nodes, 2, cpus=0.5, labels={NODE_LABEL: "1"})) as cluster:
            return [post.where for post in [await cluster.start(duty()) for _ in range(2)]]

    assert len(asyncio.run(spread())) == 3
    assert len(set(asyncio.run(labelled()))) == 1


def test_one_more_than_was_foreseen(nodes: Any) -> None:
    """It finds a place of its own, which is given back with it."""

    async def body() -> None:
        async with opened(ray_config(nodes, 1, cpus=1)) as cluster:
            posts = [await cluster.start(duty()) for _ in range(3)]
            free = sum(machine.free.cpus for machine in cluster.machines())
            for post in posts[1:]:
                post.kill()
                await post.wait()
            async with asyncio.timeout(10):
                while sum(machine.free.cpus for machine in cluster.machines()) < free + 2:
                    await asyncio.sleep(0.2)

    asyncio.run(body())


def test_nobody_comes_in_without_the_secret(nodes: Any) -> None:
    async def knock(host: str, port: int, said: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(said)
        if len(said) < 64:
            writer.write_eof()
        try:
            return await asyncio.wait_for(reader.read(), 10)
        except ConnectionResetError:
            return b"reset"
        finally:
            writer.close()

    async def body() -> None:
        async with opened(ray_config(nodes)) as cluster:
            post = await cluster.start(duty())
            host, port = cluster.doorway.address
            async with cluster.doorway.expect() as (where, arrival):
                for said in (b"x" * 64, b"", where["secret"][:63].encode() + b"x", where["secret"][:10].encode()):
                    assert await knock(host, port, said) in (b"", b"reset")
                assert cluster.doorway.refused == 4 and not arrival.done()
            assert await knock(host, port, where["secret"].encode()) in (b"", b"reset")  # too late
            assert cluster.doorway.refused == 5 and not arrival.done()
            assert (await greeting(post))["ready"]

    asyncio.run(body())


def test_the_secret_lets_one_in() -> None:
    from kitae.cluster.doorway import Doorway

    async def body() -> None:
        doorway = Doorway()
        await doorway.open("127.0.0.1")
        async with doorway.expect() as (where, arrival):
            with socket.create_connection((where["host"], where["port"])) as first:
                first.sendall(where["secret"].encode() + b"hello")
                reader, writer = await arrival
                assert await reader.read(5) == b"hello"
            with socket.create_connection((where["host"], where["port"])) as second:
                second.sendall(where["secret"].encode())
                async with asyncio.timeout(10):
                    while not doorway.refused:
                        await asyncio.sleep(0.01)
        writer.close()
        doorway.close()

    asyncio.run(body())


def test_a_keeper_that_dies_takes_its_process_along(nodes: Any) -> None:
    async def body() -> None:
        async with opened(ray_config(nodes)) as cluster:
            post = await cluster.start(duty(linger=True))
            keeper = int(Path(f"/proc/{post.pid}/stat").read_text().rpartition(")")[2].split()[1])
            os.kill(keeper, 9)
            assert "its keeper on node 127.0.0.2" in await asyncio.wait_for(post.wait(), 30)
            await gone(post.pid)
            again = await cluster.start(duty())
            assert (await greeting(again))["ready"]

    asyncio.run(body())


def test_a_node_that_is_removed(nodes: Any) -> None:
    """It is noticed within seconds, and what was there finds a place on another node."""
    added = nodes.add(9, num_cpus=64)

    async def body() -> None:
        async with opened(ray_config(nodes, 2, cpus=20, place="strict-pack")) as cluster:
            post = await cluster.start(duty(linger=True))
            nodes.add(10, num_cpus=64)
            began = time.monotonic()
            nodes.remove(added)
            assert await asyncio.wait_for(post.wait(), 30) == f"its {post.where} is gone or out of reach"
            noticed = time.monotonic() - began
            await gone(post.pid)
            again = await cluster.start(duty())
            assert (await greeting(again))["ready"] and again.where != post.where
            print(f"noticed after {noticed:.1f} s, elsewhere after {time.monotonic() - began:.1f} s")

    try:
        asyncio.run(body())
    finally:
        for node in list(nodes.nodes.worker_nodes)[2:]:
            nodes.remove(node)


def test_a_controller_that_is_killed_leaves_nothing(nodes: Any) -> None:
    program = (
        "import asyncio, sys; sys.path.insert(0, sys.argv[2]); from test_posts import *\n"
        "async def body():\n"
        "    async with opened(ClusterConfig(backend='ray', engines=1, address=sys.argv[1])) as cluster:\n"
        "        print((await cluster.start(duty(linger=True))).pid, flush=True); await asyncio.sleep(600)\n"
        "asyncio.run(body())"
    )
    here = str(Path(__file__).parent)
    with subprocess.Popen([sys.executable, "-c", program, nodes.address, here], stdout=subprocess.PIPE) as controller:
        assert controller.stdout is not None
        pid = next(int(line) for line in controller.stdout if line.strip().isdigit())  # Ray speaks there too
        assert alive(pid)
        controller.kill()
    asyncio.run(gone(pid))
