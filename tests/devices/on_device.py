"""Models on a device that is not the CPU, as ``test_on_device.py`` runs them, in a process of their own.

Every mechanism has there the value and the gradients that it has on the CPU, with no tensor left behind on the CPU, and
the host does not wait for the device in a step of training: neither in the model, nor in the criterion, the optimizer
and the task. On a GPU, waiting would cost a small model more than its arithmetic.
"""

from __future__ import annotations

import contextlib
import copy
import os
from pathlib import Path

import pytest
import torch
from fairseq import options, tasks, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics

from data_prep.__main__ import main as data_prep
from fairseq_sg import graphs
from fairseq_sg.graphs import StepGraphs
from fairseq_sg.ops import orthogonality_loss
from fairseq_sg.ops.cvmm.grouped import has_grouped_mm
from fairseq_sg.trainer import SGTrainer
from helpers import simulated
from helpers.labelled_data import write_labelled
from helpers.labelled_words import TAGGERS, write_labelled_words
from helpers.models import MODELS, PAD, model_of, pair
from helpers.scenes import write_scenes
from helpers.small_folders import random_pairs, write_folder
from helpers.software_graph import SoftwareGraphs

simulated.register(Path(os.environ["SIMULATED_DEVICE"]))
# Once a process, what torch has for mixtures is tried out.
assert has_grouped_mm(torch.empty(0, device=simulated.NAME).device, torch.float32)

#: ACT ends where all columns have halted, which the host must know; random features are drawn on the CPU, that all
#: devices have the same. Mixtures are not among them, so that the rest of them is checked: the grouped product does not
#: wait on this device, as it does not on the newest GPUs in bfloat16.
WAITING = {"depth shared_act", "feature map performer"}


def trained(model, source: torch.Tensor, target: torch.Tensor) -> dict:
    """Loss, the losses that the model emits, and every gradient."""
    torch.manual_seed(3)
    out, extra = model(source, None, target, value_roles=("encoder", "decoder", "cross"))
    orthogonality = [orthogonality_loss(v, padding_mask=p) for found in extra["values"].values() for v, p in found]
    real = target.ne(PAD).to(out.dtype)
    loss = (out.log_softmax(-1)[:, :, 4] * real).sum() / real.sum()
    emitted = [x.sum() for values in extra["aux_losses"].values() for x in values if torch.is_tensor(x)]
    emitted += orthogonality
    (loss + sum(emitted)).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss, "emitted": sum(emitted), **gradients}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_on_a_device_what_it_is_on_the_cpu(name, monkeypatch):
    monkeypatch.setattr(torch, "randn_like", torch.zeros_like)
    model, (source, target) = model_of(name).train(), pair()
    there = copy.deepcopy(model).to(simulated.NAME)
    expected = trained(model, source, target)
    source, target = source.to(simulated.NAME), target.to(simulated.NAME)
    with contextlib.nullcontext() if name in WAITING else simulated.without_waiting():
        found = trained(there, source, target)
    assert found.keys() == expected.keys() and {x.device.type for x in found.values()} == {simulated.NAME}
    for key, value in expected.items():
        # Where ReLUs are, a gradient rounded otherwise may be another one.
        near = 1e-3 * value.abs().max().item() + 1e-6
        torch.testing.assert_close(found[key].cpu(), value, rtol=0, atol=near, msg=key)


@pytest.mark.parametrize("name", ["attention relative", "attention linear", "position rotary", "feedforward sigma_moe"])
@torch.no_grad()
def test_decoding_token_by_token(name):
    model = model_of(name).double().eval().to(simulated.NAME)
    source, target = (tokens.to(simulated.NAME) for tokens in pair())
    encoded, state = model.encoder(source, None), {}
    expected = model.decoder(target, encoder_out=encoded)[0]
    for length in range(1, target.size(1) + 1):
        found = model.decoder(target[:, :length], encoder_out=encoded, incremental_state=state)[0][:, -1]
        real = target[:, length - 1].ne(PAD).cpu()
        torch.testing.assert_close(found.cpu()[real], expected[:, length - 1].cpu()[real])


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("data")
    text = made / "text"
    text.write_text("\n".join(f"a line of text, and its number: {n}" for n in range(99)))
    assert not data_prep(["text", "--unit", "bytes", "--input", str(text), "--out", str(made / "text-bin")])
    subsets = {"train": random_pairs(40, 1), "valid": random_pairs(40, 2)}
    pairs = write_folder(made / "pairs", subsets)
    return {
        "sg_translation": pairs,
        "sg_language_modeling": made / "text-bin",
        "sg_classification": write_labelled(made / "labelled"),
        "sg_visual_qa": write_scenes(made / "scenes", scenes=2, test_scenes=1),
        "sg_tagging": write_labelled_words(made / "words"),
    }


