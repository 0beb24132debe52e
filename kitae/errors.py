"""Every exception that Kitae raises on purpose.

    KitaeError
    ├── ConfigError          a setting is unknown, malformed or contradicts another one
    ├── ModelError           a model cannot be found, loaded or served
    ├── DataError            a data set, task or prompt is malformed
    ├── EngineError          the rollout engine cannot go on
    │   ├── RequestError     one request is impossible; the other requests are unharmed
    │   ├── EngineLost       this engine is gone, with its process or server; also a WorkerLost
    │   └── WeightsDamaged   new weights did not arrive whole; the engine stands still until whole ones come
    ├── TrainerError         the trainer cannot start or go on
    │   └── TrainerLost      a rank of it is gone; the last checkpoint and the journal have all that is needed
    ├── VerifierError        a verifier is unknown or breaks its contract
    ├── SandboxError         code cannot be run in a sandbox on this machine
    ├── RemoteError          a server does not answer, or with what is no use
    ├── WorkerLost           a worker process or server is gone; another can go on with what it did
    ├── StalledError         nothing in the run has moved for too long
    ├── Interrupted          the user or the system stopped the command
    └── StoreError           the run folder cannot be read or written
        ├── DiskFullError    no space; the last good state is untouched
        ├── CorruptError     a checkpoint, or an answer in a file, fails its checksum
        └── ConfigChangedError   the run was started with other settings

A message names the rule and the value that broke it. Bugs are assertions, not KitaeErrors.
"""


class KitaeError(Exception):
    """Root of the tree; the command line prints it without a traceback."""


class ConfigError(KitaeError):
    pass


class ModelError(KitaeError):
    pass


class DataError(KitaeError):
    pass


class WorkerLost(KitaeError):
    pass


class EngineError(KitaeError):
    pass


class RequestError(EngineError):
    pass


class EngineLost(EngineError, WorkerLost):
    pass


class WeightsDamaged(EngineError):
    pass


class TrainerError(KitaeError):
    pass


class TrainerLost(TrainerError):
    pass


class VerifierError(KitaeError):
    pass


class SandboxError(KitaeError):
    pass


class RemoteError(KitaeError):
    pass


class StalledError(KitaeError):
    pass


class Interrupted(KitaeError):
    """`signal` is the number of the signal; the exit status is 128 more, as a shell has it."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal


class StoreError(KitaeError):
    pass


class DiskFullError(StoreError):
    pass


class CorruptError(StoreError):
    pass


class ConfigChangedError(StoreError):
    pass


class Stopped(Exception):
    """No error: ends a loop of training that the user has asked to stop, when its state is consistent and can be
    saved."""


class KitaeWarning(UserWarning):
    """What a part has to say while it is loaded or warmed up; whoever loads it shows it to the user."""


def root_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first real exception of a task group: what the user needs to see."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
