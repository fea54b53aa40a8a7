"""The encoder of ``sg_transformer``: embedding and a stack of layers."""

from collections.abc import Iterable

from fairseq.models import FairseqEncoder
from torch import Tensor, nn

from fairseq_sg.models.checks import layer_names
from fairseq_sg.modules import compilation
from fairseq_sg.modules.attention import ATTENTION_REGISTRY
from fairseq_sg.modules.depth import build_stack
from fairseq_sg.modules.embedding import TokenEmbedding
from fairseq_sg.modules.feature_maps import FeatureMap
from fairseq_sg.modules.layers import EncoderLayer
from fairseq_sg.modules.losses import ValueLoss
from fairseq_sg.modules.packing import Packing
from fairseq_sg.modules.position import Position, build_embedded_position, build_indices


def side_embedding(config, side: str, dictionary) -> TokenEmbedding:
    """The embedding of the ``encoder`` or ``decoder``, without absolute positions where all its attentions bring their
    own.
    """
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


def longest_of(*modules: nn.Module | None) -> int:
    """The length of the longest sequence that all positions and feature maps in some modules are defined for, 10⁹ where
    there is none."""
    parts = (part for module in modules if module is not None for part in module.modules())
    limits = (part.longest for part in parts if isinstance(part, (Position, FeatureMap)))
    return min((limit for limit in limits if limit is not None), default=int(1e9))


def counts_padding(value_losses: Iterable[ValueLoss | None]) -> bool:
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
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
        token_embeddings: Tensor | None = None,
        value_loss: ValueLoss | None = None,
        keep_padding: bool = False,
    ) -> dict[str, list[Tensor]]:
        """src_tokens (B, M), padded on either side -> fairseq's dict of the encoder's output, with ``aux_losses``
        added.

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

    def reorder_encoder_out(self, encoder_out: dict[str, list[Tensor]], new_order: Tensor) -> dict[str, list[Tensor]]:
        """Selects and orders the sentences in everything the encoder returned; losses are no sentences' and stay as
        they are.
        """
        return {
            key: value
            if key == "aux_losses"
            else [x.index_select(self._batch_dim.get(key, 0), new_order) for x in value]
            for key, value in encoder_out.items()
        }

    def max_positions(self) -> int:
        """The longest sequence that has positions; most kinds of them have no end, only ``--max-source-positions``."""
        return longest_of(self.embedding.positions, self.indices, self.stack)
