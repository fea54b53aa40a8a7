"""``sg_transformer``: an encoder–decoder transformer whose mechanisms are options (``fairseq-train --arch
sg_transformer…``).

The shell is that of the reference implementations of the thesis (Csordás 2023, section 4 and appendix C): separate
embedding tables, output projection tied to the decoder's table with a free bias, post-norm, dropout in attention,
feedforward, residuals and embeddings. What its released code does and the text omits is an option;
``docs/attention.md`` says which is which.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fairseq.models import FairseqEncoderDecoderModel, register_model, register_model_architecture
from fairseq.tasks.translation import TranslationTask
from torch import Tensor

from fairseq_sg.errors import UsageError
from fairseq_sg.models.architectures import ARCHITECTURES, preset
from fairseq_sg.models.checks import MECHANISMS, check_and_fill
from fairseq_sg.models.config import Configuration
from fairseq_sg.models.decoder import SGTransformerDecoder
from fairseq_sg.models.encoder import SGTransformerEncoder, counts_padding, longest_of
from fairseq_sg.models.options import DecoderConfig, EncoderConfig, ShellConfig
from fairseq_sg.modules.attention import Attention
from fairseq_sg.modules.losses import ValueLoss, merge


@dataclass
class SGTransformerConfig(ShellConfig, DecoderConfig, EncoderConfig):
    """Sizes and mechanisms of ``sg_transformer``; the options of the mechanisms themselves are joined to these."""


configuration = Configuration(SGTransformerConfig, MECHANISMS, ARCHITECTURES)
Config = configuration.dataclass


def resolve(cfg) -> "Config":
    """A checked configuration with every default filled in; raises UsageError as ``check_and_fill`` does."""
    return check_and_fill(configuration.read(cfg))


@register_model("sg_transformer", dataclass=Config)
class SGTransformer(FairseqEncoderDecoderModel):
    """Encoder and decoder, trained and used through fairseq's commands."""

    #: Where fairseq's generator takes alignments from: a pass over the whole hypothesis, which then returns its
    #: weights.
    full_context_alignment = False

    @classmethod
    def build_model(cls, cfg, task) -> "SGTransformer":
        """A model for the task's dictionaries. Raises UsageError for a configuration that makes no sense (see
        ``resolve``), and for fairseq's default task, on which the numbers would be others."""
        if type(task) is TranslationTask:
            raise UsageError(
                "--task translation, fairseq's default, leaves out the last samples of an evaluation, has no start "
                "symbol "
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
        value_losses: Mapping[str, ValueLoss] | None = None,
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

    def max_positions(self) -> tuple[int, int]:
        """Of source and target; cross-attention, too, may have an end for the positions of the source."""
        cross = (m for m in self.decoder.modules() if isinstance(m, Attention) and m.role == "cross")
        return min(self.encoder.max_positions(), longest_of(*cross)), self.decoder.max_positions()


configuration.follow(SGTransformer, "sg_transformer")
for _name, _values in ARCHITECTURES.items():
    register_model_architecture("sg_transformer", _name)(preset(_values))
