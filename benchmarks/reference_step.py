"""The process of a reference repository's own training step; started by ``step.py --reference``.

    python -m benchmarks.reference_step PATH DEVICE SIZES    # requests and answers: one JSON object per line

The repository is robertcsordas/transformer_generalization. Used are its ``Task.train_step``, model, loss
and optimizer, without its datasets, logging and files. Packages for the latter are replaced by empty
modules if they are not installed.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import sys
import time
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock


class AbsentPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Empty modules for packages that are not installed and that no step needs."""

    NAMES = ("requests", "tensorboard", "tensorboardX", "wandb", "plotly", "psutil", "matplotlib", "tqdm")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] in self.NAMES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = MagicMock(name=spec.name)
        module.__spec__, module.__path__, module.__name__ = spec, [], spec.name
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing."""


def build(device: str, sizes: dict[str, Any]) -> Any:
    """Their task, with the parts that ``train_step`` uses."""
    import torch

    # After all other finders, so installed packages are used. A part of torch fails without tensorboard.
    sys.meta_path.append(AbsentPackages())
    for name in ("torch.utils.tensorboard", "torch.utils.tensorboard.writer"):
        sys.modules[name] = MagicMock(name=name)
    import framework
    import optimizer
    from tasks.task import Task
    from tasks.transformer_mixin import TransformerMixin

    class Step(TransformerMixin, Task):
        def __init__(self) -> None:
            transformer = SimpleNamespace(
                variant="relative_universal",
                n_heads=sizes["heads"],
                encoder_n_layers=sizes["layers"],
                decoder_n_layers=sizes["layers"],
                ff_multiplier=sizes["ffn"] / sizes["dim"],
                tied_embedding=True,
            )
            args = SimpleNamespace(
                transformer=transformer,
                state_size=sizes["dim"],
                label_smoothing=0.0,
                lr=sizes["lr"],
                lr_warmup=0,
                lr_sched=SimpleNamespace(type="step"),
                wd=0.0,
                adam=SimpleNamespace(betas=(0.9, 0.999)),
                optimizer="adam",
                grad_clip=sizes["clip"],
                max_length_per_batch=None,
                amp=False,
            )
            to_device = lambda data: {name: x.to(device) for name, x in data.items()}  # noqa: E731
            self.helper = SimpleNamespace(
                args=args, state=SimpleNamespace(iter=1), saver=MagicMock(), summary=MagicMock(), to_device=to_device
            )
            self.batch_dim = 1
            self.train_set = SimpleNamespace(
                in_vocabulary=range(sizes["source_words"]), out_vocabulary=range(sizes["target_words"])
            )
            self.forward_time_meter = framework.utils.ElapsedTimeMeter()
            self.avg_num_chunks = framework.utils.Average()
            self.lr_scheduler = optimizer.StepLrSched(sizes["lr"], [], 0.1)
            torch.manual_seed(1)
            self.model = self.create_model().to(device).train()
            self.create_model_interface()
            self.create_optimizer()
            self.scaler = torch.amp.GradScaler(device, enabled=False)

    return Step()


def padded(sentences: list[list[int]]):
    """A batch in their form: words (N, B), 0 at padding, and lengths (B,)."""
    import torch

    lengths = torch.tensor([len(s) for s in sentences])
    words = torch.zeros(int(lengths.max()), len(sentences), dtype=torch.long)
    for column, sentence in enumerate(sentences):
        words[: len(sentence), column] = torch.tensor(sentence)
    return words, lengths


def main() -> None:
    path, device, sizes = sys.argv[1:]
    answers = sys.stdout
    sys.stdout = sys.stderr
    sys.path.insert(0, path)
    import torch

    torch.set_num_threads(1)
    task = build(device, json.loads(sizes))
    print(json.dumps({"parameters": sum(p.numel() for p in task.model.parameters())}), file=answers, flush=True)
    batches: list[dict[str, Any]] = []
    for line in sys.stdin:
        request = json.loads(line)
        if "source" in request:
            source, source_lengths = padded(request["source"])
            target, target_lengths = padded(request["target"])
            batches.append({"in": source, "in_len": source_lengths, "out": target, "out_len": target_lengths})
            print(json.dumps({"batches": len(batches)}), file=answers, flush=True)
            continue
        # Copies, since their step adds the end symbol to the lengths in place.
        task.data_iter = iter([{name: x.clone() for name, x in batches[request["step"]].items()}])
        wall, cpu = time.perf_counter(), time.process_time()
        result, _ = task.train_step()
        if device == "cuda":
            torch.cuda.synchronize()
        answer = {
            "cpu": time.process_time() - cpu,
            "wall": time.perf_counter() - wall,
            "loss": float(result.loss.detach()),
        }
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
