"""Settings of what is recorded and reported of a run."""

from typing import Literal, Self

from pydantic import Field, model_validator

from kitae.clients.addresses import is_loopback
from kitae.section import Section

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class ObserveConfig(Section):
    """What is recorded and reported of a run in addition to its metrics. Nothing here changes what is trained."""

    tokens: float = Field(
        0.05, ge=0, le=1, description="Share of the samples of a step whose tokens are recorded in RUN/tokens; 0: none."
    )
    diagnose: bool = Field(True, description="Say it in one line when a rule of kitae diagnose begins to hold.")
    trackers: tuple[TrackerName, ...] = Field((), description="Where metrics go beside metrics.jsonl.")
    project: str = Field("kitae", min_length=1, description="Name of the project, or experiment, in trackers.")
    metrics_port: int = Field(
        0, ge=0, le=65535, description="Port of an HTTP server with /metrics for Prometheus; 0: none."
    )
    metrics_host: str = Field("127.0.0.1", min_length=1, description="Address that this server listens on.")
    metrics_key_env: str = Field(
        "",
        description="The variable of the environment with the key that a scraper must send as a bearer token. Without "
        "one, the server listens on this machine alone.",
    )
    on_finish: str = Field(
        "", description="A command, or the URL of a webhook: called when the run has finished or was stopped."
    )
    on_crash: str = Field("", description="The same, when an error ended the run.")
    on_diagnosis: str = Field("", description="The same, for each line of the diagnosis during the run.")

    @model_validator(mode="after")
    def _coherent(self) -> Self:
        if len(set(self.trackers)) < len(self.trackers):
            raise ValueError(f"observe.trackers must name each tracker once, got {', '.join(self.trackers)}")
        if self.metrics_port and not self.metrics_key_env and not is_loopback(self.metrics_host):
            raise ValueError(
                f"observe.metrics_host {self.metrics_host!r} lets others in, so that scrapers need a key: set "
                "observe.metrics_key_env to the name of a variable that holds one"
            )
        return self
