"""PARITY and FIRST by hand-set weights: closed forms, an oracle in numpy, all lengths, padding, mutations."""

from __future__ import annotations

import math
import os
import random
from dataclasses import replace

import pytest
import torch

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg.construct import CONSTRUCTIONS, expected
from fairseq_sg.errors import UsageError
from fairseq_sg.models import constructions
from fairseq_sg.models.constructions import FIRST, PARITY, Sentences, build, first, logits, parity, sharpen
from fairseq_sg.models.sg_encoder import SGEncoder
from helpers import chiang_cholak
from helpers.models import build as build_model

EPSILONS = [None, 1e-3, 1e-5, 0.0]
#: The whole range takes minutes: SG_ALL_LENGTHS=1.
LENGTHS = [*range(1, 301), 1000] if os.environ.get("SG_ALL_LENGTHS") else [*range(1, 65), 100, 171]
FOLDERS = {"parity": Sentences(("<s>",), ("CLS", "</s>"), "</s>"), "first": Sentences(("<s>", "CLS"), ("</s>",), "<s>")}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def close(got: torch.Tensor, want: list[float], rtol: float = 1e-9) -> None:
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=rtol, atol=1e-15)


def ones_first(length: int, ones: int) -> str:
    return "1" * ones + "0" * (length - ones)


def strings_of(length: int, count: int) -> list[str]:
    draw = random.Random(length)
    return ["".join(draw.choices("01", k=length)) for _ in range(count)]


def right(model, name: str, strings: list[str]) -> bool:
    accept = [s[0] == "1" if name == "first" else s.count("1") % 2 == 1 for s in strings]
    return bool(((logits(model, strings) > 0) == torch.tensor(accept)).all())


# Closed forms (the paper's sections 3.2 and 3.3).


def parity_without_norm(n: int, k: int) -> float:
    columns, beta = n + 1, 1 / math.sqrt(5)
    even, odd = (columns + 1) // 2, columns // 2
    sign = 1 if k % 2 else -1
    to_odd = math.exp(sign * beta) / (even * math.exp(-beta) + odd * math.exp(beta))
    to_even = math.exp(-sign * beta) / (even * math.exp(beta) + odd * math.exp(-beta))
    return (to_odd - to_even) / columns


@pytest.mark.parametrize("n", [1, 2, 3, 10, 41, 100])
def test_parity_without_norm_equals_its_closed_form(n):
    got = logits(parity(), [ones_first(n, k) for k in range(n + 1)])
    close(got, [parity_without_norm(n, k) for k in range(n + 1)])
    if n % 2:  # an even number of columns
        close(got.abs(), [2 * math.tanh(1 / math.sqrt(5)) / (n + 1) ** 2] * (n + 1))


@pytest.mark.parametrize("sharpness", [1.0, 0.3, 5.0])
@pytest.mark.parametrize("n", [1, 2, 10, 100])
def test_first_without_norm_equals_its_closed_form(n, sharpness):
    size = 0.5 * math.exp(sharpness) / (math.exp(sharpness) + n)
    close(logits(first(sharpness=sharpness), [ones_first(n, n), ones_first(n, 0)]), [size, -size])


@pytest.mark.parametrize("n", [1, 10, 100, 1000])
def test_log_length_bounds_first_away_from_0(n):
    """Proposition 3: with e^c = N, |s| = N/(2(2N − 1)) > ¼."""
    size = (n + 1) / (2 * (2 * n + 1))
    assert size > 0.25
    close(logits(first(log_length=True), [ones_first(n, 1), ones_first(n, 0)]), [size, -size])


def test_a_lower_sharpness_is_not_enough_for_a_bound():
    """The released code has c = 1/√d in the paper's terms."""
    found = [logits(first(log_length=True, sharpness=6**-0.5), ["1" * n]).item() for n in (10, 100, 1000)]
    assert found[0] > 2 * found[1] > 4 * found[2]


@pytest.mark.parametrize("n", [1, 2, 10, 100])
def test_without_eps_the_logit_is_the_same_at_every_length(n):
    want = [math.sqrt(10) if k % 2 else -math.sqrt(10) for k in range(n + 1)]
    close(logits(parity(0.0), [ones_first(n, k) for k in range(n + 1)]), want)
    close(logits(first(0.0), [ones_first(n, 1), ones_first(n, 0)]), [math.sqrt(6), -math.sqrt(6)])


# An oracle that knows no torch.


