"""``sg_classification``: one class for each sentence, on folders of ``python -m data_prep`` with one-word targets.

The same folders, batches and options as ``sg_translation``, which trains an encoder–decoder on them. The words of the
target's dictionary are the classes; the source has its begin and its end symbol, as the reference implementation of
Csordás et al. 2022 gives its transformers. (Its LSTMs have no begin symbol: ``--no-source-bos``.)
"""

from fairseq import utils
from fairseq.models import FairseqEncoderDecoderModel
from fairseq.tasks import register_task
from torch import Tensor

from fairseq_sg.errors import UsageError
from fairseq_sg.tasks.sg_translation import SGTranslationConfig, SGTranslationTask


@register_task("sg_classification", dataclass=SGTranslationConfig)
class SGClassificationTask(SGTranslationTask):
    """See the module's docstring.

    Raises:
        UsageError: a folder without classes; a model with a decoder, a criterion of sentences, or a command that
            generates.
    """

    name, criterion = "sg_classification", "classification"
    generates_nothing = "a classifier generates nothing: its accuracy"

    @classmethod
    def setup_task(cls, cfg: SGTranslationConfig, **kwargs) -> "SGClassificationTask":
        task = super().setup_task(cfg, **kwargs)
        for folder, manifest in zip(utils.split_paths(cfg.data), task.manifests, strict=True):
            if "labels" not in manifest:
                raise UsageError(
                    f"the targets of {folder} are no classes (its dataset.json has no labels): choose --task "
                    "sg_translation, or data with classes (for instance: python -m data_prep ctl --order forward --out "
                    "data-bin/ctl_forward)"
                )
        return task

    @property
    def num_classes(self) -> int:
        """The words of the target's dictionary."""
        return len(self.target_dictionary) - self.target_dictionary.nspecial

    def classes(self, target: Tensor) -> Tensor:
        """target (B, N), of a word, the end symbol and padding -> (B,) int64 in 0 … ``num_classes`` − 1."""
        return target[:, 0] - self.target_dictionary.nspecial

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs) -> None:
        super().load_dataset(split, epoch=epoch, combine=combine, **kwargs)
        dataset = self.datasets[split]
        # No decoder, so no target shifted to the right as its input.
        dataset.input_feeding = False
        # The class is the first word, also where targets are padded (--required-seq-len-multiple).
        dataset.left_pad_target = False

    def build_model(self, cfg, from_checkpoint: bool = False):
        model = super().build_model(cfg, from_checkpoint)
        if isinstance(model, FairseqEncoderDecoderModel):
            raise UsageError(
                "this --arch has a decoder, and --task sg_classification needs none: choose a classifier, such as "
                "sg_encoder or sg_lstm, or --task sg_translation, which writes the class as a word"
            )
        return model
