"""A template: a process that has loaded everything, from which workers are forked.

    pool ── setup ─────────► template: imports, loads, tries what it has, once
    pool ── "spawn", pipes ► template ── fork ──► worker: answers jobs on its pipe, in milliseconds after the fork
    pool ── "reap", pid ───► template: waits for the worker that the pool has killed, and says how it ended

A worker costs a fork, not a start of the interpreter, so losing one is cheap. A dead worker stays a zombie until it is
reaped: its process id cannot become somebody else's while the pool may still send it a signal. `serve` is the other
end of this conversation.
"""

import asyncio
import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Generic, Literal, TypeVar

from kitae.errors import KitaeError
from kitae.workers.background_tasks import within
from kitae.workers.process_status import describe
from kitae.workers.templates.template_main import MAX_CONTROL
from kitae.workers.templates.worker_handle import TemplateWorker, Words

GreetingT = TypeVar("GreetingT")
_Request = Literal["spawn"] | Mapping[Literal["reap"], int]

_START_LIMIT = 60.0  # seconds for the template to import what it needs
_ANSWER_LIMIT = 60.0  # seconds for the template to fork a worker, or to see one end that was killed
_MAX_REPLY = 2**24  # bytes
_BOOT = "import sys; sys.path[:] = sys.argv[1:]; from {} import main; main()"  # our imports work there
IN_TEMPLATE = "KITAE_TEMPLATE"
"""A variable that templates and their workers have: files of users are executed there."""
_ENVIRONMENT = {
    IN_TEMPLATE: "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}  # a core each; repeatable


class Template(Generic[GreetingT]):
    """A process that has loaded everything, started at the first use, started again should it die.

    `Template("kitae.verifiers.child_main", {"name": "math", "params": {}}, read=Loaded.of, hear=print,
    what="verifier worker", error=VerifierError)`: `main` of the module runs there, and calls `serve`. `setup` goes to
    it, `greeting` is what `read` makes of its answer, and `hear` is called with what it and its workers print, piece by
    piece. Failures are of the type `error` and name the workers as `what`. start_limit: seconds for it to load what it
    needs. environment: variables that it has beside ours.
    """

    def __init__(
        self,
        module: str,
        setup: Mapping[str, Any],
        *,
        read: Callable[[Mapping[str, Any]], GreetingT],
        hear: Callable[[bytes], None],
        what: str,
        error: type[KitaeError],
        start_limit: float = _START_LIMIT,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._module, self._setup = module, setup
        self._read, self._hear = read, hear
        self._what, self._error = what, error
        self._start_limit, self._environment = start_limit, environment or {}
        self._greeting: GreetingT | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._control: socket.socket | None = None
        self._words: Words | None = None
        self._lock = asyncio.Lock()
        self._number = 0  # of its processes so far: a worker is reaped by the one that forked it

    @property
    def greeting(self) -> GreetingT:
        """What it said when it was started last."""
        assert self._greeting is not None
        return self._greeting

    async def start(self) -> None:
        """Launch the process, unless it runs, and have it load what it needs; an error if that fails."""
        async with self._lock:
            if self._process is None or self._process.returncode is not None:
                try:
                    await self._start()
                except BaseException:  # also called off: half a start is none
                    await self._stop()
                    raise

    async def spawn(self) -> TemplateWorker:
        """A new worker, after a new start should the template be gone; an error if that does not help."""
        try:
            try:
                await self.start()
                return await self._fork()
            except EOFError:
                await self.start()
                return await self._fork()
        except (OSError, EOFError) as error:
            reason = str(error) or "its template ended"
            raise self._error(f"a {self._what} could not be forked: {reason}") from None

    async def _fork(self) -> TemplateWorker:
        jobs, theirs = socket.socketpair()
        read, write = os.pipe()
        try:
            answer = await self._ask("spawn", theirs.fileno(), write)
            pid, number = int(answer["pid"]), int(answer["number"])
        except BaseException:
            jobs.close()  # a worker that was forked all the same ends with it
            os.close(read)
            raise
        finally:
            theirs.close()
            os.close(write)
        jobs.setblocking(False)
        words: Words | None = None
        try:
            words = await Words.of(read, self._hear)
            reader, writer = await asyncio.open_connection(sock=jobs, limit=_MAX_REPLY)
        except BaseException:  # whoever wanted it is gone
            jobs.close()
            if words is not None:
                await words.close()
            raise
        return TemplateWorker(pid, partial(self.reap, number=number), reader, writer, words)

    async def reap(self, pid: int, number: int) -> int | None:
        """How a worker that is dead or dying ended, as `waitpid` says it; None if the template that forked it is gone
        too. number: of that template."""
        try:
            return int((await self._ask({"reap": pid}, number=number))["status"])
        except EOFError:
            return None

    async def close(self) -> None:
        async with self._lock:
            await self._stop()

    async def _start(self) -> None:
        await self._stop()
        setup = json.dumps(self._setup).encode()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        read, write = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", _BOOT.format(self._module), *sys.path),
                stdin=theirs.fileno(),
                stdout=write,
                stderr=write,
                start_new_session=True,  # deaf to Ctrl-C
                env={**os.environ, **_ENVIRONMENT, **self._environment},
            )
        except BaseException as error:
            ours.close()
            os.close(read)
            if isinstance(error, OSError):
                raise self._error(f"a {self._what} could not start: {error}") from None
            raise
        finally:
            theirs.close()
            os.close(write)
        self._control = ours
        self._number += 1
        self._words = await Words.of(read, self._hear)
        try:
            ours.send(setup)
            ready = await within(self._start_limit, asyncio.create_task(self._receive()))
            problem = ready.get("error")
        except TimeoutError:
            problem = f"a {self._what} must start within {self._start_limit:g} s{self._words.last()}"
        except (EOFError, OSError):
            await self._words.rest()
            status = await self._process.wait()
            ended = describe(-status if status < 0 else status << 8)
            problem = f"a {self._what} could not start: {ended}{self._words.last()}"
        if problem:
            raise self._error(problem)
        self._greeting = self._read(ready)

    async def _ask(self, request: _Request, *descriptors: int, number: int | None = None) -> dict[str, Any]:
        """A question and its answer belong together, even if whoever asked is cancelled meanwhile. number: the process
        that it is for; another one is not asked. The answer has the number of the one that gave it."""
        copies = [os.dup(d) for d in descriptors]
        return await asyncio.shield(asyncio.create_task(self._exchange(request, copies, number)))

    async def _exchange(self, request: _Request, descriptors: list[int], number: int | None) -> dict[str, Any]:
        try:
            async with self._lock:
                if self._control is None or number not in (None, self._number):
                    raise EOFError
                try:
                    socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
                    reply: dict[str, Any] = await within(_ANSWER_LIMIT, asyncio.create_task(self._receive()))
                    return {**reply, "number": self._number}
                except (TimeoutError, OSError, EOFError):  # it hangs, or is gone
                    await self._stop()
                    raise EOFError from None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    async def _receive(self) -> dict[str, Any]:
        assert self._control is not None
        message = await asyncio.get_running_loop().sock_recv(self._control, MAX_CONTROL)
        if not message:
            raise EOFError
        reply: dict[str, Any] = json.loads(message)
        return reply

    async def _stop(self) -> None:
        """Kill it; workers that are left die with it."""
        process, control, words = self._process, self._control, self._words
        self._process = self._control = self._words = None
        if control is not None:
            control.close()
        if process is not None:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
            await process.wait()
        if words is not None:
            await words.close()