@pytest.mark.parametrize("eps", EPSILONS)
@pytest.mark.parametrize("n", [1, 2, 7, 40])
def test_the_oracle(n, eps):
    strings = strings_of(n, 5)
    close(logits(parity(eps), strings), [chiang_cholak.parity(s, eps) for s in strings], 1e-8)
    for log_length in (False, True):
        model = build(FIRST, eps, log_length=log_length)
        close(logits(model, strings), [chiang_cholak.first(s, eps, 1.0, log_length) for s in strings], 1e-8)


@pytest.mark.parametrize(
    "name, eps, bits",
    [  # at lengths 10, 30, 100, 300 and, for FIRST, 1000; from an independent computation in numpy
        ("parity", None, "0.99500 0.99937 0.99994 0.999993"),
        ("parity", 1e-3, "0.5174 0.9241 0.9927 0.9992"),
        ("parity", 1e-5, "0.0725 0.4437 0.9290 0.9918"),
        ("parity", 1e-7, "0.0599 0.0679 0.4672 0.9206"),
        ("parity", 1e-9, "0.0598 0.0599 0.0689 0.4266"),
        ("parity", 1e-12, "0.0598 0.0598 0.0598 0.0605"),
        ("parity", 0.0, "0.05981 0.05981 0.05981 0.05981"),
        ("first", None, "0.9536 0.9829 0.99467 0.9982 0.99946"),
        ("first", 1e-3, "0.1457 0.2545 0.5800 0.8301 0.9459"),
        ("first", 1e-5, "0.1197 0.1212 0.1362 0.2376 0.5713"),
        ("first", 1e-7, "0.1195 0.1195 0.1196 0.1210 0.1354"),
        ("first", 0.0, "0.11947 0.11947 0.11947 0.11947 0.11947"),
        ("first, log length", None, "0.926 0.958 0.978 0.988 0.994"),
        ("first, log length", 1e-5, "0.1195 0.1195 0.1195 0.1195 0.1195"),
    ],
)
def test_cross_entropies(name, eps, bits):
    """With the released code's c = 1 in both."""
    name, _, scaled = name.partition(", ")
    model = build(CONSTRUCTIONS[name], eps, log_length=bool(scaled))
    for n, value in zip((10, 30, 100, 300, 1000), bits.split()):
        found = expected(model, name, n)
        unit = 0.1 ** len(value.partition(".")[2])
        assert found["bits"] == pytest.approx(float(value), abs=0.51 * unit)
        assert found["accuracy"] == pytest.approx(100)


def test_cross_entropy_falls_with_eps():
    for name, least in (("parity", 0.059811), ("first", 0.119473)):
        models = [build(CONSTRUCTIONS[name], eps) for eps in (1e-1, 1e-3, 1e-5, 1e-7, 1e-9, 1e-12, 0.0)]
        found = [expected(model, name, 40)["bits"] for model in models]
        assert found == sorted(found, reverse=True) and found[-1] == pytest.approx(least, abs=1e-6)


# Every length.


@pytest.mark.parametrize("eps", [None, 1e-5, 0.0])
@pytest.mark.parametrize("name", sorted(CONSTRUCTIONS))
def test_all_numbers_of_ones_are_right(name, eps):
    model = build(CONSTRUCTIONS[name], eps)
    for n in LENGTHS:
        strings = [ones_first(n, k)[:: -1 if k % 3 else 1] for k in range(n + 1)]
        assert all(right(model, name, strings[start : start + 64]) for start in range(0, n + 1, 64)), n