SMALL = (
    "--encoder-embed-dim 16 --encoder-ffn-embed-dim 32 --encoder-layers 2 --encoder-attention-heads 2 --depth shared"
)
SMALL_DECODER = SMALL.replace("encoder", "decoder")
TRANSLATION = (
    f"--task sg_translation --arch sg_transformer {SMALL} {SMALL_DECODER} --criterion cross_entropy_orthogonality"
)
LANGUAGE = (
    "--task sg_language_modeling --arch sg_transformer_lm_e8 --decoder-embed-dim 16 --decoder-ffn-embed-dim 32 "
    "--decoder-layers 2 --decoder-head-dim 8 --decoder-attention-heads 2 --tokens-per-sample 8 --memory-length 8 "
    "--criterion cross_entropy_orthogonality"
)
LABELS = "--task sg_tagging --criterion tagging"
STEPS = {
    "orthogonality": f"{TRANSLATION} --orthogonality-weight 1 --orthogonality-roles encoder,decoder,cross "
    f"--attention-dropout 0.1",
    "label smoothing": f"{TRANSLATION} --label-smoothing 0.1 --encoder-attention relative --decoder-attention linear",
    "mixtures": f"{TRANSLATION} --encoder-ffn sigma_moe --decoder-ffn switch --moe-experts 4 --encoder-update "
    f"copy_gate",
    "language model": f"{LANGUAGE} --decoder-attention relative",
    "linear language model": f"{LANGUAGE} --decoder-attention linear",
    "classifier": (
        f"--task sg_classification --arch sg_encoder_ctl {SMALL} --encoder-attention geometric --encoder-update "
        "copy_gate --copy-gate-dropout 0.1 --criterion classification"
    ),
    "questions on images": (
        f"--task sg_visual_qa --arch sg_encoder_sort_of_clevr {SMALL} --encoder-attention linear --qk-norm l2 "
        "--criterion classification --orthogonality-weight 1e-3"
    ),
    "labels": f"{LABELS} {TAGGERS['sg_encoder']}",
    "memory": f"{LABELS} {TAGGERS['sg_dnc']}",
}
#: A graph has no place for a memory of earlier segments.
RECORDED = {name: words.replace("--memory-length 8", "--memory-length 0") for name, words in STEPS.items()}


def trainer_on_device(name: str, folders, monkeypatch, *more: str, steps=STEPS) -> tuple[SGTrainer, list]:
    """The trainer of ``STEPS[name]`` with its model on the device, and the batches of an epoch there."""
    words = steps[name].split()
    task_name = words[words.index("--task") + 1]
    line = [str(folders[task_name]), *words, "--user-dir", "fairseq_sg", "--batch-size", "8", "--lr", "1e-2", *more]
    args = options.parse_args_and_arch(options.get_training_parser(), [*line, "--optimizer", "torch_adam", "--cpu"])
    cfg = convert_namespace_to_omegaconf(args)
    metrics.reset()
    torch.manual_seed(1)
    task = tasks.setup_task(cfg.task)
    trainer = SGTrainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))
    trainer.get_model().to(simulated.NAME)
    trainer.device, trainer.ahead = torch.device(simulated.NAME), True
    for subset in ("train", "valid"):
        task.load_dataset(subset)
    # Pinned memory is a GPU's.
    loader = torch.utils.data.DataLoader
    unpinned = lambda *more, pin_memory=False, **options: loader(*more, **options)  # noqa: E731
    monkeypatch.setattr(torch.utils.data, "DataLoader", unpinned)
    batches = task.get_batch_iterator(task.dataset("train"), max_sentences=8, seed=1).next_epoch_itr()
    return trainer, [utils.apply_to_sample(lambda x: x.to(simulated.NAME), batch) for batch in batches]


@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_training_and_of_validation(name, folders, monkeypatch):
    trainer, batches = trainer_on_device(name, folders, monkeypatch, "--clip-norm", "1", "--log-interval", "1000")
    model, task, criterion = trainer.get_model(), trainer.task, trainer.criterion
    before = [p.detach().cpu() for p in model.parameters()]
    logged = []
    monkeypatch.setattr(trainer, "_reduce_and_log_stats", lambda *numbers: logged.append(numbers))
    trainer._has_read = True  # the first step is read at once
    if task.cfg._name == "sg_tagging":
        task.bits_on(next(model.parameters()).device)  # and copies the table
    for sample in batches[:3]:
        with simulated.without_waiting():
            assert trainer.train_step([sample]) == {}
    assert not logged
    trainer.flush()
    for ((logs,), size, norm), sample in zip(logged, batches, strict=False):
        assert logs["loss"] > 0 and logs["nsentences"] == len(sample["id"]) and size > 0 and 0 < norm < 1e4
    assert len(logged) == 3 and trainer.get_num_updates() == 3
    assert all(not torch.equal(p.detach().cpu(), old) for p, old in zip(model.parameters(), before) if old.any())
    batches = task.get_batch_iterator(task.dataset("valid"), max_sentences=8, seed=1).next_epoch_itr(shuffle=False)
    sample = utils.apply_to_sample(lambda x: x.to(simulated.NAME), next(batches))
    loss, _, logs = task.valid_step(sample, model, criterion.eval())
    assert loss.item() > 0 and "n_exact" in logs


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_steps_are_those_that_run(name, folders, monkeypatch):
    """Dropout has the same masks. A graph is recorded for each shape alone, and no step waits."""
    trained = {}
    for how in ("run", "recorded"):
        trainer, batches = trainer_on_device(name, folders, monkeypatch, "--log-interval", "1000", steps=RECORDED)
        if how == "recorded":
            trainer._graphs = StepGraphs(trainer._step_on_device, 100, SoftwareGraphs())
        else:
            trainer.optimizer.keep_rate_on(trainer.device)
        for sample in batches[:2] * 4:
            with simulated.without_waiting() if trainer._has_read else contextlib.nullcontext():
                trainer.train_step([sample])
        trained[how] = trainer
    recorded = trained["recorded"]._graphs
    assert len(recorded) == len({described(trainer.task.recorded(batch)) for batch in batches[:2]})
    weights, expected = ({k: v.cpu() for k, v in trained[how].get_model().state_dict().items()} for how in trained)
    torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-3)


def described(batch: dict) -> tuple:
    return graphs.described(graphs.counted(batch), [])
