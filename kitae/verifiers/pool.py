"""A pool of worker processes that score responses, each of which can be killed without harm to the others.

    score() ─► take an idle worker ─► send the job, wait for the reply ─► give the worker back
                                        │ deadline passed, or worker dead
                                        └─► kill its process group; a fresh process starts in the background

A worker has one job at a time, so a lost worker costs one check, and its score says so: what a timeout means is the
verifier's `on_timeout`; everything else that goes wrong is an error, never a 0.

Built-in verifiers that only wait for a server (`async def`) need no worker: they run in the event loop, many at a time.
"""

import asyncio
import inspect
import itertools
import json
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

from kitae.errors import VerifierError
from kitae.types import Prompt, Score
from kitae.verifiers.base import TimeoutMeaning
from kitae.verifiers.registry import VERIFIERS, check_params
from kitae.verifiers.worker import as_score

_START_LIMIT = 60.0  # seconds for a worker to import what it needs
_TICKS = 10  # slices of a deadline
_MAX_REPLY = 2**24  # bytes
_STDERR_TAIL = 2_000  # bytes of a worker's stderr that are remembered
_BOOT = "import sys; sys.path[:] = sys.argv[1:]; from kitae.verifiers.worker import main; main()"  # our imports work
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}  # a core each; repeatable
_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(slots=True)
class PoolStats:
    """Counters since the start: checks that ended, and how many of them had no score or ran out of time."""

    checked: int = 0
    errors: int = 0
    timeouts: int = 0
    restarts: int = 0


class VerifierPool:
    """`async with VerifierPool("math", workers=4) as pool: score = await pool.score(response, reference)`.

    `score` may be called from any number of tasks; they wait for an idle worker in turn, and the deadline of a check
    begins when it has one. Cancelling a call kills its worker. `close` kills all of them: checks that were running or
    waiting end as errors. References and contexts travel as JSON.
    """

    def __init__(
        self, name: str, params: Mapping[str, Any] = _NOTHING, workers: int = 2, timeout: float = 10.0
    ) -> None:
        self.timeout = timeout
        self.stats = PoolStats()
        self._params = dict(params)
        found = VERIFIERS.get(name)
        self._waiting = found if found is not None and inspect.iscoroutinefunction(found.score) else None
        count = 0 if self._waiting else workers
        self._workers = [_Worker({"name": name, "params": self._params}) for _ in range(count)]
        self._job_ids = itertools.count(1)
        self._idle: asyncio.Queue[_Worker] = asyncio.Queue()
        self._starting = asyncio.Semaphore(os.cpu_count() or 1)
        self._restarts: set[asyncio.Task[None]] = set()
        self._running = False

    async def start(self) -> None:
        """Start all workers; raise `VerifierError` if the verifier cannot be loaded or refuses its params."""
        if self._waiting:
            check_params(self._waiting, self._params)
        try:
            for result in await asyncio.gather(*map(self._start, self._workers), return_exceptions=True):
                if result is not None:
                    raise result
        except BaseException:
            await self.close()
            raise
        self._running = True
        self._idle = asyncio.Queue()
        for worker in self._workers:
            self._idle.put_nowait(worker)

    async def score(self, response: str, reference: Any, context: Mapping[str, Any] = _NOTHING) -> Score:
        if not self._running:
            raise VerifierError("a verifier pool scores between start() and close(), got a call outside")
        check = self._wait_for if self._waiting else self._check
        score = await check(response, reference, context)
        self.stats.checked += 1
        self.stats.errors += not score.valid
        return score

    async def close(self) -> None:
        self._running = False
        for restart in self._restarts:
            restart.cancel()
        await asyncio.gather(*self._restarts, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in self._workers))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _wait_for(self, response: str, reference: Any, context: Mapping[str, Any]) -> Score:
        """A check that waits for a server. A deadline says nothing about the response: it is an error."""
        assert self._waiting is not None
        waiting: Any = self._waiting.score(response, reference, context, **self._params)
        try:
            async with asyncio.timeout(self.timeout):
                return as_score(await waiting)
        except TimeoutError:
            self.stats.timeouts += 1
            return Score.error(f"timed out after {self.timeout:g} s")
        except Exception as error:
            return Score.error(f"{type(error).__name__}: {error}")

    async def _check(self, response: str, reference: Any, context: Mapping[str, Any]) -> Score:
        job_id = next(self._job_ids)
        try:
            job = _encode(job_id, {"response": response, "reference": reference, "context": dict(context)})
        except (TypeError, ValueError, RecursionError) as error:
            return Score.error(f"reference and context must be JSON values: {error}")
        worker = await self._idle.get()
        healthy = False
        try:
            reply = await worker.ask(job_id, job, self.timeout)
            healthy = True
            return Score(**reply)
        except TimeoutError:
            self.stats.timeouts += 1
            reason = f"timed out after {self.timeout:g} s"
            return Score(0.0, detail=reason) if worker.on_timeout == "wrong" else Score.error(reason)
        except _WorkerDied as death:
            return Score.error(f"verifier worker died: {death}")
        finally:
            if healthy or not self._running:  # of a closed pool, so that those who still wait get their error
                self._idle.put_nowait(worker)
            else:
                restart = asyncio.create_task(self._restart(worker))
                self._restarts.add(restart)
                restart.add_done_callback(self._restarts.discard)

    async def _restart(self, worker: "_Worker") -> None:
        """A worker that does not come back answers its next job with the reason, and is then tried again."""
        self.stats.restarts += 1
        try:
            await worker.stop()
            with suppress(VerifierError):
                await self._start(worker)
        finally:
            self._idle.put_nowait(worker)

    async def _start(self, worker: "_Worker") -> None:
        async with self._starting:  # many at once would starve each other past the limit
            await worker.start()


