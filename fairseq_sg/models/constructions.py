"""Transformers with hand-set weights that recognize PARITY and FIRST (Chiang & Cholak 2022, sections 3 and 4).

PARITY: strings of 0 and 1 with an odd number of ones. FIRST: strings that begin with 1. Both models are ordinary
``sg_encoder`` classifiers of two layers, and right at every length. ``docs/constructions.md`` has the argument beside
the weights.

    layer_norm_eps=None   no norm: the logit shrinks as 1/N² (PARITY) or 1/N (FIRST), N the number of columns
    layer_norm_eps=0      layer norm makes the logit ±√(d/2), d the model's width, at every length
    log_length=True       attention logits times ln N: with a sharpness of 1 or more, FIRST's logit has a bound

A layer norm subtracts the mean. The models with layer norm therefore have twice the width: the second half of every
state is the negative of the first, and its mean is 0 (section 4.1).

The weights stand in the tables ``PARITY`` and ``FIRST``, every other weight is 0. A feature is named by what it holds.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from fairseq.data import Dictionary
from torch import Tensor

from fairseq_sg.errors import UsageError
from fairseq_sg.models.checks import layer_names
from fairseq_sg.models.encoder import SGTransformerEncoder
from fairseq_sg.models.sg_encoder import SGEncoder
from fairseq_sg.modules.norm import LayerNorm

CLS = "CLS"


class Weight(NamedTuple):
    """One weight that is not 0.

    Attributes:
        part: a key of ``PARTS`` after the number of its layer, as in ``2 query``, or ``embedding`` or ``class``.
        row, column: names of features, or ``(head, number)``, both from 1, or the number of a hidden unit from 1, or a
            symbol, or a class. None for the column of a bias.
        value: a number, or ``c``, the weight that the sharpness sets.
    """

    part: str
    row: object
    column: object
    value: float | str


class Sentences(NamedTuple):
    """The columns around the bits of a string, and the symbol that the answer is read from.

    Attributes:
        before, after: symbols.
        read: the first symbol of ``before``, or the last of ``after``.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    read: str

    def of(self, string: str) -> list[str]:
        """The symbols of a sentence."""
        return [*self.before, *string, *self.after]


@dataclass(frozen=True)
class Construction:
    """Sizes, names and weights of a model.

    Attributes:
        features: what the features of a state hold, in their order; without layer norm, the width is their number.
        position, readout, heads: options of ``sg_encoder``.
        sentences: those of the paper.
        weights: without layer norm. normed: with it, instead of ``weights``.
    """

    features: tuple[str, ...]
    position: str
    readout: str
    heads: int
    sentences: Sentences
    weights: tuple[Weight, ...]
    normed: tuple[Weight, ...]


PARTS = {
    "query": "self_attn.q_proj.weight",
    "key": "self_attn.k_proj.weight",
    "value": "self_attn.v_proj.weight",
    "output": "self_attn.out_proj.weight",
    "hidden": "update.ffn.fc1.weight",
    "hidden bias": "update.ffn.fc1.bias",
    "update": "update.ffn.fc2.weight",
}
#: The parts that write to a state, whose rows have a mirror.
WRITERS = ("output", "update")

