"""A check of decoders with modules of the user's own: no output sees later words, and decoding equals the full pass.

Without it, an attention of a ``--user-dir`` that forgets to hide later keys trains, and its teacher-forced ``accuracy``
is not that of decoding. The modules of this project and of fairseq have tests for this, so their models are not run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from fairseq.models import FairseqEncoderDecoderModel
from torch import Tensor, nn

from fairseq_sg.errors import UsageError
from fairseq_sg.models.decoder import SGTransformerDecoder

KNOWN = ("fairseq", "fairseq_sg", "torch")
#: dtype -> the largest difference of two outputs, as a share of the largest output, that is rounding.
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-9}


def own_modules(model: nn.Module) -> list[str]:
    """The names of the classes of a model's modules that are neither of this project, nor of fairseq, nor of torch."""
    classes = {type(module) for module in model.modules()}
    return sorted(f"{cls.__module__}.{cls.__name__}" for cls in classes if cls.__module__.split(".")[0] not in KNOWN)


def check_decoder(model: nn.Module, words: int, device: torch.device) -> None:
    """Runs a decoder with modules of the user's own on two sentences of random words, in evaluation.

    Args:
        words: the number of words of the target, the special ones included. device: that of the model.

    Raises:
        UsageError: an output depends on a later word, or step-by-step decoding gives another output.
    """
    own = own_modules(model)
    decodes = isinstance(getattr(model, "decoder", None), SGTransformerDecoder)
    if not own or not decodes or next(model.parameters()).dtype not in TOLERANCES:
        return
    training = model.training
    model.eval()
    with torch.no_grad():
        decoder = _decoder(model, device)
        generator = torch.Generator().manual_seed(0)
        target = torch.randint(4, words, (2, int(min(6, model.decoder.max_positions()))), generator=generator)
        later = target.clone()
        later[:, -1] = 4 + (target[:, -1] - 3) % (words - 4)  # the next word
        whole, changed = (decoder(each.to(device), None) for each in (target, later))
        state: dict = {}
        steps = [decoder(target[:, : n + 1].to(device), state)[:, -1:] for n in range(target.size(1))]
    model.train(training)
    if _differ(whole[:, :-1], changed[:, :-1]):
        raise UsageError(
            f"this decoder, which has {', '.join(own)}, sees later words: its accuracy would not be that of decoding. "
            "Hide the keys after each query where self.causal is true (docs/extending.md)"
        )
    if _differ(whole, torch.cat(steps, dim=1)):
        raise UsageError(
            f"this decoder, which has {', '.join(own)}, gives other outputs word by word than at once: its accuracy "
            "would not be that of decoding. Compare extend, fold and read with attend (docs/extending.md)"
        )


def _decoder(model: nn.Module, device: torch.device) -> Callable[[Tensor, dict | None], Tensor]:
    """(words so far (B, N), decoding state or None) -> outputs (B, N, V), or those of the last word with a state."""
    source = {}
    if isinstance(model, FairseqEncoderDecoderModel):
        words = torch.full((2, 3), 4, device=device)
        source["encoder_out"] = model.encoder(words, src_lengths=torch.full((2,), 3, device=device))
    return lambda words, state: model.decoder(words, incremental_state=state, **source)[0]


def _differ(one: Tensor, other: Tensor) -> bool:
    return one.numel() > 0 and bool((one - other).abs().max() > TOLERANCES[one.dtype] * one.abs().max())
