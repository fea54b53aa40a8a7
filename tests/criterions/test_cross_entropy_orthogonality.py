"""The criterion: its sum, every option of orthogonality, label smoothing, accuracy, and what it logs over workers."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")

import torch
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.logging import metrics
from fairseq.sequence_generator import SequenceGenerator
from torch.utils._python_dispatch import TorchDispatchMode

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg.criterions import base
from fairseq_sg.criterions.base import SGCriterionConfig, split
from fairseq_sg.criterions.cross_entropy_orthogonality import (
    CrossEntropyOrthogonality,
    best,
)
from fairseq_sg.errors import UsageError
from fairseq_sg.models.sg_transformer import SGTransformer
from fairseq_sg.modules.losses import Statistic
from fairseq_sg.ops import orthogonality_loss
from fairseq_sg.registry import emitted_losses
from fairseq_sg.tasks.sg_language_modeling import UNITS
from helpers.models import dictionary

PAD, EOS = 1, 2
SENTENCES = ([[4, 5, 6, 7, 2], [8, 9, 2], [5, 2]], [[4, 5, 2], [6, 7, 8, 9, 2], [2]])


TASK = SimpleNamespace(
    source_dictionary=dictionary(13), target_dictionary=dictionary(6), cfg=SimpleNamespace(left_pad_target=False)
)


def model(attention="linear", depth="separate", **options) -> SGTransformer:
    sizes = dict(embed_dim=8, ffn_embed_dim=12, attention_heads=2, layers=2)
    sizes = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in sizes.items()}
    kinds = {f"{role}_attention": attention for role in ("encoder", "decoder", "cross")}
    torch.manual_seed(0)
    return SGTransformer.build_model(SimpleNamespace(**(sizes | kinds | options), depth=depth), TASK).eval()


def criterion(**options) -> CrossEntropyOrthogonality:
    config = SGCriterionConfig(**({"sentence_avg": False} | options))
    return CrossEntropyOrthogonality.build_criterion(config, TASK)


def pad(rows, extra=0):
    width = max(map(len, rows)) + extra
    return torch.tensor([row + [PAD] * (width - len(row)) for row in rows])


def sample(which=None, extra=0):
    """A batch as fairseq's collater makes it: the target, and the same with its end symbol moved to the front."""
    src, tgt = SENTENCES if which is None else ([SENTENCES[0][which]], [SENTENCES[1][which]])
    inputs = {"src_tokens": pad(src, extra), "src_lengths": torch.tensor([len(row) for row in src])}
    inputs["prev_output_tokens"] = pad([[EOS] + row[:-1] for row in tgt], extra)
    return {"net_input": inputs, "target": pad(tgt, extra), "ntokens": sum(map(len, tgt)), "nsentences": len(tgt)}


def values_of(net, batch):
    """role -> the Values (B, H, M, E) and padding (B, M) of every application, caught at the projections."""
    caught = {role: [] for role in ("encoder", "decoder", "cross")}
    hooks = []
    for module in net.modules():
        if hasattr(module, "v_proj"):
            keep = caught[module.role].append
            hooks.append(module.v_proj.register_forward_hook(lambda m, i, out, keep=keep: keep(out.detach().double())))
    net(**batch["net_input"])
    for hook in hooks:
        hook.remove()
    source, target = (batch["net_input"][name].eq(PAD) for name in ("src_tokens", "prev_output_tokens"))
    padding = {"encoder": source, "decoder": target, "cross": source}
    return {
        role: [(v.unflatten(-1, (2, -1)).permute(1, 2, 0, 3), padding[role]) for v in vs] for role, vs in caught.items()
    }


def orthogonality(values, padding):
    """‖V̄V̄ᵀ − I‖²_F, the N×N matrix formed for each sentence and head (Park & Kim 2024, section 4.2)."""
    losses = []
    for value, pads in zip(values, padding):
        for v in value[:, ~pads]:
            unit = v / (v.norm(dim=-1, keepdim=True) + 1e-6)
            losses.append(((unit @ unit.T - torch.eye(len(v), dtype=v.dtype)) ** 2).sum())
    return torch.stack(losses).mean()


