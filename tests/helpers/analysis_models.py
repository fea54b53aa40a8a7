"""Small data folders, and checkpoints of random models in the form of fairseq-train."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import torch
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf

import fairseq_sg.plugin  # noqa: F401
from data_prep.__main__ import main
from data_prep.corpus import Corpus, Subset
from data_prep.dataset import Pair
from data_prep.folder import write

#: A small CTL++: function -> its values for 0, 1, 2, 3. The groups are not in alphabetical order.
TABLES = {"p": "1 2 3 0", "a": "3 1 0 2", "q": "0 2 1 3", "b": "2 3 0 1"}
GROUPS = {"a": "p q", "b": "a b"}

LINEAR = "--encoder-attention linear --decoder-attention linear --cross-attention linear --qk-norm l2"
SIZES = {
    side: f"--{side}-embed-dim 16 --{side}-ffn-embed-dim 24 --{side}-attention-heads 4"
    for side in ("encoder", "decoder")
}
BOTH = f"--arch sg_transformer {SIZES['encoder']} {SIZES['decoder']} --encoder-layers 2 --decoder-layers 2"
#: model -> its options
MODELS = {
    "softmax": BOTH,
    "linear": f"{BOTH} {LINEAR} --depth shared --encoder-layers 3 --decoder-layers 3",
    "gated": f"{BOTH} --encoder-attention geometric --decoder-attention relative --encoder-update copy_gate "
    "--decoder-update copy_gate --depth shared --encoder-layers 4",
    "mixed": f"{BOTH} --encoder-attention galerkin,compositional --decoder-attention abs_rel --cross-attention linear",
    "experts": f"{BOTH} --encoder-ffn sigma_moe --decoder-ffn topk --topk-k 5 --moe-experts 6 --moe-k 2 "
    "--depth shared --encoder-layers 3",
    "encoder": f"--arch sg_encoder {SIZES['encoder']} --encoder-layers 3 --depth shared --encoder-attention geometric "
    "--encoder-update copy_gate --readout first",
    "lstm": "--arch sg_lstm --embed-dim 8 --hidden-dim 8",
    "dnc": "--arch sg_dnc --memory-variant mds --memory-cells 5 --memory-width 4 --read-heads 2 --controller-dim 6",
    "lm": f"--arch sg_transformer_lm {SIZES['decoder']} --decoder-layers 2 --decoder-attention relative --decoder-ffn "
    f"sigma_moe "
    "--moe-experts 4 --moe-k 2 --tokens-per-sample 5 --memory-length 7",
    "visual": "--arch sg_encoder_sort_of_clevr --encoder-embed-dim 16 --encoder-ffn-embed-dim 24 "
    "--encoder-attention-heads 2 --encoder-layers 3 --encoder-attention linear --qk-norm l2",
    "regressor": f"--arch sg_regressor {SIZES['decoder']} --decoder-layers 2 --pre-norm",
    "operator": f"--arch sg_operator {SIZES['encoder']} --encoder-layers 2 --modes 4 --spectral-dim 6 --norm none",
    "operator_2d": f"--arch sg_operator {SIZES['encoder']} --encoder-layers 1 --modes 3 --spectral-dim 6 --norm none",
}
CLASSIFIERS = ("encoder", "lstm")
KINDS = {
    "dnc": "tagging", "lm": "language_modeling", "regressor": "regression", "visual": "visual_qa",
    "operator": "operator", "operator_2d": "operator",
}  # fmt: skip


def pairs_folder(folder: Path) -> Path:
    """Random sentences: 1 to 4 words in ``train`` and ``valid``, 5 and 6 in ``gen``; twice as many in targets."""
    draw = random.Random(0)

    def pairs(lengths: range, count: int) -> list[Pair]:
        made: dict[str, Pair] = {}
        while len(made) < count:
            words = draw.choices("stuvwxyz", k=draw.choice(lengths))
            target = " ".join(draw.choices("ABC", k=2 * len(words)))
            made.setdefault(" ".join(words), Pair(" ".join(words), target))
        return list(made.values())

    short, gen = pairs(range(1, 5), 55), pairs(range(5, 7), 13)
    subsets = {"train": short[:40], "valid": short[40:], "gen": gen}
    types = {"gen": [("depth_2", "depth_10", "depth_1")[number % 3] for number in range(len(gen))]}
    made = {name: Subset(found, types.get(name, ())) for name, found in subsets.items()}
    corpus = Corpus(made, "drawn", "drawn", {"generator": "tests"})
    write(folder, corpus, {"dataset": "tests", "raw_only": False})
    return folder


def subwords_folder(folder: Path, *options: object) -> Path:
    """Sentences of 2 to 6 words in pieces of SentencePiece, most words in several; targets are the words backwards."""
    draw, sources = random.Random(0), folder.with_suffix(".src")
    lines = [" ".join(draw.choices(("the", "cat", "dog", "sees", "hen"), k=draw.randint(2, 6))) for _ in range(300)]
    lines = list(dict.fromkeys(lines))
    sources.write_text("".join(f"{line}\n" for line in lines))
    targets = folder.with_suffix(".tgt")
    targets.write_text("".join(f"{line[::-1]}\n" for line in lines))
    files = ["--src", sources, "--tgt", targets, "--valid-share", 0.2, "--test-share", 0.2]
    arguments = ["parallel", *files, "--vocab-size", 14, *options, "--out", folder]
    assert main(list(map(str, arguments))) == 0
    return folder


def ctlpp_folder(folder: Path) -> Path:
    """All single functions and all pairs of TABLES."""
    subsets: dict[str, list[Pair]] = {"train": [], "valid": [], "gen": []}
    pairs = [("train", [name]) for name in TABLES]
    pairs += [
        (("train", "valid", "gen")[number % 3], list(names))
        for number, names in enumerate(itertools.product(TABLES, repeat=2))
    ]
    for subset, names in pairs:
        for symbol in "0123":
            result = symbol
            for name in reversed(names):
                result = TABLES[name].split()[int(result)]
            subsets[subset].append(Pair(" ".join([*names, symbol]), result))
    origin = {"generator": "tests", "tables": TABLES, "groups": GROUPS}
    made = {name: Subset(found) for name, found in subsets.items()}
    corpus = Corpus(made, "drawn", "drawn", origin, labels=True)
    write(folder, corpus, {"dataset": "ctlpp", "raw_only": False})
    return folder


def text_folder(folder: Path) -> Path:
    """A text of 400 bytes."""
    text = folder.with_suffix(".txt")
    text.write_text("".join(random.Random(0).choices("abcd \n", k=400)))
    assert main(["text", "--unit", "bytes", "--input", str(text), "--valid-share", "0.3", "--out", str(folder)]) == 0
    return folder


def checkpoint(path: Path, data: Path, model: str, *more: str) -> Path:
    """A random model's checkpoint in the form of fairseq-train."""
    kind = "classification" if model in CLASSIFIERS else KINDS.get(model, "translation")
    criteria = {
        "classification": "classification", "visual_qa": "classification", "regression": "regression",
        "operator": "relative_l2", "tagging": "tagging",
    }  # fmt: skip
    criterion = criteria.get(kind, "cross_entropy_orthogonality")
    fixed = f"{data} --task sg_{kind} --criterion {criterion} --optimizer torch_adam --cpu"
    arguments = [*fixed.split(), *MODELS[model].split(), *more]
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), arguments))
    torch.manual_seed(1)
    built = tasks.setup_task(cfg.task).build_model(cfg.model)
    with torch.no_grad():
        for parameter in built.parameters():
            # Unlike at the start of training, gains of norms are not all 1 and biases not all 0.
            parameter.add_(0.3 * torch.randn_like(parameter))
    state = {
        "args": None,
        "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
        "model": built.state_dict(),
        "optimizer_history": [{"num_updates": 1, "optimizer_name": "", "criterion_name": "", "lr_scheduler_state": {}}],
        "extra_state": {"train_iterator": {"epoch": 1}},
    }
    torch.save(state, path)
    return path
