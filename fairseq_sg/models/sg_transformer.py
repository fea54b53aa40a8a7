"""``sg_transformer``: an encoder–decoder transformer whose mechanisms are options (``fairseq-train --arch sg_transformer…``).

The shell is that of the reference implementations of the thesis (Csordás 2023, section 4 and appendix C): separate embedding
tables, output projection tied to the decoder's table with a free bias, post-norm, dropout in attention, feedforward, residuals and
embeddings. What its released code does and the text omits is an option; ``docs/attention.md`` says which is which.
"""

from dataclasses import dataclass, field
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from fairseq.models import (
    FairseqEncoder,
    FairseqEncoderDecoderModel,
    FairseqIncrementalDecoder,
    register_model,
    register_model_architecture,
)
from fairseq.tasks.translation import TranslationTask
from torch import Tensor, nn

from fairseq_sg import ranges
from fairseq_sg.errors import UsageError
from fairseq_sg.models.architectures import ARCHITECTURES, preset
from fairseq_sg.models.config import Configuration, refuse_unused_options
from fairseq_sg.modules import compilation
from fairseq_sg.modules.attention import ATTENTION_REGISTRY, Attention
from fairseq_sg.modules.depth import DEPTH_REGISTRY, build_stack
from fairseq_sg.modules.embedding import TokenEmbedding
from fairseq_sg.modules.feature_maps import FEATURE_MAP_REGISTRY, FeatureMap
from fairseq_sg.modules.feedforward import FEEDFORWARD_REGISTRY
from fairseq_sg.modules.layers import DecoderLayer, EncoderLayer
from fairseq_sg.modules.losses import ValueLoss, merge
from fairseq_sg.modules.packing import Packing
from fairseq_sg.modules.position import (
    POSITION_REGISTRY,
    Position,
    attention_position,
    build_embedded_position,
    build_indices,
    gives_indices,
)
from fairseq_sg.modules.update import UPDATE_REGISTRY
from fairseq_sg.ops.dispatch import check_environment

#: What a decoder remembers of a stream: ``hidden``, the input (M, B, C) of every step's layer at the last M positions,
#: without gradient, and ``position``, the number of positions so far.
Memory = Dict[str, Any]

#: The registries whose mechanisms have options of their own.
MECHANISMS = (
    ATTENTION_REGISTRY,
    FEATURE_MAP_REGISTRY,
    POSITION_REGISTRY,
    FEEDFORWARD_REGISTRY,
    UPDATE_REGISTRY,
    DEPTH_REGISTRY,
)


@dataclass
class EncoderConfig:
    """Sizes and mechanisms of an encoder."""

    encoder_embed_dim: int = field(default=512, metadata={"help": "width of the encoder", "least": 1})
    encoder_ffn_embed_dim: int = field(
        default=2048, metadata={"help": "hidden width of the encoder's feedforward layers", "least": 1}
    )
    encoder_attention_heads: int = field(default=8, metadata={"help": "attention heads of the encoder", "least": 1})
    encoder_layers: int = field(
        default=6,
        metadata={
            "help": "layers of the encoder; with a shared layer, how often it is applied (shared_act: at most)",
            "least": 1,
        },
    )
    encoder_attention: str = field(
        default="softmax",
        metadata={
            "help": "self-attention of the encoder, by name (docs/attention.md has the list); with --depth separate also one name a "
            "layer, comma separated"
        },
    )
    encoder_ffn: str = field(
        default="dense",
        metadata={
            "help": "feedforward layer of the encoder, by name (docs/feedforward.md has the list); one name, or one a layer"
        },
    )
    encoder_update: str = field(
        default="residual",
        metadata={
            "help": "update of the encoder's layers: 'residual', or 'copy_gate' (Neural Data Router); one name, or one a layer"
        },
    )