def task_loss(net, batch):
    loss, _, _ = criterion()(net, batch)
    return loss.item()


# Total loss = task + λ · orthogonality.


@pytest.mark.parametrize("roles", ["encoder", "decoder,cross", "encoder, decoder, cross"])
@pytest.mark.parametrize("depth", ["separate", "shared"])
@pytest.mark.parametrize("training", [False, True])
def test_total_is_task_plus_weighted_orthogonality(roles, depth, training):
    net, batch, weight = model(depth=depth, dropout=0.0), sample(), 0.03
    caught = values_of(net, batch)
    net.train(training)
    loss, sample_size, logs = criterion(orthogonality_weight=weight, orthogonality_roles=roles)(net, batch)
    names = [role.strip() for role in roles.split(",")]
    assert all(len(caught[role]) == 2 for role in names)
    parts = {role: sum(orthogonality(*v).item() for v in caught[role]) for role in names}
    for role, value in parts.items():
        assert logs[f"aux_orthogonality_{role}"].item() / sample_size == pytest.approx(value, rel=1e-4)
    assert {name for name in logs if name.startswith("aux_")} == {f"aux_orthogonality_{role}" for role in names}
    assert loss.item() == pytest.approx(task_loss(net, batch) + weight * sample_size * sum(parts.values()), rel=1e-5)
    assert logs["loss"].item() == loss.item() and sample_size == 9
    assert logs["nll_loss"].item() == pytest.approx(task_loss(net, batch), rel=1e-6)


def test_equal_values_are_computed_once(monkeypatch):
    """In training, the steps of a shared decoder layer have the same cross-attention Values."""
    computed = []

    def counted(values, padding_mask):
        computed.append(values)
        return orthogonality_loss(values, padding_mask=padding_mask)

    monkeypatch.setattr(base, "orthogonality_loss", counted)
    net = model(depth="shared", dropout=0.0).train()
    built = criterion(orthogonality_weight=1.0, orthogonality_roles="cross")
    once = built(net, sample())[2]["aux_orthogonality_cross"].item()
    assert len(computed) == 1
    again = built(net.eval(), sample())[2]["aux_orthogonality_cross"].item()
    assert len(computed) == 3 and once == pytest.approx(again, rel=1e-6)


@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_weight_zero_neither_computes_nor_logs(attention, monkeypatch):
    def refuse(values, padding_mask):
        raise AssertionError("computed")

    monkeypatch.setattr(base, "orthogonality_loss", refuse)
    net, batch = model(attention), sample()
    loss, _, logs = criterion(orthogonality_weight=0.0, orthogonality_roles="encoder,decoder,cross")(net, batch)
    counts = {"ntokens", "nsentences", "sample_size", "n_exact", "n_tokens_right"}
    assert set(logs) == {"loss", "nll_loss", *counts}
    assert loss.item() == logs["nll_loss"].item()
    with pytest.raises(AssertionError, match="computed"):
        criterion(orthogonality_weight=1e-4)(net, batch)


def test_gradient_is_linear_in_the_weight():
    net, batch = model(), sample()

    def gradients(weight):
        net.zero_grad()
        criterion(orthogonality_weight=weight)(net, batch)[0].backward()
        return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])

    task, one, three = (gradients(weight) for weight in (0.0, 0.1, 0.3))
    torch.testing.assert_close(three - task, 3 * (one - task), rtol=1e-3, atol=1e-3)
    assert (one - task).norm() > 1e-2 * task.norm()
    net.zero_grad()
    criterion(orthogonality_weight=0.1)(net, batch)[0].backward()
    # The decoder is no part of the encoder's orthogonality; the encoder's projections of Values are.
    parts = dict(net.named_parameters())
    loss = criterion(orthogonality_weight=1.0)(net, batch)[0] - criterion()(net, batch)[0]
    grads = dict(zip(parts, torch.autograd.grad(loss, parts.values())))
    moved = {name for name, g in grads.items() if g.abs().max() > 1e-4}
    assert moved and all(name.startswith("encoder.") for name in moved)
    assert any("v_proj" in name for name in moved)


