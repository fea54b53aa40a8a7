"""From data to a picture of attention: a small model learns FIRST in 200 steps, and is tested on longer inputs.

Run it as a script, or cell by cell in an editor that knows ``# %%`` (VS Code, PyCharm, Spyder, Jupyter with jupytext):

    python examples/first_steps.py

It takes half a minute on a CPU core. It writes data-bin/first, runs/first and attention.png into the current folder.
"""

# %% [markdown]
# ## Data
#
# FIRST (Chiang & Cholak 2022): is the first symbol a one? Training inputs have 5 to 12 symbols, those of `gen` have 20,
# 40 and 80.
#
#     CLS 1 0 0 1 0   ->   1

# %%
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt

import fairseq_sg


def run(*command: str) -> None:
    """Runs ``python -m COMMAND``."""
    subprocess.run([sys.executable, "-m", *command], check=True)


lengths = ["--train-lengths", "5-12", "--test-lengths", "20,40,80", "--train", "600", "--test", "200"]
run("data_prep", "first", *lengths, "--out", "data-bin/first")

# %% [markdown]
# ## Training
#
# `fairseq_cli.train` is the command `fairseq-train`. A second run resumes, or finds that nothing is left to do.

# %%
training = """
    data-bin/first --task sg_translation --arch sg_transformer --encoder-attention relative --decoder-attention relative
    --encoder-layers 1 --encoder-embed-dim 32 --encoder-ffn-embed-dim 64 --encoder-attention-heads 2
    --decoder-layers 1 --decoder-embed-dim 32 --decoder-ffn-embed-dim 64 --decoder-attention-heads 2 --dropout 0
    --criterion cross_entropy_orthogonality --optimizer torch_adam --lr 3e-3 --clip-norm 1 --batch-size 40
    --max-update 200 --valid-subset valid,gen --no-epoch-checkpoints --cpu --save-dir runs/first
"""
plugin = Path(fairseq_sg.__file__).parent  # `--user-dir fairseq_sg` says the same
run("fairseq_cli.train", *training.split(), "--user-dir", str(plugin))

# %% [markdown]
# ## Numbers
#
# Exact match in percent, as `python -m fairseq_sg.evaluate runs/first/checkpoint_best.pt` prints it. Guessing is right
# half of the time. Another `--seed` gives another number for the longer inputs: compare models over several seeds.

# %%
model = fairseq_sg.load("runs/first/checkpoint_best.pt")
print(f"inputs of 5 to 12 symbols: {model.accuracy('valid'):.1f} %")
for length, numbers in model.evaluate("gen")["types"].items():
    print(f"{length}: {numbers['accuracy']:.1f} % of {numbers['sentences']}")

# %% [markdown]
# ## Inputs of your own

# %%
inputs = ["CLS 1 0 0 0 0 0 0 0 0 0 0 0 0 0 0", "CLS 0 1 1 1 1 1 1 1 1 1 1 1 1 1 1"]
print(model.translate(inputs))

# %% [markdown]
# ## Where the model looks
#
# The weights of the encoder's self-attention and of the cross-attention for the first input; of the two heads the
# larger weight. Rows are queries, columns are keys. Begin symbol and CLS read the first symbol; the decoder reads them.

# %%
maps = model.attention(inputs[0])
figure, panels = plt.subplots(2, 1, figsize=(5, 6), height_ratios=(5, 1), layout="constrained")
for axes, role in zip(panels, ("encoder", "cross"), strict=True):
    axes.imshow(maps.weights[role][0].max(axis=0), vmin=0, vmax=1, cmap="Reds", aspect="auto")
    axes.set_title(role)
    axes.set_xticks(range(len(maps.keys[role])), maps.keys[role], fontsize=7)
    axes.set_yticks(range(len(maps.queries[role])), maps.queries[role], fontsize=7)
figure.savefig("attention.png", dpi=100)
print("written: attention.png")
