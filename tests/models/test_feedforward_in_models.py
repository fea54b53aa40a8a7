"""Every feedforward layer in every model: it learns, ignores padding, decodes as it trains, and its losses arrive."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("fairseq")

import torch
from fairseq import options as fairseq_options
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion

import fairseq_sg.plugin  # noqa: F401
from fairseq_sg.criterions.base import SGCriterionConfig
from fairseq_sg.criterions.cross_entropy_orthogonality import CrossEntropyOrthogonality
from fairseq_sg.errors import UsageError
from fairseq_sg.models.sg_encoder import SGEncoder
from fairseq_sg.models.sg_transformer import SGTransformer, resolve
from fairseq_sg.modules.feedforward import FEEDFORWARD_REGISTRY
from fairseq_sg.modules.losses import Statistic
from helpers.models import dictionary

MOE = {"moe_experts": 4, "moe_k": 2}
KINDS = {
    "dense": {},
    "topk": {"topk_k": 8},
    "pkm": {"pkm_k": 5},
    "sigma_moe": MOE,
    "switch": MOE,
    "s_base": MOE,
    "noisy_topk": MOE,
}
LOSSES = {
    "sigma_moe": "expert_entropy",
    "switch": "expert_balance",
    "s_base": "expert_entropy",
    "noisy_topk": "expert_load",
}
kinds = pytest.mark.parametrize("kind", KINDS)
depths = pytest.mark.parametrize("depth", ["separate", "shared"])
updates = pytest.mark.parametrize("update", ["residual", "copy_gate"])


TASK = SimpleNamespace(
    source_dictionary=dictionary(8),
    target_dictionary=dictionary(8),
    num_classes=3,
    cfg=SimpleNamespace(left_pad_target=False),
)


def options_of(kind, depth="separate", update="residual", **more) -> SimpleNamespace:
    sizes = dict(embed_dim=16, ffn_embed_dim=36, attention_heads=2, layers=2, ffn=kind, update=update)
    sizes = {f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in sizes.items()}
    return SimpleNamespace(**(sizes | KINDS.get(kind, {}) | {"depth": depth, "dropout": 0.0} | more))


def transformer(kind, *args, **more) -> SGTransformer:
    torch.manual_seed(0)
    return SGTransformer.build_model(options_of(kind, *args, **more), TASK).eval()


def encoder(kind, *args, **more) -> SGEncoder:
    torch.manual_seed(0)
    own = {name: v for name, v in vars(options_of(kind, *args, **more)).items() if not name.startswith("decoder_")}
    return SGEncoder.build_model(SimpleNamespace(**own), TASK).eval()


SOURCE, TARGET = [[4, 5, 6, 7, 2], [8, 9, 2]], [[2, 4, 5], [2, 6, 7, 8, 9]]


def pad(rows, extra=0):
    width = max(map(len, rows)) + extra
    return torch.tensor([row + [1] * (width - len(row)) for row in rows])


def test_every_kind_is_here():
    assert set(KINDS) == set(FEEDFORWARD_REGISTRY)


@pytest.mark.parametrize(("variant", "packs"), [("textbook", True), ("released", False)])
def test_layers_that_see_sequences_get_them(variant, packs):
    """Packing, which trainings on a CPU do, forgets which tokens are of one sentence."""
    model = transformer("s_base", s_base_sinkhorn=variant)
    assert model.encoder.packs is model.decoder.packs is packs


@kinds
@depths
@updates
def test_transformer_pays_no_heed_to_padding_and_repeats_itself(kind, depth, update):
    model = transformer(kind, depth, update)
    together = model(pad(SOURCE, 2), None, pad(TARGET, 1))[0]
    assert torch.equal(together, model(pad(SOURCE, 2), None, pad(TARGET, 1))[0])
    for i, (source, target) in enumerate(zip(SOURCE, TARGET)):
        alone = model(torch.tensor([source]), None, torch.tensor([target]))[0][0]
        torch.testing.assert_close(together[i, : len(target)], alone, rtol=1e-4, atol=1e-5)


@kinds
@depths
@updates
def test_transformer_decodes_step_by_step_as_in_one_pass(kind, depth, update):
    model = transformer(kind, depth, update)
    source, target = pad(SOURCE), torch.randint(4, 12, (2, 6))
    encoder_out, state = model.encoder(source, None), {}
    with torch.no_grad():
        full = model(source, None, target)[0]
        for step in range(1, 7):
            logits = model.decoder(target[:, :step], encoder_out, incremental_state=state)[0]
            torch.testing.assert_close(logits[:, 0], full[:, step - 1], rtol=1e-4, atol=1e-5)


def batch_of(source, target):
    return {
        "net_input": {"src_tokens": source, "src_lengths": None, "prev_output_tokens": target},
        "target": target.roll(-1, 1),
        "ntokens": int((target != 1).sum()),
    }


def criterion() -> CrossEntropyOrthogonality:
    return CrossEntropyOrthogonality.build_criterion(SGCriterionConfig(sentence_avg=False), TASK)


@kinds
@depths
@updates
def test_transformer_learns_and_its_losses_arrive(kind, depth, update):
    """All parameters have a gradient, and the loss is the task's plus each application's balancing loss."""
    model = transformer(kind, depth, update).train()
    sample = batch_of(pad(SOURCE), pad(TARGET))
    torch.manual_seed(3)
    loss, size, logs = criterion()(model, sample)
    loss.backward()
    # W4 of one side may have drawn noise that changed no selection's order, but its softmax always moves.
    assert not [n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
    idle = [n for n, p in model.named_parameters() if not p.grad.abs().sum() > 0]
    assert not idle
    torch.manual_seed(3)
    emitted = model(**sample["net_input"])[1]["aux_losses"]
    assert all(len(values) == 4 for values in emitted.values())  # 2 applications on each side
    expected = logs["nll_loss"]
    if kind in LOSSES:
        assert emitted[LOSSES[kind]][0].requires_grad
        expected = expected + size * sum(emitted[LOSSES[kind]])
        effective = sum(s.value for s in emitted["experts_effective"]) / 4
        assert logs["stat_experts_effective"].item() == pytest.approx(size * effective.item(), rel=1e-5)
    else:
        assert emitted == {}
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


@kinds
@depths
@updates
def test_encoder_learns_and_pays_no_heed_to_padding(kind, depth, update):
    model = encoder(kind, depth, update)
    together = model(pad(SOURCE, 3))[0]
    for i, source in enumerate(SOURCE):
        torch.testing.assert_close(together[i], model(torch.tensor([source]))[0][0], rtol=1e-4, atol=1e-5)
    logits, extra = model.train()(pad(SOURCE))
    losses = [v for values in extra["aux_losses"].values() for v in values if not isinstance(v, Statistic)]
    (logits.square().sum() + sum(losses)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_with_halting_and_after_reordering():
    model = encoder("sigma_moe", "shared_act", encoder_layers=4, act_threshold=0.6)
    together = model(pad(SOURCE, 3))[0]
    torch.testing.assert_close(together[1], model(torch.tensor(SOURCE[1:]))[0][0], rtol=1e-4, atol=1e-5)
    emitted = model.train()(pad(SOURCE))[1]["aux_losses"]
    assert {"ponder", "expert_entropy", "experts_dead"} <= set(emitted)
    both = transformer("sigma_moe").train()
    out = both.encoder(pad(SOURCE), None)
    assert both.encoder.reorder_encoder_out(out, torch.tensor([1, 0]))["aux_losses"] is out["aux_losses"]


def test_a_criterion_of_fairseq_s_own_trains_on_the_task_alone():
    model = transformer("sigma_moe", moe_expert_dropout=0.0).train()
    sample = batch_of(pad(SOURCE), pad(TARGET))
    stock = LabelSmoothedCrossEntropyCriterion(SimpleNamespace(target_dictionary=TASK.target_dictionary), False, 0.0)
    _, _, ours = criterion()(model, sample)
    assert stock(model, sample)[0].item() == pytest.approx(ours["nll_loss"].item(), rel=1e-5)


def test_one_kind_a_layer():
    model = transformer("dense,sigma_moe", moe_experts=6)
    names = [layer.update.ffn.registered_name for layer in model.encoder.stack.layers]
    assert names == ["dense", "sigma_moe"] and model.encoder.stack.layers[1].update.ffn.experts == 6
    emitted = model.train()(pad(SOURCE), None, pad(TARGET))[1]["aux_losses"]
    assert len(emitted["expert_entropy"]) == 2
    for options, message in (
        ({"kind": "dense,topk,dense"}, "--encoder-ffn names 3 layers, and --encoder-layers is 2"),
        ({"kind": "dense,topk", "depth": "shared"}, "--encoder-ffn names 2 layers, and --depth shared has one"),
        ({"kind": "switch", "topk_k": 5}, r"--topk-k 5 has no effect .* option of: topk feedforward layer"),
        ({"kind": "dense", "moe_k": 2}, r"--moe-k 2 has no effect .*sigma_moe feedforward layer"),
        ({"kind": "sigma_moe", "activation_dropout": 0.3}, "--activation-dropout 0.3 has no effect"),
    ):
        with pytest.raises(UsageError, match=message):
            resolve(options_of(**options))


@pytest.mark.filterwarnings("ignore:\\s*'config' is validated against ConfigStore schema")
def test_options_on_the_command_line():
    arguments = (
        "data --arch sg_transformer_scan --encoder-ffn sigma_moe --decoder-ffn pkm --moe-experts 8 --moe-k 3 "
        "--moe-regularization 1e-4 --moe-expert-dropout 0.1 --moe-selection softmax_after_topk --moe-init standard "
        "--moe-dropout 0.2 --pkm-k 7 --pkm-activation softmax --decoder-ffn-embed-dim 64"
    ).split()
    parsed = fairseq_options.parse_args_and_arch(fairseq_options.get_training_parser(), arguments)
    torch.manual_seed(0)
    model = SGTransformer.build_model(parsed, TASK)
    moe, pkm = model.encoder.stack.layers[0].update.ffn, model.decoder.stack.layers[0].update.ffn
    assert (moe.experts, moe.expert_dim, moe.k, moe.regularization_weight) == (8, 32, 3, 1e-4)
    assert (moe.expert_dropout, moe.dropout.p, moe.selection.__name__) == (0.1, 0.2, "softmax_of_top_k")
    assert (pkm.k, pkm.sub_keys, pkm.activation(torch.zeros(1, 2)).tolist()) == (7, 8, [[0.5, 0.5]])