def test_sum_over_layers_counts_each_application():
    shared, twice = model(depth="shared"), model(depth="shared", encoder_layers=4)
    twice.load_state_dict(shared.state_dict())
    batch = sample()
    built = criterion(orthogonality_weight=1.0)
    first, all_four = (built(net, batch)[2]["aux_orthogonality_encoder"].item() for net in (shared, twice))
    caught = values_of(twice, batch)["encoder"]
    assert len(caught) == 4
    assert first / 9 == pytest.approx(sum(orthogonality(*v).item() for v in caught[:2]), rel=1e-4)
    assert all_four / 9 == pytest.approx(sum(orthogonality(*v).item() for v in caught), rel=1e-4)


# The task part.


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("sentence_avg", [False, True])
def test_equals_fairseq_s_label_smoothed_cross_entropy(epsilon, sentence_avg):
    net, batch = model(), sample()
    theirs = LabelSmoothedCrossEntropyCriterion(TASK, sentence_avg=sentence_avg, label_smoothing=epsilon)
    expected, expected_size, expected_logs = theirs(net, batch)
    got, size, logs = criterion(label_smoothing=epsilon, sentence_avg=sentence_avg)(net, batch)
    assert size == expected_size == (3 if sentence_avg else 9)
    assert got.item() == pytest.approx(expected.item(), rel=1e-6)
    assert logs["nll_loss"].item() == pytest.approx(expected_logs["nll_loss"].item(), rel=1e-6)
    for key in ("ntokens", "nsentences", "sample_size"):
        assert logs[key] == expected_logs[key]
    gradient, expected_gradient = (torch.autograd.grad(x, net.decoder.output_bias)[0] for x in (got, expected))
    torch.testing.assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("epsilon", [0.0, 0.1])
@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_batch_is_the_sum_of_its_sentences_and_padding_does_not_count(epsilon, attention):
    net, built = model(attention), criterion(label_smoothing=epsilon)
    whole, size, logs = built(net, sample())
    alone = [built(net, sample(which)) for which in range(3)]
    assert whole.item() == pytest.approx(sum(loss.item() for loss, _, _ in alone), rel=1e-5)
    assert size == sum(s for _, s, _ in alone)
    padded, _, padded_logs = built(net, sample(extra=4))
    assert padded.item() == pytest.approx(whole.item(), rel=1e-5)
    assert padded_logs["nll_loss"].item() == pytest.approx(logs["nll_loss"].item(), rel=1e-5)


def test_orthogonality_of_a_batch_is_the_mean_of_its_sentences():
    net, built = model(), criterion(orthogonality_weight=1.0, orthogonality_roles="encoder,decoder,cross")
    for role in ("encoder", "decoder", "cross"):
        key = f"aux_orthogonality_{role}"
        whole, padded = (built(net, batch)[2][key].item() / 9 for batch in (sample(), sample(extra=5)))
        alone = [logs[key].item() / logs["sample_size"] for logs in (built(net, sample(i))[2] for i in range(3))]
        assert whole == pytest.approx(sum(alone) / 3, rel=1e-4) == padded


def test_half_precision_logits_are_summed_in_float32():
    logits = torch.randn(2, 3000, 10).half()
    target = torch.randint(4, 10, (2, 3000))
    batch = {"net_input": {}, "target": target, "ntokens": 6000}
    for epsilon in (0.0, 0.1):
        loss = criterion(label_smoothing=epsilon)(lambda: (logits, {}), batch)[0]
        expected = criterion(label_smoothing=epsilon)(lambda: (logits.double(), {}), batch)[0]
        assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected.item(), rel=1e-4)


# Accuracy.


def logits_for(target, predicted):
    """Logits whose argmax is ``predicted`` (B, N)."""
    logits = torch.randn(*target.shape, 10)
    return logits.scatter(-1, predicted[..., None], 9.0)


TARGET = [[4, 5, 6, EOS], [7, EOS, PAD, PAD], [8, 4, EOS, PAD]]
LEFT = [[4, 5, 6, EOS], [PAD, PAD, 7, EOS], [PAD, 8, 4, EOS]]