@dataclass
class CausalConfig:
    """Sizes and mechanisms of a decoder without an encoder."""

    decoder_embed_dim: int = field(default=512, metadata={"help": "width of the decoder", "least": 1})
    decoder_ffn_embed_dim: int = field(
        default=2048, metadata={"help": "hidden width of the decoder's feedforward layers", "least": 1}
    )
    decoder_attention_heads: int = field(default=8, metadata={"help": "attention heads of the decoder", "least": 1})
    decoder_layers: int = field(
        default=6,
        metadata={
            "help": "layers of the decoder; with a shared layer, how often it is applied (shared_act: at most)",
            "least": 1,
        },
    )
    decoder_attention: str = field(
        default="softmax", metadata={"help": "self-attention of the decoder, by name or names like the encoder's"}
    )
    decoder_ffn: str = field(
        default="dense", metadata={"help": "feedforward layer of the decoder, by name or names like the encoder's"}
    )
    decoder_update: str = field(
        default="residual", metadata={"help": "update of the decoder's layers, like the encoder's"}
    )
    no_output_bias: bool = field(
        default=False, metadata={"help": "no bias in the output layer (the reference has a free one)"}
    )


@dataclass
class DecoderConfig(CausalConfig):
    """Sizes and mechanisms of a decoder."""

    cross_attention: str = field(
        default="softmax", metadata={"help": "attention of the decoder to the encoder, by name or names"}
    )
    untied_output: bool = field(
        default=False, metadata={"help": "an output matrix of its own, instead of the decoder's embedding table"}
    )


@dataclass
class ShellConfig:
    """What both sides share."""

    depth: str = field(
        default="separate",
        metadata={
            "help": "'separate' layers, one 'shared' layer (universal transformer), or 'shared_act', with halting"
        },
    )
    position: Optional[str] = field(
        default=None,
        metadata={
            "help": "positions, by name (docs/attention.md has the list), on each side where not every self-attention brings its own "
            "(default: sinusoidal)"
        },
    )
    embedding_scaling: str = field(
        default="auto",
        metadata={
            "help": "scaling of token and position embeddings: token_up (TEU), none (NoS), position_down (PED); 'auto' is "
            "position_down, and the reference's unscaled Glorot start on a side without absolute positions"
        },
    )
    dropout: float = field(
        default=0.1,
        metadata={
            "help": "dropout after each sublayer and wherever no dropout of its own is set",
            "least": 0,
            "most": 1,
        },
    )
    embedding_dropout: Optional[float] = field(
        default=None,
        metadata={
            "help": "dropout on the embeddings (default: --dropout; 0 on a side without absolute positions)",
            "least": 0,
            "most": 1,
        },
    )
    pre_norm: bool = field(default=False, metadata={"help": "layer norm before each sublayer instead of after it"})
    compile: str = field(
        default="none",
        metadata={
            "help": "torch.compile of the layers in training, for models so small that a GPU waits for Python: none, default, "
            "reduce-overhead (CUDA graphs), max-autotune; docs/speed.md says what for"
        },
    )


@dataclass
class SGTransformerConfig(ShellConfig, DecoderConfig, EncoderConfig):
    """Sizes and mechanisms of ``sg_transformer``; the options of the mechanisms themselves are joined to these."""


configuration = Configuration(SGTransformerConfig, MECHANISMS, ARCHITECTURES)
Config = configuration.dataclass


def layer_names(config, option: str) -> List[str]:
    """The mechanism of every layer that ``option``, such as ``encoder_attention``, names: one name a layer, or one for all.

    Raises UsageError for a list whose length is not the number of layers, or with layers that are shared.
    """
    names = [name.strip() for name in getattr(config, option).split(",")]
    side = "encoder" if option.startswith("encoder") else "decoder"
    layers = getattr(config, f"{side}_layers")
    if len(names) == 1:
        return names * max(layers, 1)
    flag = "--" + option.replace("_", "-")
    if DEPTH_REGISTRY.find(config.depth).shares_layers:
        raise UsageError(
            f"{flag} names {len(names)} layers, and --depth {config.depth} has one for all steps: name one"
        )
    if len(names) != layers:
        raise UsageError(f"{flag} names {len(names)} layers, and --{side}-layers is {layers}: name one, or one each")
    return names


SELF_ATTENTIONS = ("encoder_attention", "decoder_attention")
ATTENTIONS = (*SELF_ATTENTIONS, "cross_attention")
OTHERS = {
    "encoder_ffn": FEEDFORWARD_REGISTRY,
    "decoder_ffn": FEEDFORWARD_REGISTRY,
    "encoder_update": UPDATE_REGISTRY,
    "decoder_update": UPDATE_REGISTRY,
}


def resolve(cfg) -> "Config":
    """A checked configuration with every default filled in; raises UsageError as ``complete`` does."""
    return complete(configuration.read(cfg))


