"""``sg_transformer``: an encoder–decoder transformer whose mechanisms are options (``fairseq-train --arch
sg_transformer…``).

The shell is that of the reference implementations of the thesis (Csordás 2023, section 4 and appendix C): separate
embedding tables, output projection tied to the decoder's table with a free bias, post-norm, dropout in attention,
feedforward, residuals and embeddings. Differences between its text and its released code are options;
``docs/attention.md`` lists them.
"""

from collections.abc import Collection
from dataclasses import dataclass

from fairseq.models import FairseqEncoderDecoderModel
from fairseq.tasks.translation import TranslationTask
from torch import Tensor

from fairseq_sg.errors import UsageError
from fairseq_sg.models.architectures import ARCHITECTURES
from fairseq_sg.models.checks import MECHANISMS, check_and_fill
from fairseq_sg.models.config import Configuration
from fairseq_sg.models.decoder import SGTransformerDecoder
from fairseq_sg.models.encoder import SGTransformerEncoder, max_length
from fairseq_sg.models.options import DecoderConfig, EncoderConfig, ShellConfig
from fairseq_sg.modules.attention import Attention
from fairseq_sg.modules.losses import merge


@dataclass
class SGTransformerConfig(ShellConfig, DecoderConfig, EncoderConfig):
    """Sizes and mechanisms of ``sg_transformer``; the options of the mechanisms themselves are joined to these."""


configuration = Configuration(SGTransformerConfig, MECHANISMS, ARCHITECTURES)


def resolve(cfg):
    """A checked configuration with every default filled in; raises UsageError as ``check_and_fill`` does."""
    return check_and_fill(configuration.read(cfg))


@configuration.register("sg_transformer", resolve)
class SGTransformer(FairseqEncoderDecoderModel):
    """Encoder and decoder, trained and used through fairseq's commands."""

    #: Where fairseq's generator takes alignments from: a pass over the whole hypothesis, which then returns its
    #: weights.
    full_context_alignment = False
    #: The roles whose Values ``forward`` can return.
    attention_roles = ("encoder", "decoder", "cross")

    @classmethod
    def build_model(cls, cfg, task) -> "SGTransformer":
        """A model for the task's dictionaries. Raises UsageError for a configuration that makes no sense (see
        ``resolve``), and for fairseq's default task, on which the numbers would be others."""
        if type(task) is TranslationTask:
            raise UsageError(
                "--task translation, fairseq's default, leaves out the last samples of an evaluation, has no start "
                "symbol in sources and logs no accuracy: choose --task sg_translation"
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
        value_roles: Collection[str] = (),
    ):
        """Logits (B, N, V) and the decoder's dict, with losses and Values of encoder and decoder joined.

        Args:
            src_tokens: (B, M). prev_output_tokens: (B, N), the target shifted right.
            value_roles: the roles whose Values the dict has under ``values``, some of ``attention_roles``.
        """
        encoder_out = self.encoder(
            src_tokens,
            src_lengths,
            return_all_hiddens=return_all_hiddens,
            return_values="encoder" in value_roles,
        )
        logits, extra = self.decoder(
            prev_output_tokens,
            encoder_out,
            src_lengths=src_lengths,
            features_only=features_only,
            return_all_hiddens=return_all_hiddens,
            need_attn=need_attn or self.full_context_alignment,
            value_roles=value_roles,
        )
        for name in ("aux_losses", "values"):
            extra[name] = merge([encoder_out[name], extra[name]])
        return logits, extra

    def max_positions(self) -> tuple[int, int]:
        """The longest source and target; cross-attention, too, may limit the positions of the source."""
        cross = (m for m in self.decoder.modules() if isinstance(m, Attention) and m.role == "cross")
        return min(self.encoder.max_positions(), max_length(*cross)), self.decoder.max_positions()
