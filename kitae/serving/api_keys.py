"""Keys of clients, and how much each of them may ask for.

    [team-a]                        # the name, which metrics show
    key = "sk-…"
    in_flight = 8                   # requests at the same time
    requests_per_minute = 120
    tokens_per_minute = 50_000      # of prompts and answers

A limit of 0 is none. Without keys, all clients together are one, which is called "anyone".
"""

import hashlib
import hmac
import math
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, ValidationError

from kitae.errors import ConfigError
from kitae.section import Section
from kitae.serving.refusals import Refused

ANYONE = "anyone"


class KeyLimits(Section):
    """`KeyLimits(in_flight=8)`; 0: as many as one likes."""

    in_flight: int = Field(0, ge=0, description="Requests at the same time.")
    requests_per_minute: int = Field(0, ge=0, description="Requests that begin in a minute.")
    tokens_per_minute: int = Field(0, ge=0, description="Tokens of prompts and answers in a minute.")


NO_LIMITS = KeyLimits()


class _Entry(KeyLimits):
    key: str


@dataclass(frozen=True, slots=True)
class ApiKey:
    """`ApiKey("team-a", "sk-…", KeyLimits(in_flight=8))`."""

    name: str
    key: str
    limits: KeyLimits = NO_LIMITS


class _Bucket:
    """What may be used up in a minute, and comes back evenly. It may be overdrawn, because the length of an answer is
    known at its end; then there is nothing until that has come back."""

    def __init__(self, most: int) -> None:
        self._most, self._left, self._at = most, float(most), time.monotonic()

    def wait(self, wanted: float) -> float:
        """Seconds until so much is there; 0: it is."""
        now = time.monotonic()
        self._left = min(self._most, self._left + (now - self._at) * self._most / 60)
        self._at = now
        return max(0.0, (min(wanted, self._most) - self._left) * 60 / self._most) if self._most else 0.0

    def take(self, count: float) -> None:
        self._left -= count


class Account:
    """What one key uses: `with account.entered(): …` around a request, `account.spend(…)` when tokens are known."""

    def __init__(self, name: str, limits: KeyLimits) -> None:
        self.name, self.limits = name, limits
        self.in_flight = 0
        self.refused = 0
        self._requests, self._tokens = _Bucket(limits.requests_per_minute), _Bucket(limits.tokens_per_minute)

    @contextmanager
    def entered(self) -> Iterator[None]:
        limits = self.limits
        if limits.in_flight and self.in_flight >= limits.in_flight:
            self._refuse(f"{limits.in_flight} requests at the same time", 1)
        if wait := self._requests.wait(1):
            self._refuse(f"{limits.requests_per_minute} requests a minute", wait)
        if wait := self._tokens.wait(1):
            self._refuse(f"{limits.tokens_per_minute} tokens a minute", wait)
        self._requests.take(1)
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def spend(self, tokens: int) -> None:
        """Tokens that were read or sampled."""
        self._tokens.take(tokens)

    def _refuse(self, rule: str, wait: float) -> None:
        self.refused += 1
        seconds = math.ceil(wait)
        who = "all clients together" if self.name == ANYONE else f"the key {self.name!r}"
        message = f"{who} may have {rule}, and has them; try again in {seconds} s"
        raise Refused(message, 429, code="rate_limit_exceeded", seconds=seconds)


class KeyRing:
    """All keys of a server: `KeyRing([ApiKey("team-a", "sk-…")]).account("sk-…")`. None: whoever may not enter."""

    def __init__(self, keys: Sequence[ApiKey], limits: KeyLimits | None = None) -> None:
        """limits: of those who come without a key, where there are none."""
        self._accounts = [(_digest(key.key), Account(key.name, key.limits)) for key in keys]
        self._anyone = None if keys else Account(ANYONE, limits or NO_LIMITS)

    @property
    def open(self) -> bool:
        """Whether nobody needs a key."""
        return self._anyone is not None

    @property
    def accounts(self) -> list[Account]:
        return [*([self._anyone] if self._anyone else []), *(account for _, account in self._accounts)]

    def account(self, given: str) -> Account | None:
        """Each key is compared, and each comparison takes the same time."""
        found, digest = self._anyone, _digest(given)
        for known, account in self._accounts:
            if hmac.compare_digest(known, digest):
                found = account
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def read_keys(file: Path, limits: KeyLimits) -> list[ApiKey]:
    """The keys of a file. limits: those of keys that do not say them."""
    try:
        tables = tomllib.loads(file.read_text())
        made = []
        for name, table in tables.items():
            if not isinstance(table, dict):
                raise ConfigError(f'{file}: {name} must be a table with a key: [{name}], key = "…"')
            entry = _Entry.model_validate(limits.model_dump() | table)
            made.append(ApiKey(name, entry.key, KeyLimits(**entry.model_dump(exclude={"key"}))))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]  # the input may be the key
        where = ".".join(map(str, (name, *problem["loc"])))
        raise ConfigError(f"{file}: {where}: {problem['msg']}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"the file of keys {file} cannot be read: {error}") from None
    if not made:
        raise ConfigError(f"the file of keys {file} must have a key at least, got none")
    return made


def check_keys(keys: Sequence[ApiKey]) -> tuple[ApiKey, ...]:
    """The keys, if each can be sent and told from the others. A refusal does not show them."""
    for number, one in enumerate(keys):
        if not one.key.strip() or not (one.key.isascii() and one.key.isprintable()) or one.key != one.key.strip():
            got = "none" if not one.key.strip() else "other"
            where = f"in {one.name}" if one.name.startswith("$") else repr(one.name)
            raise ConfigError(f"the key {where} must be printable ASCII and not empty, got {got}")
        if one.name == ANYONE or any(one.name == other.name for other in keys[:number]):
            raise ConfigError(f"keys must have names of their own, got {one.name!r} twice")
        if any(one.key == other.key for other in keys[:number]):
            raise ConfigError(f"keys must differ, got one twice: {one.name!r}")
    return tuple(keys)
