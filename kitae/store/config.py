"""Settings of the run folder."""

from pydantic import Field

from kitae.section import Section


class RunConfig(Section):
    """Where the run lives and what makes it repeatable."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9._-]+$", description="Name of the run folder; a number is appended.")
    dir: str = Field("runs", description="Folder that holds the run folders.")
    shared: bool = Field(
        False, description="Let other users of this machine read the run folder, as far as the umask does."
    )
    seed: int = Field(0, ge=0, description="Seed of prompts, sampling and initialisation.")


class CheckpointConfig(Section):
    """When the whole frontier is saved."""

    every: int = Field(10, ge=1, description="Steps between checkpoints.")
    keep: int = Field(2, ge=1, description="Checkpoints kept.")