def complete(config):
    """Checks the configuration of a model of the sides that it has options for, and fills in the last defaults.

    Raises:
        ValueError: unknown mechanism, an option without effect, a combination that is not defined; the message names the option.
    """
    try:
        check_environment()
    except ValueError as error:
        raise UsageError(str(error)) from error
    ranges.check(type(config), vars(config))
    compilation.check_mode(config.compile)
    used = {DEPTH_REGISTRY.find(config.depth)}
    for option in _of(config, ATTENTIONS):
        for name in layer_names(config, option):
            used |= ATTENTION_REGISTRY.find(name).parts(config)
    for option in _of(config, OTHERS):
        used |= {OTHERS[option].find(name) for name in layer_names(config, option)}
    if config.position is not None:
        used.add(POSITION_REGISTRY.find(config.position))
    refuse_unused_options(config, MECHANISMS, used)
    check_position(config)
    for name in ("activation_dropout", "attention_dropout"):
        if getattr(config, name) is None:
            setattr(config, name, config.dropout)
    return config


def _of(config, options: Iterable[str]) -> List[str]:
    """Those of some options that the model has: an encoder by itself has none of a decoder."""
    return [option for option in options if hasattr(config, option)]


def check_position(config) -> None:
    """Raises UsageError for a ``--position`` that some self-attention is not defined for, or that none has a use for."""
    if config.position is None:
        return
    used = config.position == "none"
    kinds = [
        (option.partition("_")[0], ATTENTION_REGISTRY.find(name))
        for option in _of(config, SELF_ATTENTIONS)
        for name in layer_names(config, option)
    ]
    for side, kind in kinds:
        attention_position(kind, config, side)
        used |= not kind.brings_position or "indices" in kind.takes and gives_indices(config)
    if not used:
        names = " and ".join(sorted({kind.registered_name for _, kind in kinds}))
        raise UsageError(
            f"--position {config.position} has no effect: {names} attention brings its own positions; leave the option out"
        )


def side_embedding(config, side: str, dictionary) -> TokenEmbedding:
    """The embedding of the ``encoder`` or ``decoder``, without absolute positions where all its attentions bring their own."""
    kinds = [ATTENTION_REGISTRY.find(name) for name in layer_names(config, f"{side}_attention")]
    dim = getattr(config, f"{side}_embed_dim")
    name = "none" if all(kind.brings_position for kind in kinds) else (config.position or "sinusoidal")
    positions = build_embedded_position(name, dim, config)
    dropout = config.embedding_dropout
    if dropout is None:
        dropout = 0.0 if positions.gives == "nothing" else config.dropout
    return TokenEmbedding(
        len(dictionary),
        dim,
        dictionary.pad(),
        scaling=config.embedding_scaling,
        positions=positions,
        dropout=dropout,
    )


def needs_sequences(stack: nn.Module) -> bool:
    """Whether a layer must see which tokens are of one sentence, which packing gives up."""
    return any(getattr(module, "by_sequence", False) for module in stack.modules())


def longest_of(*modules: Optional[nn.Module]) -> int:
    """The length of the longest sequence that all positions and feature maps in some modules are defined for, 10⁹ where
    there is none."""
    parts = (part for module in modules if module is not None for part in module.modules())
    limits = (part.longest for part in parts if isinstance(part, (Position, FeatureMap)))
    return min((limit for limit in limits if limit is not None), default=int(1e9))


def counts_padding(value_losses: Iterable[Optional[ValueLoss]]) -> bool:
    """Whether some loss does not say that Values at padding have no influence on it."""
    return any(loss is not None and not getattr(loss, "ignores_padding", False) for loss in value_losses)