_SYMBOLS = (
    Weight("embedding", "0", "0", 1),
    Weight("embedding", "1", "1", 1),
    Weight("embedding", CLS, CLS, 1),
)
_PARITY = (
    *_SYMBOLS,
    # Every column attends to all N alike: the mean of "1" is k/N, k the number of ones, that of CLS is 1/N.
    Weight("1 value", (1, 1), "1", 1),
    Weight("1 value", (1, 2), CLS, 1),
    Weight("1 output", "k/N", (1, 1), 1),
    Weight("1 output", "1/N", (1, 2), 1),
    # ReLU(k − i − 1) − 2 ReLU(k − i) + ReLU(k − i + 1) is 1 where i = k, and 0 elsewhere; all of it over N.
    *(Weight("1 hidden", unit, "i/N", -1) for unit in (1, 2, 3)),
    *(Weight("1 hidden", unit, "k/N", 1) for unit in (1, 2, 3)),
    Weight("1 hidden", 1, "1/N", -1),
    Weight("1 hidden", 3, "1/N", 1),
    Weight("1 update", "[i=k]/N", 1, 1),
    Weight("1 update", "[i=k]/N", 2, -2),
    Weight("1 update", "[i=k]/N", 3, 1),
    # CLS prefers the even positions in head 1, the odd ones in head 2: which of them sees column k?
    *(Weight("2 query", (head, 1), CLS, "c") for head in (1, 2)),
    Weight("2 key", (1, 1), "cos(πi)", 1),
    Weight("2 key", (2, 1), "cos(πi)", -1),
    *(Weight("2 value", (head, 1), "[i=k]/N", 1) for head in (1, 2)),
    Weight("2 output", "s", (1, 1), -1),
    Weight("2 output", "s", (2, 1), 1),
    Weight("class", "1", "s", 1),
)
PARITY = Construction(
    features=("i/N", "cos(πi)", "0", "1", CLS, "k/N", "1/N", "[i=k]/N", "s", "unused"),
    position="fraction",
    readout="last",
    heads=2,
    sentences=Sentences((), (CLS,), CLS),
    weights=_PARITY,
    normed=_PARITY,
)
_ATTEND_TO_FIRST = (
    # CLS prefers the first symbol; it reads ½ if that is a 1, else −½.
    Weight("2 query", (1, 1), CLS, "c"),
    Weight("2 key", (1, 1), "[i=1]", 1),
    Weight("2 value", (1, 1), "[i=1] 1", 1),
    Weight("2 value", (1, 1), "[i=1]", -0.5),
    Weight("2 output", "s", (1, 1), 1),
    Weight("class", "1", "s", 1),
)
FIRST = Construction(
    features=("[i=1]", "0", "1", CLS, "[i=1] 1", "s"),
    position="indicator",
    readout="first",
    heads=1,
    sentences=Sentences((CLS,), (), CLS),
    weights=(
        *_SYMBOLS,
        # ReLU(x_1 + x_[i=1] − 1): is this column the first symbol, and is it a 1?
        Weight("1 hidden", 1, "1", 1),
        Weight("1 hidden", 1, "[i=1]", 1),
        Weight("1 hidden bias", 1, None, -1),
        Weight("1 update", "[i=1] 1", 1, 1),
        *_ATTEND_TO_FIRST,
    ),
    normed=(
        *_SYMBOLS,
        # The same without a bias, which a layer norm would not scale with the state.
        Weight("1 hidden", 1, "[i=1]", 1),
        Weight("1 hidden", 1, "0", -1),
        Weight("1 hidden", 1, CLS, -1),
        Weight("1 update", "[i=1] 1", 1, 1),
        *_ATTEND_TO_FIRST,
    ),
)


def parity(layer_norm_eps: float | None = None, **options) -> SGEncoder:
    """The model of section 3.2, and with layer norm that of section 4.1. The released code's attention: c is 1.

    Args:
        layer_norm_eps: ε of the layer norms; None for no norm.
        options: ``dictionary``, ``classes``, ``sentences`` and ``dtype`` of :func:`build`.
    """
    return build(PARITY, layer_norm_eps, **options)


def first(
    layer_norm_eps: float | None = None, log_length: bool = False, sharpness: float = 1.0, **options
) -> SGEncoder:
    """The model of section 3.3, with log-length scaled attention that of section 5.3.

    Args:
        layer_norm_eps: ε of the layer norms; None for no norm.
        log_length: attention logits times ln N, so that the answer is bounded away from 0 (Proposition 3).
        sharpness: the paper's c: without layer norm, CLS attends to the first symbol with weight ∝ e^c, to others with
            1. The released code has c = 1/√d.
        options: ``dictionary``, ``classes``, ``sentences`` and ``dtype`` of :func:`build`.
    """
    return build(FIRST, layer_norm_eps, log_length=log_length, sharpness=sharpness, **options)