@pytest.mark.parametrize("eps", [None, 1e-5, 0.0])
@pytest.mark.parametrize("name", sorted(CONSTRUCTIONS))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_long_strings_are_right(name, eps, dtype):
    construction = {"parity": PARITY, "first": FIRST}[name]
    model = build(construction, eps, dtype=dtype)
    for n in (*range(70, 300, 10), 299, 1000):
        assert right(model, name, [ones_first(n, k) for k in (0, 1, 2, n // 2, n // 2 + 1, n - 1, n)])


@pytest.mark.parametrize("eps", EPSILONS)
def test_parity_does_not_depend_on_the_order(eps):
    strings = ["".join(random.Random(seed).sample("1" * 7 + "0" * 14, 21)) for seed in range(8)]
    assert len(set(strings)) == 8
    close(logits(parity(eps), strings), [logits(parity(eps), [ones_first(21, 7)]).item()] * 8)


# Batches, padding, other columns around the bits, gradients.


@pytest.mark.parametrize("eps", EPSILONS)
@pytest.mark.parametrize("name", sorted(CONSTRUCTIONS))
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("folder", [False, True])
def test_padding_changes_nothing(name, eps, left, folder):
    sentences = FOLDERS[name] if folder else None
    model = {"parity": parity, "first": first}[name](eps, sentences=sentences)
    strings = [string for n in (1, 9, 4, 30) for string in strings_of(n, 2)]
    alone = [logits(model, [string]).item() for string in strings]
    if not left:
        close(logits(model, strings), alone)
    rows = [[model.encoder.dictionary.index(symbol) for symbol in model.sentences.of(s)] for s in strings]
    longest = max(map(len, rows)) + 3  # padding in every row
    pad = model.encoder.dictionary.pad()
    padded = [[pad] * (longest - len(r)) + r if left else r + [pad] * (longest - len(r)) for r in rows]
    for training in (False, True):  # in training, a batch is packed
        of_classes = model.train(training)(torch.tensor(padded))[0]
        close(of_classes[:, 1] - of_classes[:, 0], alone)
    assert right(model, name, strings)


@pytest.mark.parametrize("eps", EPSILONS)
@pytest.mark.parametrize("name", sorted(CONSTRUCTIONS))
def test_other_columns_around_the_bits(name, eps):
    for sentences in (FOLDERS[name], FOLDERS[name]._replace(before=FOLDERS[name].before[-1:], after=("CLS", "</s>"))):
        read = sentences.before[0] if name == "first" else sentences.after[-1]
        model = {"parity": parity, "first": first}[name](eps, sentences=sentences._replace(read=read))
        for n in (1, 2, 33):
            assert right(model, name, [ones_first(n, k) for k in range(n + 1)])
    if name == "parity" and eps is None:  # the other columns are like zeros
        model = parity(sentences=FOLDERS["parity"])
        close(logits(model, ["1101"]), [logits(parity(), ["011010"]).item()])


def test_the_columns_are_read_from_a_sentence():
    got = constructions.sentences_around("<s> CLS 0 1 </s>".split(), "first")
    assert got == Sentences(("<s>", "CLS"), ("</s>",), "<s>") and got.of("10") == "<s> CLS 1 0 </s>".split()
    assert constructions.sentences_around("1 CLS".split(), "last") == Sentences((), ("CLS",), "CLS")
    for wrong in ("CLS", "1 0", ""):
        with pytest.raises(UsageError, match="is no string of 0 and 1 with a symbol beside it"):
            constructions.sentences_around(wrong.split(), "last")


@pytest.mark.parametrize("name", sorted(CONSTRUCTIONS))
def test_every_gradient_is_finite_without_eps(name):
    model = {"parity": parity, "first": first}[name](0.0, sentences=FOLDERS[name])
    with torch.enable_grad():
        logits(model, ["1", "0110", "111"]).sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(g is not None and g.isfinite().all() for g in gradients.values())
    assert gradients["classifier.weight"].abs().max() > 1


# Every weight counts.


def _weights():
    for construction in (PARITY, FIRST):
        for normed in (False, True):
            table = construction.normed if normed else construction.weights
            for number, weight in enumerate(table):
                name = "parity" if construction is PARITY else "first"
                yield pytest.param(construction, normed, number, id=f"{name}-{normed}-{weight.part}-{number}")


#: The sign does not matter: of a feature that is only there for its norm, and of 1/N in PARITY's hat function.
EVEN = [
    ("parity", True, "embedding", "0"),
    ("first", True, "embedding", "1"),
    *(("parity", normed, *place) for normed in (False, True) for place in (("1 value", (1, 2)), ("1 output", "1/N"))),
]


@pytest.mark.parametrize("construction, normed, number", _weights())
def test_no_weight_is_superfluous(construction, normed, number):
    name = "parity" if construction is PARITY else "first"
    table, eps = (construction.normed, 1e-5) if normed else (construction.weights, None)
    part, row, column, value = table[number]
    strings = [ones_first(n, k) for n in (1, 2, 5, 6) for k in range(n + 1)]
    before = logits(build(construction, eps), strings)

    def change(value) -> float:
        """The largest relative change of a logit with another value of the weight."""
        changed = [*table[:number], table[number]._replace(value=value), *table[number + 1 :]]
        other = replace(construction, **{"normed" if normed else "weights": tuple(changed)})
        return ((logits(build(other, eps), strings) - before).abs().max() / before.abs().max()).item()

    negated = -1 if value == "c" else -value
    if not normed and (part, row) == ("embedding", "0"):
        assert change(0) == change(negated) == 0  # without a norm, nothing reads it
    elif (part, column) == ("1 hidden", "CLS"):
        assert change(0) == 0 and change(1) > 0.01  # CLS is not the first symbol anyway
    else:
        assert change(0) > 1e-6
        assert (change(negated) > 1e-6) != ((name, normed, part, row) in EVEN)


# Proposition 2.


@pytest.mark.parametrize("bits", [0.01, 0.001, 1e-6])
def test_sharpened_models_have_the_cross_entropy_that_is_asked_for(bits):
    constants = {0.01: (1.571, 2.028), 0.001: (2.300, 2.970), 1e-6: (4.485, 5.790)}[bits]
    for name, constant in zip(("parity", "first"), constants, strict=True):
        model = sharpen(build(CONSTRUCTIONS[name], 0.0), bits)
        assert model.classifier.weight.abs().max().item() == pytest.approx(constant, abs=5e-4)
        assert len(model.encoder.stack.layers) == 3
        for n in (1, 10, 200 if name == "parity" else 1000):
            assert expected(model, name, n) == pytest.approx({"bits": bits, "accuracy": 100.0}, rel=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"encoder_attention": "softmax,softmax", "encoder_ffn": "dense,dense", "encoder_update": "residual,residual"},
        {"encoder_attention": "relative, softmax"},
        {"encoder_attention": "linear", "feature_map": "performer"},
    ],
    ids=str,
)
def test_a_random_model_is_sharpened_without_a_change_of_its_answers(options):
    model = build_model(SGEncoder, norm="layer", layer_norm_eps=0.0, encoder_ffn_embed_dim=30, **options)
    model.classifier = torch.nn.Linear(12, 2).double()
    for parameter in model.parameters():  # gains and biases of norms too
        parameter.add_(0.3 * torch.randn_like(parameter))
    model.eval()
    tokens = torch.randint(4, 11, (40, 6))
    logits_ = model(tokens)[0]
    model.classifier.bias[1] -= (logits_[:, 1] - logits_[:, 0]).mean()  # answers of both kinds
    before, after = model(tokens)[0], sharpen(model, 0.01)(tokens)[0]
    difference = before[:, 1] - before[:, 0]
    assert (difference > 0).any() and (difference < 0).any()
    torch.testing.assert_close(after[:, 1] - after[:, 0], difference.sign() * -math.log(2**0.01 - 1))


def test_sharpening_needs_a_norm_without_eps():
    with pytest.raises(UsageError, match="--layer-norm-eps 0 can be sharpened; this one differs in layer_norm_eps"):
        sharpen(parity(1e-5), 0.01)
    with pytest.raises(UsageError, match="differs in norm"):
        sharpen(parity(), 0.01)
    with pytest.raises(UsageError, match="a cross-entropy of 1 bits is out of reach"):
        sharpen(parity(0.0), 1)


def test_wrong_data_are_refused():
    with pytest.raises(UsageError, match="for data whose words are 0, 1 and CLS"):
        parity(classes=("a", "b"))
    with pytest.raises(UsageError, match="for data whose words are 0, 1 and CLS"):
        parity(sentences=Sentences((), ("?",), "?"))
    with pytest.raises(UsageError, match="--layer-norm-eps"):
        parity(-1.0)


# Learned.


@pytest.mark.parametrize("position,learned", [("indicator", True), ("none", False)])
def test_first_is_learned_where_its_position_is_marked(position, learned):
    """Strings of ten bits in batches of 32; the model of the paper's section 5."""
    options = {
        "encoder_embed_dim": 16, "encoder_ffn_embed_dim": 64, "encoder_attention_heads": 1, "encoder_layers": 2,
        "position": position, "embedding_scaling": "none", "attention_bias": True, "ffn_init": "torch",
        "readout": "first",
    }  # fmt: skip
    if learned:
        options["indicator_index"] = 2  # after the begin symbol and CLS
    begin, cls, zero, end = 0, 6, 4, 2
    with torch.enable_grad():
        model = build_model(SGEncoder, **options).float()
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        for _ in range(200):
            bits = torch.randint(0, 2, (32, 10))
            tokens = torch.nn.functional.pad(bits + zero, (1, 1), value=end)
            tokens = torch.nn.functional.pad(tokens, (1, 0), value=begin)
            tokens[:, 1] = cls
            output = model(tokens, torch.full((32,), 13))[0].view(32, -1)
            loss = torch.nn.functional.cross_entropy(output, bits[:, 0])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert loss.item() < 0.05 if learned else loss.item() > 0.5
