"""Load balancing losses of two workers are those of one with both batches, and so are the trainer's gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from fairseq_sg.modules.feedforward import FEEDFORWARD_REGISTRY
from fairseq_sg.modules.feedforward.workers import no_contribution, sum_over_workers
from fairseq_sg.modules.losses import Statistic

DIM, EXPERTS = 6, 4
KINDS = {
    "sigma_moe": {"moe_k": 2},
    "switch": {"moe_k": 2},
    "noisy_topk": {"moe_k": 2},
    "s_base": {"moe_k": EXPERTS},  # of fewer, Sinkhorn's iteration selects by what the worker sees
}
#: Sentences of each worker, and its sample size: as unequal as can be, one of them with a sentence of padding alone.
SENTENCES, SAMPLE_SIZES = ((0, 1), (1, 5)), (2, 9)


def layer(kind: str):
    torch.manual_seed(0)
    module = FEEDFORWARD_REGISTRY[kind](
        DIM, 4 * EXPERTS, moe_experts=EXPERTS, moe_expert_dropout=0.0, moe_regularization=0.7, **KINDS[kind]
    )
    nn.init.normal_(module.w3)
    module = module.double().train()
    if kind == "noisy_topk":
        clean = super(type(module), module).logits  # every worker draws noise for itself
        module.logits = lambda x: clean(x) + 0 * module.w4.sum()
    return module


def batch():
    torch.manual_seed(1)
    mask = torch.zeros(5, 3, dtype=torch.bool)
    mask[0, 2] = mask[2, 1:] = True
    mask[4] = True
    return torch.randn(5, 3, DIM, dtype=torch.float64), mask


def run(kind: str, sentences: slice, sample_size: int, wrap=lambda module: module, task: float = 1.0):
    """The worker's load balancing loss, and its gradient after the criterion's part: a task's loss that is a sum, and
    sample size times the load balancing loss."""
    module = layer(kind)
    x, mask = batch()
    wrapped = wrap(module)  # DistributedDataParallel reduces gradients only as long as it is there
    y, emitted = wrapped(x[sentences], padding_mask=mask[sentences], return_losses=True)
    (loss,) = (value for value in emitted.values() if not isinstance(value, Statistic))
    (task * y.square().sum() + sample_size * loss).backward()
    return loss.detach(), {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    begin, end = SENTENCES[rank]
    found = {}
    for kind in KINDS:
        loss, grads = run(kind, slice(begin, end), SAMPLE_SIZES[rank])
        for grad in grads.values():  # the trainer sums gradients and divides by the sum of the sample sizes
            dist.all_reduce(grad)
        found[kind] = (loss, {name: grad / sum(SAMPLE_SIZES) for name, grad in grads.items()})
        # torch's own averages them instead, while the backward pass goes on; fairseq multiplies by the workers.
        loss, grads = run(kind, slice(begin, end), SAMPLE_SIZES[rank], nn.parallel.DistributedDataParallel)
        found[f"{kind} in DDP"] = (loss, {name: grad * 2 / sum(SAMPLE_SIZES) for name, grad in grads.items()})
        # As the second one's, whose batch fills a gap: fairseq multiplies its loss by 0.
        with no_contribution(rank == 1):
            loss, grads = run(kind, slice(begin, end), SAMPLE_SIZES[rank] * (rank == 0), task=float(rank == 0))
        for grad in grads.values():
            dist.all_reduce(grad)
        found[f"{kind} alone"] = (loss, {name: grad / SAMPLE_SIZES[0] for name, grad in grads.items()})
    numbers = torch.tensor([1.0, 2.0]) * (rank + 1)
    found["sum"] = (sum_over_workers(numbers), numbers)
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_workers")
    mp.spawn(work, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["", " in DDP"])
def test_two_workers_equal_one(kind, how, two):
    total = sum(SAMPLE_SIZES)
    loss, grads = run(kind, slice(0, 5), total)
    assert loss.abs() > 1e-3
    for worker in two:
        found, found_grads = worker[kind + how]
        torch.testing.assert_close(found, loss, rtol=1e-10, atol=1e-12)
        assert set(found_grads) >= set(grads)
        for name, grad in grads.items():
            torch.testing.assert_close(found_grads[name], grad / total, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_whose_batch_fills_a_gap_is_left_out(kind, two):
    loss, grads = run(kind, slice(*SENTENCES[0]), SAMPLE_SIZES[0])
    for worker in two:
        found, found_grads = worker[f"{kind} alone"]
        torch.testing.assert_close(found, loss, rtol=1e-10, atol=1e-12)
        for name, grad in grads.items():
            torch.testing.assert_close(found_grads[name], grad / SAMPLE_SIZES[0], rtol=1e-9, atol=1e-12, msg=name)


def test_sum(two):
    for total, own in (worker["sum"] for worker in two):
        assert total.tolist() == [3.0, 6.0] and own.tolist() in (
            [1.0, 2.0],
            [2.0, 4.0],
        )  # the argument is left as it was
    x = torch.ones(2)
    assert sum_over_workers(x) is x
