"""The decoder of ``sg_transformer``: embedding, layers, an output layer, and a memory of earlier segments."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from fairseq.models import FairseqIncrementalDecoder
from torch import Tensor, nn

from fairseq_sg.errors import UsageError
from fairseq_sg.models.encoder import max_length, needs_sequences, side_embedding
from fairseq_sg.models.layers import build_layers
from fairseq_sg.modules import compilation
from fairseq_sg.modules.attention import Attention, Context
from fairseq_sg.modules.cpu.linear import linear
from fairseq_sg.modules.cpu.packing import Packing, packed, packing_for_training
from fairseq_sg.modules.feature_maps import FeatureMap
from fairseq_sg.modules.norm import final_norm_of
from fairseq_sg.modules.position import build_indices

#: What a decoder remembers of a stream: ``hidden``, the input (M, B, C) of every step's layer at the last M positions,
#: without gradient, and ``position``, the number of positions so far.
Memory = dict[str, Any]


class SGTransformerDecoder(FairseqIncrementalDecoder):
    """Embedding, a stack of decoder layers, and an output layer, tied to the embedding unless ``untied_output``.

    Args:
        config: a resolved configuration.
        dictionary: the target's dictionary.
        left_pad_target: whether targets are padded on the left. Padding on the right is hidden by causality already, so
            self-attention then needs no mask.
        outputs: number of logits; None for one of every word of the dictionary.
        bits: of the words (V, bits), for embeddings that are linear maps of them.

    Raises:
        UsageError: targets are padded on the left, and cross-attention counts their positions from the first column.
    """

    def __init__(
        self,
        config,
        dictionary,
        left_pad_target: bool = False,
        outputs: int | None = None,
        bits: Tensor | None = None,
    ):
        super().__init__(dictionary)
        self.left_pad_target = left_pad_target
        self.embedding = side_embedding(config, "decoder", dictionary, bits)
        outputs = len(dictionary) if outputs is None else outputs
        self.indices = build_indices(config)
        self.stack = build_layers(config, "decoder")
        if left_pad_target:
            self._check_left_padding()
        self.packs = config.compile == compilation.NONE and not needs_sequences(self.stack)
        self.final_norm = final_norm_of(config, config.decoder_embed_dim)
        self.output_weight = None
        if config.untied_output:
            self.output_weight = nn.Parameter(torch.empty(outputs, config.decoder_embed_dim))
            nn.init.xavier_uniform_(self.output_weight)
        self.output_bias = nn.Parameter(torch.zeros(outputs))
        if config.untied_output:
            uniform_of_linear_(self.output_bias, config.decoder_embed_dim)

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict[str, Any] | None = None,
        incremental_state: dict[str, dict] | None = None,
        features_only: bool = False,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
        need_attn: bool = False,
        value_roles: Collection[str] = (),
        memory: Memory | None = None,
        memory_length: int = 0,
    ):
        """prev_output_tokens (B, N) -> logits (B, N, V) (features (B, N, C) with ``features_only``) and a dict.

        With ``incremental_state`` only the last token is computed, N = 1. The dict has ``attn`` (cross-attention of the
        last layer, (B, N, M), with ``need_attn`` and outside decoding), ``inner_states``, ``aux_losses`` and
        ``values``. With a ``memory_length`` above 0, each row continues where it ended in the call that returned
        ``memory``, and the dict has the ``memory`` for the next call (see ``Memory``).

        Args:
            value_roles: the roles, ``decoder`` and ``cross``, whose Values are returned.

        Raises:
            UsageError: a memory for a mechanism that is not defined on parts of a stream.
            ValueError: a memory in step-by-step decoding.
        """
        decoding = incremental_state is not None
        if memory_length:
            if decoding:
                raise ValueError("decoding step by step has a state of its own, and no memory of earlier segments")
            self.check_memory()
        padding_mask = prev_output_tokens.eq(self.dictionary.pad())  # (B, N)
        start = 0 if memory is None else memory["position"]
        hidden = None if memory is None else memory["hidden"]
        x = self.embedding(prev_output_tokens, last=decoding, first=start).transpose(0, 1)  # (N, B, C)
        if decoding:
            padding_mask = padding_mask[:, -1:]
        # Packing is for training alone, and where nothing is returned but logits and Values.
        streams = memory_length > 0 or memory is not None
        packs = self.packs and self.training and not (decoding or streams or return_all_hiddens or need_attn)
        packing = packing_for_training(padding_mask) if packs else None
        context = Context(
            padding_mask=padding_mask,
            key_padding_mask=padding_mask if self.left_pad_target else None,
            positions=None if self.indices is None else self.indices(prev_output_tokens.size(1), x.device),
            first=start if hidden is None else start - hidden[0].size(0),
            state=incremental_state,
            return_values="decoder" in value_roles,
            packing=packing,
            key_packing=packing,
        )
        if encoder_out is not None:
            context = with_source(context, encoder_out, packs, need_attn, return_values="cross" in value_roles)
        keep_hidden = return_all_hiddens or memory_length > 0
        out = self.stack(packed(x, packing), context, memory=hidden, keep_hidden=keep_hidden)
        outputs = self._outputs(out.x, packing, features_only)
        extra = {
            "attn": [out.weights],
            "inner_states": out.hidden_states if return_all_hiddens else [],
            "aux_losses": out.losses,
            "values": out.values,
        }
        if memory_length:
            kept = [remember(h, hidden, step, memory_length) for step, h in enumerate(out.inputs)]
            extra["memory"] = {"hidden": kept, "position": start + x.size(0)}
        return outputs, extra

    def _outputs(self, x: Tensor, packing: Packing | None, features_only: bool) -> Tensor:
        """The last layer's state (N, B, C), or packed -> logits (B, N, V), or features (B, N, C)."""
        outputs = self.final_norm(x)
        if packing is None:
            outputs = outputs.transpose(0, 1)  # (B, N, C)
        if not features_only:
            outputs = self.output_layer(outputs)  # (B, N, V)
        return outputs if packing is None else packing.unpack_batch_first(outputs)

    def _check_left_padding(self) -> None:
        cross = (part for part in self.stack.modules() if isinstance(part, Attention) and part.role == "cross")
        for part in (part for attention in cross for part in attention.modules()):
            if isinstance(part, FeatureMap) and part.needs_positions:
                raise UsageError(
                    f"--feature-map {part.registered_name} in cross-attention counts a target's positions from its "
                    "first column: leave --left-pad-target out, or choose another --cross-attention"
                )

    def check_memory(self, seen: int = 0, option: str = "--memory-length") -> None:
        """Raises UsageError where the model is not defined on segments of a stream.

        Args:
            seen: the positions of a segment with its memory, or 0 for those that every call checks itself.
            option: which gives the memory, for the message.
        """
        for positions in (self.embedding.positions, self.indices):
            if positions is not None and not positions.continues:
                raise UsageError(
                    f"--position {positions.registered_name} numbers whole sentences, not segments of a stream: leave "
                    f"{option} out, or choose another --position"
                )
        if seen and seen > (longest := max_length(self.stack)):
            raise UsageError(
                f"{option} and --tokens-per-sample are {seen} together, and the layers are defined for {longest} "
                "positions: choose smaller ones, or train with a larger limit, such as --cosformer-horizon"
            )
        if self.left_pad_target:
            raise UsageError("a memory is for rows that are padded on the right: leave --left-pad-target out")

    def longest_stream(self) -> int:
        """The longest stream whose positions, from its beginning on, are all defined."""
        return max_length(self.embedding.positions, self.indices)

    def extract_features(self, prev_output_tokens: Tensor, encoder_out=None, incremental_state=None, **kwargs):
        """``forward`` up to the output layer."""
        return self(prev_output_tokens, encoder_out, incremental_state, features_only=True, **kwargs)

    def output_layer(self, features: Tensor) -> Tensor:
        """features (…, C) -> logits (…, V)."""
        weight = self.embedding.tokens.weight if self.output_weight is None else self.output_weight
        return linear(features, weight, self.output_bias)

    def max_positions(self) -> int:
        """The longest sequence that has positions; most kinds of them have no end, only ``--max-target-positions``."""
        return max_length(self.embedding.positions, self.indices, self.stack)