class SGTransformerEncoder(FairseqEncoder):
    """Embedding and a stack of encoder layers; with ``--pre-norm``, a last layer norm."""

    def __init__(self, config, dictionary):
        super().__init__(dictionary)
        self.embedding = side_embedding(config, "encoder", dictionary)
        self.indices = build_indices(config)
        options = ("encoder_attention", "encoder_ffn", "encoder_update")
        names = list(zip(*(layer_names(config, option) for option in options), strict=True))
        self.stack = build_stack(config, "encoder", lambda step: EncoderLayer(config, *names[step]))
        compilation.compile_in_training(self.stack, config.compile)
        self.packs = config.compile == compilation.NONE and not needs_sequences(self.stack)
        self.final_norm = nn.LayerNorm(config.encoder_embed_dim) if config.pre_norm else nn.Identity()

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Optional[Tensor] = None,
        return_all_hiddens: bool = False,
        token_embeddings: Optional[Tensor] = None,
        value_loss: Optional[ValueLoss] = None,
        keep_padding: bool = False,
    ) -> Dict[str, List[Tensor]]:
        """src_tokens (B, M), padded on either side -> fairseq's dict of the encoder's output, with ``aux_losses`` added.

        ``value_loss`` is evaluated on the Values of every self-attention. In training, the output at padding may be
        zeros, unless ``keep_padding``.
        """
        padding_mask = src_tokens.eq(self.dictionary.pad())
        embedded = self.embedding(src_tokens, token_embeddings)
        x = embedded.transpose(0, 1)
        whole = return_all_hiddens or keep_padding or counts_padding([value_loss])
        packing = Packing.where_it_pays(padding_mask) if self.packs and self.training and not whole else None
        if packing is not None:
            x = packing.pack(x)
        out = self.stack(
            x,
            padding_mask=padding_mask,
            packing=packing,
            value_loss=value_loss,
            keep_hidden=return_all_hiddens,
            positions=None if self.indices is None else self.indices(src_tokens.size(1), src_tokens.device),
        )
        x = self.final_norm(out.x)
        return {
            "encoder_out": [x if packing is None else packing.unpack(x)],
            "encoder_padding_mask": [padding_mask],
            "encoder_embedding": [embedded],
            "encoder_states": out.hidden_states,
            "src_tokens": [src_tokens],
            "src_lengths": [] if src_lengths is None else [src_lengths],
            "aux_losses": out.losses,
        }

    #: Which dimension of the tensors under each key counts the sentences.
    _batch_dim = {"encoder_out": 1, "encoder_states": 1}

    def reorder_encoder_out(self, encoder_out: Dict[str, List[Tensor]], new_order: Tensor) -> Dict[str, List[Tensor]]:
        """Selects and orders the sentences in everything the encoder returned; losses are no sentences' and stay as they are."""
        return {
            key: value
            if key == "aux_losses"
            else [x.index_select(self._batch_dim.get(key, 0), new_order) for x in value]
            for key, value in encoder_out.items()
        }

    def max_positions(self) -> int:
        """The longest sequence that has positions; most kinds of them have no end, only ``--max-source-positions``."""
        return longest_of(self.embedding.positions, self.indices, self.stack)