def build(
    construction: Construction,
    layer_norm_eps: float | None = None,
    *,
    log_length: bool = False,
    sharpness: float | None = None,
    dictionary: Dictionary | None = None,
    classes: Sequence[str] = ("0", "1"),
    sentences: Sentences | None = None,
    dtype: torch.dtype = torch.float64,
) -> SGEncoder:
    """An ``sg_encoder`` with the weights of a construction.

    Args:
        layer_norm_eps, log_length: as in :func:`first`.
        sharpness: c/√(width of a head); None for the released code's c = 1.
        dictionary: of the source; one with 0, 1 and CLS unless given.
        classes: the words of the two classes in their order.
        sentences: the columns around a string, if they are not the paper's (:func:`sentences_around`). The symbol that
            is read does what CLS does in the paper. Every other symbol that is not a bit is like a 0.
        dtype: of the parameters.

    Raises:
        UsageError: an ε below 0, or a dictionary or classes without 0 and 1.
    """
    sentences = sentences or construction.sentences
    dictionary = dictionary or bits_dictionary()
    missing = [symbol for symbol in ("0", "1", sentences.read) if symbol not in dictionary]
    if missing or sorted(classes) != ["0", "1"]:
        raise UsageError("the construction is for data whose words are 0, 1 and CLS, and whose classes are 0 and 1")
    options = _options(construction, layer_norm_eps, len(sentences.before))
    if log_length:
        options["logit_scale"] = "log_length"
    task = SimpleNamespace(source_dictionary=dictionary, num_classes=len(classes))
    model = SGEncoder.build_model(argparse.Namespace(**options), task).to(dtype)
    model.sentences = sentences
    c = 1.0 if sharpness is None else sharpness * math.sqrt(options["encoder_embed_dim"] // construction.heads)
    _set_weights(model, _entries(construction, layer_norm_eps is not None), c, classes)
    return model


def _options(construction: Construction, layer_norm_eps: float | None, before: int) -> dict[str, Any]:
    """The options of ``sg_encoder``; ``before`` is the number of columns before the bits of a string."""
    width = len(construction.features)
    hidden = max(weight.row for weight in construction.weights if weight.part == "1 hidden")
    options = {
        "encoder_layers": 2,
        "encoder_embed_dim": width,
        "encoder_ffn_embed_dim": hidden,
        "encoder_attention_heads": construction.heads,
        "readout": construction.readout,
        "embedding_scaling": "none",
        "dropout": 0.0,
        "norm": "none",
        "position": construction.position,
    }
    if layer_norm_eps is not None:
        options |= {"encoder_embed_dim": 2 * width, "encoder_ffn_embed_dim": 2 * width}
        options |= {"norm": "layer", "layer_norm_eps": layer_norm_eps, "mirrored_positions": True}
    if construction.position == "indicator":
        options["indicator_index"] = before
    return options


@torch.no_grad()
def _set_weights(model: SGEncoder, entries: Iterable[Weight], c: float, classes: Sequence[str]) -> None:
    """Makes all parameters 0 but the gains of layer norms and the ``entries``, of which some have the value ``c``."""
    dictionary = model.encoder.dictionary
    for parameter in model.parameters():
        parameter.zero_()
    for norm in (module for module in model.modules() if isinstance(module, LayerNorm)):
        norm.weight.fill_(1.0)
    for part, row, column, value in entries:
        parameter, index = _place(model, part, row, column, classes)
        parameter[index] = c if value == "c" else value
    # Every other symbol that is not a bit is like a 0.
    table = model.encoder.embedding.tokens.weight
    for symbol in range(len(dictionary)):
        if dictionary[symbol] not in ("0", "1", model.sentences.read) and symbol != dictionary.pad():
            table[symbol] = table[dictionary.index("0")]


def _entries(construction: Construction, normed: bool) -> Iterator[Weight]:
    """The weights with numbers for the names of features and heads, and with their mirrors under layer norm."""
    features = construction.features
    half = len(features)
    head = half * (2 if normed else 1) // construction.heads
    number = {name: index for index, name in enumerate(features)}

    def index(name: object, of_feature: bool) -> object:
        if isinstance(name, tuple):
            return (name[0] - 1) * head + name[1] - 1
        return name - 1 if isinstance(name, int) else number[name] if of_feature else name

    for part, row, column, value in construction.normed if normed else construction.weights:
        kind = part.partition(" ")[2] or part
        entry = Weight(part, index(row, kind in WRITERS), index(column, True) if column is not None else None, value)
        yield entry
        if normed and kind in WRITERS:
            yield entry._replace(row=entry.row + half, value=-value)
        elif normed and kind == "embedding":
            yield entry._replace(column=entry.column + half, value=-value)
    if normed:
        # The update of layer 2 is the negative of every feature but the answer: the norm then sees nothing else.
        for unit in range(2 * half):
            yield Weight("2 hidden", unit, unit, 1)
            for feature in {unit % half, unit % half + half} - {number["s"], number["s"] + half}:
                yield Weight("2 update", feature, unit, -1 if feature == unit else 1)


def _place(model: SGEncoder, part: str, row, column, classes: Sequence[str]):
    """The parameter of an entry and the index in it."""
    if part == "embedding":
        symbol = model.sentences.read if row == CLS else row
        return model.encoder.embedding.tokens.weight, (model.encoder.dictionary.index(symbol), column)
    if part == "class":
        return model.classifier.weight, (classes.index(row), column)
    layer, _, kind = part.partition(" ")
    parameter = model.encoder.stack.layers[int(layer) - 1].get_parameter(PARTS[kind])
    return parameter, row if column is None else (row, column)


def bits_dictionary() -> Dictionary:
    """A dictionary with the words 0, 1 and CLS."""
    dictionary = Dictionary()
    for symbol in ("0", "1", CLS):
        dictionary.add_symbol(symbol)
    return dictionary


def sentences_around(symbols: Sequence[str], readout: str) -> Sentences:
    """The columns around the bits of a sentence, such as ``<s> 0 1 CLS </s>``, read as ``--readout`` says.

    Raises UsageError for a sentence without bits, or whose column that is read is one.
    """
    bits = [place for place, symbol in enumerate(symbols) if symbol in ("0", "1")]
    read = symbols[0 if readout == "first" else -1] if symbols else None
    if not bits or read in ("0", "1"):
        raise UsageError(f"{' '.join(symbols)!r} is no string of 0 and 1 with a symbol beside it to read")
    return Sentences(tuple(symbols[: bits[0]]), tuple(symbols[bits[-1] + 1 :]), read)


def logits(model: SGEncoder, strings: Sequence[str]) -> Tensor:
    """The logit s of every string (B,): it is accepted where s > 0. One pass, padded on the right."""
    dictionary = model.encoder.dictionary
    rows = [[dictionary.index(symbol) for symbol in model.sentences.of(string)] for string in strings]
    longest = max(map(len, rows))
    device = model.classifier.weight.device
    tokens = torch.tensor([row + [dictionary.pad()] * (longest - len(row)) for row in rows], device=device)
    of_classes = model(tokens)[0]  # (B, 2)
    return of_classes[:, 1] - of_classes[:, 0]


def sharpen(model: SGEncoder, bits: float) -> SGEncoder:
    """The model with a cross-entropy of ``bits`` on every string that it classifies right (Proposition 2).

    One more layer leaves s and −s of the state, s the model's logit. A layer norm with ε = 0 makes ±√(d/2) of them, d
    the width, which the output layer multiplies by a constant.

    Args:
        model: a classifier of two classes with separate post-norm layers, whose ε is 0 and whose feedforward layers
            are dense with ReLU.
        bits: the cross-entropy, above 0 and below 1.

    Raises:
        UsageError: another model, or other ``bits``.
    """
    if not 0 < bits < 1:
        raise UsageError(f"a cross-entropy of {bits} bits is out of reach: choose one above 0 and below 1")
    config, width = model.config, model.config.encoder_embed_dim
    needed = {"depth": "separate", "pre_norm": False, "norm": "layer", "layer_norm_eps": 0, "ffn_activation": "relu"}
    wrong = [name for name, value in needed.items() if getattr(config, name) != value]
    of_layers = {"encoder_ffn": "dense", "encoder_update": "residual"}
    wrong += [name for name, kind in of_layers.items() if set(layer_names(config, name)) != {kind}]
    if wrong or model.classifier.out_features != 2:
        raise UsageError(
            "only classifiers of two classes with separate post-norm layers, dense ReLU feedforward layers and "
            f"--layer-norm-eps 0 can be sharpened; this one differs in {', '.join(wrong) or 'its classes'}"
        )
    deeper = copy.copy(config)
    deeper.encoder_layers = config.encoder_layers + 1
    deeper.encoder_ffn_embed_dim = max(config.encoder_ffn_embed_dim, 2 * width + 2)
    for option in ("encoder_attention", *of_layers):
        names = layer_names(config, option)
        setattr(deeper, option, ",".join([*names, names[-1]]))
    weight = model.classifier.weight
    sharp = SGEncoder(deeper, SGTransformerEncoder(deeper, model.encoder.dictionary), 2).to(weight)
    sharp.train(model.training)
    sharp.sentences = getattr(model, "sentences", None)
    with torch.no_grad():
        for parameter in sharp.parameters():
            parameter.zero_()
        entries = sharp.encoder.state_dict()  # buffers too
        for name, value in model.encoder.state_dict().items():
            target = entries[name]
            target[tuple(slice(size) for size in value.shape)] = value
        _keep_answer(sharp, model)
        scale = -math.log(math.expm1(bits * math.log(2))) / math.sqrt(width / 2)
        sharp.classifier.weight[1, 0] = scale
    return sharp


def _keep_answer(sharp: SGEncoder, model: SGEncoder) -> None:
    """The new layer of ``sharpen``: its update adds s to feature 0, −s to feature 1, and the negative of the rest."""
    *_, old, new = sharp.encoder.stack.layers
    width = model.classifier.in_features
    norm = old.update.residual.norm
    # The last norm's z goes through the new attention's norm unchanged, and its γ ⊙ z + β into the new logit.
    difference = model.classifier.weight[1] - model.classifier.weight[0]  # (C,)
    offset = model.classifier.bias[1] - model.classifier.bias[0] + difference @ norm.bias
    difference = difference * norm.weight
    norm.weight.fill_(1.0)
    norm.bias.zero_()
    for residual in (new.self_attn_residual, new.update.residual):
        residual.norm.weight.fill_(1.0)
    eye = torch.eye(width, dtype=difference.dtype, device=difference.device)
    ffn = new.update.ffn
    for sign, rows in ((1, slice(0, width)), (-1, slice(width, 2 * width))):
        ffn.fc1.weight[rows] = sign * eye
        ffn.fc2.weight[:, rows] = -sign * eye
    for sign, row in ((1, 2 * width), (-1, 2 * width + 1)):
        ffn.fc1.weight[row] = sign * difference
        ffn.fc1.bias[row] = sign * offset
        ffn.fc2.weight[0, row] = sign
        ffn.fc2.weight[1, row] = -sign