def with_source(
    context: Context, encoder_out: dict[str, Any], packs: bool, return_weights: bool, return_values: bool
) -> Context:
    """The context of a decoder's pass, with the encoder's output and the context of cross-attention to it."""
    padding_mask = encoder_out["encoder_padding_mask"][0]
    cross = Context(
        padding_mask=padding_mask,
        key_padding_mask=padding_mask,
        return_weights=return_weights,
        return_values=return_values,
        packing=context.packing,
        key_packing=packing_for_training(padding_mask) if packs else None,
    )
    return replace(context, source=packed(encoder_out["encoder_out"][0], cross.key_packing), cross=cross)


def uniform_of_linear_(parameter: Tensor, inputs: int) -> None:
    """PyTorch's start of ``nn.Linear``, U(−1/√inputs, 1/√inputs), which the released code leaves to its output
    layers.
    """
    bound = inputs**-0.5
    nn.init.uniform_(parameter, -bound, bound)


def remember(h: Tensor, memory: Sequence[Tensor] | None, step: int, length: int) -> Tensor:
    """The last ``length`` positions of a step's ``memory`` (M, B, C) and of h (N, B, C) after it, without gradient."""
    if memory is not None and h.size(0) < length:
        h = torch.cat([memory[step].type_as(h), h])
    kept = h[-length:].detach()
    return kept.clone() if kept.size(0) < h.size(0) else kept  # a slice would keep the rest alive
