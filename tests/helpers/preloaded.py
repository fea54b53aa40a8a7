"""What the process that commands are forked from has imported: torch and fairseq, but neither the modules of the
commands, which set up logging when they are imported, nor this package. torch itself imports ``torch._dynamo`` at the
first step of an optimizer, which takes as long as all the rest.
"""

from __future__ import annotations

import gc

import fairseq.checkpoint_utils
import fairseq.dataclass.initialize
import fairseq.distributed.utils
import fairseq.logging.progress_bar
import fairseq.options
import fairseq.sequence_generator
import fairseq.sequence_scorer
import fairseq.tasks
import fairseq.trainer  # noqa: F401
import torch._dynamo  # noqa: F401

# These objects are left out of every collection in the forked processes.
gc.collect()
gc.freeze()
