"""``sg_transformer_lm``: a language model, the decoder of ``sg_transformer`` with a memory of earlier segments.

A stream of text comes in segments of N tokens. Transformer-XL (Dai et al. 2019, section 3.2) keeps the inputs h_{n−1}
of each layer at the last M positions. SG stops the gradient:

    h̃_n = [SG(memory_n); h_n]          queries of h_n, keys and values of h̃_n

Here ``memory_n`` is the input of layer n, before its layer norm. The current layer norm and projections of keys and
values are applied to it, and get gradients through it; earlier segments get none. The memory is an argument and a
return value of ``forward``. ``--task sg_language_modeling`` carries it from batch to batch.

The language models of Csordás 2023, chapter 7, are pre-norm, with an output matrix that is not the embedding table, and
dropout after the embedding and before the output. Their attention is relative (``--decoder-attention relative
--attention-scale learned --attention-dropout 0``), their initialization ``--linear-init depth``. ``--arch
sg_transformer_lm_wt_s`` and the like have their sizes, norm and initialization.

With ``--task sg_tagging`` the same layers label every word from the words up to it.
"""

from dataclasses import dataclass, field
from typing import Any

from fairseq.models import FairseqLanguageModel
from fairseq.tasks.translation import TranslationTask
from torch import Tensor, nn

from fairseq_sg import ranges
from fairseq_sg.errors import UsageError
from fairseq_sg.models.architectures import LM_ARCHITECTURES
from fairseq_sg.models.checks import MECHANISMS, check_and_fill
from fairseq_sg.models.config import Configuration
from fairseq_sg.models.decoder import SGTransformerDecoder, uniform_of_linear_
from fairseq_sg.models.labels import InputConfig, labels_words, outputs_of, source_bits
from fairseq_sg.models.options import CausalConfig, ShellConfig
from fairseq_sg.modules.attention import Attention
from fairseq_sg.modules.cpu.dropout import Dropout
from fairseq_sg.modules.feedforward import summed_layers
from fairseq_sg.modules.feedforward.dense import scaled_


@dataclass
class SGTransformerLMConfig(InputConfig, ShellConfig, CausalConfig):
    """Sizes and mechanisms of ``sg_transformer_lm``; the options of the mechanisms themselves are joined to these."""

    decoder_head_dim: int | None = field(
        default=None,
        metadata={
            "help": "width of an attention head (default: --decoder-embed-dim / --decoder-attention-heads)",
            "least": 1,
        },
    )
    linear_init: str = field(
        default="mechanism",
        metadata={
            "help": "start of the linear layers of attention and of dense feedforward layers: that of each "
            "'mechanism', or 'depth', a truncated normal of standard deviation √(2/(layers · fan-in)) with zero "
            "biases, as the reference's language models (layers counts every loop, and is 1 in a post-norm model)",
            "choices": ("mechanism", "depth"),
        },
    )


#: The projections of an attention; a kind may lack some.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj", "pos_proj")

configuration = Configuration(SGTransformerLMConfig, MECHANISMS, LM_ARCHITECTURES)


def resolve(cfg) -> Any:
    """A checked configuration with every default filled in. Raises UsageError for one that makes no sense."""
    config = check_and_fill(configuration.read(cfg), "embedding_dropout")
    for option in ("attention_init", "ffn_init") if config.linear_init == "depth" else ():
        if getattr(config, option) != "reference":
            raise UsageError(
                f"{ranges.flag(option)} {getattr(config, option)} has no effect with --linear-init depth: choose "
                "--linear-init mechanism"
            )
    if config.linear_init == "depth":
        config.ffn_init = "scaled"
    config.untied_output = True
    return config


class SGLanguageDecoder(SGTransformerDecoder):
    """The decoder without an encoder; rows are padded on the right unless ``left_pad``. Other arguments: see there."""

    def __init__(self, config, dictionary, left_pad: bool = False, outputs: int | None = None, bits=None):
        super().__init__(config, dictionary, left_pad, outputs, bits)
        self.output_dropout = Dropout(config.dropout)
        uniform_of_linear_(self.output_weight, config.decoder_embed_dim)
        if config.linear_init == "depth":
            self._scale_attentions(summed_layers(config, "decoder"))

    def _scale_attentions(self, layers: int) -> None:
        attentions = [module for module in self.stack.modules() if isinstance(module, Attention)]
        # The projections alone: a feature map, a gate or a retrieval in an attention keeps the start of its method.
        projections = (getattr(attention, name, None) for attention in attentions for name in PROJECTIONS)
        for linear in (module for module in projections if isinstance(module, nn.Linear)):
            scaled_(linear, layers)

    def output_layer(self, features: Tensor) -> Tensor:
        """features (…, C) -> logits (…, V), with dropout before."""
        return super().output_layer(self.output_dropout(features))


@configuration.register("sg_transformer_lm", resolve)
class SGTransformerLM(FairseqLanguageModel):
    """See the module's docstring; for this project's task and for fairseq's ``language_modeling``.

    ``forward`` is the decoder's (``models.decoder``): logits (B, N, V) of the next tokens, and its dict.

    Args:
        src_tokens: (B, N), each row the tokens of a stream that come after those of the call before, padded on the
            right.
        value_roles: ``("decoder",)`` for the Values of this segment under ``values``.
        memory: ``extra["memory"]`` of that call; None at the start of the streams.
        memory_length: how many positions the next call is to remember; 0 for none, and no ``memory`` in the dict.

    Raises:
        UsageError: a memory for a mechanism without.
    """

    #: What tells ``sg_language_modeling`` that ``forward`` has the arguments of a memory.
    remembers = True
    #: The roles whose Values ``forward`` can return.
    attention_roles = ("decoder",)

    @classmethod
    def build_model(cls, cfg, task) -> "SGTransformerLM":
        """A model for the task's dictionary. Raises UsageError for a configuration that makes no sense (see
        ``resolve``).
        """
        config = resolve(cfg)
        if labels_words(task):
            bits = source_bits(config, task)
            return cls(
                SGLanguageDecoder(config, task.source_dictionary, task.cfg.left_pad_source, outputs_of(task), bits)
            )
        if config.input_embedding is not None:
            raise UsageError("--input-embedding is for --task sg_tagging: leave it out")
        if isinstance(task, TranslationTask):
            raise UsageError("this --arch is a language model: choose --task sg_language_modeling")
        return cls(SGLanguageDecoder(config, task.source_dictionary, outputs=len(task.target_dictionary)))
