"""What runs inside a vLLM server that Kitae has started: a method more for each of its workers.

vLLM mixes this class into its own worker (`--worker-extension-cls`), in an environment that has neither Kitae's
packages nor its settings: it imports torch and the plain parts of Kitae alone.
"""

import json
from pathlib import Path
from typing import Any

from kitae.engines.servers.tensor_files import Written


class KitaeWorker:
    """`/collective_rpc {"method": "kitae_load", "args": ["/dev/shm/kitae-x/b"]}`."""

    reload_weights: Any  # of vLLM's worker
    model_runner: Any

    def kitae_load(self, folder: str) -> str:
        """Load the weights of a folder if all of them are as they were written: `{"damaged": []}`.

        An exception would end the server's engine, so what goes wrong is an answer too; whoever reads `failed` must
        not use the server any more.
        """
        try:
            written = Written(Path(folder))
            damaged = written.damaged()
            if not damaged:
                self.reload_weights(weights_iterator=written.tensors())
                _pack_heads(self.model_runner.get_model())
            return json.dumps({"damaged": damaged})
        except Exception as error:
            return json.dumps({"failed": f"{type(error).__name__}: {error}"})


def _pack_heads(model: Any) -> None:
    """On a CPU vLLM keeps a packed copy of the output head. A head that is tied to the embedding has no weights of its
    own to load, and the copy would stay as it was."""
    for module in model.modules():
        if hasattr(module, "cpu_linear") and module.weight.numel():  # other layers keep the packed weights alone
            module.quant_method.process_weights_after_loading(module)