@pytest.mark.parametrize(
    "target,predicted,exact,tokens",
    [
        (TARGET, TARGET, 3, 9),
        (TARGET, [[4, 5, 6, EOS], [7, EOS, 5, 9], [8, 4, EOS, EOS]], 3, 9),
        (TARGET, [[4, 5, 5, EOS], [7, EOS, 5, 9], [8, 4, EOS, EOS]], 2, 8),
        (TARGET, [[4, 5, 6, 7], [7, 4, 5, 9], [8, 4, EOS, EOS]], 1, 7),
        (TARGET, [[EOS, 5, 6, EOS], [7, 4, 5, 9], [8, 4, 5, EOS]], 0, 6),
        (LEFT, [[4, 5, 6, EOS], [5, 5, 7, EOS], [5, 8, 4, 4]], 2, 8),
    ],
    ids=["all", "padding-counts-not", "token-wrong", "end-missing", "none", "left-padded"],
)
def test_accuracy_counts_sentences_with_every_token_and_the_end_right(target, predicted, exact, tokens):
    target, predicted = torch.tensor(target), torch.tensor(predicted)
    logits = logits_for(target, predicted)
    batch = {"net_input": {}, "target": target, "ntokens": int(target.ne(PAD).sum())}
    _, _, logs = criterion()(lambda: (logits, {}), batch)
    assert logs["n_exact"].item() == exact
    with metrics.aggregate() as aggregator:
        CrossEntropyOrthogonality.reduce_metrics([logs])
    assert aggregator["accuracy"].avg == pytest.approx(100 * exact / 3)
    assert aggregator["token_accuracy"].avg == pytest.approx(100 * tokens / 9)


def test_a_row_without_a_token_is_neither_right_nor_wrong():
    """The last batch of a text may have such rows."""
    target = torch.tensor([[4, 5, 6], [PAD, PAD, PAD]])
    batch = {"net_input": {}, "target": target, "ntokens": 3, "nsentences": 1}
    _, _, logs = criterion()(lambda: (logits_for(target, target), {}), batch)
    assert (logs["n_exact"].item(), logs["n_tokens_right"].item(), logs["nsentences"]) == (1, 3, 1)


def test_accuracy_never_predicts_padding_and_leaves_the_loss_alone():
    target = torch.tensor([[4, EOS]])
    logits = logits_for(target, target)
    logits[..., PAD] = 20.0
    before = logits.clone()
    loss, _, logs = criterion()(lambda: (logits, {}), {"net_input": {}, "target": target, "ntokens": 2})
    assert logs["n_exact"].item() == 1 and loss.item() > 10 and torch.equal(logits, before)


