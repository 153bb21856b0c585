"""A model that scores lanes: the policy itself, or a frozen one. Loading, start-up tests, forward.

How lanes reach the model (shared prefixes or flat rows) is decided by computing a small tree both ways on the
loaded model, never by the model's name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from . import models, routing
from .errors import Refused
from .head import Items, Output, Scores, items_of, logits_of, top
from .lanes import Lane
from .models import Loaded, Settings
from .tree import Batch, Form, chunks, flat_batch, shared_batch

CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 512 << 20}
"""Size of the logits of one chunk, unless the request sets the chunk."""


SQUARE = 8192
"""Longest lane for which a square mask stands in for FlexAttention: 64 MiB of bits as bytes."""


class Wrapped(nn.Module):
    """The root that FSDP hooks: whatever runs in `forward` sees whole parameters of embedding, norm and
    head."""

    def __init__(self, causal: Any) -> None:
        super().__init__()
        self.model = causal

    def forward(self, call: Callable[..., Any], *args: Any) -> Any:
        """Runs `call` between FSDP's hooks. Its result must be tensors."""
        return call(*args)


class Member:
    """A loaded, sharded model with its form of input and its head."""

    def __init__(
        self,
        loaded: Loaded,
        wrapped: Wrapped,
        settings: Settings,
        device: torch.device,
        max_tokens: int,
        chunk: int | None,
    ) -> None:
        self.loaded, self.wrapped, self.device, self.max_tokens = loaded, wrapped, device, max_tokens
        self.causal = loaded.causal
        self.asked = settings.attention
        self.dtype = torch.bfloat16 if settings.dtype == "bf16" else torch.float32
        config = self.causal.config.get_text_config()
        self.config = config
        self.vocabulary = int(self.causal.get_output_embeddings().weight.shape[0])
        self.hidden = int(config.hidden_size)
        room = CHUNK_BYTES.get(device.type, 64 << 20) // (4 * self.vocabulary)
        self.chunk = chunk or max(1, min(room, 4096))
        self.form = Form(True, self.causal.config._attn_implementation)
        self.output = Output()
        self.routers: routing.Routers | None = None

    def run(self, call: Callable[..., Any], *args: Any) -> Any:
        """Runs `call` in the root. Without gradients the root is sharded again at once."""
        try:
            result = self.wrapped(call, *args)
        except Exception:
            self.settle()
            raise
        if isinstance(self.wrapped, FSDPModule) and not torch.is_grad_enabled():
            self.wrapped.reshard()
        return result

    def settle(self) -> None:
        """Drops what FSDP keeps of a forward pass whose backward pass never came."""
        if isinstance(self.wrapped, FSDPModule):
            self.wrapped.reset_iter_state()
            for part in self.wrapped.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()

    @contextlib.contextmanager
    def without_adapters(self, off: bool) -> Iterator[None]:
        """Computes without LoRA. The flag is set directly: `peft` would also change `requires_grad`."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        parts = [p for p in self.causal.modules() if isinstance(p, BaseTunerLayer)] if off else []
        for part in parts:
            part._disable_adapters = True
        try:
            yield
        finally:
            for part in parts:
                part._disable_adapters = False

    def passes(self, lane: Lane) -> int:
        """Number of calls of the model that the lane needs."""
        return len(chunks(lane, self.max_tokens)) if self.form.flat else 1

    def batch(self, lane: Lane, passes: int) -> Batch:
        """The lane as input of the model."""
        if self.form.flat:
            return flat_batch(lane, self.max_tokens, passes, self.device)
        return shared_batch(lane, self.form, self.device, self.dtype)

    def states(
        self,
        batch: Batch,
        experts: np.ndarray | None = None,
        logits: dict[int, list[torch.Tensor]] | None = None,
    ) -> torch.Tensor:
        """Hidden states after the final norm, `[tokens, hidden]`, computed by the experts of a lane. To be
        called in the root."""
        base = models.base_of(self.causal)
        parts = []
        for one in batch.passes:
            chosen = None
            if experts is not None and self.routers is not None:
                chosen = self.routers.on_device(experts, one.rows, self.device)
            with routing.during(chosen, logits):
                out = base(
                    input_ids=one.ids, attention_mask=one.mask, position_ids=one.positions, use_cache=False
                )
            parts.append(out.last_hidden_state.flatten(0, 1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def head(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output matrix and bias. To be called in the root."""
        layer = self.causal.get_output_embeddings()
        return layer.weight, getattr(layer, "bias", None)

    def scores(
        self,
        lane: Lane,
        passes: int,
        entropies: bool,
        value: torch.Tensor | None,
        balance: bool = False,
    ) -> tuple[torch.Tensor, ...]:
        """Log-probabilities, entropies and values of the items, in the request's order, and with `balance`
        the load-balancing loss of the lane's tokens."""
        batch = self.batch(lane, passes)
        items = items_of(lane, batch.places, self.device)
        places = torch.from_numpy(batch.places).to(self.device)

        def call() -> tuple[torch.Tensor, ...]:
            logits: dict[int, list[torch.Tensor]] = {}
            rows = self.states(batch, lane.experts, logits if balance else None)[items.places]
            weight, bias = self.head()
            rows = rows.to(weight.dtype)
            scores, spread = Scores.apply(rows, weight, bias, items, self.output, self.chunk, entropies)
            owner = items.owner[items.order]
            found = [scores[items.order], spread[owner] if entropies else scores.new_empty(0)]
            found.append(values_of(rows, value)[owner] if value is not None else scores.new_empty(0))
            if balance and self.routers is not None:
                found.append(self.routers.loss(self.causal, logits, places))
            else:
                found.append(scores.new_empty(0))
            return tuple(found)

        return self.run(call)

    @torch.no_grad()
    def best(self, lane: Lane, passes: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The `k` most likely tokens of each item."""
        batch = self.batch(lane, passes)
        items: Items = items_of(lane, batch.places, self.device)

        def call() -> tuple[torch.Tensor, torch.Tensor]:
            rows = self.states(batch, lane.experts)[items.places]
            weight, bias = self.head()
            return top(rows.to(weight.dtype), weight, bias, items, self.output, self.chunk, k)

        return self.run(call)

    @torch.no_grad()
    def test(self, sharing: str) -> None:
        """Chooses the head's form and the form of input by computing both ways."""
        flex = self.causal.config._attn_implementation == "flex_attention"
        try:
            self.output = self._output()
        except Exception as error:
            if not flex or isinstance(error, Refused) or models.is_fatal(error):
                raise
            if self.asked == "flex":
                raise Refused(
                    f"attention is 'flex', allowed is 'auto' or 'sdpa': {first_line(error)}"
                ) from error
            self._leave_flex()
            self.output = self._output()
        if sharing == "flat":
            self._flat("the request asks for flat rows")
            return
        why = self._share()
        if why is not None and flex and self.asked == "auto":
            # FlexAttention may not compile here; a square mask does for lanes that are short enough.
            self._leave_flex()
            why = (
                self._share() if self.max_tokens <= SQUARE else f"{why}; lanes are too long for a square mask"
            )
        if why is not None:
            self._flat(why)

    def _leave_flex(self) -> None:
        """Takes an attention implementation that needs no compiler."""
        if self.causal.config._attn_implementation == "flex_attention":
            self.causal.set_attn_implementation("sdpa" if self.causal._supports_sdpa else "eager")

    def _share(self) -> str | None:
        """Takes the first form of masks under which a tree computes what its rows compute, or returns why
        none."""
        why = None
        for windows in self._windows():
            form = Form(False, self.causal.config._attn_implementation, windows)
            why = self._differs(form)
            if why is None:
                self.form = form
                return None
        return why

    def _flat(self, why: str) -> None:
        """Takes flat rows, with an attention implementation that needs no compiled mask."""
        self._leave_flex()
        self.form = Form(True, self.causal.config._attn_implementation, why_flat=why)

    @torch.no_grad()
    def route(self, balance: bool) -> None:
        """Finds the routers of a mixture of experts, and whether recorded experts can replace their choice.
        With `balance` the model must have a load-balancing loss."""
        base = models.base_of(self.causal)
        self.routers = routing.find(self.causal, base, models.decoder_layers(base))
        if balance and (self.routers is None or routing.balance_of(self.causal) is None):
            raise Refused(
                f"router_loss is true, allowed is false: {type(self.causal).__name__} has no load-balancing "
                "loss; set trainer.router_aux_loss = 0"
            )
        routers = self.routers
        if routers is None:
            return
        ids = torch.arange(1, 9, device=self.device)[None] % self.vocabulary
        tokens, layers = np.arange(8)[:, None, None], np.arange(routers.layers)[:, None]
        # Other experts for each token and layer than a router is likely to choose.
        experts = (tokens + layers + np.arange(routers.top_k)) % routers.count
        logits: dict[int, list[torch.Tensor]] = {}
        try:
            self.run(self.states, Batch([probe(ids)], np.arange(8)), experts, logits)
        except Refused as error:
            routers.why_not = error.text
            return
        routers.replays = logits.keys() == routers.modules.keys()
        routers.why_not = None if routers.replays else "some layers do not call their router"

    def described(self) -> dict[str, int] | None:
        """Sizes of the routers, if recorded experts can replace their choice."""
        routers = self.routers
        if routers is None or not routers.replays:
            return None
        return {"layers": routers.layers, "top_k": routers.top_k, "experts": routers.count}

    def _output(self) -> Output:
        """Scale and cap of the logits, found among what configurations name and checked against the model."""
        config = self.config
        divisor = getattr(config, "logits_scaling", None)
        scales = [getattr(config, "logit_scale", None), 1.0 / divisor if divisor else None, 1.0]
        caps = [getattr(config, "final_logit_softcapping", None), None]
        # Configured forms come first: small logits do not separate them from plain ones.
        candidates = [Output(s, c) for s in scales if s is not None for c in caps]
        ids = torch.arange(1, 9, device=self.device)[None] % self.vocabulary

        def call() -> tuple[torch.Tensor, ...]:
            own = self.causal(input_ids=ids, use_cache=False).logits.float().flatten(0, 1)
            weight, bias = self.head()
            rows = self.states(Batch([probe(ids)], np.arange(8))).to(weight.dtype)
            gaps = [(logits_of(rows, weight, bias, c)[0] - own).abs().max() for c in candidates]
            return (torch.stack(gaps), own.abs().max())

        gaps, size = self.run(call)
        found = agreed(torch.stack([*gaps, size])).tolist()
        limit = (1e-4 if self.dtype == torch.float32 else 5e-2) * max(1.0, found.pop())
        for candidate, gap in zip(candidates, found, strict=True):
            if gap <= limit:
                return candidate
        raise Refused(
            f"model is a {type(self.causal).__name__}, whose logits are not those of its output matrix "
            f"(they differ by {min(found):.3g}, allowed is {limit:.3g})"
        )

    def _windows(self) -> list[dict[str, int | None]]:
        """Forms of masks to try: one for each layer type where the configuration has types, then a single
        one."""
        window = getattr(self.config, "sliding_window", None)
        types = sorted(set(getattr(self.config, "layer_types", None) or []))
        known = {"full_attention": None, "sliding_attention": window}
        forms: list[dict[str, int | None]] = []
        if types and all(kind in known for kind in types):
            forms.append({kind: known[kind] for kind in types})
        forms.append({"": window})
        if window is not None:
            forms.append({"": None})
        return forms

    def _differs(self, form: Form) -> str | None:
        """Nothing if a tree computes what its rows compute, else the reason in words."""
        lane, ends = trial(self.vocabulary, self.max_tokens, reach(self.config, self.max_tokens))
        try:
            whole = self.run(self.states, shared_batch(lane, form, self.device, self.dtype))[
                : len(lane.tokens)
            ]
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError) as error:
            if models.is_fatal(error):
                raise
            return f"the model takes no mask by ancestry ({type(error).__name__}: {first_line(error)})"
        flat = flat_batch(lane, self.max_tokens, len(chunks(lane, self.max_tokens)), self.device)
        rows = self.run(self.states, flat)[torch.from_numpy(flat.places).to(self.device)]
        error = (whole - rows).float().norm(dim=1) / rows.float().norm(dim=1).clamp(min=1e-6)
        # In bf16 the noise of single tokens is large (a router may choose another expert): the median counts.
        share, limit = (0.9, 3e-4) if self.dtype == torch.float32 else (0.5, 0.1)
        gap = float(agreed(torch.stack([torch.quantile(error[a:b], share) for a, b in ends]).max()))
        if not gap <= limit:
            return (
                f"hidden states of a small tree differ from those of its rows by {gap:.2g} (relative; "
                f"allowed is {limit:g}): some layers do not follow the mask (linear attention?)"
            )
        return None


