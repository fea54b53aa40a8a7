"""The plugin: importing this module repairs fairseq (``compat``), then registers everything with it.

fairseq imports it through ``tasks`` and ``models`` when it loads ``--user-dir fairseq_sg``. Programs and tests import
it themselves.

Raises:
    ImportError: fairseq is missing, or is not the one that runs on today's Python and torch.
"""

import importlib

from fairseq_sg import compat

compat.repair()

#: Modules whose import registers a criterion, a model, an optimizer, a scorer or a task. The lists of names in messages
#: have their order.
REGISTERING = (
    "criterions.classification",
    "criterions.cross_entropy_orthogonality",
    "criterions.regression",
    "criterions.relative_l2",
    "criterions.tagging",
    "models.sg_transformer",
    "models.sg_encoder",
    "models.sg_transformer_lm",
    "models.sg_lstm",
    "models.sg_dnc",
    "models.sg_regressor",
    "models.sg_operator",
    "optim.torch_adam",
    "optim.one_cycle",
    "scoring.exact_match",
    "tasks.sg_classification",
    "tasks.sg_language_modeling",
    "tasks.sg_operator",
    "tasks.sg_regression",
    "tasks.sg_tagging",
    "tasks.sg_translation",
    "tasks.sg_visual_qa",
)
for _name in REGISTERING:
    importlib.import_module(f"fairseq_sg.{_name}")
# Commands: their options, how a training resumes, and its step.
for _name in ("command_line", "resuming", "trainer"):
    importlib.import_module(f"fairseq_sg.{_name}").install()