@pytest.mark.parametrize("padding", [0, PAD, 9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_best_symbol_is_the_argmax_of_logits_without_padding(padding, dtype):
    logits = torch.randint(-2, 3, (300, 4, 10)).to(dtype)  # many are equal
    logits[:40].masked_fill_(torch.rand(40, 4, 10) < 0.2, math.nan)
    logits[40:80].masked_fill_(torch.rand(40, 4, 10) < 0.9, -math.inf)
    logits[80:120, :, padding] = 9.0
    without = logits.clone()
    without[..., padding] = -math.inf
    expected = without.argmax(-1)
    # Where all others are -inf as well, the first of them.
    some = (without != -math.inf).any(-1)
    found = best(logits, padding)
    assert torch.equal(found[some], expected[some]) and found.ne(padding).all() and not some.all()


def test_logits_are_not_copied_to_count_what_is_right():
    class Copies(TorchDispatchMode):
        found = ()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in (torch.ops.aten.clone.default, torch.ops.aten.index_fill.int_Scalar):
                self.found += (args[0].shape,)
            return func(*args, **(kwargs or {}))

    target = torch.tensor(TARGET)
    logits, batch = logits_for(target, target), {"net_input": {}, "target": target, "ntokens": 9}
    with Copies() as copies:
        criterion()(lambda: (logits, {}), batch)
    assert logits.shape not in copies.found


def copying(sentences: int, seed: int):
    """A batch of the task to say the source again."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 5, (sentences,), generator=generator).tolist()
    rows = [torch.randint(4, 10, (n,), generator=generator).tolist() + [EOS] for n in lengths]
    inputs = {
        "src_tokens": pad(rows),
        "src_lengths": torch.tensor(lengths) + 1,
        "prev_output_tokens": pad([[EOS] + r[:-1] for r in rows]),
    }
    return {"net_input": inputs, "target": pad(rows), "ntokens": sum(map(len, rows))}, rows


@pytest.mark.parametrize("attention", ["softmax", "linear"])
def test_accuracy_is_the_exact_match_of_greedy_decoding(attention):
    """For a half-trained model whose largest logit is often padding's: fairseq's generator never picks it."""
    net, built = model(attention).train(), criterion()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for step in range(200):
        loss, size, _ = built(net, copying(64, step)[0])
        optimizer.zero_grad()
        (loss / size).backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        net.decoder.output_bias[PAD] = 6.0
        batch, targets = copying(200, 1000)
        exact = built(net, batch)[2]["n_exact"].item()
        largest = net(**batch["net_input"])[0].argmax(-1)
    generator = SequenceGenerator([net], TASK.target_dictionary, beam_size=1, max_len_b=20, min_len=0)
    hypotheses = [h[0]["tokens"].tolist() for h in generator.generate([net], batch)]
    matches = sum(hypothesis == target for hypothesis, target in zip(hypotheses, targets))
    assert exact == matches and 20 < matches < 180
    assert (largest.eq(PAD) & batch["target"].ne(PAD)).any()


# Other losses that a model emits.


def emitting(**losses):
    logits = torch.randn(2, 3, 10, requires_grad=True)
    batch = {"net_input": {}, "target": torch.randint(4, 10, (2, 3)), "ntokens": 6}
    emitted = {name: [torch.tensor(float(v)) for v in values] for name, values in losses.items()}
    return (lambda: (logits, {"aux_losses": emitted})), batch


def test_other_losses_are_summed_over_layers_and_weighted_by_name():
    net, batch = emitting(balance=[1, 2, 4], entropy=[0.5])
    plain = criterion()(lambda: (net()[0], {}), batch)[0].item()
    loss, size, logs = criterion(aux_loss_weights='{"balance": 0.01}')(net, batch)
    assert loss.item() == pytest.approx(plain + size * (0.01 * 7 + 1 * 0.5), rel=1e-6)
    assert logs["aux_balance"].item() == pytest.approx(size * 7) and logs["aux_entropy"].item() == pytest.approx(
        size * 0.5
    )


@pytest.mark.parametrize(
    "weights,emitted,message",
    [
        ('{"ballance": 1}', {"balance": [1]}, r"--aux-loss-weights names ballance, which is none of .* \(balance\)"),
        ('{"balance": 1}', {}, r"--aux-loss-weights names balance, which is none of .* \(it emits none\)"),
        ('{"orthogonality_encoder": 1}', {}, r"names orthogonality_encoder.* has --orthogonality-weight"),
    ],
)
def test_weight_of_a_loss_that_is_not_there(weights, emitted, message):
    net, batch = emitting(**emitted)
    with pytest.raises(ValueError, match=message):
        criterion(aux_loss_weights=weights)(net, batch)


def knowing(emitted, **options):
    """A criterion whose task has built a model that declares losses with their default weights."""
    config = SGCriterionConfig(**({"sentence_avg": False} | options))
    return CrossEntropyOrthogonality.build_criterion(config, SimpleNamespace(**vars(TASK), emitted_losses=emitted))


def test_misspelt_weight_is_found_before_the_first_step():
    for declared, known in (({"ponder": 0.03, "balance": 1.0}, "balance, ponder"), ({}, "it emits none")):
        with pytest.raises(UsageError, match=rf"--aux-loss-weights names pondr, which is none .* \({known}\)"):
            knowing(declared, aux_loss_weights='{"pondr": 1}')
    # With a task of fairseq's, at the first look at the model, whatever it computes there.
    built = criterion(aux_loss_weights='{"expert_entrpy": 1}')
    with pytest.raises(UsageError, match=r"names expert_entrpy, which is none .* \(expert_entropy\)"):
        built(model(encoder_ffn="sigma_moe", moe_experts=4), sample())


def test_default_weight_of_a_loss_is_its_mechanism_s_and_is_logged_once(caplog):
    net, batch = emitting(ponder=[2.0], balance=[3.0])
    plain = criterion()(lambda: (net()[0], {}), batch)[0].item()
    with caplog.at_level("INFO"):
        built = knowing({"ponder": 0.03, "balance": 1.0}, aux_loss_weights='{"balance": 0.5}')
        loss, size, _ = built(net, batch)
        built(net, batch)
    assert loss.item() == pytest.approx(plain + size * (0.03 * 2 + 0.5 * 3), rel=1e-6)
    lines = [record.message for record in caplog.records if "aux-loss-weights" in record.message]
    assert lines == ["weights of the model's own losses (--aux-loss-weights): balance 0.5, ponder 0.03"]


def test_a_layer_cannot_return_what_it_does_not_declare_or_the_name_of_another_number():
    net, batch = emitting(ponder=[2.0], pondr=[5.0])
    with pytest.raises(UsageError, match="returns the loss pondr, which none declares: add it to emitted_losses"):
        knowing({"ponder": 0.03})(net, batch)
    logits, _ = net()
    values = (torch.tensor(2.0), Statistic(torch.tensor(2.0)))
    for name, value in itertools.product(("accuracy", *UNITS.values(), "orthogonality_encoder"), values):
        for built in (knowing({name: 1.0}), criterion()):
            with pytest.raises(UsageError, match=f"statistic {name}, which is the name of another number"):
                built(lambda name=name, value=value: (logits, {"aux_losses": {name: [value]}}), batch)


@pytest.mark.parametrize(
    "options,declared",
    [
        ({}, {}),
        ({"depth": "shared_act"}, {"ponder": 0.03}),
        ({"encoder_ffn": "switch", "moe_experts": 4, "depth": "shared_act"}, {"expert_balance": 1.0, "ponder": 0.03}),
        (
            {"encoder_ffn": "noisy_topk", "decoder_ffn": "sigma_moe", "moe_experts": 4},
            {"expert_load": 1.0, "expert_entropy": 1.0},
        ),
        ({"encoder_ffn": "s_base", "moe_experts": 4, "moe_regularization": 0.0}, {}),
    ],
    ids=str,
)
def test_a_model_emits_the_losses_that_its_mechanisms_declare(options, declared):
    net = model(**options).train()
    emitted, _ = split(net(**sample()["net_input"])[1]["aux_losses"])
    assert set(emitted) == set(declared) and emitted_losses(net) == declared


def test_weight_of_a_loss_of_training_alone():
    """As of mixtures of experts: in evaluation they emit nothing."""
    net, batch = emitting()
    net.training = False
    (loss, _, _), (plain, _, _) = criterion(aux_loss_weights='{"balance": 2}')(net, batch), criterion()(net, batch)
    assert loss.item() == plain.item()


@pytest.mark.parametrize(
    "options,message",
    [
        (
            {"aux_loss_weights": "balance=1"},
            r"--aux-loss-weights is 'balance=1': it must be JSON like '\{\"name\": 0.01\}'",
        ),
        ({"aux_loss_weights": "[1]"}, r"--aux-loss-weights is '\[1\]': it must be JSON"),
        ({"aux_loss_weights": '{"a": "much"}'}, "--aux-loss-weights is .* must be JSON"),
        ({"aux_loss_weights": '{"a": null}'}, "--aux-loss-weights is .* must be JSON"),
        (
            {"orthogonality_roles": "encoder,decoders"},
            "--orthogonality-roles has 'decoders': choose from encoder, decoder, cross",
        ),
        ({"orthogonality_roles": ""}, "--orthogonality-roles has ''"),
    ],
)
def test_wrong_options_are_refused_at_the_start_also_with_weight_zero(options, message):
    with pytest.raises(ValueError, match=message):
        criterion(**options)


@pytest.mark.filterwarnings("ignore:\\s*'config' is validated against ConfigStore schema")
def test_json_weights_pass_the_command_line():
    from fairseq import options
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    arguments = [
        "--criterion",
        "cross_entropy_orthogonality",
        "--aux-loss-weights",
        '{"a_b": 0.01, "c": 2}',
        "--arch",
        "sg_transformer",
    ]
    parsed = options.parse_args_and_arch(
        options.get_training_parser(), ["data", *arguments, "--orthogonality-roles", "encoder,cross"]
    )
    config = convert_namespace_to_omegaconf(parsed).criterion
    assert CrossEntropyOrthogonality.build_criterion(config, TASK).aux_loss_weights == {"a_b": 0.01, "c": 2.0}
    assert config.orthogonality_roles == "encoder,cross"


def test_statistics_are_logged_and_not_trained_on():
    """The mean over the applications, pooled over workers and accumulated batches as everything else."""
    net, batch = emitting(balance=[1, 2])
    emitted = net()[1]["aux_losses"]
    emitted["effective"] = [Statistic(torch.tensor(v)) for v in (3.0, 5.0)]
    weights = '{"balance": 0.5}'
    loss, size, logs = criterion(aux_loss_weights=weights)(net, batch)
    plain = criterion()(lambda: (net()[0], {}), batch)[0].item()
    assert loss.item() == pytest.approx(plain + size * 0.5 * 3, rel=1e-6)
    assert logs["stat_effective"].item() == pytest.approx(size * 4.0) and "aux_effective" not in logs
    other = dict(logs, sample_size=3 * size, stat_effective=3 * size * 8.0)
    for calls in ([[logs, other]], [[logs], [other]], [[{k: logs[k] + other[k] for k in logs}]]):
        with metrics.aggregate() as aggregator:
            for call in calls:
                CrossEntropyOrthogonality.reduce_metrics(call)
        assert aggregator["effective"].avg == pytest.approx((4.0 + 3 * 8.0) / 4)
    with pytest.raises(ValueError, match=r"--aux-loss-weights names effective, which is none of .* \(balance\)"):
        criterion(aux_loss_weights='{"effective": 1}')(net, batch)


# Logs.


def reduced(*calls) -> dict:
    """What the user sees after several calls of ``reduce_metrics``, each with the logs of all workers."""
    with metrics.aggregate() as aggregator:
        for logs in calls:
            CrossEntropyOrthogonality.reduce_metrics(logs)
    return {
        name: aggregator[name].avg
        for name in ("loss", "nll_loss", "accuracy", "orthogonality_encoder")
        if name in aggregator
    }


def logs_of(sentence_avg=False):
    built = criterion(orthogonality_weight=0.01, sentence_avg=sentence_avg)
    logs = [built(model(), sample(which))[2] for which in range(3)]
    logs[1]["n_exact"] = torch.tensor(1)
    return logs


@pytest.mark.parametrize("sentence_avg", [False, True])
def test_workers_and_steps_are_pooled_by_their_counts(sentence_avg):
    logs = logs_of(sentence_avg)
    total = {key: sum(float(log[key]) for log in logs) for key in logs[0]}
    expected = {
        "loss": total["loss"] / total["sample_size"] / math.log(2),
        "nll_loss": total["nll_loss"] / total["ntokens"] / math.log(2),
        "accuracy": 100 / 3,
        "orthogonality_encoder": total["aux_orthogonality_encoder"] / total["sample_size"],
    }
    assert total["sample_size"] == (3 if sentence_avg else 9)
    for calls in ([logs], [[logs[0]], logs[1:]], [[log] for log in logs]):
        assert reduced(*calls) == pytest.approx(expected, rel=1e-5)


def test_logs_may_be_summed_before_reducing():
    assert CrossEntropyOrthogonality.logging_outputs_can_be_summed() is True
    logs = logs_of()
    summed = {key: sum(log[key] for log in logs) for key in logs[0]}
    assert reduced([summed]) == pytest.approx(reduced(logs), rel=1e-6)
    assert reduced([logs[0], {key: 0 for key in logs[0]}, *logs[1:]]) == pytest.approx(
        reduced(logs), rel=1e-6
    )  # an idle worker


def all_reduced(*calls) -> dict:
    with metrics.aggregate() as aggregator:
        for logs in calls:
            CrossEntropyOrthogonality.reduce_metrics(logs)
    return {name: meter.avg for name, meter in aggregator.items()}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("sentence_avg", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing": 0.1},
        {"orthogonality_weight": 0.01, "orthogonality_roles": "encoder,cross"},
        {"aux_loss_weights": '{"balance": 0.3, "ponder": 0}', "label_smoothing": 0.2, "orthogonality_weight": 0.05},
    ],
    ids=["smoothing", "orthogonality", "all"],
)
def test_shares_add_up_to_the_loss(options, sentence_avg, training):
    """Also over accumulated batches, over several updates, and over logs of two workers that are summed."""
    net, built = model(dropout=0.2).train(training), criterion(sentence_avg=sentence_avg, **options)

    def emit(**inputs):
        logits, extra = net(**inputs)
        others = {"balance": [net.decoder.output_bias.sum() + 2.0], "ponder": [torch.tensor(3.0)]}
        emitted = others if "aux_loss_weights" in options else {}
        return logits, {"aux_losses": extra["aux_losses"] | emitted, "values": extra["values"]}

    emit.attention_roles = net.attention_roles

    logs = [built(emit, sample(which))[2] for which in (0, 1, 2, None)]
    workers = [{key: left[key] + right[key] for key in left} for left, right in (logs[:2], logs[2:])]
    ways = [all_reduced(logs), all_reduced(*([log] for log in logs)), all_reduced(*([log] for log in workers))]
    for found in ways:
        shares = {name: value for name, value in found.items() if name.startswith("share_")}
        assert sum(shares.values()) == pytest.approx(found["loss"], rel=1e-5)
        assert found == pytest.approx(ways[0], rel=1e-6)
    raw = {name.removeprefix("share_") for name in shares} - {"nll", "label_smoothing"}
    weights = {"balance": 0.3, "ponder": 0.0}
    for name in raw:
        weight = weights.get(name, options.get("orthogonality_weight"))
        assert shares[f"share_{name}"] == pytest.approx(weight * found[name] / math.log(2), rel=1e-5)
    emitted = {name for name in found if name in weights or name.startswith("orthogonality")}
    assert raw == emitted and ("share_label_smoothing" in shares) == ("label_smoothing" in options)
    tokens = 1.0 if not sentence_avg else sum(log["ntokens"] for log in logs) / sum(log["nsentences"] for log in logs)
    assert shares["share_nll"] == pytest.approx(found["nll_loss"] * tokens, rel=1e-6)


def test_a_loss_of_one_part_has_no_shares():
    logs = criterion()(model(), sample())[2]
    assert not any(name.startswith("share_") for name in all_reduced([logs]))


@pytest.mark.parametrize("sentence_avg,unit", [(False, "token"), (True, "sentence")])
def test_the_log_says_what_is_in_percent(sentence_avg, unit, caplog):
    with caplog.at_level("INFO"):
        criterion(sentence_avg=sentence_avg)
    (line,) = caplog.messages
    assert f"loss and its shares (share_*), bits per {unit}; nll_loss, bits per token" in line
    assert line.endswith("accuracy, % of sentences; token_accuracy, % of tokens")


def test_nothing_is_logged_of_nothing():
    assert reduced([]) == {} and reduced([{"sample_size": 0, "ntokens": 0, "nsentences": 0, "loss": 0.0}]) == {}


def test_logs_are_plain_numbers_for_checkpoints():
    with metrics.aggregate() as aggregator:
        CrossEntropyOrthogonality.reduce_metrics(logs_of())
    assert all(type(value) is float for value in aggregator.get_smoothed_values().values())
    loss, _, logs = criterion(orthogonality_weight=0.01)(model(), sample())
    assert loss.requires_grad and not any(torch.is_tensor(v) and v.requires_grad for v in logs.values())