class SGTransformerDecoder(FairseqIncrementalDecoder):
    """Embedding, a stack of decoder layers, and an output layer tied to the embedding.

    Args:
        config: a resolved configuration.
        dictionary: the target's dictionary.
        left_pad_target: whether targets are padded on the left. Padding on the right is hidden by causality already, so
            self-attention then needs no mask.
    """

    def __init__(self, config, dictionary, left_pad_target: bool = False):
        super().__init__(dictionary)
        self.left_pad_target = left_pad_target
        self.embedding = side_embedding(config, "decoder", dictionary)
        self.indices = build_indices(config)
        options = ("decoder_attention", "cross_attention", "decoder_ffn", "decoder_update")
        # A language model has no cross-attention.
        named = [
            layer_names(config, option) if hasattr(config, option) else [None] * max(config.decoder_layers, 1)
            for option in options
        ]
        names = list(zip(*named, strict=True))
        self.stack = build_stack(config, "decoder", lambda step: DecoderLayer(config, *names[step]))
        compilation.compile_in_training(self.stack, config.compile)
        self.packs = config.compile == compilation.NONE and not needs_sequences(self.stack)
        self.final_norm = nn.LayerNorm(config.decoder_embed_dim) if config.pre_norm else nn.Identity()
        self.output_weight = None
        if config.untied_output:
            self.output_weight = nn.Parameter(torch.empty(len(dictionary), config.decoder_embed_dim))
            nn.init.xavier_uniform_(self.output_weight)
        self.output_bias = None if config.no_output_bias else nn.Parameter(torch.zeros(len(dictionary)))
        if config.untied_output and self.output_bias is not None:
            uniform_of_linear_(self.output_bias, config.decoder_embed_dim)

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Optional[Dict[str, List[Tensor]]] = None,
        incremental_state: Optional[Dict[str, Dict]] = None,
        features_only: bool = False,
        src_lengths: Optional[Tensor] = None,
        return_all_hiddens: bool = False,
        need_attn: bool = False,
        value_losses: Optional[Mapping[str, ValueLoss]] = None,
        memory: Optional[Memory] = None,
        memory_length: int = 0,
    ):
        """prev_output_tokens (B, N) -> logits (B, N, V) (features (B, N, C) with ``features_only``) and a dict.

        With ``incremental_state`` only the last token is computed, N = 1. The dict has ``attn`` (cross-attention of the last layer,
        (B, N, M), with ``need_attn`` and outside decoding), ``inner_states``, ``aux_losses``. ``value_losses`` may have a loss for
        ``decoder`` (self-attention) and ``cross``. With a ``memory_length`` above 0, each row goes on where it ended
        in the call that returned ``memory``, and the dict has the ``memory`` for the next call (see ``Memory``).

        Raises:
            UsageError: a memory for a mechanism that is not defined on parts of a stream.
            ValueError: a memory in step-by-step decoding.
        """
        value_losses = value_losses or {}
        padding_mask = prev_output_tokens.eq(self.dictionary.pad())
        decoding = incremental_state is not None
        if memory_length:
            self._check_streams(decoding)
        start = 0 if memory is None else memory["position"]
        x = self.embedding(prev_output_tokens, last=decoding, first=start).transpose(0, 1)
        if decoding:
            padding_mask = padding_mask[:, -1:]
        past: Dict[str, Any] = {}
        if memory is not None:
            past = {"memory": memory["hidden"], "first": start - memory["hidden"][0].size(0)}
        # Outside training, and where more than logits is asked for, everything has its place in (B, N).
        whole = (
            decoding
            or memory_length
            or past
            or return_all_hiddens
            or need_attn
            or counts_padding(value_losses.values())
        )
        packs = self.packs and self.training and not whole
        packing = Packing.where_it_pays(padding_mask) if packs else None
        source, source_mask, source_packing = None, None, None
        if encoder_out is not None:
            source, source_mask = encoder_out["encoder_out"][0], encoder_out["encoder_padding_mask"][0]
            source_packing = Packing.where_it_pays(source_mask) if packs else None
        out = self.stack(
            x if packing is None else packing.pack(x),
            encoder_out=source if source_packing is None else source_packing.pack(source),
            encoder_padding_mask=source_mask,
            encoder_packing=source_packing,
            # Outside training every application projects: there the analysis looks on.
            encoder_projected={} if self.training and not decoding and self.stack.shares_layers else None,
            packing=packing,
            padding_mask=padding_mask,
            self_padding_mask=padding_mask if self.left_pad_target else None,
            incremental_state=incremental_state,
            need_weights=need_attn,
            keep_hidden=return_all_hiddens or memory_length > 0,
            value_loss=value_losses.get("decoder"),
            cross_value_loss=value_losses.get("cross"),
            positions=None if self.indices is None else self.indices(prev_output_tokens.size(1), x.device),
            **past,
        )
        outputs = self.final_norm(out.x)
        if packing is None:
            outputs = outputs.transpose(0, 1)
        if not features_only:
            outputs = self.output_layer(outputs)
        if packing is not None:
            outputs = packing.unpack(outputs, batch_first=True)
        inner_states = out.hidden_states if return_all_hiddens else []
        extra = {"attn": [out.weights], "inner_states": inner_states, "aux_losses": out.losses}
        if memory_length:
            inputs = (x, *out.hidden_states[:-1])
            hidden = [remember(h, past.get("memory"), step, memory_length) for step, h in enumerate(inputs)]
            extra["memory"] = {"hidden": hidden, "position": start + x.size(0)}
        return outputs, extra

    def _check_streams(self, decoding: bool) -> None:
        if decoding:
            raise ValueError("decoding step by step has a state of its own, and no memory of earlier segments")
        for positions in (self.embedding.positions, self.indices):
            if positions is not None and not positions.continues:
                raise UsageError(
                    f"--position {positions.registered_name} numbers whole sentences, not segments of a stream: leave "
                    "--memory-length out, or choose another --position"
                )
        if self.left_pad_target:
            raise UsageError("a memory is for rows that are padded on the right: leave --left-pad-target out")

    def extract_features(self, prev_output_tokens: Tensor, encoder_out=None, incremental_state=None, **kwargs):
        """``forward`` up to the output layer."""
        return self(prev_output_tokens, encoder_out, incremental_state, features_only=True, **kwargs)

    def output_layer(self, features: Tensor) -> Tensor:
        """features (…, C) -> logits (…, V)."""
        weight = self.embedding.tokens.weight if self.output_weight is None else self.output_weight
        return F.linear(features, weight, self.output_bias)

    def max_positions(self) -> int:
        """The longest sequence that has positions; most kinds of them have no end, only ``--max-target-positions``."""
        return longest_of(self.embedding.positions, self.indices, self.stack)