def probe(ids: torch.Tensor) -> Any:
    """A plain pass."""
    from .tree import Pass

    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    return Pass(ids, positions, None, np.arange(ids.numel()))


def values_of(rows: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The critic's values of hidden states, in f32."""
    return rows.float() @ value[:-1] + value[-1]


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).strip() or "no text").splitlines()[0][:200]


def agreed(values: torch.Tensor) -> torch.Tensor:
    """The largest value of any rank, so that all ranks decide alike."""
    values = values.detach().float().clone()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values, dist.ReduceOp.MAX)
    return values


def reach(config: Any, max_tokens: int) -> int:
    """The longest window of the configuration that a lane can exceed, in tokens; 0 without any."""
    words = ("window", "chunk", "local")
    named = [value for key, value in config.to_dict().items() if any(word in key for word in words)]
    return max([one for one in named if isinstance(one, int) and one < max_tokens], default=0)


def trial(vocabulary: int, max_tokens: int, window: int) -> tuple[Lane, list[tuple[int, int]]]:
    """A tree of random tokens with two levels of branches, longer than the window, and the spans of its
    leaves."""
    long = max(8, window + window // 2)
    lengths = [max(1, min(long + 3, max_tokens - 6)), 3, 5, 4, 6, 5]
    parents = [0, 1, 2, 2, 1, 0]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    positions = [0] * len(lengths)
    for index, parent in enumerate(parents):
        if parent:
            positions[index] = positions[parent - 1] + lengths[parent - 1]
    segments = np.array(list(zip(starts[:-1], lengths, positions, parents, strict=True)), np.int64)
    tokens = np.random.default_rng(7).integers(0, vocabulary, int(starts[-1]))
    zero = np.zeros(1, np.int64)
    lane = Lane(tokens, segments, zero, zero, np.ones(1, np.float32), zero - 1, np.zeros((0, 0), np.uint32))
    return lane, [(int(starts[i]), int(starts[i + 1])) for i in range(1, len(lengths))]


def load(
    folder: str,
    settings: Settings,
    mesh: DeviceMesh,
    device: torch.device,
    trained: bool,
    agree: Callable[[Callable[[], Any]], Any],
    share: Callable[[Any], Any],
) -> tuple[Loaded, Wrapped]:
    """Reads, builds, shards and fills a model. `agree` runs a step whose failure all ranks share; `share`
    sends an object of rank 0 to all."""
    rank, world = mesh.get_local_rank(), mesh.size()
    lora = settings.lora if trained else None

    def first() -> Any:
        models.check_folder(folder, "model")
        if rank != 0:
            return None
        half = settings.dtype == "bf16" and not trained
        source = models.read(folder, settings, device, torch.bfloat16 if half else torch.float32)
        models.freeze_unused(source)
        return source, models.prepare(source, lora)

    found = agree(first)
    causal: Any
    causal, adapters = found if found is not None else (None, None)
    whole = world == 1 and settings.dtype == "f32"
    recipe = share((type(causal), causal.config, models.conversions_of(causal)) if rank == 0 else None)
    source = None
    if not whole:
        if causal is not None:
            source = tensors_of(causal)
        causal = models.build(*recipe)
        models.freeze_unused(causal)
        adapters = models.prepare(causal, lora)
        agree(lambda: models.unlinked(causal))
    if not trained:
        causal.requires_grad_(False)
    layers = models.decoder_layers(models.base_of(causal))
    if trained:
        models.checkpoint_layers(layers, settings.checkpointing)
    wrapped = Wrapped(causal)
    if whole:
        wrapped.to(device)
    else:
        if settings.dtype == "bf16":
            for parameter in causal.parameters():
                if not parameter.requires_grad:
                    parameter.data = parameter.data.to(torch.bfloat16)
        models.shard(wrapped, layers, mesh, settings.dtype)
        wrapped.to_empty(device=device)
        causal.tie_weights()
        models.receive(tensors_of(causal), source, device)
    loaded = Loaded(causal, adapters, folder, dict(causal.named_parameters()))
    return loaded, wrapped


def tensors_of(causal: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters (tied ones once) and all buffers by name."""
    return {**dict(causal.named_parameters()), **dict(causal.named_buffers())}
