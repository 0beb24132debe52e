"""A policy: one Hugging Face causal LM, its tokenizer, and the calls that trainer and engine share."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from kitae.errors import ModelError
from kitae.models.agreement import check_pauses, gap
from kitae.models.attention_seam import AttentionCall, AttentionContext, SelfAttention, keywords
from kitae.models.empty import Unfilled
from kitae.models.logprobs import Head, HeadTransform, KeptColumns, token_logprobs
from kitae.models.parts import context_of, decoder_of, setting
from kitae.models.pass_context import by_thread
from kitae.models.picture_reader import reader_of
from kitae.models.state_seam import MixerCall, States, limit_steps, mixers_of
from kitae.models.vision import Vision


class Policy(torch.nn.Module):
    """The modules that are trained and served. Engine and trainer hold the same object, without a copy.

    The trainer calls it as one module, so decoder and head are used through one `forward`, and it can be sharded as a
    whole. `model` is the only submodule; base, decoder and head are parts of it.
    """

    base: Any
    decoder: Callable[..., Any]
    head: Any
    between: Any

    def __init__(self, model: Any, tokenizer: Any, source: str, *, exact: bool = False, plain: bool = False) -> None:
        """exact: whether the modules are those of `kitae.models.exact`, and attention and log-probs must be exact too.

        plain: whether engine and trainer use plain torch, see `ModelConfig.plain`.
        """
        super().__init__()
        self.exact, self.plain = exact, plain
        self.model = model
        self.tokenizer = tokenizer
        self.source = source
        self.rows: int | None = None  # rows of logits that log-probs are normalised over; None: all
        self.sequence: ProcessGroup | None = None  # each holds a part of a row; None: this one holds it all
        self._place: torch.device | None = None
        self.unfilled: Unfilled | None = None  # where its weights are, of a model that is loaded in shards
        base = model.get_base_model() if hasattr(model, "peft_config") else model
        # These are not submodules, so that each parameter has one name.
        self.__dict__.update(base=base, decoder=decoder_of(base), head=base.get_output_embeddings())
        last = getattr(base, "lm_head", None)  # of ModernBERT, a layer between its decoder and its head
        self.__dict__["between"] = last if last is not self.head else None
        reader = reader_of(tokenizer)
        self.vision = None if reader is None else Vision(base, reader, alone=exact)  # None: a model of text alone
        limit_steps(model)
        config = base.config.get_text_config()
        self.layers = int(config.num_hidden_layers)
        heads = setting(config, "num_attention_heads")
        if heads is None and not mixers_of(model):
            raise AttributeError(f"{type(config).__name__} without num_attention_heads")
        self.heads = int(heads or 1)
        self.kv_heads = int(setting(config, "num_key_value_heads") or self.heads)
        self.head_dim = int(setting(config, "head_dim") or config.hidden_size // self.heads)
        self.max_context = context_of(config)
        scale = 1.0
        if getattr(config, "logits_scaling", None):  # Granite divides
            scale = 1.0 / float(config.logits_scaling)
        elif getattr(config, "logit_scale", None):  # Cohere multiplies
            scale = float(config.logit_scale)
        self.transform = HeadTransform(scale, getattr(config, "final_logit_softcapping", None))

    @property
    def device(self) -> torch.device:
        return self._place or next(self.model.parameters()).device

    def spread(self, device: torch.device, tensor: int, sequence: ProcessGroup | None) -> None:
        """Compute on this device from now on, wherever the shards lie, with a part of the heads and maybe of each
        row."""
        self._place = device
        self.sequence = sequence
        self.heads, self.kv_heads = self.heads // tensor, self.kv_heads // tensor

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the computation, which is that of the head, as LoRA leaves it unchanged."""
        return self.head.weight.dtype  # type: ignore[no-any-return]

    @property
    def vocabulary(self) -> int:
        return int(self.head.weight.shape[0])

    @property
    def output(self) -> Head:
        """The head as log-probs are computed with it."""
        head = Head(self.head.weight, getattr(self.head, "bias", None), self.transform, self.exact)
        return head if self.rows is None else head.cut(self.rows)

    def hidden(self, tokens_T: Tensor, positions_T: Tensor, context: AttentionContext) -> Tensor:
        """Last hidden states `[T, H]` of one packed row, whose tokens may be places of pictures.

        positions_T: what tokens are turned by, `[T]`, or `[3, T]` where pictures have rows and columns.
        """
        given = keywords(context, tokens_T, positions_T)
        if self.vision is not None and (seen := self.vision.keywords(tokens_T)):
            given = {**given, "input_ids": None, **seen}
        with by_thread(context):
            out = self.decoder(**given)
        states = out.last_hidden_state if self.between is None else self.between(out.last_hidden_state)
        return states.squeeze(0)  # type: ignore[no-any-return]

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        context: AttentionContext,
        source_N: Tensor,
        target_N: Tensor,
        *,
        temperature: float,
        chunk: int,
        entropy_grad: bool = False,
        kept: KeptColumns | None = None,
        also: Callable[[Head, Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """`(logp_N, entropy_N)` of the tokens `target_N`, which the states of the row at `source_N` predict.

        kept: the tokens that they are over; None: the vocabulary.

        also: computes something else from the head and these states; its result comes third.
        """
        hidden_NH = self.hidden(tokens_T, positions_T, context)[source_N]
        head = self.output
        found = token_logprobs(
            head, hidden_NH, target_N, temperature=temperature, chunk=chunk, entropy_grad=entropy_grad, kept=kept
        )
        return found if also is None else (*found, also(head, hidden_NH))

    def within(self, function: Callable[[], None]) -> None:
        """Call it where the parameters of a sharded policy are whole, but for those of layers."""
        function()

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Logits `[N, V]` exactly as the model class computes them."""
        return self.transform(self.head(hidden_NH))

    def turned(self, tokens: Sequence[int]) -> Tensor | None:
        """`[3, T]`: the positions that the tokens of a whole sequence are turned by, where they are not those in the
        sequence."""
        found = None if self.vision is None else self.vision.positions(tokens)
        return None if found is None else torch.from_numpy(found).to(self.device)

    def score(self, tokens_T: Tensor) -> Tensor:
        """Log-probs `[T - 1]` of all tokens but the first, given those before, in fp32. A plain pass, for checks."""
        positions_T = torch.arange(len(tokens_T), device=self.device)
        with torch.no_grad():  # not inference mode: what it gathers of a sharded model is trained with later
            turned = self.turned(tokens_T.tolist())
            hidden_TH = self.hidden(tokens_T, positions_T if turned is None else turned, SelfAttention(positions_T))
            logp_TV = self.logits(hidden_TH[:-1]).float().log_softmax(-1)
        said_T = tokens_T[1:].where(tokens_T[1:] < self.vocabulary, 0)  # places of pictures have no log-prob
        return logp_TV.gather(1, said_T[:, None])[:, 0]

    def check_layers(self) -> None:
        """Raise if anything but attention and mixers carries information from token to token, as that would leak
        between the sequences of a row, and the engine would lose it. Raise too if a layer uses the order of tokens
        instead of their positions."""
        calls = self.attended()
        self.kv_heads = min((call.size[0] for call in calls), default=self.kv_heads)  # a config may say otherwise
        missing = sorted(set(range(self.layers)) - {call.layer for call in calls})
        if missing and len(calls) < self.layers and not mixers_of(self.model):
            raise ModelError(
                f"{self.source}: every layer of {type(self.base).__name__} must attend, got {len(missing)} of "
                f"{self.layers} that carry a state of their own, the first of them layer {missing[0]}"
            )
        self._check_states()
        self._check_positions()
        check_pauses(self.base, self.source)

    def _check_states(self) -> None:
        positions = torch.arange(2, device=self.device)
        with torch.no_grad():
            a, b = (
                self.hidden(positions.new_tensor([first, 1]), positions, _OneByOne())[1].float() for first in (0, 1)
            )
        rounding = 1e-4 if self.dtype == torch.float32 else 0.05
        if (a - b).norm() > rounding * a.norm():
            raise ModelError(
                f"{self.source}: a layer of {type(self.base).__name__} must see other tokens through attention alone, "
                "got one that carries a state of its own beside it"
            )

    def _check_positions(self) -> None:
        positions = torch.arange(12, device=self.device)
        with torch.no_grad():
            straight, reverse = (
                self.hidden(order * 7919 % self.vocabulary, order, SelfAttention(order)).float()
                for order in (positions, positions.flip(0))
            )
        if not (found := gap(reverse.flip(0), straight)) < (1e-3 if self.dtype == torch.float32 else 0.1):
            raise ModelError(
                f"{self.source}: {type(self.base).__name__} must read the positions of tokens, whatever their order, "
                f"got states of a row in reverse that differ by {found:.2g} of their size"
            )

    def attended(self) -> list[AttentionCall]:
        """The calls of attention of a pass, in their order: usually one for each layer that attends."""
        positions = torch.arange(2, device=self.device)
        context = SelfAttention(positions)
        with torch.no_grad():
            self.hidden(torch.zeros_like(positions), positions, context)
        return context.calls

    def states(self) -> dict[int, States]:
        """What each mixer carries from token to token, `[1, …]`; {}: all of the model attends."""
        positions = torch.arange(2, device=self.device)
        context = SelfAttention(positions)
        with torch.no_grad():
            self.hidden(torch.zeros_like(positions), positions, context)
        return context.states

    def check_head(self) -> None:
        """Raise if the model class processes its logits in a way that `transform` does not cover."""
        tokens = torch.arange(4, device=self.device) % self.vocabulary
        positions = torch.arange(4, device=self.device)
        context = SelfAttention(positions)
        with torch.no_grad():  # see `score`
            ours = self.logits(self.hidden(tokens, positions, context)).float()
            with by_thread(context):
                theirs = self.base(**keywords(context, tokens, positions)).logits[0].float()
        gap = (ours - theirs).abs().max().item()
        if not gap <= 1e-2 * max(1.0, theirs.abs().max().item()):
            raise ModelError(
                f"{self.source}: {type(self.base).__name__} post-processes its logits in a way Kitae does not know "
                f"(largest difference {gap:.3g})"
            )


class _OneByOne:
    """Attention in which each token sees only itself."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, **settings: Any) -> Tensor:
        return v.repeat_interleave(q.shape[0] // v.shape[0], 0).transpose(0, 1)

    def carry(self, call: MixerCall) -> None:
        call.run(torch.arange(call.tokens, device=call.device)[:, None])