async def validate(pool: VerifierPool, prompts: Iterable[Prompt]) -> list[tuple[Prompt, Score]]:
    """Score each gold reference as if it were the response; return those that do not get 1, which are bad data."""

    async def check(prompt: Prompt) -> tuple[Prompt, Score]:
        return prompt, await pool.score(str(prompt.reference), prompt.reference, prompt.context)

    results = await asyncio.gather(*map(check, prompts))
    return [(prompt, score) for prompt, score in results if score.value != 1]


class _WorkerDied(Exception):
    """The process is gone or useless; the message says why."""


class _Worker:
    """One place in the pool, and the process that fills it at the moment."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self.on_timeout: TimeoutMeaning = "error"
        self._setup = setup
        self._process: _Process | None = None
        self._absence = "it was never started"

    async def start(self) -> None:
        """Launch a process and wait until its verifier is loaded."""
        try:
            async with asyncio.timeout(_START_LIMIT):
                self._process = await _Process.launch()
                ready = await self._process.exchange(0, _encode(0, self._setup))
            problem = ready.get("error")
        except TimeoutError:
            words = self._process.last_words() if self._process else ""
            problem = f"a verifier worker must start within {_START_LIMIT:g} s{words}"
        except EOFError:
            assert self._process is not None
            problem = f"a verifier worker could not start: {await self._process.post_mortem()}"
        except (OSError, _WorkerDied) as error:
            problem = f"a verifier worker could not start: {error}"
        if problem:
            await self.stop(problem)
            raise VerifierError(problem)
        self.on_timeout = ready["on_timeout"]

    async def ask(self, job_id: int, job: bytes, timeout: float) -> dict[str, Any]:
        """The reply to a job; `TimeoutError` or `_WorkerDied` mean that the worker must be restarted.

        The deadline is counted in slices, so that an event loop that was blocked (by a training step, say) is late for
        one slice of it and does not take its own delay for the worker's.
        """
        if self._process is None:
            raise _WorkerDied(self._absence)
        exchange = asyncio.create_task(self._process.exchange(job_id, job))
        try:
            for _ in range(_TICKS):
                await asyncio.wait({exchange}, timeout=timeout / _TICKS)
                if exchange.done():
                    return exchange.result()
            raise TimeoutError
        except EOFError:
            raise _WorkerDied(await self._process.post_mortem() if self._process else self._absence) from None
        finally:
            exchange.cancel()

    async def stop(self, reason: str = "it was stopped") -> None:
        process, self._process, self._absence = self._process, None, reason
        if process is not None:
            try:
                await process.kill()
            except asyncio.CancelledError:
                self._process = process  # it is not gone yet: the next stop waits for it
                raise


class _Process:
    """A running `kitae.verifiers.worker`."""

    @classmethod
    async def launch(cls) -> Self:
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.subprocess_exec(
            lambda: asyncio.subprocess.SubprocessStreamProtocol(limit=_MAX_REPLY, loop=loop),
            *(sys.executable, "-c", _BOOT, *sys.path),
            start_new_session=True,  # its own process group: killed whole, and deaf to Ctrl-C
            env=os.environ | _ENVIRONMENT,
        )
        return cls(transport, asyncio.subprocess.Process(transport, protocol, loop))

    def __init__(self, transport: asyncio.SubprocessTransport, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self._transport, self._process = transport, process
        self._requests, self._replies = process.stdin, process.stdout
        self._stderr = b""
        self._stderr_reader = asyncio.create_task(self._read_stderr(process.stderr))

    async def exchange(self, message_id: int, message: bytes) -> dict[str, Any]:
        """Send one message and wait for its answer; `EOFError` where the process has ended."""
        try:
            self._requests.write(message)
            await self._requests.drain()
            line = await self._replies.readline()
            if not line.endswith(b"\n"):
                raise EOFError
            reply: dict[str, Any] = json.loads(line)
        except ConnectionError:
            raise EOFError from None
        except ValueError:  # not JSON, or longer than the limit
            reply = {}
        if reply.pop("id", None) != message_id:  # or a fork of it answers too
            raise _WorkerDied(f"it broke the protocol{self.last_words()}")
        return reply

    async def post_mortem(self) -> str:
        with suppress(TimeoutError):
            async with asyncio.timeout(1):  # a child of it that escaped may hold its stderr open
                await asyncio.wait({self._stderr_reader})
                await self._process.wait()
        match self._process.returncode:
            case None:
                cause = "it closed its pipe"
            case code if code < 0:
                cause = f"killed by signal {-code} ({signal.strsignal(-code)})"
            case code:
                cause = f"exit status {code}"
        return cause + self.last_words()

    def last_words(self) -> str:
        words = self._stderr.decode(errors="replace").strip()
        return f"; its stderr ends with:\n{words}" if words else ""

    async def kill(self) -> None:
        """End the process and the children it started, and let go of the pipes that any others may hold."""
        if self._process.returncode is None:  # afterwards its id may be somebody else's
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        if not self._requests.is_closing():
            self._requests.transport.abort()
        for fd in (1, 2):
            pipe = self._transport.get_pipe_transport(fd)
            if pipe is not None and not pipe.is_closing():
                pipe.close()
        await self._process.wait()
        self._stderr_reader.cancel()

    async def _read_stderr(self, stderr: asyncio.StreamReader) -> None:
        while chunk := await stderr.read(2**16):
            self._stderr = (self._stderr + chunk)[-_STDERR_TAIL:]


def _encode(message_id: int, message: Mapping[str, Any]) -> bytes:
    return json.dumps({"id": message_id, **message}).encode() + b"\n"
