"""Classifying transformers and LSTMs on CTL, simple arithmetic, ListOps and CTL++ (Csordás et al. 2022, Csordás 2023).

    python scripts/ndr.py ctl --order forward --models ndr,relative --seeds 1,2,3
    python scripts/ndr.py arithmetic --steps-scale 0.1 --results results/arithmetic
    python scripts/ndr.py ctlpp --variant R --models ndr,bilstm
    python scripts/ndr.py ctl --small                             # a smaller task and smaller models, for a CPU

The protocol is the papers'. Checkpoints are evaluated every 1,000 steps. The one with the best accuracy on ``dev``
(out-of-distribution validation; the latest of several) is tested on ``gen`` (OOD). IID is the accuracy on
``valid`` at the end of training. CTL++ has no ``dev``: its last checkpoint is tested. Finished runs are skipped,
stopped ones are resumed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import quickstart  # noqa: E402
from runs import REPOSITORY, Run, check_data, end, environment, on, schedule  # noqa: E402


@dataclass
class Recipe:
    """A model and its training.

    Attributes:
        arguments: its architecture and mechanisms.
        lr, weight_decay, batch, clip: of the optimizer (AdamW), constant.
        steps: of the published training.
        buckets: whether batches have sentences of similar lengths.
        warmup: number of warm-up steps.
        more_layers: steps of the shared layer in the last evaluation, if not those of training.
    """

    arguments: str
    lr: float
    weight_decay: float
    clip: float
    steps: int
    batch: int = 512
    buckets: bool = True
    warmup: int = 0
    more_layers: int = 0


#: N(0, 1) embeddings; dropout of attention is on Keys, and baselines' attention starts ``fused``, as in the released
#: code.
GATED = "--encoder-update copy_gate --embedding-scaling none"
GEOMETRIC = "--encoder-attention geometric"
ABSOLUTE = "--embedding-scaling none --embedding-dropout 0.1 --attention-dropout 0 --attention-init fused"
RELATIVE = "--encoder-attention relative --attention-init fused --attention-scale learned --attention-dropout 0"
ABS_REL = "--encoder-attention abs_rel --attention-scale learned --attention-dropout 0"
NDR = f"{GATED} {GEOMETRIC} --geometric-key-dropout 0.1"
TANH = f"{GATED} --copy-gate-content tanh --relative-key-dropout 0.1"

#: dataset -> model -> recipe: Tables D.3 to D.5 and appendix E.1.2 of Csordás 2023, and the released code where it
#: differs. Beyond the papers are `linear_gate`, copy gates with linear attention, and `ndr_sigma_moe`, a mixture of
#: experts for the new content.
RECIPES: dict[str, dict[str, Recipe]] = {
    "ctl": {
        "ndr": Recipe(
            f"--arch sg_encoder_ctl {NDR} --copy-gate-dropout 0.1 --dropout 0.5", 1.5e-4, 0.01, 5, 30_000
        ),
        "abs_rel_gate": Recipe(
            f"--arch sg_encoder_ctl --encoder-ffn-embed-dim 1024 {TANH} {ABS_REL} --dropout 0.5",
            *(2e-4, 0.01, 5, 30_000),
            buckets=False,
        ),
        "relative_gate": Recipe(
            f"--arch sg_encoder_ctl --encoder-ffn-embed-dim 1024 {TANH} {RELATIVE} --dropout 0.5",
            *(2e-4, 0.01, 5, 30_000),
            buckets=False,
        ),
        "geometric": Recipe(
            f"--arch sg_encoder_ctl_baseline {GEOMETRIC} --geometric-normalize "
            "--embedding-scaling position_down --dropout 0.1",
            *(1.5e-4, 0.0025, 5, 30_000),
            buckets=False,
        ),
        "relative": Recipe(
            f"--arch sg_encoder_ctl_baseline {RELATIVE} --embedding-scaling position_down --dropout 0.1",
            *(1.5e-4, 0.0025, 5, 30_000),
            buckets=False,
        ),
        "absolute": Recipe(
            f"--arch sg_encoder_ctl_baseline {ABSOLUTE} --dropout 0.1", 1.5e-4, 0.0025, 5, 30_000, buckets=False
        ),
        "linear_gate": Recipe(
            f"--arch sg_encoder_ctl {GATED} --encoder-attention linear --copy-gate-dropout 0.1 --dropout 0.5",
            *(1.5e-4, 0.01, 5, 30_000),
        ),
        "ndr_sigma_moe": Recipe(
            f"--arch sg_encoder_ctl {NDR} --copy-gate-dropout 0.1 --dropout 0.5 --encoder-ffn "
            "sigma_moe --moe-experts 8 --moe-k 2",
            *(1.5e-4, 0.01, 5, 30_000),
        ),
        "lstm": Recipe("--no-source-bos --arch sg_lstm_ctl --dropout 0.5", 1e-3, 0, 5, 20_000, batch=256,
                       buckets=False),
        "bilstm": Recipe(
            "--no-source-bos --arch sg_lstm_ctl --bidirectional --dropout 0.5", 1e-3, 0, 5, 20_000, batch=256,
            buckets=False,
        ),
    },
    "arithmetic": {
        "ndr": Recipe(
            f"--arch sg_encoder_arithmetic {NDR} --copy-gate-dropout 0.1 --dropout 0.5", 1.5e-4, 0.01, 1, 100_000
        ),
        "abs_rel_gate": Recipe(
            f"--arch sg_encoder_arithmetic {TANH} {ABS_REL} --copy-gate-dropout 0.1 --dropout 0.5",
            *(1.5e-4, 0.01, 1, 100_000),
        ),
        "relative": Recipe(
            f"--arch sg_encoder_arithmetic_baseline {RELATIVE} --embedding-scaling position_down --dropout 0.5 "
            "--relative-key-dropout 0.1",
            *(1.5e-4, 0.0025, 1, 200_000),
        ),
        "absolute": Recipe(
            f"--arch sg_encoder_arithmetic_baseline {ABSOLUTE} --dropout 0.5", 1.5e-4, 0.0025, 1, 200_000
        ),
        "lstm": Recipe("--no-source-bos --arch sg_lstm_arithmetic --dropout 0.5", 1e-3, 0, 5, 200_000, batch=256,
                       buckets=False),
        "bilstm": Recipe("--no-source-bos --arch sg_lstm_arithmetic --bidirectional --dropout 0.5", 1e-3,
                         0, 5, 200_000, batch=256, buckets=False),
    },
    "listops": {
        "ndr": Recipe(
            f"--arch sg_encoder_listops {NDR} --copy-gate-dropout 0.05 --dropout 0.1",
            *(2e-4, 0.09, 1, 100_000),
            more_layers=24,
        ),
        "abs_rel_gate": Recipe(
            f"--arch sg_encoder_listops --encoder-ffn-embed-dim 2048 {TANH} {ABS_REL} "
            "--copy-gate-dropout 0.05 --dropout 0.1",
            *(2e-4, 0.09, 1, 100_000),
        ),
        "relative": Recipe(
            f"--arch sg_encoder_listops_baseline {RELATIVE} --dropout 0.015 --relative-key-dropout 0.05",
            *(4e-4, 0.05, 1, 200_000),
        ),
        "absolute": Recipe(f"--arch sg_encoder_listops_baseline {ABSOLUTE} --dropout 0.015", 4e-4, 0.05, 1, 200_000),
        "lstm": Recipe("--no-source-bos --arch sg_lstm_listops --dropout 0.1", 1e-3, 0.08, 1, 200_000),
        "bilstm": Recipe("--no-source-bos --arch sg_lstm_listops --bidirectional --dropout 0.1", 1e-3,
                         0.08, 1, 200_000),
    },
    "ctlpp": {
        "ndr": Recipe(
            f"--arch sg_encoder_ctlpp {NDR} --copy-gate-content residual --ffn-activation gelu --activation-dropout 0 "
            "--attention-bias --copy-gate-dropout 0.1 --dropout 0.5",
            *(1.5e-4, 0, 1, 80_000),
            warmup=500,
            more_layers=10,
        ),
        "relative": Recipe(
            f"--arch sg_encoder_ctlpp_baseline {RELATIVE} --embedding-scaling position_down --dropout 0.1 "
            f"--relative-key-dropout 0.1",
            *(1.5e-4, 0.0025, 5, 300_000),
            warmup=500,
        ),
        "bilstm": Recipe(
            "--no-source-bos --arch sg_lstm_ctlpp --bidirectional --dropout 0.5", 1.5e-4, 0, 5, 80_000, warmup=500
        ),
    },
}  # fmt: skip

ONE = "1.00"
#: data -> model -> (IID, OOD) as published
PUBLISHED: dict[str, dict[str, tuple[str, str]]] = {
    "ctl forward": {
        "ndr": (ONE, ONE), "abs_rel_gate": (ONE, ".98 ± .01"), "relative_gate": (ONE, ".99 ± .01"),
        "geometric": (".96 ± .04", ".16 ± .02"), "relative": (ONE, ".23 ± .05"), "absolute": (ONE, ".13 ± .01"),
        "lstm": (ONE, ONE), "bilstm": (ONE, ONE),
    },
    "ctl backward": {
        "ndr": (ONE, ONE), "abs_rel_gate": (ONE, ".98 ± .03"), "relative_gate": (ONE, ".19 ± .04"),
        "geometric": (".93 ± .06", ".15 ± .02"), "relative": (ONE, ".13 ± .01"), "absolute": (".82 ± .39", ".12 ± .01"),
        "lstm": (".59 ± .03", ".22 ± .03"), "bilstm": (ONE, ONE),
    },
    "arithmetic": {
        "ndr": (ONE, ".98 ± .01"), "abs_rel_gate": ("1.00 ± .01", ".80 ± .16"), "relative": (ONE, ".77 ± .04"),
        "absolute": (".98 ± .01", ".47 ± .01"), "lstm": (".99", ".74 ± .02"), "bilstm": (".98 ± .01", ".82 ± .06"),
    },
    "listops": {
        "ndr": (ONE, ".99 ± .01"), "abs_rel_gate": ("1.00 ± .01", ".90 ± .06"), "relative": (".98 ± .01", ".79 ± .04"),
        "absolute": (".98", ".74 ± .03"), "lstm": (".99", ".71 ± .03"), "bilstm": (ONE, ".57 ± .04"),
    },
    "ctlpp A": {"ndr": (ONE, ".34 ± .26"), "relative": (ONE, ".21 ± .09"), "bilstm": (ONE, ".95 ± .03")},
    "ctlpp R": {"ndr": ("1.00 ± .01", ".75 ± .27"), "relative": (ONE, ".75 ± .25"), "bilstm": (ONE, ONE)},
}  # fmt: skip
SOURCE = "Csordás 2023, Tables 5.1, 5.3, 5.4 and 6.1, five seeds (CTL++: 25), as fractions"

#: ``--small``: dataset -> the options of its data, and what differs from the recipes: sizes, dropout, optimization, and
#: of some models more. (With the learning rate of the gated ones, `relative` came to predict one class for every
#: expression of arithmetic.)
SMALL: dict[str, tuple[list[str], str, dict[str, Any], dict[str, dict[str, Any]]]] = {
    "ctl": (
        ["--functions", "4", "--longest", "4"],
        "--encoder-embed-dim 64 --encoder-ffn-embed-dim 128 --encoder-layers 8 --dropout 0.1",
        {"lr": 1e-3, "batch": 128, "steps": 3_000, "buckets": True},
        {},
    ),
    "arithmetic": (
        ["--deepest", "3", "--train", "20000", "--test", "500"],
        "--encoder-embed-dim 64 --encoder-ffn-embed-dim 512 --encoder-layers 8 --dropout 0.1",
        {"lr": 1e-3, "batch": 64, "steps": 30_000, "buckets": True},
        {"relative": {"lr": 3e-4}, "absolute": {"lr": 3e-4}},
    ),
}

#: Batches of similar lengths are cut from this many sorted sentences.
WINDOW = 16_384
CONDITIONS = {"ctl": ("--order", ("forward", "backward")), "ctlpp": ("--variant", ("A", "R"))}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", choices=RECIPES)
    parser.add_argument("--order", choices=CONDITIONS["ctl"][1], help="order of CTL (default: forward)")
    parser.add_argument("--variant", choices=CONDITIONS["ctlpp"][1], help="variant of CTL++ (default: A)")
    parser.add_argument("--models", default="all", help="comma separated (default: all that the dataset has)")
    parser.add_argument(
        "--small", action="store_true", help=f"a smaller task and smaller transformers, for a CPU ({', '.join(SMALL)})"
    )
    parser.add_argument(
        "--steps-scale", type=float, default=1.0, help="factor on the published number of steps (default: 1)"
    )
    parser.add_argument("--batch-size", type=int, help="sentences per step (default: the published number)")
    parser.add_argument("--validate-every", type=int, help="steps between evaluations (default: 1,000)")
    quickstart.add_arguments(parser, "runs/DATASET")
    args = parser.parse_args()
    args.condition = None
    for dataset, (flag, choices) in CONDITIONS.items():
        chosen = getattr(args, flag[2:])
        if dataset == args.dataset:
            args.condition = chosen or choices[0]
        elif chosen is not None:
            parser.error(f"{flag} is for {dataset}")
    if args.steps_scale <= 0:
        parser.error(f"--steps-scale is {args.steps_scale}: choose a number above 0")
    args.title = f"{args.dataset} {args.condition}" if args.condition else args.dataset
    recipes = RECIPES[args.dataset]
    if args.small:
        if args.dataset not in SMALL:
            parser.error(f"--small is for {', '.join(SMALL)}")
        args.title += " (small)"
        recipes = {
            model: smaller(recipe, args.dataset, model) for model, recipe in recipes.items() if "lstm" not in model
        }
    args.recipes = recipes
    name = re.sub(r"\W+", "_", args.title).strip("_")
    args.data, args.out = args.data or Path("data-bin", name), args.out or Path("runs", name)
    quickstart.complete_arguments(parser, args, recipes)
    return args


def smaller(recipe: Recipe, dataset: str, model: str) -> Recipe:
    """The recipe with the changes of ``--small``; the last of two equal options counts."""
    _, sizes, changes, of_models = SMALL[dataset]
    return replace(recipe, arguments=f"{recipe.arguments} {sizes}", **changes | of_models.get(model, {}))


def prepare(args: argparse.Namespace) -> None:
    """Generates the data if their folder has no dataset.json. Raises ValueError if it has that of other data."""
    condition = [CONDITIONS[args.dataset][0], args.condition] if args.condition else []
    if args.small:
        condition += SMALL[args.dataset][0]
    if (REPOSITORY / args.data / "dataset.json").exists():
        check_data(REPOSITORY / args.data, [args.dataset, *condition])
    else:
        command = [sys.executable, "-m", "data_prep", args.dataset, *condition, "--out", str(args.data)]
        subprocess.run(command, cwd=REPOSITORY, env=environment(), check=True)


def make_runs(args: argparse.Namespace) -> list[Run]:
    # `dev` comes first: fairseq selects the best checkpoint by the first subset.
    selection = {} if args.dataset == "ctlpp" else {"dev": "OOD validation"}
    runs = []
    for seed in args.seeds:
        for model in args.models:
            recipe = args.recipes[model]
            steps = max(1, round(recipe.steps * args.steps_scale))
            every = args.validate_every or min(1000, steps)
            layers = ["--model-overrides", f"{{'encoder_layers': {recipe.more_layers}}}"] if recipe.more_layers else []
            arguments = [
                "--task", "sg_classification", "--criterion", "classification", *recipe.arguments.split(),
                "--optimizer", "torch_adam", "--lr", str(recipe.lr), "--weight-decay", str(recipe.weight_decay),
                "--warmup-updates", str(recipe.warmup), "--clip-norm", str(recipe.clip),
                "--batch-size", str(args.batch_size or recipe.batch),
                "--length-window", str(WINDOW if recipe.buckets else 1), "--batch-size-valid", "1000",
                *schedule(every, args.device),
            ]  # fmt: skip
            runs.append(
                Run(
                    name=model,
                    seed=seed,
                    folder=args.out / f"{model}-seed{seed}",
                    data=args.data,
                    steps=steps,
                    arguments=arguments,
                    subsets=selection | {"valid": "IID", "gen": "OOD"},
                    evaluation=["--batch-size", "1000", *layers, *on(args.device)],
                    generate=False,
                    best=bool(selection),
                )
            )
    return runs


def summarize(args: argparse.Namespace, records: list[dict[str, Any]]) -> dict[str, Any]:
    published = PUBLISHED.get(args.title, {})
    return {
        "what": args.title,
        **quickstart.common_summary(args, records),
        "steps_scale": args.steps_scale,
        "published": {
            model: dict(zip(("IID", "OOD"), published[model])) for model in args.models if model in published
        },
    }


def table(summary: dict[str, Any]) -> list[list[str]]:
    """Rows of text with a header; percentages over the sentences, mean ± sample std over the seeds."""
    published = summary["published"]
    columns = ["model", "steps", "IID %", "OOD %", "OOD of step", "minutes"]
    rows = [[*columns, *(["published IID / OOD"] if published else []), "folder"]]
    for model, done, steps, folder in quickstart.by_model(summary):
        cells = [steps] + ["–"] * 4
        if done:
            results = [r["result"] for r in done]
            cells = [
                steps,
                quickstart.spread([r["curve"][-1]["valid"] for r in results]),
                quickstart.spread([r["accuracy"]["gen"] for r in results]),
                ", ".join(str(r["checkpoint_step"]) for r in results),
                quickstart.spread([r["minutes"] for r in done]),
            ]
        beside = [f"{published[model]['IID']} / {published[model]['OOD']}"] if model in published else []
        rows.append([model, *cells, *(beside or ["–"] * bool(published)), folder])
    return rows


def as_markdown(summary: dict[str, Any]) -> str:
    lines = quickstart.markdown_lines([row[:-1] for row in table(summary)])
    text = (
        f"Commit {', '.join(summary['commits'])}; {quickstart.machines(summary)}; seeds "
        f"{', '.join(map(str, summary['seeds']))}. IID is the accuracy on `valid` at the last step, OOD that on "
        "`gen` of the checkpoint with the best accuracy on `dev` (of the last one without a `dev`)."
    )
    if summary["published"]:
        text += f" The published numbers are those of {SOURCE}."
    return "\n".join([f"# {summary['what']}", "", f"`{summary['command']}`", "", text, "", *lines, ""])


def main() -> int:
    args = parse_arguments()

    def publish(records: list[dict[str, Any]]) -> None:
        summary = summarize(args, records)
        quickstart.write_results(args.results, summary, as_markdown(summary))
        print(f"\n{args.title}: accuracy on examples like those of training (IID, last step) and on others (OOD)\n")
        print(quickstart.as_text(table(summary)))

    return quickstart.carry_out(args, make_runs(args), lambda: prepare(args), publish)


if __name__ == "__main__":
    end(main)