def uniform_of_linear_(parameter: Tensor, inputs: int) -> None:
    """PyTorch's start of ``nn.Linear``, U(−1/√inputs, 1/√inputs), which the released code leaves to its output layers."""
    bound = inputs**-0.5
    nn.init.uniform_(parameter, -bound, bound)


def remember(h: Tensor, memory: Optional[Sequence[Tensor]], step: int, length: int) -> Tensor:
    """The last ``length`` positions of a step's ``memory`` (M, B, C) and of h (N, B, C) after it, without gradient."""
    if memory is not None and h.size(0) < length:
        h = torch.cat([memory[step].type_as(h), h])
    return h[-length:].detach()


@register_model("sg_transformer", dataclass=Config)
class SGTransformer(FairseqEncoderDecoderModel):
    """Encoder and decoder, trained and used through fairseq's commands."""

    #: Where fairseq's generator takes alignments from: a pass over the whole hypothesis, which then returns its weights.
    full_context_alignment = False

    @classmethod
    def build_model(cls, cfg, task) -> "SGTransformer":
        """A model for the task's dictionaries. Raises UsageError for a configuration that makes no sense (see ``resolve``),
        and for fairseq's default task, on which the numbers would be others."""
        if type(task) is TranslationTask:
            raise UsageError(
                "--task translation, fairseq's default, leaves out the last samples of an evaluation, has no start symbol "
                "in sources and logs no accuracy: choose --task sg_translation"
            )
        config = resolve(cfg)
        left_pad_target = getattr(task.cfg, "left_pad_target", True)
        encoder = SGTransformerEncoder(config, task.source_dictionary)
        decoder = SGTransformerDecoder(config, task.target_dictionary, left_pad_target=left_pad_target)
        return cls(encoder, decoder)

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor,
        prev_output_tokens: Tensor,
        return_all_hiddens: bool = False,
        features_only: bool = False,
        need_attn: bool = False,
        value_losses: Optional[Mapping[str, ValueLoss]] = None,
    ):
        """Logits (B, N, V) and the decoder's dict, with the encoder's and decoder's losses joined under ``aux_losses``.

        Args:
            src_tokens: (B, M). prev_output_tokens: (B, N), the target shifted right.
            value_losses: a loss on the Values of the attentions in each role (``encoder``, ``decoder``, ``cross``).
        """
        encoder_out = self.encoder(
            src_tokens,
            src_lengths,
            return_all_hiddens=return_all_hiddens,
            value_loss=(value_losses or {}).get("encoder"),
            keep_padding=counts_padding((value_losses or {}).values()),
        )
        logits, extra = self.decoder(
            prev_output_tokens,
            encoder_out,
            src_lengths=src_lengths,
            features_only=features_only,
            return_all_hiddens=return_all_hiddens,
            need_attn=need_attn or self.full_context_alignment,
            value_losses=value_losses,
        )
        extra["aux_losses"] = merge([encoder_out["aux_losses"], extra["aux_losses"]])
        return logits, extra

    def max_positions(self) -> Tuple[int, int]:
        """Of source and target; cross-attention, too, may have an end for the positions of the source."""
        cross = (m for m in self.decoder.modules() if isinstance(m, Attention) and m.role == "cross")
        return min(self.encoder.max_positions(), longest_of(*cross)), self.decoder.max_positions()


configuration.follow(SGTransformer, "sg_transformer")
for _name, _values in ARCHITECTURES.items():
    register_model_architecture("sg_transformer", _name)(preset(_values))
